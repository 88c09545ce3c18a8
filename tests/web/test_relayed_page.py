"""The page where only one TCP port of a relay is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from tests.stream.live_service import running
from tests.stream.turn_relay import needs_coturn, turn_relay
from tests.web.live_page import open_sessions, play

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

pytestmark = [pytest.mark.cpu, needs_coturn]


def test_video_comes_through_a_relay_over_tcp(page: Page, tmp_path: Path) -> None:
    with (
        turn_relay(tmp_path) as relay,
        running(ice_server=relay.url, turn_secret=relay.secret) as service,
    ):
        play(page, service, "?transport=relay")
        assert page.get_attribute("body", "data-rung") == "relay"
        (session,) = open_sessions(service)
        media = service.live.room(session.id).transports.media
        assert media is not None
        assert media.stats().webrtc_viewers == 1
