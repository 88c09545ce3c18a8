"""Fused operators of the causal ViT decoder, on CUDA; `plain` is their oracle.

    place   qkv rows -> q, k: unit RMS a head, rotated, q scaled; k and v go into the ring
    attend  rows of a call over the ring: each token over its own window in the latents that are
            seen, and the suffix; the suffix over everything, itself once

With x as projected and its bias, n = x rsqrt(mean x^2 + eps) over a head; for j < A
    r_j = n_j cos_j - n_{j+A} sin_j   and   r_{j+A} = n_{j+A} cos_j + n_j sin_j;
channels from 2A on pass. Attention is 2^(q k) v over the sum of 2^(q k), in fp32; weights are
rounded to the dtype of v before their product. With the scale `LOG2_E` / sqrt(K) of q that is the
softmax, without a look for the largest logit: for q and k of unit RMS it is at most sqrt(K), where
fp32 has 88. The slots to read and their number are tensors, so that a recorded call serves every
moment of a stream.
Rows are dense [R, D] with D = heads x K; the qkv of a head lie side by side. K and A as in
`vae_stream.vit` (64 and 24). Owns the operators; `window_attention_triton` has the kernels.

Legend: R rows (tokens of C latents, then the suffix; in the ring: of one latent), F 3D, D width,
A rotary pairs, S slots, W windows, J places of a window, C latents.
Source: online softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vae_stream.kernel_contract import require

LOG2_E = math.log2(math.e)


@torch.library.custom_op("worldstream::vit_place", mutates_args=("key_SRD", "value_SRD"))
def place(
    qkv_RF: Tensor,
    bias_F: Tensor,
    cos_RA: Tensor,
    sin_RA: Tensor,
    own_C: Tensor,
    ring_R: Tensor,
    key_SRD: Tensor,
    value_SRD: Tensor,
    heads: int,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write k and v of the tokens into the ring.

    Args:
        qkv_RF: as projected, without the bias.
        bias_F: of the projection.
        cos_RA: fp32 cosines.
        sin_RA: fp32 sines.
        own_C: int64 slots of the call's latents.
        ring_R: int64 row of a slot for each token of a latent.
        key_SRD: ring of one layer.
        value_SRD: as above.
        heads: number of heads.
        scale: of q.
        eps: of the norm.

    Returns q [R, D], and k and v of the suffix.

    Raises: ValueError.
    """
    from vae_stream.causal_vit import window_attention_triton

    rows, channels = qkv_RF.shape[0], key_SRD.shape[2]
    tables = (rows, cos_RA.shape[1])
    require("place", qkv_RF, key_SRD.dtype, (rows, 3 * channels), "qkv")
    require("place", bias_F, key_SRD.dtype, (3 * channels,), "bias")
    require("place", value_SRD, key_SRD.dtype, tuple(key_SRD.shape), "value")
    require("place", cos_RA, torch.float32, tables, "cos")
    require("place", sin_RA, torch.float32, tables, "sin")
    require("place", own_C, torch.int64, (own_C.shape[0],), "own")
    require("place", ring_R, torch.int64, (key_SRD.shape[1],), "ring")
    require("place", key_SRD, key_SRD.dtype, tuple(key_SRD.shape), "key")
    return window_attention_triton.place(
        qkv_RF, bias_F, cos_RA, sin_RA, own_C, ring_R, key_SRD, value_SRD, heads, scale, eps
    )


@place.register_fake
def _(
    qkv_RF: Tensor,
    bias_F: Tensor,
    cos_RA: Tensor,
    sin_RA: Tensor,
    own_C: Tensor,
    ring_R: Tensor,
    key_SRD: Tensor,
    value_SRD: Tensor,
    heads: int,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    suffix = qkv_RF.shape[0] - own_C.shape[0] * key_SRD.shape[1]
    q_RD = qkv_RF.new_empty(qkv_RF.shape[0], key_SRD.shape[2])
    return q_RD, q_RD.new_empty(suffix, q_RD.shape[1]), q_RD.new_empty(suffix, q_RD.shape[1])


@torch.library.custom_op("worldstream::vit_attend", mutates_args=())
def attend(
    q_RD: Tensor,
    key_SRD: Tensor,
    value_SRD: Tensor,
    last_key_RD: Tensor,
    last_value_RD: Tensor,
    slots_S: Tensor,
    count_1: Tensor,
    token_WJ: Tensor,
    begin_W: Tensor,
    size_W: Tensor,
    heads: int,
) -> Tensor:
    """Return rows [R, D].

    Args:
        q_RD: of the tokens, then of the suffix; scaled.
        key_SRD: ring of one layer, with the call's own latents.
        value_SRD: as above.
        last_key_RD: keys of the suffix, which may be empty.
        last_value_RD: values of the suffix.
        slots_S: int64 slots that are seen, in the order in which they are summed; the first one
            and those that follow it around the ring.
        count_1: int64 number of slots that count.
        token_WJ: see `WindowPlan`.
        begin_W: see `WindowPlan`.
        size_W: see `WindowPlan`.
        heads: number of heads.

    Raises: ValueError.
    """
    from vae_stream.causal_vit import window_attention_triton

    dtype, ring = q_RD.dtype, tuple(key_SRD.shape)
    last = tuple(last_key_RD.shape)
    require("attend", q_RD, dtype, (q_RD.shape[0], ring[2]), "q")
    require("attend", key_SRD, dtype, ring, "key")
    require("attend", value_SRD, dtype, ring, "value")
    require("attend", last_key_RD, dtype, (last[0], ring[2]), "last key")
    require("attend", last_value_RD, dtype, last, "last value")
    require("attend", slots_S, torch.int64, ring[:1], "slots")
    require("attend", count_1, torch.int64, (1,), "count")
    require("attend", token_WJ, torch.int32, tuple(token_WJ.shape), "token")
    require("attend", begin_W, torch.int32, tuple(token_WJ.shape[:1]), "begin")
    require("attend", size_W, torch.int32, tuple(token_WJ.shape[:1]), "size")
    if last[0] > 16 or (q_RD.shape[0] - last[0]) % ring[1]:
        raise ValueError(
            f"attend: {q_RD.shape[0]} rows, {last[0]} of them the suffix; allowed: at most 16 "
            f"after a multiple of {ring[1]} tokens"
        )
    return window_attention_triton.attend(
        q_RD, key_SRD, value_SRD, last_key_RD, last_value_RD, slots_S, count_1, token_WJ, begin_W,
        size_W, heads,
    )  # fmt: skip


@attend.register_fake
def _(
    q_RD: Tensor,
    key_SRD: Tensor,
    value_SRD: Tensor,
    last_key_RD: Tensor,
    last_value_RD: Tensor,
    slots_S: Tensor,
    count_1: Tensor,
    token_WJ: Tensor,
    begin_W: Tensor,
    size_W: Tensor,
    heads: int,
) -> Tensor:
    return torch.empty_like(q_RD)
