"""One chunk of a live rollout: the action is latched, the model runs, frames go into the ring.

Owns the numbers of a session's frames, and the reports of chunks and frames. Does not own the
moment at which a chunk starts (`worker`). Invariants: the action is taken right before the model
runs; a wait for room in the ring is no work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from stream.actions import ActionMailbox, wall_ms
from stream.chunk_schedule import ChunkSchedule
from stream.frames import NO_CHUNK, FrameMeta, FrameRing
from stream.live_rollout import LiveRollout
from stream.worker_messages import ChunkDone, ChunkStarted, FrameReady, Report
from stream.worker_pulse import Pulse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ChunkMaker:
    """Makes the chunks of one session after another.

    Args:
        mailbox: where actions are latched.
        ring: where frames go.
        schedule: learns what chunks cost.
        pulse: takes reports, and lets a wait be none of the model's.
    """

    def __init__(
        self, mailbox: ActionMailbox, ring: FrameRing, schedule: ChunkSchedule, pulse: Pulse
    ) -> None:
        self._mailbox = mailbox
        self._ring = ring
        self._schedule = schedule
        self._pulse = pulse
        self._report: Callable[[Report], None] = pulse.report
        self._next_frame_id = 0

    def begin(self, first_frame_id: int) -> None:
        """Begin the frames of a session."""
        self._next_frame_id = first_frame_id

    def show(self, epoch: int, frame_HWC: NDArray[np.uint8]) -> None:
        """Put a picture that no chunk made into the ring.

        Raises:
            RingCancelledError: a command came that ends what is under way.
        """
        self._put(frame_HWC, epoch=epoch, chunk=NO_CHUNK, act_seq=0, latch_ms=wall_ms(), offset=0)

    def make(self, rollout: LiveRollout, epoch: int) -> None:
        """Make the next chunk and put its frames into the ring.

        Raises:
            RingCancelledError: a command came that ends what is under way.
            OutputError: the chunk cannot be shown.
        """
        rollout.prepare()
        index = rollout.chunk_index
        begin_s = time.monotonic()
        latched = self._mailbox.latch(wall_ms())
        self._report(
            ChunkStarted(
                epoch=epoch,
                chunk=index,
                latch_ms=latched.latch_ms,
                act_seq=latched.act_seq,
                lost_press_count=latched.lost_press_count,
            )
        )
        period_s = self._schedule.period_s
        made, wait_s, need_s, first_s, ready_s = 0, 0.0, 0.0, 0.0, 0.0
        with closing(rollout.step(latched.action)) as portions:
            for frames_THWC in portions:
                ready_s = time.monotonic() - begin_s - wait_s
                first_s = first_s or ready_s
                # These frames are due `made` periods after the first one of the chunk.
                need_s = max(need_s, ready_s - made * period_s)
                for frame_HWC in frames_THWC:
                    before_s = time.monotonic()
                    self._put(
                        frame_HWC,
                        epoch=epoch,
                        chunk=index,
                        act_seq=latched.act_seq,
                        latch_ms=latched.latch_ms,
                        offset=made,
                    )
                    wait_s += time.monotonic() - before_s
                    made += 1
        if index > 0:  # nothing was played before the first one, and what is cold costs more
            self._schedule.chunk_made(need_s)
        total_s = time.monotonic() - begin_s
        timings = getattr(rollout.world, "timings", None)
        latents_s = timings.latents_ms / 1000.0 if timings is not None else 0.0
        self._report(
            ChunkDone(
                epoch=epoch,
                chunk=index,
                denoise_ms=timings.denoise_ms if timings is not None else (),
                refresh_ms=timings.refresh_ms if timings is not None else 0.0,
                first_frame_ms=first_s * 1000.0,
                first_decode_ms=(first_s - latents_s) * 1000.0,
                decode_ms=(ready_s - latents_s) * 1000.0,
                ring_wait_ms=wait_s * 1000.0,
                total_ms=total_s * 1000.0,
            )
        )

    def _put(
        self,
        frame_HWC: NDArray[np.uint8],
        *,
        epoch: int,
        chunk: int,
        act_seq: int,
        latch_ms: float,
        offset: int,
    ) -> None:
        # A reader that is slow must not look like a stuck model.
        with self._pulse.waiting():
            slot = self._ring.write(frame_HWC)
        meta = FrameMeta(
            frame_id=self._next_frame_id,
            epoch=epoch,
            chunk=chunk,
            act_seq=act_seq,
            latch_ms=latch_ms,
            ready_ms=wall_ms(),
            offset=offset,
        )
        self._next_frame_id += 1
        self._report(FrameReady(slot=slot, meta=meta))
