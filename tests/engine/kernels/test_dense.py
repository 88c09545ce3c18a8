"""The dense attention for Hopper: what the compiler makes of it, and its output on a GPU."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, UnsupportedError
from engine.kernels import contract
from engine.kernels.dense import dense


def _inputs(rows, keys, heads, *, batch_size=1, device="cpu", dtype=torch.bfloat16, width=128):
    generator = torch.Generator(device).manual_seed(0)

    def normal(count):
        shape = (batch_size, heads, count, width)
        return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

    # Keys are the first rows of longer buffers, heads outermost, as in the cache.
    return normal(rows).contiguous(), normal(keys + 3)[:, :keys], normal(keys + 3)[:, :keys]


@pytest.fixture(scope="module")
def compiled() -> Any:
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "kernels_run_on", lambda x: True)
        (kernel,) = sm90.compiled_launches(lambda: dense(*_inputs(150, 700, 2)))
    return kernel


@pytest.mark.cpu
def test_the_kernel_compiles_for_an_h200(compiled):
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


@pytest.fixture(scope="module")
def loops(compiled) -> list[str]:
    """Code from the wait for the scores to that for the sum, in both sweeps of both groups."""
    wait = "wgmma.wait_group.sync.aligned "
    return [part.partition(f"{wait}0;")[0] for part in compiled.asm["ptx"].split(f"{wait}1;")[1:]]


@pytest.mark.cpu
def test_weights_are_made_while_the_values_are_summed(loops):
    assert len(loops) == 4
    for loop in loops:
        # A branch keeps the assembler from moving the wait in front of the weights.
        assert loop.count("ex2.approx") >= 64
        assert re.search(r"@%p\d+ bra", loop.rpartition("ex2.approx")[2])


@pytest.mark.cpu
def test_threads_of_a_row_meet_in_no_step_but_for_a_maximum_that_runs_along(loops):
    # Two shuffles for the maximum of each of a thread's two rows.
    assert sorted(loop.count("shfl.sync") for loop in loops) == [0, 0, 4, 4]


@pytest.mark.cpu
def test_a_compiler_sees_through():
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        made = dense(*(mode.from_tensor(tensor) for tensor in _inputs(5, 9, 2)))
    assert made.shape == (1, 5, 2, 128)
    assert made.dtype == torch.bfloat16
    assert made.is_contiguous()


@pytest.mark.cpu
def test_a_kernel_refuses_a_cpu():
    with pytest.raises(UnsupportedError, match="dense: tensors are on cpu; allowed: cuda"):
        dense(*_inputs(5, 9, 2))


def _shifted(tensor):
    wide = torch.zeros(*tensor.shape[:3], tensor.shape[3] + 4, dtype=tensor.dtype)
    return wide[..., 4:]


BAD = {
    "dtype": (_inputs(5, 9, 2, dtype=torch.float32), "float32, heads 128 wide; allowed: bfloat16"),
    "width": (_inputs(5, 9, 2, width=64), r"bfloat16, heads 64 wide; allowed: bfloat16, 128"),
    "empty": (_inputs(0, 9, 2), r"q has shape \(1, 0, 2, 128\), .*allowed: no axis of length 0"),
    "keys": (
        (*_inputs(5, 9, 2)[:2], _inputs(5, 8, 2)[2]), r"v has shape .*allowed: \(1, 9, 2, 128\)",
    ),
    "strides": (
        (*_inputs(5, 9, 2)[:2], _shifted(_inputs(5, 9, 2)[2])),
        r"v begins at .*\(4752, 528, 264\) bytes; allowed: multiples of 16",
    ),
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("bad", BAD)
def test_wrong_arguments_are_refused(bad, monkeypatch):
    monkeypatch.setattr(contract, "kernels_run_on", lambda x: True)
    given, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        dense(*given)


SIZES = [
    (1, 1, 1, 1), (63, 127, 3, 1), (65, 128, 2, 2), (130, 129, 5, 2), (1950, 13526, 56, 1),
    (1, 13526, 56, 1), (2600, 700, 56, 2), (5040, 333, 56, 1),
]  # fmt: skip


def _as_near_as_torch(made, q, k, v):
    """Twice torch's own distance from fp32 in the largest place, and in the mean the bar of F."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(q.float(), k.float(), v.float()).transpose(1, 2)
    theirs = attend(q, k, v).transpose(1, 2)
    error = made.float() - exact
    floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    # Squares of large values leave fp32.
    assert error.double().norm() <= 5e-3 * exact.double().norm()
    assert error.abs().max() <= 2 * (theirs - exact).abs().max() + floor


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "keys", "heads", "batch_size"), SIZES)
def test_the_kernel_agrees_with_fp32(rows, keys, heads, batch_size):
    given = _inputs(rows, keys, heads, batch_size=batch_size, device="cuda")
    _as_near_as_torch(dense(*given), *given)


@pytest.mark.gpu
def test_outliers_and_zeros_do_no_harm():
    q, k, v = _inputs(300, 1000, 4, device="cuda")
    q[:, 9] = 0.0
    for row, key, sign in ((7, 11, 1.0), (70, 999, 1.0), (71, 0, -1.0), (200, 500, -1.0)):
        # A logit of 200 either way.
        q[:, row] = (
            sign
            * k[:, key]
            * (200.0 * 128**0.5 / k[:, key].float().square().sum(-1))[..., None].bfloat16()
        )
    made = dense(q, k, v)
    assert made.isfinite().all()
    _as_near_as_torch(made, q, k, v)


def _apart(log2_weight, *, rows=slice(None), values=1.0):
    """Queries, keys, values where the 104 keys computed first weigh 2^-log2_weight of the others.

    For the queries of `rows`; to the others all keys are alike.
    """
    q, k, v = _inputs(300, 1000, 3, device="cuda")
    push = (abs(log2_weight) * math.log(2) * math.sqrt(128)) ** 0.5
    q[:, :, :, 5] = 0.0
    q[:, rows, :, 5] = push
    k[:, :, :, 5] = 0.0
    k[:, :896, :, 5] = math.copysign(push, log2_weight)
    return q, k, v * values


def _one_long_key():
    q, k, v = _inputs(300, 1000, 3, device="cuda")
    k[:, 11] *= 30
    return q, k, v


APART = {
    "weights-overflow": lambda: _apart(360),
    "weights-of-one-row-overflow": lambda: _apart(360, rows=slice(70, 71)),
    "weights-are-large": lambda: _apart(87),
    "sums-overflow": lambda: _apart(87, values=2.0**60),
    "weights-vanish": lambda: _apart(-360),
    "one-long-key": _one_long_key,
}


@pytest.mark.gpu
@pytest.mark.parametrize("apart", APART)
def test_no_maximum_of_the_first_block_does_harm(apart):
    given = APART[apart]()
    made = dense(*given)
    assert made.isfinite().all()
    _as_near_as_torch(made, *given)
    assert torch.equal(dense(*given), made)


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row():
    q, k, v = _inputs(300, 1000, 3, device="cuda")
    q[:, 70] = float("nan")
    made = dense(q, k, v)
    assert made[:, 70].isnan().all()
    # Its tile is swept twice; the second sweep rounds other weights, so only the bar is the same.
    others = torch.arange(300, device="cuda") != 70
    _as_near_as_torch(made[:, others], q[:, others], k, v)


@pytest.mark.gpu
def test_a_recorded_call_repeats_its_bits():
    given = _inputs(1950, 2000, 8, device="cuda")
    eager = dense(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = dense(*given)
    made.zero_()
    graph.replay()
    assert torch.equal(made, eager)
