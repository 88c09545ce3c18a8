"""Snapshots: what comes back is what was kept, to the bit, or nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, Geometry
from engine.types import Action, Control
from stream.live_rollout import LiveRollout
from stream.session import WorldState
from stream.snapshots import Snapshot, read_snapshot, snapshot_file, write_snapshot
from stream.trace import Trace, read_trace
from stream.world_spec import Start, WorldSpec, read_start
from stream.worlds import ModelCache

pytestmark = pytest.mark.cpu

FORWARD = Action.from_keys([[Control.FORWARD, Control.LOOK_LEFT]] * 17)
GEOMETRY = Geometry(height_px=64, width_px=96)
MODEL = WorldSpec(
    source="model",
    preset="tiny",
    geometry=GEOMETRY,
    weights="random",
    engine=EngineConfig(device="cpu", dtype="float32"),
)
RENDERER = WorldSpec(
    source="renderer",
    preset="mini",
    geometry=GEOMETRY,
    weights="shipped",
    engine=EngineConfig(device="cpu", dtype="float32"),
)


def _snapshot() -> Snapshot:
    values = torch.randn(2, 3, 4, 5)
    tensors = {
        "plain": values,
        "turned": values.transpose(1, 2),
        "last": values.to(memory_format=torch.channels_last),
        "half": values.bfloat16(),
    }
    return Snapshot(
        chunk_index=7,
        frame_count=119,
        digest="ab" * 32,
        prompt="a lake \N{WATER WAVE}",
        state=WorldState(tensors=tensors, values={"x": 0.1, "chunk_index": 7.0}),
        last_frame_HWC=torch.randint(0, 256, (4, 6, 3), dtype=torch.uint8),
    )


def test_snapshot_comes_back_with_its_layout_in_memory(tmp_path: Path) -> None:
    kept, path = _snapshot(), tmp_path / "a.snapshot"
    write_snapshot(path, kept)
    found = read_snapshot(path)
    assert found is not None
    assert (found.chunk_index, found.frame_count, found.digest) == (7, 119, "ab" * 32)
    assert (found.prompt, found.state.values) == (kept.prompt, kept.state.values)
    assert torch.equal(found.last_frame_HWC, kept.last_frame_HWC)
    assert found.state.tensors.keys() == kept.state.tensors.keys()
    for name, tensor in kept.state.tensors.items():
        assert torch.equal(found.state.tensors[name], tensor), name
        assert found.state.tensors[name].stride() == tensor.stride(), name
    assert [each.name for each in tmp_path.iterdir()] == ["a.snapshot"]


def test_snapshot_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        write_snapshot(tmp_path / "gone" / "a.snapshot", _snapshot())


@pytest.mark.parametrize("fault", ["none", "empty", "cut", "bit", "junk"])
def test_damaged_snapshot_counts_as_none(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "a.snapshot"
    write_snapshot(path, _snapshot())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    faults = {"empty": b"", "cut": data[:-9], "bit": bytes(data), "junk": b"x" * 100}
    path.unlink()
    if fault in faults:
        path.write_bytes(faults[fault])
    assert read_snapshot(path) is None


def _begin(spec: WorldSpec, start: Start, path: Path) -> LiveRollout:
    """A rollout on models of its own, as in another process."""
    world = ModelCache().world(spec, start)
    return LiveRollout(spec, world, start, prompt="a lake", seed=5, trace_path=path)


def _step(rollout: LiveRollout, action: Action = FORWARD) -> list[np.ndarray]:
    rollout.prepare()
    return [portion.copy() for portion in rollout.step(action)]


def _played(rollout: LiveRollout, chunk_count: int) -> tuple[Trace, Snapshot]:
    """Play with a change of the prompt, and a snapshot two chunks before the end."""
    for index in range(chunk_count):
        if index == 2:
            rollout.switch_prompt("snow by night, with a long way round to a new town")
        _step(rollout, FORWARD if index % 2 else Action.still())
        if index == chunk_count - 3:
            rollout.keep(at_once=True)
    kept = read_snapshot(snapshot_file(rollout.trace_path))
    assert kept is not None
    return read_trace(rollout.trace_path), kept


@pytest.mark.parametrize(
    ("spec", "chunk_count"),
    [(MODEL, 5), (MODEL, 10), (RENDERER, 5)],
    ids=["filling", "steady", "renderer"],
)
def test_world_goes_on_from_a_snapshot_with_the_same_bits(
    tmp_path: Path, spec: WorldSpec, chunk_count: int
) -> None:
    start = read_start(spec, image=None, scene="snow-ruins")
    first = _begin(spec, start, tmp_path / "a.trace.jsonl")
    trace, kept = _played(first, chunk_count)
    wanted = _step(first)
    second = _begin(spec, start, tmp_path / "b.trace.jsonl")
    assert list(second.restore(trace, lambda: False, kept)) == [True, True]
    assert (second.chunk_index, second.prompt) == (chunk_count, first.prompt)
    assert second.frame_count == first.frame_count - 17
    for portion, expected in zip(_step(second), wanted, strict=True):
        np.testing.assert_array_equal(portion, expected)
    assert read_trace(second.trace_path).chunks == read_trace(first.trace_path).chunks
    second.end()
    first.end()
    assert not list(tmp_path.glob("*.snapshot"))


def test_snapshot_of_another_rollout_is_passed_over(tmp_path: Path) -> None:
    start = read_start(RENDERER, image=None, scene="snow-ruins")
    first = _begin(RENDERER, start, tmp_path / "a.trace.jsonl")
    trace, _ = _played(first, 4)
    second = _begin(RENDERER, start, tmp_path / "b.trace.jsonl")
    assert list(second.restore(trace, lambda: False, _snapshot())) == [True] * 4
    first.end()
    second.end()


def test_a_world_that_is_too_large_keeps_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("stream.live_rollout.SNAPSHOT_LIMIT_BYTES", 1_000)
    start = read_start(MODEL, image=None, scene="meadow-lake")
    models = ModelCache()
    path = tmp_path / "a.trace.jsonl"
    world = models.world(MODEL, start)
    rollout = LiveRollout(MODEL, world, start, prompt="", seed=0, trace_path=path)
    list(rollout.step(FORWARD))
    rollout.keep(at_once=True)
    assert not snapshot_file(path).exists()
    rollout.end()
    models.close()
