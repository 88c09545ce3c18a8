"""Making of one chunk: what is latched, which frames and reports come, and what counts as cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.types import Action
from stream import chunk_maker
from stream.actions import ActionMailbox, ActionSnapshot, wall_ms
from stream.chunk_maker import ChunkMaker
from stream.chunk_schedule import ChunkSchedule
from stream.frames import NO_CHUNK, FrameMeta, FrameRing
from stream.live_rollout import LiveRollout, OutputError
from stream.worker_messages import ChunkDone, ChunkStarted, FrameReady, Report
from stream.world_spec import Start
from tests.stream.painted_worlds import GEOMETRY, SPEC, PaintedWorld

pytestmark = pytest.mark.cpu

START = Start(image=None, image_path=None, scene="meadow-forest")
FPS = 20.0


class Desk:
    """A maker whose reports are a list, and which counts the waits for room."""

    def __init__(self, folder: Path, prompt: str = "", world: PaintedWorld | None = None) -> None:
        self.reports: list[Report] = []
        self.waits = 0
        self.mailbox = ActionMailbox.create()
        self.ring = FrameRing.create(width_px=GEOMETRY.width_px, height_px=GEOMETRY.height_px)
        self.schedule = ChunkSchedule(FPS, 0.0)
        self.maker = ChunkMaker(self.mailbox, self.ring, self.schedule, cast(Any, self))
        self.rollout = LiveRollout(
            SPEC, world or PaintedWorld(), START, prompt=prompt, seed=3, trace_path=folder / "a"
        )

    def report(self, report: Report) -> None:
        self.reports.append(report)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits += 1
        yield

    def metas(self) -> list[FrameMeta]:
        return [each.meta for each in self.reports if isinstance(each, FrameReady)]

    def done(self) -> ChunkDone:
        (found,) = (each for each in self.reports if isinstance(each, ChunkDone))
        return found

    def close(self) -> None:
        self.rollout.end()
        self.ring.close()
        self.mailbox.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()


def test_a_chunk_is_told_before_its_frames_and_after_them(desk: Desk) -> None:
    desk.maker.make(desk.rollout, 2)
    kinds = [type(each) for each in desk.reports]
    assert kinds == [ChunkStarted, *[FrameReady] * 17, ChunkDone]
    metas = desk.metas()
    assert [meta.offset for meta in metas] == list(range(17))
    assert {(meta.epoch, meta.chunk) for meta in metas} == {(2, 0)}
    assert desk.waits == 17


def test_frames_of_a_session_are_counted_on(desk: Desk) -> None:
    desk.maker.begin(100)
    desk.maker.show(0, np.zeros((GEOMETRY.height_px, GEOMETRY.width_px, 3), np.uint8))
    desk.maker.make(desk.rollout, 0)
    metas = desk.metas()
    assert [meta.frame_id for meta in metas] == list(range(100, 118))
    assert (metas[0].chunk, metas[0].act_seq, metas[0].offset) == (NO_CHUNK, 0, 0)


def _held(seq: int) -> ActionSnapshot:
    return ActionSnapshot(
        seq=seq, held=frozenset({"KeyW"}), look=(0.0, 0.0), pad=(0.0,) * 4, edges=(),
        received_ms=wall_ms(),
    )  # fmt: skip


def test_the_newest_action_is_latched_and_named_with_each_frame(desk: Desk) -> None:
    assert desk.mailbox.post(_held(9))
    desk.maker.make(desk.rollout, 0)
    started = desk.reports[0]
    assert isinstance(started, ChunkStarted)
    assert started.act_seq == 9
    assert {meta.act_seq for meta in desk.metas()} == {9}
    assert {meta.latch_ms for meta in desk.metas()} == {started.latch_ms}


def test_a_new_prompt_is_there_before_the_action_is_latched(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def switch(prompt: str) -> None:
        prompts.append(prompt)
        desk.mailbox.post(_held(4))

    prompts: list[str] = []
    monkeypatch.setattr(desk.rollout.world, "set_prompt", switch)
    desk.rollout.switch_prompt("snow")
    desk.maker.make(desk.rollout, 0)
    assert prompts == ["snow"]
    assert {meta.act_seq for meta in desk.metas()} == {4}


def test_presses_that_no_chunk_took_are_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    latched = dataclasses.replace(desk.mailbox.latch(wall_ms()), lost_press_count=3)
    monkeypatch.setattr(desk.mailbox, "latch", lambda now_ms: latched)
    desk.maker.make(desk.rollout, 0)
    started = desk.reports[0]
    assert isinstance(started, ChunkStarted)
    assert started.lost_press_count == 3


class Clock:
    """Time that passes for work and for waits alone, in seconds."""

    def __init__(self, desk: Desk, *, portion_s: float, wait_s: float) -> None:
        self.now_s = 0.0
        self.costs_s: list[float] = []
        step, write = desk.rollout.step, desk.ring.write

        def slow_step(action: Action) -> Iterator[NDArray[np.uint8]]:
            for frames in step(action):
                self.now_s += portion_s
                yield frames

        def slow_write(frame_HWC: NDArray[np.uint8]) -> int:
            self.now_s += wait_s
            return write(frame_HWC)

        desk.rollout.step = slow_step  # type: ignore[method-assign]
        desk.ring.write = slow_write  # type: ignore[method-assign]
        desk.schedule.chunk_made = self.costs_s.append  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.now_s


def test_a_wait_for_room_is_no_work(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(desk, portion_s=0.05, wait_s=0.1)
    monkeypatch.setattr(chunk_maker, "time", clock)
    desk.maker.make(desk.rollout, 0)
    done = desk.done()
    assert done.ring_wait_ms == pytest.approx(17 * 100.0)
    assert done.total_ms == pytest.approx(17 * 100.0 + 5 * 50.0)
    assert (done.first_frame_ms, done.decode_ms) == pytest.approx((50.0, 250.0))


class TimedWorld(PaintedWorld):
    """Knows how long its parts took, as a model does."""

    timings = SimpleNamespace(denoise_ms=(10.0, 20.0), refresh_ms=5.0, latents_ms=40.0)


def test_what_a_model_knows_of_its_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, world=TimedWorld())
    monkeypatch.setattr(chunk_maker, "time", Clock(desk, portion_s=0.05, wait_s=0.0))
    desk.maker.make(desk.rollout, 0)
    done = desk.done()
    assert (done.denoise_ms, done.refresh_ms) == ((10.0, 20.0), 5.0)
    assert (done.first_decode_ms, done.decode_ms) == pytest.approx((10.0, 210.0))
    desk.close()


def test_the_schedule_learns_by_when_frames_had_to_be_begun(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(desk, portion_s=0.2, wait_s=0.0)
    monkeypatch.setattr(chunk_maker, "time", clock)
    desk.maker.make(desk.rollout, 0)
    assert clock.costs_s == []  # nothing was played before the first chunk
    desk.maker.make(desk.rollout, 0)
    # The second portion is due one frame of 0.05 s after the first, the third five frames after.
    assert clock.costs_s == [pytest.approx(0.4 - 0.05)]


def test_a_chunk_that_cannot_be_shown_is_not_done(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "nan 0")
    with pytest.raises(OutputError):
        desk.maker.make(desk.rollout, 0)
    assert [type(each) for each in desk.reports] == [ChunkStarted]
    desk.close()
