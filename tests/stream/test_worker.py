"""The loop of the worker in a thread, with real pipe, ring and mailbox, and a painted world."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from engine.config import EngineConfig, preset
from stream import live_rollout
from stream.actions import ActionMailbox, ActionSnapshot, wall_ms
from stream.command_inbox import merge_resets
from stream.frames import NO_CHUNK, FrameMeta, FrameRing
from stream.load_news import LoadNews
from stream.trace import read_trace
from stream.worker import Worker
from stream.worker_messages import (
    Applied,
    ChunkDone,
    ChunkStarted,
    Command,
    EndSession,
    Failed,
    FailureCode,
    FrameReady,
    Heartbeat,
    Loading,
    Pause,
    Ready,
    Refused,
    Report,
    Reset,
    Resume,
    SessionEnded,
    SessionStarted,
    SetPrompt,
    Shutdown,
    StartFrom,
    StartSession,
    StepOnce,
    WorkerConfig,
)
from stream.world_source import LoadedWorlds, OpenSource, Worlds
from stream.world_spec import WorldSpec
from tests.allocator import AllocatorLimit
from tests.stream.painted_worlds import SPEC, NoWorlds, PaintedWorld, PaintedWorlds

pytestmark = pytest.mark.cpu

SCENE = StartFrom(scene="meadow-forest")
PATIENCE_S = 30.0
R = TypeVar("R", bound=Report)


class Api:
    """The other side of a worker: reads reports, shows frames at once unless told not to."""

    def __init__(
        self, folder: Path, open_source: OpenSource = PaintedWorlds, spec: WorldSpec = SPEC
    ) -> None:
        self.pipe, theirs = Pipe()
        self.mailbox = ActionMailbox.create()
        size = spec.geometry
        self.ring = FrameRing.create(width_px=size.width_px, height_px=size.height_px)
        self.holds_frames = False
        self.frames: list[tuple[FrameMeta, np.ndarray]] = []
        self.reports: list[Report] = []
        # At 2,000 frames a second playback never holds the worker back.
        config = WorkerConfig(world=spec, trace_folder=folder, fps=2000.0, jit_margin_ms=0.0)
        # On a machine that is busy a chunk may begin late; what is held counts all the same.
        self._mailbox = ActionMailbox.attach(self.mailbox.name, stale_ms=60_000.0)
        self._ring = FrameRing.attach(self.ring.handle)
        worker = Worker(config, theirs, self._mailbox, self._ring, open_source)
        self.thread = threading.Thread(target=worker.run, daemon=True)
        self.thread.start()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.pipe.send(command)

    def start(self, prompt: str = "", *, is_paused: bool = False) -> None:
        if not any(isinstance(report, Ready) for report in self.reports):
            self.wait(Ready)
        self.send(
            StartSession(session_id="s", start=SCENE, prompt=prompt, is_paused=is_paused, epoch=3)
        )
        self.wait(SessionStarted)

    def wait(self, kind: type[R], that: Callable[[R], bool] = lambda report: True) -> R:
        """Take reports up to the first of a kind."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.pipe.poll(max(0.0, deadline_s - time.monotonic())):
            report: Report = self.pipe.recv()
            self.reports.append(report)
            if isinstance(report, FrameReady) and not self.holds_frames:
                self.frames.append((report.meta, self.ring.read(report.slot)))
                self.ring.release(report.slot)
            if isinstance(report, kind) and that(report):
                return report
        raise AssertionError(f"no {kind.__name__} within {PATIENCE_S} s: {self.reports[-5:]}")

    def rest(self, for_s: float = 0.1) -> list[Report]:
        """Reports of a time in which nothing should come, heartbeats left out."""
        before = len(self.reports)
        while self.pipe.poll(for_s):
            self.reports.append(self.pipe.recv())
        return [each for each in self.reports[before:] if not isinstance(each, Heartbeat)]

    def close(self) -> None:
        self.pipe.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        for each in (self._mailbox, self._ring, self.mailbox, self.ring):
            each.close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.close()


def test_loading_is_told_and_ends_in_ready(api: Api) -> None:
    ready = api.wait(Ready)
    stages = [report.stage for report in api.reports if isinstance(report, Loading)]
    assert stages == ["loading the model", "warming up"]
    assert (ready.width_px, ready.height_px, ready.model_hash) == (64, 32, "painted")


def test_damaged_weights_end_the_worker_with_a_reason(tmp_path: Path) -> None:
    api = Api(tmp_path, NoWorlds)
    failed = api.wait(Failed)
    assert (failed.code, failed.is_fatal) == (FailureCode.LOAD_FAILED, True)
    assert "damaged" in failed.detail
    api.close()


