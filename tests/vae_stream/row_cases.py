"""Sizes of the fused parts between two attentions of the H3 ViT, and their comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tolerances import VIT_KERNEL_RATIO
from tests.vae_stream.h3_tiny import random_vit
from vae_stream.row_ops import PLAIN_ROWS, RowForms, gated
from vae_stream.vit import VitConfig
from vae_stream.vit_rows import Layer, between, layers_of

EPS = 1e-5
ROW_KERNELS = RowForms(has_kernels=True, has_gated=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCase:
    """Rows of a network."""

    rows: int
    heads: int
    ffn_width: int = 96

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.rows}x{64 * self.heads}"


SMALL = tuple(RowCase(rows=rows, heads=heads) for rows, heads in ((1, 1), (9, 3), (41, 2)))
RELEASED = tuple(RowCase(rows=rows, heads=32, ffn_width=512) for rows in (1565, 8069))


def layers(case: RowCase) -> list[Layer]:
    """Two layers with bf16 products."""
    config = VitConfig(layer_count=2, head_count=case.heads, ffn_width=case.ffn_width)
    return layers_of(random_vit(config).cast_blocks(torch.bfloat16))


def moved(layer: Layer, device: torch.device, dtype: torch.dtype | None = None) -> Layer:
    """The layer on a device, and perhaps all of a dtype."""
    return Layer(*(each.to(device, dtype) for each in layer))


def inputs(case: RowCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows, fp32, and what attention made of them, bf16."""
    generator = torch.Generator().manual_seed(1)
    x_RD, o_RD = torch.randn(2, case.rows, 64 * case.heads, generator=generator).to(device)
    return x_RD, o_RD.bfloat16()


@torch.no_grad()
def complaints(case: RowCase, device: torch.device) -> list[str]:
    """What is wrong with the row kernels; empty where all is well."""
    both = [moved(layer, device) for layer in layers(case)]
    wide = [moved(layer, device, torch.float32) for layer in both]
    x_RD, o_RD = inputs(case, device)
    # As in use, a compiler sees the operators, and may not leave them to Python.
    traced = torch.compile(between, backend="eager", fullgraph=True, dynamic=False)
    exact = between(x_RD, o_RD.float(), wide[0], wide[1], EPS, PLAIN_ROWS)
    plain = between(x_RD, o_RD, both[0], both[1], EPS, PLAIN_ROWS)
    made = traced(x_RD, o_RD, both[0], both[1], EPS, ROW_KERNELS)
    wrong = []
    for name, *each in zip(("rows", "qkv"), made, plain, exact, strict=True):
        wrong += _far(name, *each)
    return wrong


@torch.no_grad()
def gated_complaints(case: RowCase, device: torch.device) -> list[str]:
    """What is wrong with the gated product; empty where all is well."""
    layer = moved(layers(case)[0], device)
    n_RD = inputs(case, device)[1]

    def plainly(dtype: torch.dtype) -> Tensor:
        weight_GD, bias_G = layer.up_weight.to(dtype), layer.up_bias.to(dtype)
        gate_RU, value_RU = (F.linear(n_RD.to(dtype), weight_GD) + bias_G).chunk(2, dim=-1)
        return value_RU * F.silu(gate_RU)

    made = gated(n_RD, layer.up_weight, layer.up_bias)
    return _far("gated", made, plainly(torch.bfloat16), plainly(torch.float32))


def _far(name: str, made: Tensor, plain: Tensor, exact: Tensor) -> list[str]:
    far, allowed = ((each.float() - exact).square().mean().sqrt() for each in (made, plain))
    if far <= VIT_KERNEL_RATIO * allowed and made.dtype == plain.dtype:
        return []
    return [f"{name}: {made.dtype}, {far:.1e} from fp32; plain {plain.dtype}, {allowed:.1e}"]
