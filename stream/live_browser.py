"""Chromium as `bench live` drives it: the page is opened and played as a person would.

Owns the start of Chromium, the strokes of keys, and the log of what the page sent, got and showed.
Invariant: the page runs as it is; the log listens at the browser's own WebSocket and video element.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import UnsupportedError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--allow-loopback-in-peer-connection",
    "--disable-features=WebRtcHideLocalIpsWithMdns",
)
KEYS = ("KeyW", "KeyA", "KeyS", "KeyD", "ArrowLeft", "ArrowRight")
TAP_SHARE = 0.4
TAP_S = (0.02, 0.08)
HOLD_S = (0.3, 1.5)
GAP_S = (0.1, 0.7)

_LISTEN = """
(() => {
  const log = { sent: [], received: [], rtp: [], packets: [] };
  const nowMs = () => performance.timeOrigin + performance.now();
  const NativeSocket = globalThis.WebSocket;
  globalThis.WebSocket = class extends NativeSocket {
    constructor(...options) {
      super(...options);
      this.addEventListener("message", ({ data }) => {
        const atMs = nowMs();
        if (typeof data === "string") return void log.received.push([atMs, JSON.parse(data)]);
        const view = new DataView(data);
        log.packets.push([atMs, view.getUint32(4, true), view.getUint8(2),
          view.getUint32(12, true), view.getFloat64(16, true)]);
      });
    }
    send(data) {
      if (typeof data === "string") log.sent.push([nowMs(), JSON.parse(data)]);
      super.send(data);
    }
  };
  const video = HTMLVideoElement.prototype;
  const ask = video.requestVideoFrameCallback;
  video.requestVideoFrameCallback = function (callback) {
    return ask.call(this, (now, metadata) => {
      const { rtpTimestamp, receiveTime, processingDuration } = metadata;
      log.rtp.push([nowMs(), rtpTimestamp ?? null,
        receiveTime === undefined ? null : performance.timeOrigin + receiveTime,
        processingDuration === undefined ? null : processingDuration * 1e3]);
      callback(now, metadata);
    });
  };
  globalThis.takeLog = () => {
    const taken = { ...log, origin: performance.timeOrigin };
    log.sent = []; log.received = []; log.rtp = []; log.packets = [];
    return taken;
  };
})();
"""


class RtpFrame(NamedTuple):
    """A frame that the video element showed."""

    at_ms: float
    rtp: int | None
    came_ms: float | None
    """Its last packet."""
    decode_ms: float | None


class Packet(NamedTuple):
    """A frame that came over the WebSocket."""

    came_ms: float
    frame: int
    flags: int
    pts90: int
    created_ms: float
    """By the server's clock."""


@dataclass(kw_only=True, slots=True)
class PageLog:
    """What one page sent, got and showed; times are ms of the page's wall clock."""

    opened_ms: float = 0.0
    """Begin of the navigation."""
    sent: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    received: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    rtp: list[RtpFrame] = field(default_factory=list)
    packets: list[Packet] = field(default_factory=list)

    def add(self, taken: dict[str, Any]) -> None:
        """Append what the page logged since it was last asked."""
        self.opened_ms = float(taken["origin"])
        self.sent += [(at_ms, message) for at_ms, message in taken["sent"]]
        self.received += [(at_ms, message) for at_ms, message in taken["received"]]
        self.rtp += [RtpFrame(*each) for each in taken["rtp"]]
        self.packets += [Packet(*each) for each in taken["packets"]]

    def first(self, kind: str) -> dict[str, Any] | None:
        """First message of this type that the page got."""
        return next((message for _, message in self.received if message["t"] == kind), None)


@dataclass(frozen=True, slots=True)
class Stroke:
    """Keys that go down together, stay down, and are followed by a pause."""

    keys: tuple[str, ...]
    held_s: float
    gap_s: float


def strokes(seed: int) -> Iterator[Stroke]:
    """Taps and holds of one or two keys without end; the same for the same seed."""
    chance = random.Random(seed)
    while True:
        count = 1 if chance.random() < 0.7 else 2
        held_s = TAP_S if chance.random() < TAP_SHARE else HOLD_S
        yield Stroke(
            tuple(chance.sample(KEYS, count)), chance.uniform(*held_s), chance.uniform(*GAP_S)
        )


def find_chromium() -> str:
    """Path of the Chromium of this machine.

    Raises:
        UnsupportedError: there is none, or playwright, which drives it, is missing.
    """
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "playwright: not installed; needed to drive Chromium: pip install playwright"
        ) from None
    found = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if found is None:
        raise UnsupportedError(
            f"Chromium: none of {', '.join(CHROMIUM_NAMES)} on this machine; needed as the viewer "
            "(Debian: apt-get install chromium)"
        )
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """Headless Chromium until the end of the block.

    Raises:
        UnsupportedError: see `find_chromium`.
    """
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """One page in a browser profile of its own.

    Args:
        browser: where it opens.
        url: of the page.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self.log = PageLog()
        self._context = browser.new_context(viewport={"width": 900, "height": 800})
        self.page: Page = self._context.new_page()
        self.page.add_init_script(_LISTEN)
        self.page.goto(url)

    def wait_for(self, selector: str, limit_s: float) -> None:
        """Wait until the page looks like this.

        Raises:
            UnsupportedError: it does not within `limit_s`; says what the page shows instead.
        """
        from playwright.sync_api import TimeoutError as LimitReached

        try:
            self.page.wait_for_selector(selector, state="attached", timeout=limit_s * 1e3)
        except LimitReached:
            words = " ".join(self.page.inner_text("#overlay").split())
            raise UnsupportedError(
                f"page: no {selector} within {limit_s:.0f} s; it shows {words!r}"
            ) from None

    def hold(self, stroke: Stroke) -> None:
        """Press and release real keys, then pause."""
        for key in stroke.keys:
            self.page.keyboard.down(key)
        self.page.wait_for_timeout(stroke.held_s * 1e3)
        for key in stroke.keys:
            self.page.keyboard.up(key)
        self.page.wait_for_timeout(stroke.gap_s * 1e3)

    def read_log(self) -> None:
        """Take over what the page logged."""
        self.log.add(self.page.evaluate("takeLog()"))

    def close(self) -> None:
        """Close page and profile."""
        self._context.close()
