"""Pictures of the page for README.md, taken of the shipped world while it is played.

Run by hand: `python -m pytest -m manual tests/web/test_pictures.py`; the files are written anew.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from stream.world_source import LoadedWorlds
from tests.stream.live_service import running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.manual

PICTURES = Path(__file__).parents[2] / "benchmarks" / "pictures"
PLAY_S = 12.0
PHONE_PX = 500
START_LIMIT_MS = 180_000


@pytest.mark.parametrize(
    ("name", "scheme", "size_px"),
    [("page", "dark", (960, 940)), ("page-phone", "light", (360, 740))],
)
def test_page_is_pictured(
    browser: Browser, name: str, scheme: str, size_px: tuple[int, int]
) -> None:
    with running(open_source=LoadedWorlds, renderer=False) as service:
        context = browser.new_context(
            viewport={"width": size_px[0], "height": size_px[1]},
            color_scheme=scheme,  # type: ignore[arg-type]
            has_touch=size_px[0] < PHONE_PX,
            is_mobile=size_px[0] < PHONE_PX,
        )
        page = context.new_page()
        page.goto(service.base)
        page.wait_for_selector("body[data-state=READY]", timeout=START_LIMIT_MS)
        page.keyboard.press("KeyW")
        page.keyboard.down("KeyW")
        deadline_s = time.monotonic() + PLAY_S
        while time.monotonic() < deadline_s:
            page.keyboard.press("ArrowLeft", delay=150)
            page.wait_for_timeout(600)
        assert page.get_attribute("body", "data-state") == "RUNNING"
        page.screenshot(path=PICTURES / f"{name}.png")
        context.close()
