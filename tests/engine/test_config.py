"""Configuration: strict reading, derived sizes, presets, memory."""

from __future__ import annotations

import json

import pytest

from engine.config import (
    PRESET_NAMES,
    EngineConfig,
    Geometry,
    ModelConfig,
    preset,
)
from engine.errors import ConfigError

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_json_round_trip(name):
    model = preset(name).model
    assert ModelConfig.from_json(model.to_json()) == model


def test_released_sizes():
    model = preset("h3_33b").model
    assert (model.rows_per_latent, model.rows_per_chunk, model.audio_rows) == (1008, 5040, 526)
    assert (model.rotary_dim, model.attention_dim) == (96, 7168)
    assert model.text_rows == 8 + 1008 + 512
    small = preset("h3_33b", Geometry(height_px=480, width_px=832)).model
    assert (small.rows_per_latent, small.text_rows) == (390, 8 + 390 + 512)


def test_mini_sizes():
    model = preset("mini").model
    assert (model.rows_per_latent, model.rows_per_chunk, model.audio_rows) == (40, 200, 2)
    assert (model.rotary_dim, model.attention_head_dim - model.rotary_dim) == (48, 16)
    assert (model.history_chunks, model.frames_per_chunk) == (5, 17)


def _changed(path: list[str], value: object) -> str:
    data = json.loads(preset("mini").model.to_json())
    section = data
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["extra"], 1, "unknown key 'extra'; allowed: num_attention_heads"),
        (["camera", "speed"], 1, "camera: unknown key 'speed'; allowed: forward_per_frame"),
        (["num_layers"], "10", "num_layers is '10'; allowed: int"),
        (["num_layers"], True, "num_layers is True; allowed: int"),
        (["num_layers"], 0, "num_layers is 0; allowed: 1 or more"),
        (["camera_dtype"], "half", "camera_dtype is 'half'; allowed: 'attention', 'float32'"),
        (["text", "vocabulary"], "words", "vocabulary is 'words'; allowed: a list"),
        (["text", "vocabulary"], [1], "vocabulary is 1; allowed: str"),
        (["patch_size"], [1, 2], "patch_size has 2 items; allowed: 3"),
        (["patch_size"], [1, 4, 4], r"patch_size is \(1, 4, 4\); allowed: \(1, 2, 2\)"),
        (["geometry", "width_px"], 250, "geometry.width_px is 250; allowed: positive multiples"),
        (["geometry"], None, "geometry is NoneType; allowed: an object"),
        (["rope_freq_dim"], 11, "rope_freq_dim is 11; allowed"),
    ],
)
def test_bad_json_names_the_key(path, value, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(_changed(path, value))


def test_missing_key_is_named():
    data = json.loads(preset("mini").model.to_json())
    del data["sampler"]["shift"]
    with pytest.raises(ConfigError, match=r"sampler: missing key 'shift'; needed: steps, shift"):
        ModelConfig.from_json(json.dumps(data))


def test_text_that_is_not_json_is_refused():
    with pytest.raises(ConfigError, match=r"here\.json is not json"):
        ModelConfig.from_json("{", where="here.json")


def test_integers_may_stand_for_floats():
    assert ModelConfig.from_json(_changed(["rope_theta"], 10000)).rope_theta == 10000.0


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="preset is 'huge'; allowed: mini, h3_33b, tiny"):
        preset("huge")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:a"])
def test_bad_devices_are_refused(device):
    with pytest.raises(ConfigError, match="device is"):
        EngineConfig(device=device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": "fast"}, "compile is 'fast'; allowed: 'auto', 'off', 'blocks', 'full'"),
        ({"graphs": "on"}, "graphs is 'on'; allowed: True, False, 'auto', 'strict'"),
        ({"attention": "xformers"}, "attention is 'xformers'; allowed: 'auto', 'sdpa', 'cudnn'"),
        ({"kernels": "on"}, "kernels is 'on'; allowed: 'auto', 'off', 'eager', 'fast'"),
        ({"linear": "int4"}, "linear is 'int4'; allowed: 'auto', 'bf16', 'fp8_rowwise'"),
        ({"free_adaln": "no"}, "free_adaln is 'no'; allowed: True, False, 'auto'"),
        ({"compile": "full", "prefix_cache": False}, "compile is 'full'; allowed with prefix_c"),
        ({"graphs": True, "packed_history": False}, "graphs is True; allowed with prefix_cache"),
        ({"graphs": "strict", "prefix_cache": False}, "graphs is 'strict'; allowed with prefix_"),
        ({"kernels": "fast", "adaln_tables": False}, "kernels is 'fast'; allowed with prefix_c"),
    ],
)
def test_speed_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)
