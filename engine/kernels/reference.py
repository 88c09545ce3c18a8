"""One plain oracle for each fused operator, with the operator's own signature.

Owns the formulas in torch, on any device. `rounding` says where they round:

    eager   where the plain code of `engine.model` does, to the dtype of the rows
    fast    once, at the end; inside everything is fp32

A delta is added to what the kernel reads, and the sum is rounded as if it had been stored.
Quantised forms round to the dtype of the rows first and then quantise, so that both see the same
activation. Shape suffixes: B batch, R rows, D width, N heads, K head width, F inner width of the
feed-forward part, M runs of rows with one modulation, G runs of rows with one camera.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import sparse_reference
from engine.model.prope import apply_prope
from engine.model.rope import apply_rope

Rounding = Literal["eager", "fast"]

SHIFT_A, SCALE_A, GATE_A, SHIFT_F, SCALE_F, GATE_F = range(6)
"""Parts of a modulation, axis -2."""

FP8_MAX = 448.0
"""Largest finite e4m3 value."""
FP8_AMAX_FLOOR = 1e-12
"""Keeps the factor of a row of zeros finite."""
FP8_BLOCK = 128
"""Input channels, and of a weight output channels too, that share a factor in blocks."""
FP8_FACTOR_MULTIPLE = 4
"""Of the factors of a weight along its input channels; what is past the last one counts nothing."""


def quantize_rows(x: Tensor, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [..., K] and fp32 factors, amax / 448.

    One factor a row [..., 1], or one for each block of its channels [..., K / 128].
    """
    parts = x.float().unflatten(-1, (-1, FP8_BLOCK if in_blocks else x.shape[-1]))
    codes, factor = _quantized(parts, parts.abs().amax(-1, keepdim=True))
    return codes.flatten(-2), factor[..., 0]


