"""Notice of a chunk: when each of its frames is shown, and which actions they show.

Owns what the `chunk` message says, and the memory of it. Pure: decisions of pacing go in.
Invariant: times that were announced for a frame differ from those it is sent with by rounding only,
or a correction came before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stream import pacing

if TYPE_CHECKING:
    from stream.frames import FrameMeta

CHUNKS_REMEMBERED = 16
PTS_TOLERANCE = 2
"""Ticks of 1/90000 s by which rounding may move a time that was announced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkNotice:
    """The `chunk` message: when the frames of a chunk are shown, and which actions they show."""

    k: int
    epoch: int
    first: int
    """Frame id of the first frame."""
    n: int
    pts0: int
    dpts: int | None
    """Even spacing; None where `pts` lists each time."""
    pts: tuple[int, ...] | None
    act: tuple[tuple[int, int], ...]
    latch: tuple[tuple[int, float], ...]
    gen0_ms: float
    gen1_ms: float
    """When the first frame was ready."""
    enq_ms: float
    due_ms: float
    """When the first frame leaves, or would have left."""
    is_correction: bool


class DueTimes:
    """When frames of the last chunks left, by the server's wall clock."""

    def __init__(self) -> None:
        self._notices: OrderedDict[int, ChunkNotice] = OrderedDict()

    def told(self, notice: ChunkNotice) -> None:
        """Remember what a notice says; a correction replaces what it corrects."""
        self._notices[notice.first] = notice
        if len(self._notices) > CHUNKS_REMEMBERED:
            self._notices.popitem(last=False)

    def due_ms(self, frame_id: int) -> float | None:
        """Wall clock at which a frame left; None for one that was not told of."""
        for first, notice in reversed(self._notices.items()):
            index = frame_id - first
            if 0 <= index < notice.n:
                ticks = index * notice.dpts if notice.dpts else 0
                if notice.pts is not None:
                    ticks = notice.pts[index] - notice.pts0
                return notice.due_ms + ticks * 1e3 / pacing.PTS_HZ
        return None


class Announcer:
    """Remembers what was announced of the newest chunk.

    Args:
        frames_per_chunk: in each chunk.
    """

    def __init__(self, frames_per_chunk: int) -> None:
        self._frames_per_chunk = frames_per_chunk
        self._expected_pts: list[int] = []
        self.newest: ChunkNotice | None = None

    def forget(self) -> None:
        """A new epoch begins: what was announced no longer holds."""
        self.newest = None
        self._expected_pts = []

    def announce(
        self,
        meta: FrameMeta,
        timeline: pacing.Timeline,
        decision: pacing.PacingDecision,
        *,
        queued_ms: float,
        now_ms: float,
    ) -> ChunkNotice | None:
        """Notice that has to be told before this frame is sent; None where all is as told.

        Args:
            meta: of the frame that is sent next.
            timeline: before this frame.
            decision: of this frame.
            queued_ms: wall clock when the frame came to be paced.
            now_ms: wall clock of the decision.
        """
        if meta.chunk < 0:
            return None
        known = self.newest
        if known is not None and (known.k, known.epoch) != (meta.chunk, meta.epoch):
            known = None
        if known is not None and self._is_expected(meta.offset, decision.pts90):
            return None
        step = round(pacing.PTS_HZ * timeline.period_s)
        if known is not None:
            past = self._expected_pts[: meta.offset]
        else:  # frames that were dropped at the chunk's begin lie in the past
            past = [decision.pts90 - step * (meta.offset - i) for i in range(meta.offset)]
        left = self._frames_per_chunk - meta.offset
        self._expected_pts = [*past, *pacing.forecast_pts90(timeline, decision, left)]
        is_even = known is None and not meta.offset
        ahead_ms = (decision.pts90 - self._expected_pts[0]) * 1e3 / pacing.PTS_HZ
        self.newest = ChunkNotice(
            k=meta.chunk,
            epoch=meta.epoch,
            first=meta.frame_id - meta.offset,
            n=self._frames_per_chunk,
            pts0=self._expected_pts[0],
            dpts=step if is_even else None,
            pts=None if is_even else tuple(self._expected_pts),
            act=((0, meta.act_seq),),
            latch=((0, meta.latch_ms),),
            gen0_ms=meta.latch_ms,
            gen1_ms=known.gen1_ms if known else meta.ready_ms,
            enq_ms=known.enq_ms if known else queued_ms,
            due_ms=now_ms + decision.wait_s * 1e3 - ahead_ms,
            is_correction=known is not None,
        )
        return self.newest

    def _is_expected(self, offset: int, pts90: int) -> bool:
        return (
            offset < len(self._expected_pts)
            and abs(self._expected_pts[offset] - pts90) <= PTS_TOLERANCE
        )
