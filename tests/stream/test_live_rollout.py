import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.config import EngineConfig, Geometry
from engine.errors import ConfigError
from engine.types import Action, Control
from stream.live_rollout import LiveRollout, OutputError, trace_file
from stream.replay import plan_replay, replay
from stream.session import ModelWorld, World
from stream.trace import Trace, read_trace
from stream.worker_messages import FailureCode
from stream.world_spec import Start, WorldSpec, read_start
from stream.worlds import ModelCache
from tests.stream.painted_worlds import SPEC, PaintedWorld

pytestmark = pytest.mark.cpu

FORWARD = Action.from_keys([[Control.FORWARD]] * 17)
START = Start(image=None, image_path=None, scene="meadow-forest")


Begin = Callable[..., LiveRollout]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Begin rollouts whose traces are closed in the end."""
    rollouts: list[LiveRollout] = []

    def begin(path: Path, prompt: str = "", world: World | None = None) -> LiveRollout:
        world = world or PaintedWorld()
        rollouts.append(LiveRollout(SPEC, world, START, prompt=prompt, seed=3, trace_path=path))
        return rollouts[-1]

    yield begin
    for rollout in rollouts:
        rollout.end()


def _step(rollout: LiveRollout, action: Action = FORWARD) -> list[np.ndarray]:
    rollout.prepare()
    return list(rollout.step(action))


def test_the_trace_has_each_chunk_as_soon_as_it_is_made(tmp_path: Path, begin: Begin) -> None:
    path = trace_file(tmp_path, "abc", 4)
    rollout = begin(path)
    for count in (1, 2):
        _step(rollout)
        assert len(read_trace(path).chunks) == count
    rollout.end()
    end = read_trace(path).end
    assert end is not None
    assert (end.chunk_count, end.frame_count) == (2, 34)
    assert path.name == "abc-e4.trace.jsonl"


def test_a_new_prompt_is_in_the_line_of_its_first_chunk(tmp_path: Path, begin: Begin) -> None:
    rollout = begin(tmp_path / "a", "lake")
    _step(rollout)
    rollout.switch_prompt("snow")
    rollout.switch_prompt("rain")
    _step(rollout)
    rollout.switch_prompt("rain")
    _step(rollout)
    rollout.end()
    trace = read_trace(tmp_path / "a")
    assert trace.header.prompt == "lake"
    assert [chunk.prompt for chunk in trace.chunks] == [None, "rain", None]


def test_a_chunk_that_was_cut_short_is_in_the_trace(tmp_path: Path, begin: Begin) -> None:
    rollout = begin(tmp_path / "a")
    portions = rollout.step(FORWARD)
    next(portions)
    portions.close()
    rollout.end()
    trace = read_trace(tmp_path / "a")
    assert len(trace.chunks) == 1
    assert trace.end is not None
    assert (trace.end.chunk_count, trace.end.digest) == (1, trace.chunks[0].digest)


@pytest.mark.parametrize(
    ("kind", "code", "shown"),
    [
        ("nan", FailureCode.OUTPUT_NAN, 0),
        ("black", FailureCode.OUTPUT_BLACK, 5),
        ("frozen", FailureCode.OUTPUT_FROZEN, 17),
    ],
)
def test_bad_output_is_found_in_its_chunk(
    tmp_path: Path, begin: Begin, kind: str, code: FailureCode, shown: int
) -> None:
    rollout = begin(tmp_path / "a", f"{kind} 1")
    _step(rollout)
    frames = 0
    with pytest.raises(OutputError, match="chunk 1") as caught:  # noqa: PT012
        for portion in rollout.step(FORWARD):
            frames += len(portion)
    assert caught.value.code is code
    assert frames == shown
    assert len(read_trace(tmp_path / "a").chunks) == 2


def test_a_model_that_makes_no_numbers_is_found_although_its_decoder_refuses_them(
    tmp_path: Path, begin: Begin
) -> None:
    size = Geometry(height_px=64, width_px=96)
    spec = WorldSpec(
        source="model", preset="tiny", geometry=size, weights="random",
        engine=EngineConfig(device="cpu", dtype="float32"),
    )  # fmt: skip
    models = ModelCache()
    world = models.world(spec, read_start(spec, image=None, scene="meadow-lake"))
    assert isinstance(world, ModelWorld)
    world._engine.core.model.proj_out.bias.data.fill_(float("nan"))
    rollout = begin(tmp_path / "a", "lake", world)
    with pytest.raises(OutputError, match="chunk 0: latents are not finite") as caught:
        _step(rollout)
    assert caught.value.code is FailureCode.OUTPUT_NAN
    models.close()


def test_rendered_frames_may_stand_still(tmp_path: Path, begin: Begin) -> None:
    class Rendered(PaintedWorld):
        digest_of = "frames"

    rollout = begin(tmp_path / "a", "frozen 0", Rendered())
    assert len(_step(rollout)) == 5


def _played(begin: Begin, path: Path) -> Trace:
    rollout = begin(path, "lake")
    _step(rollout)
    rollout.switch_prompt("snow")
    _step(rollout, Action.still())
    _step(rollout)
    return read_trace(path)


def test_a_rollout_goes_on_from_its_trace(tmp_path: Path, begin: Begin) -> None:
    trace = _played(begin, tmp_path / "a")
    rollout = begin(tmp_path / "b", "lake")
    assert list(rollout.restore(trace, lambda: False)) == [True, True, True]
    assert (rollout.chunk_index, rollout.prompt) == (3, "snow")
    assert rollout.last_frame_HWC is not None
    assert rollout.last_frame_HWC[0, 0, 1] == 16
    assert read_trace(tmp_path / "b").chunks == trace.chunks


def test_restoring_stops_when_asked(tmp_path: Path, begin: Begin) -> None:
    rollout = begin(tmp_path / "b", "lake")
    assert list(rollout.restore(_played(begin, tmp_path / "a"), lambda: True)) == []


def test_a_trace_of_other_weights_is_refused(tmp_path: Path, begin: Begin) -> None:
    trace = _played(begin, tmp_path / "a")
    rollout = begin(tmp_path / "b")
    rollout.world.model_hash = "other"
    with pytest.raises(ConfigError, match="other weights"):
        next(rollout.restore(trace, lambda: False))


def test_a_long_prompt_is_refused_before_a_trace_is_made(tmp_path: Path, begin: Begin) -> None:
    with pytest.raises(ConfigError, match="1001 characters"):
        begin(tmp_path / "a", "x" * 1001)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "attention",
    [EngineConfig(), EngineConfig(attention="sparse", sparse_block=8, sparse_steps=1)],
    ids=["dense", "sparse"],
)
def test_a_live_trace_replays_offline_bit_for_bit(tmp_path: Path, attention: EngineConfig) -> None:
    spec = WorldSpec(
        source="model",
        preset="tiny",
        geometry=Geometry(height_px=64, width_px=96),
        weights="random",
        engine=dataclasses.replace(attention, device="cpu", dtype="float32"),
    )
    Image.new("RGB", (96, 64), (20, 120, 200)).save(tmp_path / "seed.png")
    start = read_start(spec, image=str(tmp_path / "seed.png"), scene=None)
    models = ModelCache()
    path = tmp_path / "a.trace.jsonl"
    rollout = LiveRollout(
        spec, models.world(spec, start), start, prompt="a lake", seed=5, trace_path=path
    )
    _step(rollout)
    rollout.switch_prompt("snow")
    rollout.prepare()
    portions = rollout.step(FORWARD)
    next(portions)
    portions.close()
    rollout.end()
    trace = read_trace(path)
    assert trace.header.image == "seed.png"
    assert trace.header.sparse_steps == attention.sparse_steps
    replayed = replay(plan_replay(trace, tmp_path, image=None, outputs=None, force=False), models)
    models.close()
    assert replayed.first_difference is None
    assert trace.end is not None
    assert replayed.made.digest == trace.end.digest
