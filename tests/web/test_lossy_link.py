"""A page whose video comes over a link that loses packets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from stream.world_source import LoadedWorlds
from tests import tolerances
from tests.stream.live_service import Service, running
from tests.stream.rtc_browser import Dropper
from tests.web.live_page import open_sessions, play, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.cpu

LOSS = 0.05
GAP_PACKETS = 200
"""More than the sender can send again."""


@pytest.fixture
def service() -> Iterator[Service]:
    """A service with true pictures: painted ones are too small to be several packets."""
    with running(open_source=LoadedWorlds) as service:
        yield service


def frames(page: Page) -> int:
    """Frames that the video element was given so far."""
    count: int = page.evaluate(
        "() => document.querySelector('video').getVideoPlaybackQuality().totalVideoFrames"
    )
    return count


def test_lost_packets_cost_few_frames_and_a_long_gap_a_second(page: Page, service: Service) -> None:
    play(page, service, "?transport=webrtc")
    page.keyboard.down("KeyW")
    page.keyboard.down("ArrowLeft")
    (session,) = open_sessions(service)
    media = service.live.room(session.id).transports.media
    assert media is not None
    ((_, peer),) = media.audience._peers.items()
    drops = Dropper(peer._sender)

    drops.share = LOSS
    seen, sent = frames(page), peer.track.sent_count
    page.wait_for_timeout(6_000)
    shown_share = (frames(page) - seen) / (peer.track.sent_count - sent)
    assert drops.lost_count
    assert shown_share >= tolerances.LOSSY_LINK_SHARE[LOSS]

    drops.share, drops.count_left = 0.0, GAP_PACKETS
    until(lambda: not drops.count_left)
    end_s, seen = time.monotonic(), frames(page)
    until(lambda: frames(page) >= seen + 5)
    assert time.monotonic() - end_s <= tolerances.LOSS_RECOVERY_S
    assert page.get_attribute("body", "data-rung") == "webrtc"
