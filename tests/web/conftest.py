"""One Chromium for the tests of the page; each test gets a page of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from stream.live_browser import CHROMIUM_FLAGS, CHROMIUM_NAMES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

    from tests.stream.live_service import Service

CHROMIUM = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
ARGUMENTS = list(CHROMIUM_FLAGS)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    """What drives the browsers."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Chromium of this machine."""
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Fresh page; an exception in its scripts fails the test."""
    context = browser.new_context(viewport={"width": 900, "height": 800})
    page = context.new_page()
    page.set_default_timeout(15_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []


@pytest.fixture(scope="session")
def shared() -> Iterator[Service]:
    """A service for tests that leave it empty; it takes pictures, as one with a model does."""
    pytest.importorskip("fastapi")
    from tests.stream.live_service import running

    with running(renderer=False, grace_s=8.0, bye_grace_s=2.0) as service:
        yield service


@pytest.fixture
def service(shared: Service) -> Iterator[Service]:
    """The shared service, empty before and after."""
    yield shared
    for session in shared.live.registry:
        token = {"Authorization": f"Bearer {session.resume_token}"}
        shared.request("DELETE", f"/v1/sessions/{session.id}", **token)
    registry = shared.live.registry
    shared.wait(lambda: not any(each.holds_slot for each in registry), "all sessions have ended")


@pytest.fixture
def other(browser: Browser) -> Iterator[Page]:
    """Page of another browser."""
    context = browser.new_context()
    yield context.new_page()
    context.close()