class LateWorlds(PaintedWorlds):
    """Source of a world whose frames wait for a chunk that nobody has steered yet."""

    def __init__(self, spec: WorldSpec, news: LoadNews) -> None:
        super().__init__(spec, news)
        self._world.lookahead_latents = 2


def test_a_decoder_that_looks_ahead_is_refused_for_play(tmp_path: Path) -> None:
    api = Api(tmp_path, LateWorlds)
    failed = api.wait(Failed)
    assert (failed.code, failed.is_fatal) == (FailureCode.LOAD_FAILED, True)
    assert "wait for 2 latents of the next chunk" in failed.detail
    api.close()


def test_the_first_picture_comes_before_anything_is_made(api: Api) -> None:
    api.start(is_paused=True)
    first = api.wait(FrameReady)
    assert (first.meta.frame_id, first.meta.epoch, first.meta.chunk) == (1, 3, NO_CHUNK)
    assert api.rest() == []


def test_frames_are_numbered_and_carry_what_they_show(api: Api) -> None:
    api.start()
    api.wait(ChunkDone, lambda done: done.chunk == 1)
    metas = [meta for meta, _ in api.frames[1:]]
    assert [meta.frame_id for meta in metas] == list(range(2, 36))
    assert [meta.offset for meta in metas] == [*range(17), *range(17)]
    assert [meta.chunk for meta in metas] == [0] * 17 + [1] * 17
    for meta, frame_HWC in api.frames[1:]:
        assert tuple(frame_HWC[0, 0, :2]) == (50 + meta.chunk, meta.offset)


def test_the_action_is_taken_at_the_start_of_a_chunk(api: Api) -> None:
    api.start(is_paused=True)
    api.mailbox.post(ActionSnapshot(seq=41, held=frozenset({"KeyW"}), received_ms=wall_ms()))
    api.send(StepOnce(id=1))
    started = api.wait(ChunkStarted)
    api.wait(ChunkDone)
    assert started.act_seq == 41
    meta, frame_HWC = api.frames[-1]
    assert (meta.act_seq, meta.latch_ms) == (41, started.latch_ms)
    assert frame_HWC[0, 0, 2] == 17


def test_a_step_makes_one_chunk(api: Api) -> None:
    api.start(is_paused=True)
    api.send(StepOnce(id=8))
    assert api.wait(Applied).id == 8
    api.wait(ChunkDone)
    assert api.rest() == []


def test_pause_and_resume(api: Api) -> None:
    api.start()
    api.wait(ChunkDone)
    api.send(Pause())
    deadline_s = time.monotonic() + PATIENCE_S
    while [each for each in api.rest() if isinstance(each, ChunkStarted)]:
        assert time.monotonic() < deadline_s
        for slot in range(api.ring.capacity):
            if api.ring.state(slot):
                api.ring.release(slot)
    for slot in range(api.ring.capacity):
        if api.ring.state(slot):
            api.ring.release(slot)
    api.send(Resume())
    api.wait(ChunkStarted)


def test_reset_begins_anew_in_the_next_epoch(api: Api, tmp_path: Path) -> None:
    api.start()
    api.wait(ChunkDone)
    api.send(Reset(id=5, seed=9, prompt="snow"))
    started = api.wait(SessionStarted)
    assert (started.epoch, started.seed, started.prompt) == (4, 9, "snow")
    applied = api.wait(Applied)
    assert (applied.id, applied.epoch, applied.chunk) == (5, 4, 0)
    assert api.wait(ChunkStarted).chunk == 0
    epochs = [meta.epoch for meta, _ in api.frames]
    assert epochs == sorted(epochs)
    assert read_trace(tmp_path / "s-e3.trace.jsonl").end is not None


def test_ten_resets_in_a_row_act_as_one(api: Api) -> None:
    api.start("slow 0.3")
    api.wait(ChunkStarted)
    api.send(*[Reset(id=number) for number in range(10)])
    assert api.wait(SessionStarted).epoch == 4
    answered = [api.wait(Applied).id for _ in range(10)]
    assert answered == list(range(10))
    api.wait(ChunkDone)
    assert {meta.epoch for meta, _ in api.frames} == {3, 4}


def test_a_later_reset_keeps_what_the_earlier_one_asked_for() -> None:
    other = StartFrom(scene="snow-ruins")
    merged = merge_resets(
        [
            Reset(id=1, start=other, prompt="lake", seed=4),
            Pause(),
            Reset(id=2, seed=5),
            Reset(id=3, prompt="snow"),
            Reset(id=4, start=other),
        ]
    )
    assert [ids for _, ids in merged] == [(1,), (), (2, 3, 4)]
    assert merged[2][0] == Reset(id=4, start=other, prompt=None, seed=5)


