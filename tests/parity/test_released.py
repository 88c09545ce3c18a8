"""Files that diffusers writes and reads, through our reading of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.adapters import open_adapter
from engine.checkpoint.folder import read_config
from engine.checkpoint.reading import load_model
from engine.checkpoint.source import open_source
from tests.adapters import adapted_names, fused_factors, peft_keys, random_factors, write_adapter
from tests.parity.test_diffusers import CONFIG as SMALL
from tests.parity.test_diffusers import CONSTRUCTOR_KEYS
from tests.tiny import tiny_config, unpacked_model

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
CONFIG = tiny_config()
"""Heads of 128 channels, which diffusers' conversion of adapters takes for granted."""


@pytest.mark.parametrize("shard_size", ["100KB", "10GB"])
def test_a_model_that_diffusers_saved_is_read_bit_for_bit(tmp_path: Path, shard_size: str) -> None:
    from diffusers import MiniMaxH3Transformer3DModel

    keys = {key: getattr(SMALL, key) for key in CONSTRUCTOR_KEYS}
    upstream = MiniMaxH3Transformer3DModel(**keys)
    for name, module in upstream.named_children():
        module.to(torch.float32 if name in upstream._keep_in_fp32_modules else torch.bfloat16)
    upstream.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert read_config(tmp_path, SMALL) == SMALL
    source = open_source(tmp_path, SMALL)
    assert source.layout == "diffusers"
    loaded = load_model(source, dtype=torch.bfloat16, device=CPU).state_dict()
    expected = upstream.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("form", ["stacked", "interleaved", "kohya"])
def test_adapters_are_converted_as_diffusers_does(tmp_path: Path, form: str) -> None:
    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_minimax_h3_lora_to_diffusers as convert,
    )

    factors = random_factors(unpacked_model(CONFIG), adapted_names(CONFIG))
    fused = fused_factors(factors, CONFIG, "interleaved" if form == "interleaved" else "stacked")
    if form == "kohya":
        tensors = {}
        for name, (a, b) in fused.items():
            stem = "lora_unet_" + name.replace(".", "_")
            tensors |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
            tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    elif form == "interleaved":
        tensors = peft_keys(fused, infix=".default")
    else:
        tensors = peft_keys(fused, "diffusion_model.")
    adapter = open_adapter(write_adapter(tmp_path / "a.safetensors", tensors), CONFIG)
    expected = convert({name: tensor.float() for name, tensor in tensors.items()})
    assert len(expected) == 2 * len(adapter.pairs)
    for name in adapter.pairs:
        a = expected[f"transformer.{name}.lora_A.weight"]
        b = expected[f"transformer.{name}.lora_B.weight"]
        torch.testing.assert_close(adapter.delta(name, CPU), b @ a)
