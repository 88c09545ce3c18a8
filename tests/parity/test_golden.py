"""The golden rollout: nine chunks of a tiny random model computed by the public SolarWM code."""

from __future__ import annotations

import re

import pytest
import torch

from engine.camera import camera_indices
from engine.config import preset
from engine.core import CoreOptions
from engine.denoise import model_times
from engine.layout import prefix_positions, window_positions
from engine.model.dit import TAG_AUDIO, TAG_VIDEO
from engine.model.prope import compress_views, identity_projective, projective
from engine.model.rope import rope_tables
from tests.parity.golden_run import (
    DTYPES,
    PREFIX_ROWS,
    TEXT_ROWS,
    golden,
    golden_prefix,
    golden_views,
    record,
)
from tests.tolerances import (
    BF16_GOLDEN_RATIO,
    FP32_BLOCK_OUT_ATOL,
    FP32_ROLLOUT_ATOL,
    FP32_ROPE_ATOL,
    FP64_POSITION_ATOL,
)

pytestmark = pytest.mark.cpu

CONFIG = preset("tiny").model
PLAIN = CoreOptions(prefix_cache=False, adaln_tables=False, packed_history=False)
FAST = CoreOptions()
MATRICES = re.compile(r"prope_|logd4_")


def _run_names() -> list[str]:
    return sorted(
        key[5:] for key in golden() if key.startswith("fp32.") and not MATRICES.search(key)
    )


def test_camera_tables_are_bit_equal():
    assert camera_indices(45, 158) == golden()["table.camera_indices"].tolist()
    assert torch.equal(golden_views()[0], golden()["table.viewmats"][1:])
    assert torch.equal(golden_views()[0, :1], golden()["table.viewmats"][:1])


@pytest.mark.parametrize("name", DTYPES)
def test_camera_matrices_are_bit_equal(name):
    views, dtype, data = golden()["table.viewmats"], DTYPES[name], golden()
    assert torch.equal(compress_views(views, dtype), data[f"{name}.logd4_viewmats"])
    found = projective(views, dtype)
    identity = identity_projective(dtype)
    for index, part in enumerate(("query", "key_value", "output")):
        assert torch.equal(getattr(found, part), data[f"{name}.prope_{part}"]), part
        row = data[f"{name}.prope_identity_row"][index]
        assert torch.equal(getattr(identity, part)[0], row), f"identity {part}"


def test_prefix_inputs_are_bit_equal():
    inputs, data = golden_prefix(), golden()
    assert torch.equal(inputs.anchor_rows_BRC, data["table.anchor_rows"])
    assert torch.equal(inputs.audio_rows_BRC, data["table.audio_rows"])
    assert torch.equal(inputs.audio_t_B, data["table.audio_t"])


@pytest.mark.parametrize("part", ["prefix", "window"])
def test_positions_and_rotary_tables(part):
    make = prefix_positions if part == "prefix" else window_positions
    positions, data = make(CONFIG, TEXT_ROWS), golden()
    assert (positions - data[f"table.pos_{part}"]).abs().max() <= FP64_POSITION_ATOL
    cos, sin = rope_tables(positions, CONFIG.rope_freq_dim, CONFIG.rope_theta)
    assert (cos - data[f"table.rope_{part}_cos"]).abs().max() <= FP32_ROPE_ATOL
    assert (sin - data[f"table.rope_{part}_sin"]).abs().max() <= FP32_ROPE_ATOL


def test_tags_and_times_of_rows():
    data, inputs, times = golden(), golden_prefix(), model_times(CONFIG.sampler)
    tags = [*inputs.text_tags_R.tolist(), *[TAG_VIDEO] * 6, *[TAG_AUDIO] * 22, *[TAG_VIDEO] * 30]
    assert tags == data["table.tags"].tolist()
    anchor_t = torch.tensor(CONFIG.sampler.anchor_t)
    for step, t in enumerate([*times, torch.tensor(1.0)]):
        row_time = torch.cat(
            [torch.ones(17), anchor_t.expand(6), inputs.audio_t_B.expand(22), t.expand(30)]
        )
        assert torch.equal(row_time, data[f"table.row_time.s{step}"]), f"step {step}"


def test_cache_holds_the_golden_chunks():
    assert record("fp32", PLAIN)["cache_k.c0.L0"].shape[0] == len(golden()["table.cache_chunks.c0"])
    assert record("fp32", PLAIN)["cache_k.c6.L0"].shape[0] == len(golden()["table.cache_chunks.c6"])


@pytest.mark.parametrize("name", _run_names())
def test_fp32_plain_agrees(name):
    bar = FP32_BLOCK_OUT_ATOL if name.startswith("block_out") else FP32_ROLLOUT_ATOL
    assert (record("fp32", PLAIN)[name] - golden()[f"fp32.{name}"]).abs().max() <= bar


@pytest.mark.parametrize("name", _run_names())
def test_bf16_plain_is_as_near_to_fp32_as_the_golden_bf16(name):
    reference, own = golden()[f"fp32.{name}"].float(), golden()[f"bf16.{name}"].float()
    found = record("bf16", PLAIN)[name].float()
    distance = (found - reference).norm() / reference.norm()
    assert distance <= BF16_GOLDEN_RATIO * (own - reference).norm() / reference.norm()


def _cached_names() -> list[str]:
    """Names that a run with a cached prefix has; per-row tensors hold the chunk's rows only."""
    return [each for each in _run_names() if not re.match(r"cache_|(anchor|audio)_velocity", each)]


@pytest.mark.parametrize("name", _cached_names())
def test_fp32_cached_prefix_agrees(name):
    found, expected = record("fp32", FAST)[name], golden()[f"fp32.{name}"]
    if name.startswith(("block_out", "attn_")):
        expected = expected[PREFIX_ROWS:]
    bar = FP32_BLOCK_OUT_ATOL if name.startswith("block_out") else FP32_ROLLOUT_ATOL
    assert (found - expected).abs().max() <= bar


@pytest.mark.parametrize("name", _cached_names())
def test_bf16_cached_prefix_is_as_near_to_fp32_as_the_golden_bf16(name):
    reference, own = golden()[f"fp32.{name}"].float(), golden()[f"bf16.{name}"].float()
    if name.startswith(("block_out", "attn_")):
        reference, own = reference[PREFIX_ROWS:], own[PREFIX_ROWS:]
    distance = (record("bf16", FAST)[name].float() - reference).norm()
    assert distance <= BF16_GOLDEN_RATIO * (own - reference).norm()


@pytest.mark.parametrize("chunk", [0, 6])
def test_prefix_pass_gives_the_prefix_rows_of_every_chunk(chunk):
    found = record("fp32", FAST)
    for layer in range(CONFIG.num_layers - 1):
        expected = golden()[f"fp32.block_out.c{chunk}.s0.L{layer}"][:PREFIX_ROWS]
        assert (found[f"block_out.prefix.L{layer}"] - expected).abs().max() <= FP32_BLOCK_OUT_ATOL
