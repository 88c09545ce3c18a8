"""A world that two processes share: played, reset, killed, brought back, made again."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine.calls import Close, Settle
from engine.config import EngineConfig, PromptOptions, preset
from engine.errors import DeviceError
from engine.loading import EngineSource
from stream import follower, followers
from stream.follower import Answer, Broken, Held, Loaded, NotLoaded
from stream.follower import Refused as CallRefused
from stream.followers import Followers
from stream.processes import runs
from stream.snapshots import SNAPSHOT_CHUNKS
from stream.supervisor import WatchdogLimits, WorkerHandle
from stream.trace import read_trace
from stream.worker_messages import (
    Applied,
    ChunkDone,
    ChunkStarted,
    EndSession,
    Failed,
    FailureCode,
    FrameReady,
    Heartbeat,
    Loading,
    Planned,
    Ready,
    Refused,
    Report,
    Reset,
    SessionEnded,
    SessionStarted,
    SetPrompt,
    StartFrom,
    StartSession,
    WorkerConfig,
)
from stream.world_spec import WorldSpec, world_spec
from tests.stream.test_ranks import by_ranks

pytestmark = pytest.mark.cpu

SPEC = world_spec(
    "tiny", size=None, weights="random", renderer=False, device="cpu", dtype="float32",
    compiling="off", rank_count=2,
)  # fmt: skip
ENDS_A_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
GONE_S = 10.0
PATIENCE_S = 120.0
R = TypeVar("R", bound=Report)


@dataclass(kw_only=True)
class Story:
    """What a session of two ranks went through."""

    handle: WorkerHandle
    reports: list[Report] = field(default_factory=list)
    survivors: dict[str, set[int]] = field(default_factory=dict)
    """Processes that were still there after what should have ended them."""
    trace: Path = Path()

    async def until(self, kind: type[R], that: Callable[[R], bool] = lambda report: True) -> R:
        """Take reports, and frames off the ring, up to the first of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            async for report in self.handle.messages():
                self.reports.append(report)
                if isinstance(report, FrameReady):
                    self.handle.ring.release(report.slot)
                if isinstance(report, kind) and that(report):
                    return report
        raise AssertionError(f"the reports ended without {kind.__name__}")

    def all(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports if isinstance(report, kind)]

    async def pids(self) -> tuple[int, int]:
        """The worker and its follower."""
        await self.until(Heartbeat, lambda beat: len(beat.follower_pids) == 1)
        leader, follower = self.handle.pids
        return leader, follower

    def note_survivors(self, after: str, pids: Iterable[int]) -> None:
        """Give processes that should be gone some time to go."""
        end_s, left = time.monotonic() + GONE_S, set(pids)
        while left and time.monotonic() < end_s:
            left = {pid for pid in left if runs(pid)}
            time.sleep(0.02)
        self.survivors[after] = left


async def play(folder: Path, spec: WorldSpec = SPEC) -> Story:
    """Let a session go through everything that may happen to it."""
    config = WorkerConfig(world=spec, trace_folder=folder, fps=2000.0, jit_margin_ms=0.0)
    story = Story(handle=WorkerHandle(config, limits=WatchdogLimits(backoff_first_s=0.05)))
    handle, until = story.handle, story.until
    try:
        await handle.start()
        await until(Ready)
        handle.send(StartSession(session_id="s", start=StartFrom(scene="snow-ruins"), seed=11))
        await until(ChunkStarted, lambda started: started.chunk == 2)
        handle.send(Reset(id=1, seed=12))
        await until(ChunkDone, lambda done: (done.epoch, done.chunk) == (1, 1))
        handle.send(SetPrompt(id=2, prompt="a lake at night"))
        handle.send(SetPrompt(id=3, prompt="x" * 100_000))
        await until(ChunkDone, lambda done: done.chunk > SNAPSHOT_CHUNKS)
        leader, follower = await story.pids()
        os.kill(follower, signal.SIGKILL)
        story.trace = (await until(SessionStarted)).trace
        story.note_survivors("death of a follower", (leader, follower))
        await until(ChunkDone)
        handle.send(EndSession())
        await until(SessionEnded)
        leader, follower = await story.pids()
        os.kill(leader, signal.SIGKILL)
        story.note_survivors("death of the leader", (leader, follower))
        await until(Heartbeat, lambda beat: len(beat.follower_pids) == 1)
        pids = handle.pids
    finally:
        await handle.close()
    story.note_survivors("end of the service", pids)
    return story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return asyncio.run(play(tmp_path_factory.mktemp("story")))


