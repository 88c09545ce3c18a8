"""Rotary position tables of the MiniMax-H3 transformer and their application.

Owns the rotate-half convention over three axes (time, height, width).
Shape suffixes: B batch, R rows, N heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    positions_R3: Tensor, rope_freq_dim: int, theta: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return fp32 cosines and sines of every row, each [R, 6 * rope_freq_dim].

    Args:
        positions_R3: float64 (time, height, width) of each row.
        rope_freq_dim: frequencies per axis; three axes, each pair twice.
        theta: rotary base.

    Source: MiniMax-H3 transformer; positions are cast to fp32 before they meet the fp32
    frequencies, so the tables agree with the released model to the last bit.
    """
    exponent = torch.arange(rope_freq_dim, dtype=torch.float32, device=positions_R3.device)
    inv_freq = 1.0 / theta ** (exponent / rope_freq_dim)
    half_RK = (positions_R3.float()[:, :, None] * inv_freq).flatten(1)
    angles_RK = torch.cat([half_RK, half_RK], dim=1)
    return angles_RK.cos(), angles_RK.sin()


def apply_rope(x_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor) -> Tensor:
    """Rotate the first ``cos_RK.shape[1]`` channels of every head; the rest pass through.

    The tables are rounded to the dtype of ``x_BRNK`` first: that rounding belongs to the
    reference numerics. Channel d pairs with channel d + half.
    """
    width = cos_RK.shape[-1]
    half = width // 2
    cos_R1K = cos_RK[:, None, :half].to(x_BRNK.dtype)
    sin_R1K = sin_RK[:, None, :half].to(x_BRNK.dtype)
    first, second, rest = x_BRNK.split([half, half, x_BRNK.shape[-1] - width], dim=-1)
    return torch.cat(
        [first * cos_R1K - second * sin_R1K, second * cos_R1K + first * sin_R1K, rest], dim=-1
    )
