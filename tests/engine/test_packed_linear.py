"""Packed weights against plain ones."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.errors import StateError
from engine.model.dit import MiniMaxH3Transformer
from engine.model.packed_linear import PackedLinear, can_pack, pack_blocks
from tests.tiny import tiny_config
from tests.tolerances import FP32_ATOL, FP32_RTOL

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="this torch packs no weights"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 7, 65])
def test_packed_equals_plain(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(41, 96, generator=generator) / 96**0.5).to(dtype)
    x = torch.randn(2, rows, 96, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T
    plain_error = (torch.nn.functional.linear(x, weight) - exact).abs().max()
    bound = 2 * plain_error + torch.finfo(dtype).eps * exact.abs().max()
    assert (PackedLinear(weight, 64)(x) - exact).abs().max() <= bound


@torch.no_grad()
def test_a_packed_block_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    plain = MiniMaxH3Transformer(tiny_config())
    packed = copy.deepcopy(plain)
    pack_blocks(packed, rows=30)
    x = torch.randn(1, 30, 96)
    modulation = torch.randn(1, 1, 6, 96)
    outputs = []
    for model in (plain, packed):
        block = model.transformer_blocks[0]
        q, k, v = block.project(x, modulation)
        outputs.append(block.finish(x, q + k + v, modulation))
    torch.testing.assert_close(*outputs, atol=FP32_ATOL, rtol=FP32_RTOL)


def test_the_state_of_a_packed_model_is_that_of_the_plain_one() -> None:
    model = MiniMaxH3Transformer(tiny_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pack_blocks(model, rows=30)
    after = model.state_dict()
    assert isinstance(model.transformer_blocks[0].attn.to_q, PackedLinear)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("target", "named"),
    [(torch.device("meta"), "to meta, torch.float32"), (torch.bfloat16, "to cpu, torch.bfloat16")],
    ids=["device", "dtype"],
)
def test_a_packed_model_goes_nowhere(target: torch.device | torch.dtype, named: str) -> None:
    model = MiniMaxH3Transformer(tiny_config())
    pack_blocks(model, rows=30)
    assert model.to("cpu", torch.float32) is model
    with pytest.raises(StateError, match=named):
        model.to(target)


def test_nothing_is_packed_for_a_gpu() -> None:
    assert not can_pack(torch.device("cuda", 0))