def quantize_weight(weight_NK: Tensor, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [N, K] and fp32 factors.

    One factor an output channel [N], or one for each block of 128 by 128 channels [N / 128, K / 128
    and up to 3 more of zero].
    """
    if not in_blocks:
        codes, factor = quantize_rows(weight_NK)
        return codes, factor[:, 0].contiguous()
    parts = weight_NK.float().unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    codes, factor = _quantized(parts, parts.abs().amax((1, 3), keepdim=True))
    _, room = weight_scale_shape(weight_NK.shape[0], weight_NK.shape[1], in_blocks)
    return codes.flatten(2).flatten(0, 1), F.pad(factor[:, 0, :, 0], (0, room - factor.shape[2]))


def weight_scale_shape(channels: int, width: int, in_blocks: bool) -> tuple[int, ...]:
    """Shape of the factors of a weight [N, K]."""
    if not in_blocks:
        return (channels,)
    factors = -(-width // (FP8_BLOCK * FP8_FACTOR_MULTIPLE)) * FP8_FACTOR_MULTIPLE
    return channels // FP8_BLOCK, factors


def _quantized(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    amax = amax.clamp_min(FP8_AMAX_FLOOR)
    inverse = amax.reciprocal() * FP8_MAX
    codes = (x * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, amax * (1.0 / FP8_MAX)


def dequantize_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Return what the codes of rows stand for, in fp32 or the wider dtype of the factors."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    parts = codes.to(wide).unflatten(-1, (scale.shape[-1], -1))
    return (parts * scale[..., None]).flatten(-2)


def dequantize_weight(codes_NK: Tensor, scale: Tensor) -> Tensor:
    """Return what the codes of a weight stand for, in fp32 or the wider dtype of the factors."""
    if scale.ndim == 1:
        return dequantize_rows(codes_NK, scale[:, None])
    used = scale[:, : codes_NK.shape[1] // FP8_BLOCK]
    return dequantize_rows(codes_NK, used.repeat_interleave(FP8_BLOCK, dim=0))


def fp8_linear(
    codes: Tensor, scale: Tensor, weight_NK: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (codes * scale) (weight * weight_scale)^T, summed in fp32 and rounded once."""
    if weight_scale.ndim == 2:
        rows, weight = dequantize_rows(codes, scale), dequantize_weight(weight_NK, weight_scale)
        return (rows @ weight.mT).to(dtype)
    wide = torch.promote_types(scale.dtype, torch.float32)
    product = codes.to(wide) @ weight_NK.to(wide).mT
    return (product * scale * weight_scale).to(dtype)


def norm_modulate(
    x_BRD: Tensor, weight_D: Tensor, modulation_BMPD: Tensor, eps: float, rounding: Rounding
) -> Tensor:
    """Return norm(x) (1 + scale) + shift with parts 1 and 0 of the modulation."""
    shift, scale = (_part(modulation_BMPD, part, x_BRD) for part in (SHIFT_A, SCALE_A))
    return _norm_modulate(x_BRD, weight_D, shift, scale, eps, rounding, x_BRD.dtype)


def norm_modulate_fp8(
    x_BRD: Tensor,
    weight_D: Tensor,
    modulation_BMPD: Tensor,
    eps: float,
    rounding: Rounding,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `norm_modulate` of the same arguments, quantised."""
    return quantize_rows(norm_modulate(x_BRD, weight_D, modulation_BMPD, eps, rounding), in_blocks)


def add_norm_modulate(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation_BM6D: Tensor,
    eps: float,
    rounding: Rounding,
    delta_BRD: Tensor | None = None,
    following_BMPD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return h = x + gate branch, and norm(h) (1 + scale) + shift.

    Gate, shift, scale: parts 2, 3, 4, or 5 and then 0, 1 of the ``following`` block.
    """
    branch_BRD = _summed(branch_BRD, delta_BRD)
    vectors, parts = modulation_BM6D, (GATE_A, SHIFT_F, SCALE_F)
    if following_BMPD is not None:
        vectors, parts = following_BMPD, (GATE_F, SHIFT_A, SCALE_A)
    gate = _part(modulation_BM6D, parts[0], x_BRD)
    shift, scale = (_part(vectors, part, x_BRD) for part in parts[1:])
    h_BRD = _add_gated(x_BRD, branch_BRD, gate, rounding)
    out_BRD = _norm_modulate(h_BRD, weight_D, shift, scale, eps, rounding, x_BRD.dtype)
    return h_BRD.to(x_BRD.dtype), out_BRD


def add_norm_modulate_fp8(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    weight_D: Tensor,
    modulation_BM6D: Tensor,
    eps: float,
    rounding: Rounding,
    following_BMPD: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `add_norm_modulate` of the same arguments, the second part quantised."""
    h_BRD, out_BRD = add_norm_modulate(
        x_BRD, branch_BRD, weight_D, modulation_BM6D, eps, rounding, None, following_BMPD
    )
    return h_BRD, *quantize_rows(out_BRD, in_blocks)


def add_gated(
    x_BRD: Tensor,
    branch_BRD: Tensor,
    modulation_BM6D: Tensor,
    rounding: Rounding,
    delta_BRD: Tensor | None = None,
) -> Tensor:
    """Return x + gate branch with part 5 of the modulation."""
    branch_BRD = _summed(branch_BRD, delta_BRD)
    gate = _part(modulation_BM6D, GATE_F, x_BRD)
    return _add_gated(x_BRD, branch_BRD, gate, rounding).to(x_BRD.dtype)


def place(
    q_BRNK: Tensor,
    k_BRNK: Tensor,
    v_BRNK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_RK: Tensor,
    sin_RK: Tensor,
    query_BG44: Tensor,
    key_value_BG44: Tensor,
    key_BRNK: Tensor,
    value_BRNK: Tensor,
    raw_BRNK: Tensor | None,
    eps: float,
    rounding: Rounding,
    q_delta_BRNK: Tensor | None = None,
    k_delta_BRNK: Tensor | None = None,
    v_delta_BRNK: Tensor | None = None,
) -> Tensor:
    """Normalise q and k a head, rotate them, apply the cameras; write k and v, return q.

    The normalised rotary channels of k go into ``raw_BRNK``, before they are rotated.
    """
    start = cos_RK.shape[-1]
    q_BRNK = _norm(_summed(q_BRNK, q_delta_BRNK), q_weight_K, eps, rounding)
    k_BRNK = _norm(_summed(k_BRNK, k_delta_BRNK), k_weight_K, eps, rounding)
    v_BRNK = _inner(_summed(v_BRNK, v_delta_BRNK), rounding)
    if raw_BRNK is not None:
        raw_BRNK.copy_(k_BRNK[..., :start])
    key_BRNK.copy_(apply_prope(apply_rope(k_BRNK, cos_RK, sin_RK), key_value_BG44, start))
    value_BRNK.copy_(apply_prope(v_BRNK, key_value_BG44, start))
    q_BRNK = apply_prope(apply_rope(q_BRNK, cos_RK, sin_RK), query_BG44, start)
    return q_BRNK.to(key_BRNK.dtype)


def rotate(
    raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor, rounding: Rounding
) -> None:
    """Write the rotary channels of keys from their raw form; the other channels stay."""
    key_BRNK[..., : cos_RK.shape[-1]] = apply_rope(_inner(raw_BRNK, rounding), cos_RK, sin_RK)


def slide(
    keys_BSNK: Sequence[Tensor],
    values_BSNK: Sequence[Tensor],
    raw_BSNK: Sequence[Tensor],
    newest_BRNK: Sequence[Tensor],
    cos_SK: Tensor,
    sin_SK: Tensor,
    mean_BNJK: Sequence[Tensor],
    sum_BNJK: Sequence[Tensor],
    reach_BNJ: Sequence[Tensor],
    slot: int,
    block: int,
    rounding: Rounding,
) -> None:
    """Let the newest chunk take a slot of the ring, and rotate every chunk for its place in time.

    Places count from the slot after this one on, around the ring. Then the whole blocks that hold
    rows of the ring are summarized.
    """
    rows, start = newest_BRNK[0].shape[1], cos_SK.shape[-1]
    slots = raw_BSNK[0].shape[1] // rows
    ring_end = keys_BSNK[0].shape[1] - rows
    prefix_rows = ring_end - slots * rows

    def rows_of(index: int, first: int) -> slice:
        return slice(first + index * rows, first + (index + 1) * rows)

    target, source = rows_of(slot, prefix_rows), rows_of(slots, prefix_rows)
    for keys, values, raw, newest in zip(
        keys_BSNK, values_BSNK, raw_BSNK, newest_BRNK, strict=True
    ):
        keys[:, target, :, start:] = keys[:, source, :, start:]
        values[:, target] = values[:, source]
        raw[:, rows_of(slot, 0)] = newest
        for place in range(slots):
            index = (slot + 1 + place) % slots
            tables = cos_SK[rows_of(place, 0)], sin_SK[rows_of(place, 0)]
            rotate(
                raw[:, rows_of(index, 0)], *tables, keys[:, rows_of(index, prefix_rows)], rounding
            )
    first = len(keys_BSNK) - len(mean_BNJK)
    for keys, values, *summary in zip(
        keys_BSNK[first:], values_BSNK[first:], mean_BNJK, sum_BNJK, reach_BNJ, strict=True
    ):
        mean, sum_, reach = (part.clone() for part in summary)
        sparse_reference.summarize(keys, values, mean, sum_, reach, keys.shape[1], block)
        renewed = slice(prefix_rows // block, ring_end // block)
        for part, made in zip(summary, (mean, sum_, reach), strict=True):
            part[:, :, renewed] = made[:, :, renewed]


def turn_output(o_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Multiply the channels from ``start`` on by each row's matrix; heads side by side [B, R, NK].

    Sums are fp32 and round once in both roundings.
    """
    return apply_prope(o_BRNK, matrix_BG44, start).flatten(-2)


def turn_output_fp8(
    o_BRNK: Tensor, matrix_BG44: Tensor, start: int, in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `turn_output` of the same arguments, quantised."""
    return quantize_rows(turn_output(o_BRNK, matrix_BG44, start), in_blocks)


def absorb(o_BRNK: Tensor, lse_BNR: Tensor, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> None:
    """Let more keys into an attention output ``o`` whose sums have the logarithms ``lse``.

    Weights are relative to the largest one and rounded to the dtype of the rows before they meet
    the values, as in any product of that dtype.
    """
    wide = lse_BNR.dtype
    q, k, v = (part.transpose(1, 2).to(wide) for part in (q_BRNK, k_BSNK, v_BSNK))
    logits, before = q @ k.mT * q.shape[-1] ** -0.5, lse_BNR[..., None]
    top = torch.maximum(logits.amax(-1, keepdim=True), before)
    weights, weight_before = (logits - top).exp(), (before - top).exp()
    total = weight_before + weights.sum(-1, keepdim=True)
    sum_ = o_BRNK.transpose(1, 2).to(wide) * weight_before + weights.to(o_BRNK.dtype).to(wide) @ v
    o_BRNK.copy_((sum_ / total).transpose(1, 2))


def swiglu(z_BRF: Tensor, rounding: Rounding, delta_BRF: Tensor | None = None) -> Tensor:
    """Return value * silu(gate) for z = [value ; gate]."""
    value, gate = _inner(_summed(z_BRF, delta_BRF), rounding).chunk(2, dim=-1)
    return (value * F.silu(gate)).to(z_BRF.dtype)


def swiglu_fp8(z_BRF: Tensor, rounding: Rounding, in_blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Return `swiglu` of the same arguments, quantised."""
    return quantize_rows(swiglu(z_BRF, rounding), in_blocks)


def _summed(x: Tensor, delta: Tensor | None) -> Tensor:
    """Sum of a product and what an adapter adds to it, rounded to their dtype in both roundings."""
    return x if delta is None else x + delta


def _inner(x: Tensor, rounding: Rounding) -> Tensor:
    """Dtype of what is computed: that of the rows, or at least fp32."""
    if rounding == "eager" or x.dtype == torch.float64:
        return x
    return x.float()


def _part(modulation_BMPD: Tensor, part: int, x_BRD: Tensor) -> Tensor:
    part_BMD = modulation_BMPD[..., part, :]
    runs = part_BMD.shape[1]
    return part_BMD if runs == 1 else part_BMD.repeat_interleave(x_BRD.shape[1] // runs, dim=1)


def _add_gated(x: Tensor, branch: Tensor, gate: Tensor, rounding: Rounding) -> Tensor:
    return _inner(x, rounding) + _inner(gate, rounding) * _inner(branch, rounding)


def _norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    normed = F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps)
    return normed.to(x.dtype) if rounding == "eager" else normed


def _norm_modulate(
    x: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    rounding: Rounding,
    dtype: torch.dtype,
) -> Tensor:
    normed = _norm(x, weight, eps, rounding)
    out = normed * (1 + _inner(scale, rounding)) + _inner(shift, rounding)
    return out.to(dtype)