def test_a_reset_frees_a_worker_that_waits_for_the_ring(api: Api) -> None:
    api.holds_frames = True
    api.start("lake", is_paused=True)
    api.send(StepOnce(id=1))
    api.wait(ChunkDone)
    api.send(StepOnce(id=2))
    deadline_s = time.monotonic() + PATIENCE_S
    while api.ring.taken_count < api.ring.capacity:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    api.send(EndSession())
    api.wait(SessionEnded)


def test_a_prompt_counts_from_the_next_chunk(api: Api, tmp_path: Path) -> None:
    api.start("lake", is_paused=True)
    api.send(StepOnce(id=1))
    api.wait(ChunkDone)
    api.send(SetPrompt(id=2, prompt="snow"), StepOnce(id=3))
    assert api.wait(Applied, lambda applied: applied.id == 2).chunk == 1
    api.wait(ChunkDone)
    chunks = read_trace(tmp_path / "s-e3.trace.jsonl").chunks
    assert [chunk.prompt for chunk in chunks] == [None, "snow"]


def test_chunks_are_made_while_a_prompt_is_encoded(api: Api) -> None:
    PaintedWorld.may_encode.clear()
    api.start("lake")
    api.send(SetPrompt(id=1, prompt="late"), SetPrompt(id=2, prompt="snow"))
    for _ in range(3):
        api.wait(ChunkDone)
    assert not any(isinstance(each, Applied) for each in api.reports)
    PaintedWorld.may_encode.set()
    first, second = api.wait(Applied), api.wait(Applied)
    assert (first.id, second.id) == (1, 2)
    assert first.chunk <= second.chunk


def test_a_prompt_that_the_encoder_refuses_changes_nothing(api: Api, tmp_path: Path) -> None:
    api.start("lake", is_paused=True)
    api.send(SetPrompt(id=1, prompt="refused"))
    refused = api.wait(Refused)
    assert (refused.id, refused.detail) == (1, "prompt: 900 tokens; allowed: at most 512")
    api.send(StepOnce(id=2))
    api.wait(ChunkDone)
    assert read_trace(tmp_path / "s-e3.trace.jsonl").chunks[0].prompt is None


def test_a_reset_takes_prompts_along_that_are_on_their_way(api: Api) -> None:
    PaintedWorld.may_encode.clear()
    api.start("lake", is_paused=True)
    api.send(SetPrompt(id=1, prompt="late"), SetPrompt(id=2, prompt="snow"), Reset(id=3))
    started = api.wait(SessionStarted)
    assert (started.epoch, started.prompt) == (4, "snow")
    applied = [api.wait(Applied) for _ in range(3)]
    assert [(each.id, each.chunk) for each in applied] == [(1, 0), (2, 0), (3, 0)]
    PaintedWorld.may_encode.set()


def test_a_reset_to_a_refused_prompt_begins_anew_with_the_old_one(api: Api) -> None:
    api.start("lake", is_paused=True)
    api.send(Reset(id=1, prompt="refused"))
    assert api.wait(Refused).id == 1
    started = api.wait(SessionStarted)
    assert (started.epoch, started.prompt) == (4, "lake")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("nan", FailureCode.OUTPUT_NAN),
        ("black", FailureCode.OUTPUT_BLACK),
        ("frozen", FailureCode.OUTPUT_FROZEN),
        ("raise", FailureCode.GEN_FAILED),
    ],
)
def test_a_bad_chunk_ends_the_session_and_the_next_one_works(
    api: Api, kind: str, code: FailureCode
) -> None:
    api.start(f"{kind} 5")
    failed = api.wait(Failed)
    assert (failed.session_id, failed.code, failed.is_fatal) == ("s", code, False)
    assert max(meta.chunk for meta, _ in api.frames) == (5 if kind in ("black", "frozen") else 4)
    api.wait(SessionEnded)
    assert api.rest() == []
    api.start("lake")
    api.wait(ChunkDone)


class CrampedWorlds(LoadedWorlds):
    """The tiny model, in a thread whose memory can be made short."""

    limit = AllocatorLimit()

    def __init__(self, spec: WorldSpec, news: LoadNews) -> None:
        super().__init__(spec, news)
        self.limit.__enter__()

    def close(self) -> None:
        self.limit.__exit__(None, None, None)
        super().close()


def test_memory_that_runs_out_ends_the_session_and_the_next_one_works(tmp_path: Path) -> None:
    spec = WorldSpec(
        source="model",
        preset="tiny",
        geometry=preset("tiny").model.geometry,
        weights="random",
        engine=EngineConfig(device="cpu", dtype="float32"),
    )
    api = Api(tmp_path, CrampedWorlds, spec)
    try:
        api.start("lake")
        api.wait(ChunkDone)
        CrampedWorlds.limit.limit_bytes = 20_000
        failed = api.wait(Failed)
        assert (failed.code, failed.is_fatal) == (FailureCode.GEN_FAILED, False)
        assert failed.detail.startswith("OutOfMemoryError: memory ran out in ")
        api.wait(SessionEnded)
        CrampedWorlds.limit.limit_bytes = math.inf
        api.start("lake")
        api.wait(ChunkDone)
    finally:
        api.close()


