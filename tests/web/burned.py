"""Ids in the pixels: what a frame is, written into it before it is encoded and read in the browser.

The service is the real one; only what enters its media carries the ids. Cells of 8x8 pixels, black
or white, row by row from the top left: the marker 1, 0, then the frame id and the newest action.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stream.media import Media

if TYPE_CHECKING:
    import pytest
    from playwright.sync_api import Page

    from stream.frames import FrameMeta

CELL_PX = 8
ID_BITS = 24
ACT_BITS = 16
READ = """
async ([cell, idBits, actBits]) => {
  const { Latency } = await import('/latency.js');
  const { Wishes } = await import('/wishes.js');
  const rows = 2, width = 256;
  const canvasOfIds = new OffscreenCanvas(width, rows * cell);
  const context = canvasOfIds.getContext('2d', {willReadFrequently: true});
  const video = document.getElementById('video'), canvas = document.getElementById('canvas');
  const read = () => {
    context.drawImage(video.hidden ? canvas : video, 0, 0);
    const { data } = context.getImageData(0, 0, width, rows * cell);
    const bit = (i) => {
      const perRow = width / cell;
      const x = (i % perRow) * cell + cell / 2, y = Math.floor(i / perRow) * cell + cell / 2;
      return data[4 * (y * width + x) + 1] > 127 ? 1 : 0;
    };
    const number = (from, count) => {
      let value = 0;
      for (let i = 0; i < count; i += 1) value = value * 2 + bit(from + i);
      return value;
    };
    const isMarked = bit(0) === 1 && bit(1) === 0;
    return isMarked ? [number(2, idBits), number(2 + idBits, actBits)] : null;
  };
  window.seen = [];
  window.applied = [];
  const onShown = Latency.prototype.onShown;
  Latency.prototype.onShown = function (frame, atMs, seq = this.actionOf(frame)) {
    const burned = read();
    if (burned) window.seen.push([frame, seq, ...burned, atMs]);
    return onShown.call(this, frame, atMs, seq);
  };
  const onApplied = Wishes.prototype.onApplied;
  Wishes.prototype.onApplied = function (message) {
    window.applied.push([message.id, message.epoch, window.seen.length]);
    return onApplied.call(this, message);
  };
}
"""


@dataclass(frozen=True, slots=True)
class Published:
    """A frame that entered the media."""

    at_ms: float
    epoch: int
    act_seq: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A frame on the screen: what the page takes it for, and what its pixels say."""

    frame_id: int
    act_seq: int
    burned_id: int
    burned_seq: int
    at_ms: float


def burn(frame_HWC: NDArray[np.uint8], frame_id: int, act_seq: int) -> NDArray[np.uint8]:
    """Copy of a frame with the ids in its top left."""
    bits = f"10{frame_id % 2**ID_BITS:0{ID_BITS}b}{act_seq % 2**ACT_BITS:0{ACT_BITS}b}"
    burned_HWC = frame_HWC.copy()
    per_row = frame_HWC.shape[1] // CELL_PX
    for index, bit in enumerate(bits):
        y, x = (CELL_PX * part for part in divmod(index, per_row))
        burned_HWC[y : y + CELL_PX, x : x + CELL_PX] = 255 * int(bit)
    return burned_HWC


def burn_all(monkeypatch: pytest.MonkeyPatch) -> dict[int, Published]:
    """Burn ids into every frame from now on; what was published, by frame id."""
    publish, published = Media.publish, {}

    def burning(
        media: Media,
        frame_HWC: NDArray[np.uint8],
        meta: FrameMeta,
        release: Callable[[], None] | None = None,
    ) -> None:
        published[meta.frame_id] = Published(time.time() * 1e3, meta.epoch, meta.act_seq)
        publish(media, burn(frame_HWC, meta.frame_id, meta.act_seq), meta, release)

    monkeypatch.setattr(Media, "publish", burning)
    return published


def begin_reading(page: Page) -> None:
    """From now on the page notes the ids of what it shows."""
    page.evaluate(READ, [CELL_PX, ID_BITS, ACT_BITS])


def seen(page: Page) -> list[Seen]:
    """What the page showed since `begin_reading`."""
    return [Seen(*each) for each in page.evaluate("window.seen")]


def applied(page: Page) -> list[Any]:
    """Wishes that were acknowledged: id, epoch, and how many frames were shown before."""
    return list(page.evaluate("window.applied"))
