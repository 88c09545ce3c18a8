"""Linears in eight bits: which, how well, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from engine import loading
from engine.checkpoint.folder import save_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, UnsupportedError
from engine.kernels import contract
from engine.kernels.fp8_linear import operand_of_blocks
from engine.kernels.reference import dequantize_rows, quantize_rows, quantize_weight
from engine.linears import QuantCache
from engine.model.packed_linear import PackedLinear, can_pack, pack_blocks
from engine.quant import Fp8Linear, quantize_, refusal, sqnr_db
from engine.schemes import LINEARS, SCHEMES, Fp8Block, Fp8Rowwise
from engine.text import WordEncoder
from tests.tiny import block_config, random_action, random_anchor, tiny_config, unpacked_model
from tests.tolerances import FP8_LINEAR_SQNR_DB, FP8_OUTPUT_SQNR_DB

pytestmark = pytest.mark.cpu

ALL = (Fp8Rowwise(blocks=(0, 2)),)


@pytest.mark.parametrize(
    ("config", "scheme", "factors"),
    [(tiny_config(), ALL, 1 / 90), (block_config(), (Fp8Block(blocks=(0, 2)),), 1 / 4000)],
    ids=["rows", "blocks"],
)
def test_every_linear_reaches_its_sqnr(config, scheme, factors):
    model = unpacked_model(config)
    report = quantize_(model, scheme)
    assert len(report.layers) == 3 * len(LINEARS)
    assert report.skipped == {}
    assert report.lowest_db >= FP8_LINEAR_SQNR_DB
    assert all(layer.weight_sqnr_db > layer.output_sqnr_db for layer in report.layers)
    # One byte for four, and four for each 96 to 160 input channels, or sixteen at most for each 128
    # by 128 weights.
    assert 1 / 4 < report.after_gib / report.before_gib < 1 / 4 + factors


def test_the_linear_is_what_its_formula_says():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 32, generator=generator), torch.randn(16, 32, generator=generator)
    codes, scale = quantize_rows(weight)
    rows, row_scale = quantize_rows(x)
    expected = (rows.double() * row_scale) @ (codes.double() * scale).mT
    made = Fp8Linear(codes, scale[:, 0].contiguous())(x)
    torch.testing.assert_close(made.double(), expected, atol=1e-5, rtol=1.3e-6)


def test_the_linear_in_blocks_is_what_its_formula_says():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 384, generator=generator)
    weight = torch.randn(256, 384, generator=generator)
    made = Fp8Linear.of(weight, Fp8Block())
    rows, row_scale = quantize_rows(x, in_blocks=True)
    expected = torch.zeros(2, 3, 256, dtype=torch.float64)
    for column in range(3):
        inputs = slice(128 * column, 128 * column + 128)
        for block in range(2):
            outputs = slice(128 * block, 128 * block + 128)
            product = rows[..., inputs].double() @ made.codes_NK[outputs, inputs].double().mT
            factor = row_scale[..., column].double() * made.scale[block, column].double()
            expected[..., outputs] += product * factor[..., None]
    torch.testing.assert_close(made(x).double(), expected, atol=1e-4, rtol=1.3e-6)
    assert made.scale.shape == (2, 4)
    assert not made.scale[:, 3].any()


def test_what_stands_far_out_costs_its_own_block_alone():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[:, 200] = 2.0**20  # at 448; ones are at 2^-11.2 then, and the least code is 2^-9
    made = {form: dequantize_rows(*quantize_rows(x, form))[:, :128] for form in (False, True)}
    assert sqnr_db(x[:, :128], made[True]) >= FP8_LINEAR_SQNR_DB
    assert sqnr_db(x[:, :128], made[False]) < 10.0


def test_a_weight_of_zeros_has_factors():
    codes, scale = quantize_weight(torch.zeros(128, 128), in_blocks=True)
    assert not codes.float().any()
    assert scale.isfinite().all()


@pytest.mark.parametrize("rows", [(2, 3), (1, 8), (1, 5)], ids=["six", "eight", "five"])
@pytest.mark.parametrize("width", [128, 384])
def test_a_product_of_blocks_reads_what_kernels_made_where_it_lies(rows, width):
    codes, scale = contract.new_quantized(torch.zeros(1), (*rows, width), in_blocks=True)
    codes.copy_(torch.randn(*rows, width))
    scale.copy_(torch.rand(*rows, width // 128))
    codes_PK, scale_PJ = operand_of_blocks(codes, scale)
    count = rows[0] * rows[1]
    assert codes_PK.shape[0] == scale_PJ.shape[0] == -(-count // 4) * 4
    assert codes_PK.data_ptr() == codes.data_ptr()
    assert scale_PJ.data_ptr() == scale.data_ptr()
    assert scale_PJ.stride() == (1, codes_PK.shape[0])
    assert torch.equal(codes_PK[:count].float(), codes.flatten(0, 1).float())
    assert torch.equal(scale_PJ[:count], scale.flatten(0, 1))


@pytest.mark.parametrize("part", ["codes", "scale", "room of the scale"])
def test_a_product_of_blocks_copies_what_lies_otherwise(part):
    made = contract.new_quantized(torch.zeros(1), (1, 6, 256), in_blocks=True)
    codes, scale = (each.copy_(torch.rand(each.shape)) for each in made)
    if part == "codes":
        codes = codes.clone()  # has no room for eight rows
    elif part == "scale":
        scale = scale.contiguous()
    else:
        scale = torch.empty_strided(scale.shape, scale.stride()).copy_(scale)
    codes_PK, scale_PJ = operand_of_blocks(codes, scale)
    assert codes_PK.shape == (8, 256)
    assert scale_PJ.stride() == (1, 8)
    assert torch.equal(codes_PK[:6].float(), codes[0].float())
    assert torch.equal(scale_PJ[:6], scale[0])


def test_rows_use_the_whole_range_of_the_codes():
    x = torch.tensor([[1e-3, -2e-3], [700.0, 1.0], [0.0, 0.0]])
    codes, scale = quantize_rows(x)
    assert codes.float().abs().amax(1).tolist() == [448.0, 448.0, 0.0]
    torch.testing.assert_close(scale[:2, 0], torch.tensor([2e-3, 700.0]) / 448)


def test_what_is_left_out_has_a_reason():
    model = unpacked_model(tiny_config(ffn_dim=168))
    report = quantize_(model, (Fp8Rowwise(blocks=(1, 1)),))
    assert [layer.name for layer in report.layers] == [f"blocks.1.{n}" for n in LINEARS[:3]]
    assert report.skipped["blocks.0.qkv"] == "not named by the scheme"
    assert "96 x 168; products in eight bits need multiples" in report.skipped["blocks.1.down"]
    assert isinstance(model.block(1).ff.net[2], nn.Linear)
    again = quantize_(model, (Fp8Block(blocks=(0, 0)),))
    assert "256 x 96; products in eight bits, in blocks, need" in again.skipped["blocks.0.qkv"]


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


def test_named_schemes_touch_what_they_say():
    config = dataclasses.replace(tiny_config(), num_layers=6)
    assert quantize_(unpacked_model(config), SCHEMES["bf16"]).layers == ()
    report = quantize_(unpacked_model(config), SCHEMES["fp8_rowwise"])
    assert [layer.name for layer in report.layers] == [f"blocks.2.{name}" for name in LINEARS]


@pytest.mark.parametrize(
    ("name", "by_row", "in_blocks"),
    [("fp8_block", (), LINEARS), ("fp8_mixed", ("qkv", "up"), ("down",))],
)
def test_named_schemes_have_blocks_where_they_say(name, by_row, in_blocks):
    model = unpacked_model(block_config(num_layers=6))
    assert len(quantize_(model, SCHEMES[name]).layers) == len(by_row + in_blocks)
    block = model.block(2)
    linears = {"qkv": block.attn.to_v, "out": block.attn.to_out[0], "up": block.ff.net[0].proj,
               "down": block.ff.net[2]}  # fmt: skip
    form = {each: linear.in_blocks for each, linear in linears.items()
            if isinstance(linear, Fp8Linear)}  # fmt: skip
    assert form == dict.fromkeys(by_row, False) | dict.fromkeys(in_blocks, True)


def _latents(**changes) -> torch.Tensor:
    config = block_config(num_layers=6)
    engine = Engine.from_random(config, EngineConfig(device="cpu", dtype="float32", **changes))
    rollout = engine.new_rollout("snow", anchor_BCTHW=random_anchor(config))
    return torch.cat([engine.step(rollout, random_action(i)).latents_BCTHW for i in range(2)])


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_block", "fp8_mixed"])
def test_an_engine_runs_in_eight_bits(name):
    decibels = sqnr_db(_latents(), _latents(linear=name))
    assert FP8_OUTPUT_SQNR_DB <= decibels < 60.0


def test_an_engine_takes_a_scheme_from_a_file(tmp_path):
    path = tmp_path / "scheme.json"
    path.write_text(json.dumps([{"format": "fp8_rowwise", "blocks": [2, 2]}]))
    assert torch.equal(_latents(linear=str(path)), _latents(linear="fp8_rowwise"))


@pytest.mark.parametrize(
    ("layers", "name", "reason"),
    [
        (3, "fp8_rowwise", "the scheme names none of its linears"),
        (6, "fp8_block", "hidden_size is 96 and qkv .* multiples of 128"),
        (6, "fp8_mixed", "hidden_size is 96 and down .* multiples of 128"),
    ],
)
def test_a_scheme_that_the_model_cannot_have_is_refused(monkeypatch, layers, name, reason):
    monkeypatch.setattr(loading, "empty_model", lambda *given, **named: pytest.fail("built"))
    config = EngineConfig(device="cpu", dtype="float32", linear=name)
    message = f"linear is '{name}'; .* {layers} blocks: 'bf16', because {reason}"
    with pytest.raises(UnsupportedError, match=message):
        Engine.from_random(tiny_config(num_layers=layers), config)


def test_a_scheme_that_weights_cannot_have_is_refused_before_they_are_read(monkeypatch, tmp_path):
    model = tiny_config(num_layers=6)
    words = WordEncoder.of(model)
    save_model(tmp_path / "w", unpacked_model(model), model, text_encoder=words, int8=False)
    monkeypatch.setattr(loading, "load_model", lambda *given, **named: pytest.fail("read"))
    config = EngineConfig(device="cpu", dtype="float32", linear="fp8_mixed")
    with pytest.raises(UnsupportedError, match=r"because hidden_size is 96 and down .* of 128"):
        Engine.from_pretrained(tmp_path / "w", config)


@pytest.mark.parametrize(
    ("capability", "cuda", "names", "message"),
    [
        ((8, 0), "13.0", ("fp8_rowwise", "fp8_block"), "a card has no products in eight bits"),
        ((10, 0), "13.0", ("fp8_block", "fp8_mixed"), r"a card is of capability 10\.0 and .* 9\.x"),
        ((9, 0), "12.6", ("fp8_block", "fp8_mixed"), "built for CUDA 12.6 and .* need 12.9"),
    ],
)
def test_a_device_without_such_products_is_refused(monkeypatch, capability, cuda, names, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    device, told = torch.device("cuda"), []
    for name in ("bf16", "fp8_rowwise", "fp8_mixed", "fp8_block"):
        reason = refusal(SCHEMES[name], device, torch.bfloat16)
        if name in names:
            assert reason is not None
            assert re.search(message, reason)
        told.append(reason)
    assert told[0] is None
    assert (told[1] is None) == ("fp8_rowwise" not in names)


def test_hopper_is_not_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert refusal(SCHEMES["fp8_block"], torch.device("cuda"), torch.bfloat16) is None


def test_every_scheme_has_a_file_of_its_own(tmp_path):
    other = tmp_path / "scheme.json"  # differs from the mixed one by a linear of a rule
    rules = [{"format": "fp8_rowwise"}, {"format": "fp8_block", "linears": ["down"]}]
    other.write_text(json.dumps(rules))
    schemes = ("fp8_rowwise", "fp8_block", "fp8_mixed", str(other))
    configs = [EngineConfig(dtype="bfloat16", linear=name) for name in schemes]
    assert len({QuantCache(Path(), "x", config).path for config in configs}) == len(schemes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear": "fp4"}, "linear is 'fp4'; allowed: 'auto', .*'fp8_block', a json file"),
        ({"kernels": "fast", "compile": "blocks"}, "kernels is 'fast'; allowed with compile"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_decibels():
    assert sqnr_db(torch.tensor([10.0, 0.0]), torch.tensor([9.0, 0.0])) == pytest.approx(20.0)
