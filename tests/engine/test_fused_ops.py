"""Whole rollouts by fused kernels, interpreted, against the plain code of the blocks."""

from __future__ import annotations

import json

import pytest
import torch

from engine.block_ops import Fp8Rows, join_rows
from engine.core import CoreOptions, RolloutCore
from engine.errors import ConfigError, UnsupportedError
from engine.fused_ops import fused_block_ops
from engine.model.packed_linear import can_pack, pack_blocks
from engine.quant import quantize_
from engine.schemes import Fp8Rowwise
from tests.engine.kernels.test_ops import run_interpreted
from tests.tiny import tiny_config, unpacked_model
from tests.tolerances import FP32_ROLLOUT_ATOL, FUSED_ROLLOUT_RATIO

pytestmark = pytest.mark.cpu

# Five chunks in a window of three: it slides into both slots of its ring.
_SCRIPT = """
import itertools, json, torch
from engine.config import SPARSE_DENSE_LAYERS, Geometry, SamplerConfig
from engine.block_ops import Fp8Rows
from engine.cache_buffers import BufferShape, WindowViews, allocate
from engine.core import RolloutCore
from engine.fused_ops import fused_block_ops
from engine.kernels import fp8_linear
from engine.quant import quantize_
from engine.schemes import SCHEMES, Fp8Block, Fp8Rowwise
from tests.engine.kernels.interpreter import mend_interpreter
from tests.tiny import chunk_noise, narrow_config, random_prefix, unpacked_model, walk_views
import dataclasses

mend_interpreter()
narrow = dataclasses.replace(
    narrow_config(), num_layers=2, num_attention_heads=2, hidden_size=32, ffn_dim=48,
    window_chunks=3, sampler=SamplerConfig(steps=1), geometry=Geometry(height_px=32, width_px=32),
)
config, chunks = narrow, 5

def model(dtype, scheme=()):
    made = unpacked_model(config)
    made.cast_blocks(dtype)
    quantize_(made, scheme)
    return made

def roll(model, block_ops=None):
    core = RolloutCore(model, block_ops=block_ops)
    state, made, views = core.begin(random_prefix(config)), [], walk_views(config, 5)
    for chunk in range(chunks):
        noise = chunk_noise(config, chunk)
        latents = core.denoise(state, noise[0], noise[1:], views[:, 5 * chunk : 5 * chunk + 5])
        core.refresh(state, latents)
        made.append(latents)
    return torch.stack(made)

def fused(model, rounding):
    return roll(model, fused_block_ops(model, rounding))

bf16 = torch.bfloat16
exact = roll(model(torch.float32))
figures = {"fp32_gap": (fused(model(torch.float32), "eager") - exact).abs().max()}
def compare(name, scheme):
    figures[name] = (roll(model(bf16, scheme)) - exact).norm()
    figures[f"{name}_fused"] = (fused(model(bf16, scheme), "fast") - exact).norm()

compare("bf16", ())
compare("fp8", (Fp8Rowwise(blocks=(0, 1)),))
# Linears of several whole blocks: with one alone a factor a row would be the same.
config, chunks = dataclasses.replace(narrow, hidden_size=256, ffn_dim=256), 2
exact = roll(model(torch.float32))
compare("fp8_block", (Fp8Block(blocks=(0, 1)),))
ops = fused_block_ops(model(bf16, (Fp8Block(blocks=(0, 1)),)), "fast")
shapes = (4, 256), (4, 2, 128), (1, 6, 256)
x, o, modulation = (torch.randn(1, *shape).to(bf16) for shape in shapes)
codes = Fp8Rows(*fp8_linear.quantize_rows(o.flatten(-2), True))
joined, made = (ops.finish(0, x, each, modulation).branch_BRD for each in (o, codes))
figures["joined_gap"] = (joined - made).abs().max()
everywhere = (dataclasses.replace(rule, blocks=(0, 1)) for rule in SCHEMES["fp8_mixed"])
compare("fp8_mixed", tuple(everywhere))

def stale(block):
    # Values of a summary that a slide leaves wrong, of a window with random rows.
    deep = dataclasses.replace(narrow, num_layers=SPARSE_DENSE_LAYERS + 1)
    shape, cpu = BufferShape(batch_size=1, heads=2, prefix_room=30), torch.device("cpu")
    buffers = allocate(deep, shape, device=cpu, dtype=torch.float32, sparse_block=block)
    lists = (buffers.keys_BSNK, buffers.values_BSNK, buffers.raw_BSNK, buffers.newest_BRNK)
    for tensor in [*itertools.chain(*lists), buffers.cos_SK, buffers.sin_SK]:
        tensor.normal_()
    window = WindowViews(
        keys_BSNK=tuple(each[:, 1:-1] for each in buffers.keys_BSNK),
        values_BSNK=tuple(each[:, 1:-1] for each in buffers.values_BSNK),
        raw_BRNK=tuple(buffers.newest_BRNK),
        summaries=tuple(each and each.first(29 + 15) for each in buffers.summaries),
    )
    window.renew_summaries()
    fused_block_ops(unpacked_model(deep), "fast").slide(buffers, window, 1)
    window.renew_summaries(deep.rows_per_chunk)  # as a pass does
    kept = [part.clone() for part in window.summaries[-1].tensors]
    window.renew_summaries()
    return sum((a != b).sum() for a, b in zip(kept, window.summaries[-1].tensors))

figures |= {f"stale_{block}": stale(block) for block in (8, 16)}
print(json.dumps({name: figure.item() for name, figure in figures.items()}))
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return json.loads(run_interpreted(_SCRIPT))


def test_fp32_rollouts_agree(figures):
    assert figures["fp32_gap"] <= FP32_ROLLOUT_ATOL


@pytest.mark.parametrize("linears", ["bf16", "fp8", "fp8_block", "fp8_mixed"])
def test_fused_rollouts_are_as_near_to_fp32_as_plain_ones(figures, linears):
    assert figures[linears] > 0
    assert figures[f"{linears}_fused"] <= FUSED_ROLLOUT_RATIO * figures[linears]


def test_rows_that_come_whole_are_quantised_in_blocks_too(figures):
    # As those of ranks do, each of which has some of the heads.
    assert figures["joined_gap"] == 0


@pytest.mark.parametrize("block", [8, 16])
def test_summaries_of_the_past_are_right_after_slides(figures, block):
    # Blocks of 8 are too short for a kernel.
    assert figures[f"stale_{block}"] == 0


_COMPILED = """
import torch
from engine.attention.placement import Placement, PlacementOps
from engine.block_ops import Slot
from engine.fused_ops import fused_block_ops
from engine.model.prope import projective
from engine.quant import quantize_
from engine.schemes import Fp8Block, Fp8Rowwise
from tests.tiny import narrow_config, unpacked_model, walk_views
import dataclasses

