"""The HTTP routes against their own OpenAPI description: requests that schemathesis makes up."""

from collections.abc import Iterator

import pytest

pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from stream.app import create_app
from stream.live import Live
from stream.settings import load_settings
from tests.stream.live_service import Client, Service, running

pytestmark = pytest.mark.cpu

EXAMPLES = 12
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
description = create_app(Live(load_settings(renderer=True))).openapi()
schema = schemathesis.openapi.from_dict(description)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service where somebody plays while all this goes on."""
    with running(max_queue=1_000) as service:
        player = Client.hello(service)
        player.play()
        yield service
        player.act("KeyW")
        player.until_frames(3)
        player.close()


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
def test_every_answer_is_as_described(case: schemathesis.Case, service: Service) -> None:
    case.call_and_validate(base_url=service.base, checks=CHECKS)
