"""Linears in eight bits: which, how well, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from engine.config import EngineConfig, preset
from engine.engine import Engine
from engine.errors import ConfigError, UnsupportedError
from engine.kernels.reference import quantize_rows
from engine.model.packed_linear import PackedLinear, can_pack, pack_blocks
from engine.quant import LINEARS, SCHEMES, Fp8Linear, Fp8Rowwise, quantize_, read_scheme, sqnr_db
from tests.tiny import random_action, random_anchor, tiny_config, unpacked_model
from tests.tolerances import FP8_LINEAR_SQNR_DB, FP8_OUTPUT_SQNR_DB

pytestmark = pytest.mark.cpu

ALL = (Fp8Rowwise(blocks=(0, 2)),)


def test_every_linear_reaches_its_sqnr():
    model = unpacked_model(tiny_config())
    report = quantize_(model, ALL)
    assert len(report.layers) == 3 * len(LINEARS)
    assert report.skipped == {}
    assert report.lowest_db >= FP8_LINEAR_SQNR_DB
    assert all(layer.weight_sqnr_db > layer.output_sqnr_db for layer in report.layers)
    # One byte for four, and four for each of 96 to 160 input channels.
    assert 1 / 4 < report.after_gib / report.before_gib < 1 / 4 + 1 / 90


def test_the_linear_is_what_its_formula_says():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 32, generator=generator), torch.randn(16, 32, generator=generator)
    codes, scale = quantize_rows(weight)
    rows, row_scale = quantize_rows(x)
    expected = (rows.double() * row_scale) @ (codes.double() * scale).mT
    made = Fp8Linear(codes, scale[:, 0].contiguous())(x)
    torch.testing.assert_close(made.double(), expected, atol=1e-5, rtol=1.3e-6)


def test_rows_use_the_whole_range_of_the_codes():
    x = torch.tensor([[1e-3, -2e-3], [700.0, 1.0], [0.0, 0.0]])
    codes, scale = quantize_rows(x)
    assert codes.float().abs().amax(1).tolist() == [448.0, 448.0, 0.0]
    torch.testing.assert_close(scale[:2, 0], torch.tensor([2e-3, 700.0]) / 448)


def test_outer_blocks_of_the_large_model_are_kept():
    rule = Fp8Rowwise()
    count = preset("h3_33b").model.num_layers
    assert [i for i in range(count) if rule.names(i, count, "up")] == list(range(2, 47))


def test_what_is_left_out_has_a_reason():
    model = unpacked_model(tiny_config(ffn_dim=168))
    report = quantize_(model, (Fp8Rowwise(blocks=(1, 1)),))
    assert [layer.name for layer in report.layers] == [f"blocks.1.{n}" for n in LINEARS[:3]]
    assert report.skipped["blocks.0.qkv"] == "not named by the scheme"
    assert "96 x 168; products in eight bits need multiples" in report.skipped["blocks.1.down"]
    assert isinstance(model.block(1).ff.net[2], nn.Linear)


def test_quantising_twice_changes_nothing():
    model = unpacked_model(tiny_config())
    quantize_(model, ALL)
    again = quantize_(model, ALL)
    assert again.layers == ()
    assert again.lowest_db == float("inf")
    assert len(again.ready) == 3 * len(LINEARS)


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="this torch packs no weights")
def test_packing_leaves_what_is_in_eight_bits():
    model = unpacked_model(tiny_config())
    quantize_(model, (Fp8Rowwise(blocks=(0, 0)),))
    pack_blocks(model, rows=30)
    kinds = [type(model.block(layer).attn.to_q) for layer in range(2)]
    assert kinds == [Fp8Linear, PackedLinear]


def test_the_last_block_that_a_model_lacks_is_named():
    with pytest.raises(ConfigError, match=r"blocks are \(0, 3\); this model has 0 to 2"):
        quantize_(unpacked_model(tiny_config()), (Fp8Rowwise(blocks=(0, 3)),))


def test_a_scheme_is_read_from_a_file(tmp_path):
    path = tmp_path / "scheme.json"
    rules = [
        {"format": "fp8_rowwise", "blocks": [1, 2], "linears": ["up", "down"]},
        {"format": "fp8_rowwise", "blocks": [0, 0]},
    ]
    path.write_text(json.dumps(rules))
    assert read_scheme(path) == (
        Fp8Rowwise(blocks=(1, 2), linears=("up", "down")),
        Fp8Rowwise(blocks=(0, 0)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a json list of rules"),
        ("{}", "is dict; allowed: a list of rules"),
        ('[{"format": "fp7"}]', "rule 0 is .*; allowed: an object with format 'fp8_rowwise'"),
        ('[{"format": "fp8_rowwise", "block": [0, 1]}]', r"unknown \['block'\]; allowed"),
        ('[{"format": "fp8_rowwise", "blocks": [0, true]}]', r"allowed: blocks \[first, last\]"),
        ('[{"format": "fp8_rowwise", "blocks": [2, 1]}]', r"\(2, 1\); allowed: first <= last"),
        ('[{"format": "fp8_rowwise", "linears": ["side"]}]', "'side'; allowed: qkv, out, up, down"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = tmp_path / "scheme.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_scheme(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_scheme(tmp_path / "none.json")


def test_named_schemes_touch_what_they_say():
    config = dataclasses.replace(tiny_config(), num_layers=6)
    assert quantize_(unpacked_model(config), SCHEMES["bf16"]).layers == ()
    report = quantize_(unpacked_model(config), SCHEMES["fp8_rowwise"])
    assert [layer.name for layer in report.layers] == [f"blocks.2.{name}" for name in LINEARS]


def _latents(**changes) -> torch.Tensor:
    config = tiny_config(num_layers=6)
    engine = Engine.from_random(config, EngineConfig(device="cpu", dtype="float32", **changes))
    rollout = engine.new_rollout("snow", anchor_BCTHW=random_anchor(config))
    return torch.cat([engine.step(rollout, random_action(i)).latents_BCTHW for i in range(2)])


def test_an_engine_runs_in_eight_bits():
    decibels = sqnr_db(_latents(), _latents(linear="fp8_rowwise"))
    assert FP8_OUTPUT_SQNR_DB <= decibels < 60.0


def test_an_engine_takes_a_scheme_from_a_file(tmp_path):
    path = tmp_path / "scheme.json"
    path.write_text(json.dumps([{"format": "fp8_rowwise", "blocks": [2, 2]}]))
    assert torch.equal(_latents(linear=str(path)), _latents(linear="fp8_rowwise"))


def test_a_scheme_that_touches_nothing_is_refused():
    config = EngineConfig(device="cpu", dtype="float32", linear="fp8_rowwise")
    with pytest.raises(UnsupportedError, match="3 blocks: 'bf16', because the scheme names no"):
        Engine.from_random(tiny_config(), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear": "fp4"}, "linear is 'fp4'; allowed: 'auto', 'bf16', 'fp8_rowwise', a json file"),
        ({"kernels": "fast", "compile": "blocks"}, "kernels is 'fast'; allowed with compile"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_decibels():
    assert sqnr_db(torch.tensor([10.0, 0.0]), torch.tensor([9.0, 0.0])) == pytest.approx(20.0)
