"""Plain form of attention in eight bits; see `fp8_attention`.

Owns the oracle, block of keys by block of keys as the kernel goes: the code of a weight depends on
the largest logit so far. And the same without codes of queries and weights, for what those cost.
Shape suffixes as there.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.reference import FP8_BLOCK, dequantize_rows, quantize_rows

WEIGHT_FACTOR = 256.0
"""Of weights before they are rounded: the largest power of two whose codes are finite. Weights
below 2^-18 of the largest are lost, those below 2^-14 have fewer bits."""


WEIGHT_KEYS = 64
"""Keys whose weights are rounded together, against the largest logit up to them. Of 128 a program
would hold more than its registers."""


def window_codes(k_BSNK: Tensor, v_BSNK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and factors of keys by row, of values by channel and block."""
    k_BNSK, v_BNKS = padded(k_BSNK, v_BSNK)
    return *quantize_rows(k_BNSK), *quantize_rows(v_BNKS, in_blocks=True)


def padded(k_BSNK: Tensor, v_BSNK: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as codes lie, zero after the last key."""
    more = -k_BSNK.shape[1] % FP8_BLOCK
    return (
        F.pad(k_BSNK.permute(0, 2, 1, 3), (0, 0, 0, more)),
        F.pad(v_BSNK.permute(0, 2, 3, 1), (0, more)),
    )


def fp8_attend(
    q_BRNK: Tensor,
    k_codes: Tensor,
    k_factors: Tensor,
    v_codes: Tensor,
    v_factors: Tensor,
    keys: int,
) -> Tensor:
    """Return the output [B, R, N, K] in the dtype of the queries."""
    q_codes, q_factor = quantize_rows(q_BRNK.transpose(1, 2))
    logits = q_codes.float() @ k_codes[:, :, :keys].float().mT
    logits *= q_factor * (q_BRNK.shape[-1] ** -0.5 * math.log2(math.e))
    logits *= k_factors[:, :, :keys].mT
    top = torch.full_like(logits[..., :1], -math.inf)
    total, sum_ = torch.zeros_like(top), torch.zeros_like(q_codes, dtype=torch.float32)
    for index, part in enumerate(logits.split(WEIGHT_KEYS, dim=-1)):
        new_top = torch.maximum(top, part.amax(-1, keepdim=True))
        weights, kept = (part - new_top).exp2(), (top - new_top).exp2()
        codes = (weights * WEIGHT_FACTOR).to(torch.float8_e4m3fn).float()
        first = index * WEIGHT_KEYS
        values_BNKS = v_codes[..., first : first + part.shape[-1]].float()
        total = total * kept + weights.sum(-1, keepdim=True)
        sum_ = sum_ * kept + codes @ values_BNKS.mT * v_factors[..., None, :, first // FP8_BLOCK]
        top = new_top
    return (sum_ / (total * WEIGHT_FACTOR)).to(q_BRNK.dtype).transpose(1, 2)


def attend_codes(
    q_BRNK: Tensor,
    k_codes: Tensor,
    k_factors: Tensor,
    v_codes: Tensor,
    v_factors: Tensor,
    keys: int,
) -> Tensor:
    """Return what the keys and values that the codes stand for give, nothing rounded besides."""
    k_BNSK = dequantize_rows(k_codes, k_factors)[:, :, :keys]
    v_BNKS = dequantize_rows(v_codes, v_factors)[..., :keys]
    logits = q_BRNK.transpose(1, 2).to(k_BNSK.dtype) @ k_BNSK.mT * q_BRNK.shape[-1] ** -0.5
    return (torch.softmax(logits, dim=-1) @ v_BNKS.mT).to(q_BRNK.dtype).transpose(1, 2)
