"""Static buffers: what may be copied in, and that they stay where they are."""

from __future__ import annotations

import pytest
import torch

from graphs.buffers import StaticBuffers

pytestmark = pytest.mark.cpu


def _buffers(**more: bool) -> StaticBuffers:
    return StaticBuffers({"x": torch.zeros(2, 3), "step": torch.zeros(1).long()}, **more)


def test_a_copy_keeps_the_address():
    buffers = _buffers(check_addresses=True)
    before = buffers.addresses
    buffers.copy_in(x=torch.ones(2, 3))
    assert torch.equal(buffers["x"], torch.ones(2, 3))
    assert before == tuple(buffers[name].data_ptr() for name in buffers.names)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"y": torch.zeros(2)}, "y: no such input; allowed: x, step"),
        ({"x": torch.zeros(3, 2)}, r"x: shape is .*\[3, 2\]\); allowed: .*\[2, 3\]"),
        ({"x": torch.zeros(2, 3).double()}, r"x: dtype is torch\.float64; allowed: torch\.float32"),
        ({"x": torch.zeros(2, 3, device="meta")}, "x: device is meta; allowed: cpu"),
    ],
    ids=["name", "shape", "dtype", "device"],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(values, message):
    buffers = _buffers()
    with pytest.raises(ValueError, match=message):
        buffers.copy_in(step=torch.ones(1).long(), **values)
    assert buffers["step"].item() == 0


def test_shared_memory_is_refused():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="share memory"):
        StaticBuffers({"a": x[:2], "b": x[2:]})


def test_a_moved_tensor_is_noticed():
    buffers = _buffers(check_addresses=True)
    buffers["x"].set_(torch.zeros(2, 3).untyped_storage(), 0, (2, 3))
    with pytest.raises(RuntimeError, match="x: moved from"):
        buffers.copy_in(x=torch.ones(2, 3))