def test_a_worker_says_how_many_share_its_world(story: Story) -> None:
    assert {ready.rank_count for ready in story.all(Ready)} == {2}
    assert story.all(Loading)[0].stage == "loading the model, 2 ranks"
    assert all("first of 2 ranks" in planned.text for planned in story.all(Planned))


def test_a_reset_within_a_chunk_abandons_it_on_every_rank(story: Story) -> None:
    assert [done.chunk for done in story.all(ChunkDone) if done.epoch == 0] == [0, 1]
    assert story.all(Applied)[0].epoch == 1


def test_a_refused_prompt_disturbs_nobody(story: Story) -> None:
    assert [refused.id for refused in story.all(Refused)] == [3]


def test_a_session_goes_on_when_a_follower_dies(story: Story) -> None:
    assert story.all(Failed)[0].code is FailureCode.WORKER_DIED
    restored = story.all(SessionStarted)[-1]
    assert restored.is_same_world
    assert restored.restored_chunk_count > SNAPSHOT_CHUNKS
    remade = [each for each in story.all(Loading) if each.stage == "restoring the world"]
    assert len(remade) == restored.restored_chunk_count - SNAPSHOT_CHUNKS


@pytest.mark.parametrize(
    "after", ["death of a follower", "death of the leader", "end of the service"]
)
def test_no_process_is_left(story: Story, after: str) -> None:
    assert story.survivors[after] == set()


class Far:
    """A follower that does what the test says; its process does nothing."""

    def __init__(self, rank: int, device: str) -> None:
        ours, self.pipe = Pipe()
        self.is_killed = False
        self.known = followers._Follower(
            rank=rank,
            device=device,
            process=self,
            connection=ours,  # type: ignore[arg-type]
        )

    pid = 7

    def kill(self) -> None:
        self.is_killed = True

    def join(self, limit_s: float | None = None) -> None:
        self.pipe.close()

    def say(self, answer: Answer) -> None:
        self.pipe.send_bytes(pickle.dumps(answer))

    def hear(self) -> Any:
        return pickle.loads(self.pipe.recv_bytes())


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which this process would have ended."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        sys.exit()  # of the thread

    monkeypatch.setattr(followers, "end_at_once", end)
    monkeypatch.setattr(followers, "AGREE_S", 0.2)
    return codes


@pytest.fixture
def failures() -> list[BaseException]:
    """Errors for which this process would have ended."""
    return []


@pytest.fixture
def far(
    monkeypatch: pytest.MonkeyPatch, ends: list[int], failures: list[BaseException]
) -> Iterator[tuple[Followers, list[Far]]]:
    """Two followers without processes."""
    fars: list[Far] = []

    def start(rank: int, devices: Sequence[str], port: int) -> Any:
        fars.append(Far(rank, devices[rank]))
        return fars[-1].known

    monkeypatch.setattr(followers, "_start", start)
    monkeypatch.setattr(followers, "join", lambda device, meeting: "group")
    monkeypatch.setattr(followers, "part", lambda group: None)
    thread_count = torch.get_num_threads()
    led = Followers(("cpu",) * 3, on_failure=failures.append)
    yield led, fars
    led.close()
    torch.set_num_threads(thread_count)


def _wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


FarPair = tuple[Followers, list[Far]]


def test_followers_load_what_the_leader_loads_but_no_prompt_encoder(far: FarPair) -> None:
    led, fars = far
    config = EngineConfig(dtype="float32", prompts=PromptOptions(encoder="there", residency="cpu"))
    source = EngineSource(weights=None, model=preset("tiny").model, config=config)
    led.load(source)
    for each in fars:
        heard: EngineSource = each.hear()
        assert heard.model == source.model
        assert heard.config.device == "cpu"
        assert heard.config.prompts == PromptOptions(encoder="there", residency="free")
        each.say(Loaded())
    led.wait_loaded()


def test_a_follower_that_cannot_load_is_told_of(far: FarPair) -> None:
    led, (first, second) = far
    first.say(Loaded())
    second.say(NotLoaded(detail="DeviceError: 3 GiB are free"))
    with pytest.raises(DeviceError, match="rank 2 on cpu: DeviceError: 3 GiB are free"):
        led.wait_loaded()
    led.close()
    assert first.is_killed


