"""`latency.js` in the browser, fed by hand: which frame, which action, which clock offset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")

from pathlib import Path

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.cpu

WEB_CLIENT = Path(__file__).parents[2] / "web_client"
CHUNK = {"t": "chunk", "k": 3, "epoch": 0, "first": 52, "n": 17, "pts0": 90_000, "dpts": 3_750,
         "act": [[0, 7], [9, 8]], "times": {}}  # fmt: skip


def run(page: Page, body: str, argument: Any = None) -> Any:
    """Run a function body with `m`, the module, and `x`, the argument; nothing is listened to."""

    def answer(route: Any) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        if name:
            route.fulfill(path=WEB_CLIENT / name, content_type="text/javascript")
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    page.route("http://page.test/**", answer)
    page.goto("http://page.test/")
    return page.evaluate(
        f"async x => {{ const m = await import('/latency.js'); {body} }}", argument
    )


def test_frame_is_found_by_rtp_time_across_the_wrap(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      latency.onChunk(x);
      latency.origin = 2 ** 32 - 100_000;
      return [2, 16, 17].map(i => latency.frameOfRtp((2 ** 32 - 10_000 + 3_750 * i) % 2 ** 32));
    """
    assert run(page, body, CHUNK) == [54, 68, None]


def test_corrected_times_replace_the_announced_ones(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      latency.onChunk(x);
      latency.origin = 0;
      const pts = Array.from({length: 17}, (_, i) => 100_000 + 5_000 * i);
      latency.onChunk({...x, pts});
      return [latency.frameOfRtp(105_000), latency.frameOfRtp(93_750)];
    """
    assert run(page, body, CHUNK) == [53, None]


def test_origin_is_found_from_uneven_times_alone(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      const pts = Array.from({length: 17}, (_, i) => 1_000 * i * i);
      latency.onChunk({...x, pts});
      return pts.map(time => latency.frameOfRtp((time + 4_000_000_000) % 2 ** 32));
    """
    found = run(page, body, CHUNK)
    assert found[:7] == [None] * 7
    assert found[7:] == list(range(59, 69))


def test_even_times_alone_name_no_origin(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      latency.onChunk(x);
      return Array.from({length: 9}, (_, i) => latency.frameOfRtp(500 + 3_750 * i));
    """
    assert run(page, body, CHUNK) == [None] * 9


def test_latency_ends_at_the_first_frame_that_shows_the_action(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      latency.onChunk(x);
      latency.onAction(8, 1_000);
      latency.onShown(60, 1_200);
      const before = latency.samples.length;
      latency.onShown(61, 1_240);
      latency.onShown(62, 1_280);
      return [before, latency.samples];
    """
    assert run(page, body, CHUNK) == [0, [240]]


def test_clock_offset_comes_from_the_fastest_answers(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      for (let i = 0; i < 10; i += 1) {
        const isFast = i === 4 || i === 7;
        latency.pongs.push({rtt: isFast ? 2 : 50 + i, offset: isFast ? 100 : 900});
      }
      return latency.offsetMs;
    """
    assert run(page, body) == 100


def test_action_of_an_ended_world_is_not_measured_in_the_next(page: Page) -> None:
    body = """
      const latency = new m.Latency();
      latency.onChunk(x);
      latency.onAction(7, 1_000);
      latency.onChunk({...x, epoch: 1, k: 0, first: 69});
      latency.onShown(69, 1_400);
      return latency.samples;
    """
    assert run(page, body, CHUNK) == []
