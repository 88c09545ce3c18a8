"""Small adapters under the keys of everybody who writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.checkpoint.layouts import QkvLayout, to_original
from engine.checkpoint.source import targets_of
from engine.config import ModelConfig
from engine.model.dit import MiniMaxH3Transformer

SIX = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")


def adapted_names(config: ModelConfig, linears: Iterable[str] = SIX) -> list[str]:
    """Return the linears of all blocks and refiner blocks that are usually adapted."""
    blocks = [f"transformer_blocks.{index}" for index in range(config.num_layers)]
    blocks += [f"token_refiner.refiner_blocks.{i}" for i in range(config.num_refiner_layers)]
    return [f"{block}.{linear}" for block in blocks for linear in linears]


def random_factors(
    model: MiniMaxH3Transformer, names: Iterable[str], rank: int = 8, size: float = 0.05
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return bf16 factors A [rank, K] and B [N, rank] by name of the linear."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        a = torch.randn(rank, linear.in_features, generator=generator)
        b = torch.randn(linear.out_features, rank, generator=generator)
        a, b = a * linear.in_features**-0.5, b * size * rank**-0.5
        found[name] = (a.bfloat16(), b.bfloat16())
    return found


def peft_keys(
    factors: dict[str, tuple[Tensor, Tensor]], prefix: str = "", infix: str = ""
) -> dict[str, Tensor]:
    """Return tensors as PEFT names them."""
    tensors = {}
    for name, (a, b) in factors.items():
        tensors[f"{prefix}{name}.lora_A{infix}.weight"] = a
        tensors[f"{prefix}{name}.lora_B{infix}.weight"] = b
    return tensors


def fused_factors(
    factors: dict[str, tuple[Tensor, Tensor]], config: ModelConfig, qkv: QkvLayout
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return factors by original names; queries, keys and values share the A of queries."""
    outputs = to_original({f"{name}.weight": b for name, (_, b) in factors.items()}, config, qkv)
    found = {}
    for original, b in outputs.items():
        first = targets_of(original)[0].removesuffix(".weight")
        found[original.removesuffix(".weight")] = (factors[first][0], b)
    return found


def write_adapter(
    file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Write one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, file, metadata)
    return file
