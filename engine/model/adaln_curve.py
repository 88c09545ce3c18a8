"""Modulation from a curve over time instead of the time embedder: weights in the pruned form.

    p = clamp(t, 0, 1) (G - 1),  i = floor(p)
    c(t) = table[i] + (p - i) (table[i + 1] - table[i]),  modulation = W c(t) + b

Owns the form and its installation. The table [G points, C] is a truncated decomposition of
silu(temb(t)), so c(t) takes its place and there is no silu. Table and projections are fp32: with
eight columns a bf16 weight would be most of the error. Source: ComfyUI's and SGLang's MiniMax-H3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.dit import MiniMaxH3Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveShape:
    """Size of the table."""

    points: int
    width: int


class TimeCurve(nn.Module):
    """The time embedder's place."""

    def __init__(self, shape: CurveShape) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(shape.points, shape.width))

    def forward(self, t_M: Tensor) -> Tensor:
        """Return c(t), fp32 [..., C]."""
        last = self.table.shape[0] - 1
        position = t_M.float().clamp(0.0, 1.0) * last
        index = position.floor().clamp(max=max(last - 1, 0))
        low = self.table[index.long()]
        high = self.table[(index.long() + 1).clamp(max=last)]
        return torch.lerp(low, high, (position - index)[..., None])


def install_curve(model: MiniMaxH3Transformer, shape: CurveShape) -> None:
    """Give a model the pruned form; the new weights are unwritten fp32."""
    device = model.proj_in.weight.device
    with torch.device(device):
        model.add_module("time_embedder", TimeCurve(shape))
        for block in model.transformer_blocks:
            projection = block.get_submodule("adaln_proj")
            outputs = projection.get_parameter("linear.bias").shape[0]
            projection.add_module("linear", nn.Linear(shape.width, outputs))
        outputs = model.norm_out.linear.out_features
        model.norm_out.add_module("linear", nn.Linear(shape.width, outputs))
