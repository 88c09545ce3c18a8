"""Which linears are in eight bits: rules, names, files."""

from __future__ import annotations

import json
import re

import pytest

from engine.config import LINEAR_SCHEMES, EngineConfig, preset
from engine.errors import ConfigError
from engine.schemes import (
    LINEARS,
    SCHEMES,
    Fp8Block,
    Fp8Rowwise,
    check_blocks,
    layer_rules,
    read_scheme,
    rule_of,
    scheme_of,
    width_refusal,
)
from tests.tiny import block_config, tiny_config

pytestmark = pytest.mark.cpu


def test_outer_blocks_of_the_large_model_are_kept():
    rule = Fp8Rowwise()
    count = preset("h3_33b").model.num_layers
    assert [i for i in range(count) if rule.names(i, count, "up")] == list(range(2, 47))


def test_the_last_rule_that_names_a_layer_holds():
    scheme = (Fp8Rowwise(blocks=(0, 2)), Fp8Block(blocks=(1, 2), linears=("down",)))
    held = {(block, name): rule_of(scheme, block, 4, name) for block in (0, 1, 3) for name in
            ("up", "down")}  # fmt: skip
    assert held[1, "down"] is scheme[1]
    assert {held[0, "up"], held[0, "down"], held[1, "up"]} == {scheme[0]}
    assert {held[3, "up"], held[3, "down"]} == {None}


def test_the_mixed_scheme_leaves_attentions_output_and_has_blocks_in_the_last_linear_alone():
    rules = layer_rules(SCHEMES["fp8_mixed"], preset("h3_33b").model)
    by_row = layer_rules(SCHEMES["fp8_rowwise"], preset("h3_33b").model)
    assert rules.keys() == {layer for layer in by_row if layer[1] != "out"}
    assert {name for (_, name), rule in rules.items() if rule.in_blocks} == {"down"}


@pytest.mark.parametrize("name", ["mini", "h3_33b"])
def test_every_linear_of_a_preset_can_have_blocks(name):
    model = preset(name).model
    rules = layer_rules((Fp8Block(blocks=(0, model.num_layers - 1)),), model)
    assert len(rules) == len(LINEARS) * model.num_layers


def test_a_layer_that_is_no_whole_blocks_is_left_out():
    everywhere = (Fp8Block(blocks=(0, 2)),)
    assert layer_rules(everywhere, tiny_config()) == {}
    rules = layer_rules(everywhere, block_config(ffn_dim=192))
    assert {name for _, name in rules} == {"qkv", "out", "up"}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fp8_block", {"hidden_size": 96}, "hidden_size is 96 and qkv in eight bits in blocks"),
        ("fp8_block", {"ffn_dim": 192}, "ffn_dim is 192 and down in eight bits in blocks"),
        ("fp8_block", {"ffn_dim": 160}, "ffn_dim is 160 and up .* needs multiples of 64"),
        (
            "fp8_block",
            {"num_attention_heads": 3, "attention_head_dim": 64, "rope_freq_dim": 8},
            "num_attention_heads x attention_head_dim is 192 and qkv .* multiples of 128",
        ),
        ("fp8_mixed", {"ffn_dim": 192}, "ffn_dim is 192 and down .* multiples of 128"),
        ("fp8_rowwise", {"ffn_dim": 168}, "ffn_dim is 168 and down in eight bits needs .* of 16"),
    ],
)
def test_a_width_that_a_scheme_does_not_serve_is_named(name, changes, reason):
    refusal = width_refusal(SCHEMES[name], block_config(num_layers=6, **changes))
    assert refusal is not None
    assert re.fullmatch(f"{reason}.*", refusal)


def test_widths_of_linears_that_no_rule_names_do_not_count():
    scheme = (Fp8Block(linears=("qkv", "out")),)
    assert width_refusal(scheme, block_config(num_layers=6, ffn_dim=192)) is None


def test_every_scheme_that_has_a_name_can_be_asked_for():
    assert set(LINEAR_SCHEMES) == SCHEMES.keys() | {"auto"}
    for name in SCHEMES:
        assert scheme_of(EngineConfig(linear=name).linear) == SCHEMES[name]


def test_the_last_block_that_a_model_lacks_is_named():
    with pytest.raises(ConfigError, match=r"blocks are \(0, 3\); allowed: 0 to 2, those of this"):
        check_blocks((Fp8Rowwise(blocks=(0, 3)),), 3)


def test_a_scheme_is_read_from_a_file(tmp_path):
    path = tmp_path / "scheme.json"
    rules = [
        {"format": "fp8_rowwise", "blocks": [1, 2], "linears": ["up", "down"]},
        {"format": "fp8_block", "blocks": [0, 0]},
    ]
    path.write_text(json.dumps(rules))
    assert read_scheme(path) == (
        Fp8Rowwise(blocks=(1, 2), linears=("up", "down")),
        Fp8Block(blocks=(0, 0)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a json list of rules"),
        ("{}", "is dict; allowed: a list of rules"),
        (
            '[{"format": "fp7"}]',
            "rule 0 is .*; allowed: an object with format 'fp8_rowwise' or 'fp8_block'",
        ),
        ('[{"format": ["fp8_block"]}]', "rule 0 is .*; allowed: an object with format"),
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
