import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.types import Action
from stream.trace import (
    TRACE_VERSION,
    Digest,
    TraceEnd,
    TraceHeader,
    TraceWriter,
    held_axes,
    read_trace,
    trace_path,
)

pytestmark = pytest.mark.cpu

HEADER = TraceHeader(
    version=TRACE_VERSION,
    source="model",
    preset="tiny",
    weights="random",
    model_hash="abc",
    prompt="a lake, ünïcode",
    seed=2**64 - 1,
    chunk_count=2,
    width_px=96,
    height_px=64,
    device="cpu",
    dtype="float32",
    torch_version="2.13.0",
    linear="bf16",
    attention="sparse",
    sparse_tau=1.25,
    sparse_block=32,
    sparse_steps=3,
    kernels="off",
    compile="off",
    thread_count=1,
    rank_count=1,
    scene=None,
    image="a.png",
    image_sha256="00",
)
END = TraceEnd(chunk_count=2, frame_count=34, digest="d1", interrupted=False)


def _action() -> Action:
    """Analogue values with no short decimal form."""
    axes_FA = np.random.default_rng(0).uniform(0.0, 1.0, (17, 5)) / 3.0
    axes_FA[5:9] = axes_FA[4]
    axes_FA[12:] = 0.0
    return Action(axes_FA)


def _write(path: Path) -> Path:
    with TraceWriter(path, HEADER) as trace:
        trace.chunk(0, _action(), digest="d0")
        trace.chunk(1, Action.still(), digest="d1", prompt="snow")
        trace.end(END)
    return path


def test_trace_comes_back_as_written(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "a.trace.jsonl"))
    assert trace.header == HEADER
    assert trace.end == END
    assert not trace.is_torn
    assert [chunk.prompt for chunk in trace.chunks] == [None, "snow"]
    assert [chunk.digest for chunk in trace.chunks] == ["d0", "d1"]


def test_actions_come_back_to_the_last_bit(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path / "a.trace.jsonl"))
    assert np.array_equal(trace.chunks[0].action().axes_FA, _action().axes_FA)


def test_held_axes_name_changes_only() -> None:
    frames = [frame for frame, _ in held_axes(_action())]
    assert frames == [0, 1, 2, 3, 4, 9, 10, 11, 12]


def test_lines_are_on_the_disk_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.jsonl"
    trace = TraceWriter(path, HEADER)
    trace.chunk(0, _action(), digest="d0")
    assert len(read_trace(path).chunks) == 1
    trace.close()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = _write(tmp_path / "a.trace.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    trace = read_trace(path)
    assert trace.is_torn
    assert trace.end is None
    assert len(trace.chunks) == 2


def _replace_line(path: Path, index: int, line: str) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[index] = line
    path.write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("index", "line", "name"),
    [
        (0, "{}", "header line"),
        (0, json.dumps({"type": "header", "version": 99}), "version 99"),
        # It did not say how attention reads, and other kernels rounded otherwise.
        (0, json.dumps({"type": "header", "version": 4}), "version 4; allowed: 8"),
        (0, json.dumps({"type": "header", "version": TRACE_VERSION}), "prompt"),
        (1, "{", "line 2 is not JSON"),
        (1, "[]", "line 2 is not an object"),
        (1, json.dumps({"type": "chunk", "chunk_index": 3, "held": [], "digest": ""}), "expected"),
        (1, json.dumps({"type": "chunk", "chunk_index": 0, "digest": ""}), "held"),
        (
            1,
            json.dumps({"type": "chunk", "chunk_index": 0, "held": [[3, {}]], "digest": ""}),
            "allowed: 0",
        ),
        (
            1,
            json.dumps({"type": "chunk", "chunk_index": 0, "held": [[0, {"a": "b"}]]}),
            "line 2",
        ),
        (2, json.dumps({"type": "other"}), "'other'"),
    ],
)
def test_fault_is_refused_with_its_place(tmp_path: Path, index: int, line: str, name: str) -> None:
    path = _write(tmp_path / "a.trace.jsonl")
    _replace_line(path, index, line)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    assert name in str(refused.value)


def test_header_value_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.trace.jsonl")
    header = json.loads(path.read_text(encoding="utf-8").split("\n")[0])
    _replace_line(path, 0, json.dumps({**header, "seed": "7"}))
    with pytest.raises(ConfigError, match="seed"):
        read_trace(path)


def test_unknown_axis_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.trace.jsonl")
    data = {"type": "chunk", "chunk_index": 0, "held": [[0, {"sideways": 1}]], "digest": ""}
    _replace_line(path, 1, json.dumps(data))
    with pytest.raises(ConfigError, match="sideways"):
        read_trace(path).chunks[0].action()


def test_digest_is_a_chain_over_the_bytes_in_order() -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.tensor([7, 8], dtype=torch.uint8)
    digest = Digest()
    digest.update(first.T.contiguous().T)
    digest.update(second)
    link = hashlib.sha256(bytes(32) + first.numpy().tobytes()).digest()
    assert digest.hex() == hashlib.sha256(link + second.numpy().tobytes()).hexdigest()


def test_digest_goes_on_from_its_value() -> None:
    whole, first, rest = Digest(), Digest(), Digest()
    whole.update(torch.zeros(3))
    first.update(torch.zeros(3))
    rest.resume(first.hex())
    for digest in (whole, rest):
        digest.update(torch.ones(2))
    assert rest.hex() == whole.hex()


def test_trace_lies_beside_the_video() -> None:
    assert trace_path(Path("a/b.c.mp4")) == Path("a/b.c.trace.jsonl")