config = dataclasses.replace(narrow_config(), hidden_size=128, ffn_dim=128)
camera = projective(walk_views(config, 1), torch.float32)
angles = torch.randn(10, 96)
placement = Placement(
    cos_RK=angles.cos(), sin_RK=angles.sin(), camera=camera, ops=PlacementOps()
)
x, modulation = torch.randn(1, 10, 128), torch.randn(1, 1, 6, 128)
for rule in ((), (Fp8Rowwise(blocks=(0, 0)),), (Fp8Block(blocks=(0, 0)),)):
    model = unpacked_model(config)
    quantize_(model, rule)
    ops = fused_block_ops(model, "eager")

    def run(cache):
        slot = Slot(
            key_BRNK=cache[0][:, 4:14], value_BRNK=cache[1][:, 4:14],
            raw_BRNK=cache[2][:, :10, :, :96], placement=placement,
        )
        entered, q, k, v = ops.project(0, x, modulation)
        q = ops.place(0, q, k, v, slot)
        o = ops.output(0, q + cache[0][:, 4:14], placement)
        left, *qkv = ops.project(0, ops.finish(0, entered, o, modulation), modulation)
        return torch.cat([left, ops.settle(left), *(each.flatten(2) for each in qkv)], dim=-1)

    with torch.no_grad():
        caches = [[torch.zeros(1, 16, 1, 128) for _ in range(3)] for _ in range(2)]
        plain = run(caches[0])
        made = torch.compile(run, backend="aot_eager", fullgraph=True)(caches[1])
    assert torch.equal(plain, made)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*caches))
"""


def test_a_compiler_takes_the_whole_block_with_its_writes():
    run_interpreted(_COMPILED)


def test_joined_weights_are_the_same_model():
    model = unpacked_model(tiny_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storages = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    fused_block_ops(model, "eager")
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    joined = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    assert joined == storages - 2 * model.config.num_layers


def test_joining_twice_moves_nothing():
    model = unpacked_model(tiny_config())
    fused_block_ops(model, "eager")
    addresses = [p.data_ptr() for p in model.parameters()]
    fused_block_ops(model, "fast")
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_cpu_is_refused():
    model = unpacked_model(tiny_config())
    ops = fused_block_ops(model, "eager")
    with pytest.raises(UnsupportedError, match="tensors are on cpu"):
        ops.project(0, torch.zeros(1, 30, 96), torch.zeros(1, 1, 6, 96))


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="this torch packs no weights")
def test_packed_linears_are_refused():
    model = unpacked_model(tiny_config())
    pack_blocks(model, rows=30)
    with pytest.raises(UnsupportedError, match="PackedLinear, PackedLinear, PackedLinear; allowed"):
        fused_block_ops(model, "eager")


def test_partly_quantised_queries_are_refused():
    model = unpacked_model(tiny_config())
    plain = model.block(0).attn.to_q
    quantize_(model, (Fp8Rowwise(blocks=(0, 0)),))
    model.block(0).attn.to_q = plain
    with pytest.raises(UnsupportedError, match="linears are Linear, Fp8Linear, Fp8Linear"):
        fused_block_ops(model, "eager")


def test_a_plain_cache_is_refused():
    model = unpacked_model(tiny_config())
    options = CoreOptions(packed_history=False)
    with pytest.raises(ConfigError, match="packed_history is False; allowed with"):
        RolloutCore(model, options, block_ops=fused_block_ops(model, "eager"))


def test_rows_of_one_kind_are_joined():
    plain = torch.randn(1, 3, 8)
    assert torch.equal(join_rows([plain[:, :1], plain[:, 1:]]), plain)
    codes, scale = torch.randn(1, 3, 8).to(torch.float8_e4m3fn), torch.rand(1, 3, 1)
    parts = [Fp8Rows(codes[:, :1], scale[:, :1]), Fp8Rows(codes[:, 1:], scale[:, 1:])]
    joined = join_rows(parts)
    assert torch.equal(joined.codes.float(), codes.float())
    assert torch.equal(joined.scale, scale)


def test_rows_in_blocks_are_joined_by_their_factors():
    codes, scale = torch.randn(1, 3, 256).to(torch.float8_e4m3fn), torch.rand(1, 3, 2)
    joined = join_rows([Fp8Rows(codes[:, :1], scale[:, :1]), Fp8Rows(codes[:, 1:], scale[:, 1:])])
    assert torch.equal(joined.codes.float(), codes.float())
    assert torch.equal(joined.scale, scale)