def test_an_unusable_start_ends_the_session_only(api: Api) -> None:
    api.wait(Ready)
    api.send(StartSession(session_id="s", start=StartFrom(image_path="/nowhere.png")))
    assert api.wait(Failed).code is FailureCode.BAD_START
    api.start()
    api.wait(ChunkDone)


def test_a_session_goes_on_from_a_trace(api: Api, tmp_path: Path) -> None:
    api.start("lake", is_paused=True)
    for number in range(2):
        api.send(StepOnce(id=number))
        api.wait(ChunkDone)
    api.send(EndSession())
    api.wait(SessionEnded)
    trace = tmp_path / "s-e3.trace.jsonl"
    last_HWC = api.frames[-1][1]
    api.send(
        StartSession(session_id="s", start=SCENE, epoch=4, resume_trace=trace, first_frame_id=36)
    )
    started = api.wait(SessionStarted)
    assert (started.epoch, started.restored_chunk_count, started.is_same_world) == (4, 2, True)
    shown = api.wait(FrameReady)
    assert (shown.meta.frame_id, shown.meta.chunk) == (36, NO_CHUNK)
    assert np.array_equal(api.frames[-1][1], last_HWC)
    assert api.wait(ChunkStarted).chunk == 2


def test_few_chunks_are_made_again_where_there_is_a_snapshot(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rollout, "SNAPSHOT_CHUNKS", 3)
    api.start("lake", is_paused=True)
    for number in range(5):
        api.send(StepOnce(id=number))
        api.wait(ChunkDone)
    for kept in tmp_path.glob("s-e3.*"):  # as a worker leaves them that dies
        shutil.copyfile(kept, tmp_path / kept.name.replace("s-e3", "d-e0"))
    api.send(
        StartSession(
            session_id="d", start=SCENE, epoch=1, resume_trace=tmp_path / "d-e0.trace.jsonl"
        )
    )
    started = api.wait(SessionStarted)
    assert (started.restored_chunk_count, started.is_same_world) == (5, True)
    made_again = [each for each in api.reports if isinstance(each, Loading)]
    assert len([each for each in made_again if each.stage == "restoring the world"]) == 2
    assert [each.name for each in tmp_path.glob("d-*.snapshot")] == ["d-e1.snapshot"]


def test_shutdown_ends_the_worker_in_mid_session(api: Api) -> None:
    api.start("slow 0.1")
    api.wait(ChunkStarted)
    api.send(Shutdown())
    api.wait(SessionEnded)
    api.thread.join(PATIENCE_S)
    assert not api.thread.is_alive()


def test_the_heartbeat_tells_how_long_a_chunk_takes(api: Api) -> None:
    api.start("slow 2.5")
    assert api.wait(Heartbeat, lambda beat: beat.busy_ms > 1000.0)


def test_the_heartbeat_tells_what_became_of_passes(api: Api) -> None:
    api.start()
    api.wait(ChunkDone, lambda done: done.chunk == 3)
    (use,) = api.wait(Heartbeat, lambda beat: bool(beat.graphs)).graphs
    # One chunk of the warm-up and these: plain, recorded, replayed from then on.
    assert (use.part, use.plain_count, use.recorded_count) == ("transformer", 1, 1)
    assert use.replayed_count >= 3
    assert (use.entry_count, use.held_bytes) == (1, 100)
    assert use.unlisted_count == use.refused_count == use.evicted_count == 0


def test_a_worker_between_two_worlds_tells_of_no_passes(tmp_path: Path) -> None:
    worlds = Worlds(SPEC, PaintedWorlds, LoadNews())
    assert worlds.graphs() == ()
    worlds.open(SCENE)
    assert [use.part for use in worlds.graphs()] == ["transformer"]
    worlds.forget()
    assert worlds.graphs() == ()


def test_waiting_for_room_in_the_ring_is_no_work(api: Api) -> None:
    api.start(is_paused=True)
    for _ in range(api.ring.capacity - 3):
        api.ring.handle.free.acquire()
    api.holds_frames = True
    api.send(Resume())
    api.wait(FrameReady, lambda frame: frame.meta.offset == 1)
    api.wait(Heartbeat)
    assert api.wait(Heartbeat).busy_ms == 0.0
    assert api.wait(Heartbeat).busy_ms == 0.0