def test_memory_of_followers_is_summed(far: FarPair) -> None:
    led, fars = far
    for each in fars:
        each.say(Held(device_bytes=5))
    _wait_for(lambda: led.device_bytes == 10)
    assert led.pids == (7, 7)


def test_what_all_refuse_ends_nobody(far: FarPair, ends: list[int]) -> None:
    led, fars = far
    for each in fars:
        each.say(CallRefused(detail="seed"))
    led.agree()
    time.sleep(2 * followers.AGREE_S)
    assert ends == []


def test_what_the_leader_refuses_alone_ends_all(far: FarPair, ends: list[int]) -> None:
    led, (first, _) = far
    first.say(CallRefused(detail="seed"))
    with pytest.raises(SystemExit):
        led.agree()
    assert ends[0] == 1


@ENDS_A_THREAD
@pytest.mark.parametrize(
    ("last", "told", "is_failure"),
    [
        (CallRefused(detail="seed is -1"), "rank 1 refused alone: seed is -1", True),
        (Broken(detail="KeyError: 3"), "rank 1 on cpu: KeyError: 3", True),
        (None, "rank 1 ended", False),
    ],
)
def test_what_goes_wrong_on_a_follower_ends_all(
    far: FarPair,
    ends: list[int],
    failures: list[BaseException],
    caplog: pytest.LogCaptureFixture,
    last: Answer | None,
    told: str,
    is_failure: bool,
) -> None:
    _, (first, _) = far
    if last is None:
        first.pipe.close()
    else:
        first.say(last)
    _wait_for(lambda: ends == [1])
    assert told in caplog.text
    assert [str(error) for error in failures] == ([told] if is_failure else [])


@ENDS_A_THREAD
def test_a_follower_that_refuses_alone_cannot_talk_it_away(
    far: FarPair, ends: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    _, (first, second) = far
    first.say(CallRefused(detail="seed"))
    end_s = time.monotonic() + 20 * followers.AGREE_S
    while not ends and time.monotonic() < end_s:
        second.say(Held(device_bytes=5))
        time.sleep(0.02)
    assert ends == [1]
    assert "rank 1 refused alone: seed" in caplog.text


def test_followers_that_end_when_they_are_told_end_nobody(far: FarPair, ends: list[int]) -> None:
    led, fars = far
    led.tell(Close())
    fars[0].say(Broken(detail="the group is gone"))  # before the leader is done with its engine
    fars[0].pipe.close()
    led._thread.join(PATIENCE_S)
    led.close()
    assert ends == []
    assert all(each.known.connection.closed for each in fars)


@ENDS_A_THREAD
def test_a_call_that_fails_on_a_follower_is_heard_of(
    ends: list[int], failures: list[BaseException]
) -> None:
    """With a real process."""
    thread_count = torch.get_num_threads()
    led = Followers(("cpu", "cpu"), on_failure=failures.append)
    led.load(EngineSource(weights=None, model=preset("tiny").model, config=SPEC.engine))
    led.wait_loaded()
    led.tell(Settle(rollout=3))
    _wait_for(lambda: ends == [1])
    led.close()
    torch.set_num_threads(thread_count)
    assert str(failures[0]) == "rank 1 on cpu: KeyError: 3"


@ENDS_A_THREAD
def test_what_a_follower_cannot_read_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower, "end_at_once", sys.exit)
    ours, theirs = Pipe()
    link = follower._Link(theirs)
    ours.send_bytes(b"torn")
    with pytest.raises(pickle.UnpicklingError):
        link.receive()
    ours.close()
    link._thread.join(PATIENCE_S)
    assert not link._thread.is_alive()


def test_as_many_ranks_make_the_session_again(story: Story) -> None:
    trace = read_trace(story.trace)
    assert trace.header.rank_count == 2
    assert [chunk.prompt for chunk in trace.chunks if chunk.prompt] == ["a lake at night"]
    result = by_ranks(story.trace.parent, "replay", str(story.trace))
    assert result.returncode == 0, result.stderr
    count = len(trace.chunks)
    assert f"same as recorded: {count} of {count} chunks" in result.stdout
