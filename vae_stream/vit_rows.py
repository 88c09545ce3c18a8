"""The H3 ViT as functions of rows, for a compiler: what lies between two attentions is one of them.

    enter | attention | between | attention | ... | between | attention | leave, head

Owns the weights as these functions take them, which serve all layers and every decoder of the
network. Precision is that of `vit` with two differences in bf16: the head is a product of fp16 with
fp32 sums (of fp32 values it keeps the ten bits that TF32 keeps), and a product is rounded before
its bias is added. Where the operators of `row_ops` serve, rows are added and normalised in one
pass, and, of many rows, the gate is made where its product ends, class F; the plain form here is
their oracle. All depends on the row alone but for that: calls with rows on either side of
`GATED_LEAST_ROWS` round the gate differently.

Legend: R rows (tokens, then the suffix, of one tile after another), F latent channels or 3D,
D width, G twice the width of the feed-forward part, P values of a token's pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from graphs.compile import CompileMode
from vae_stream.pixels import from_imagenet
from vae_stream.row_ops import (
    GATED_LEAST_ROWS,
    PLAIN_ROWS,
    RowForms,
    add_norm,
    add_two_norm,
    gated,
    row_forms,
)
from vae_stream.vit import Block, Vit


class Layer(NamedTuple):
    """Weights of a block; products in its dtype, the rest fp32."""

    norm1_D: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    scale1_D: Tensor
    norm2_D: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor
    scale2_D: Tensor


class Edges(NamedTuple):
    """Weights of the way in and out, fp32; `head` may be fp16."""

    mean_F: Tensor
    std_F: Tensor
    post_quant_weight: Tensor
    post_quant_bias: Tensor
    embed_weight: Tensor
    embed_bias: Tensor
    suffix_SD: Tensor
    head_PD: Tensor
    """Of rows that are normalised: the scale and shift of the last norm are in it."""
    head_bias_P: Tensor


def layers_of(vit: Vit) -> list[Layer]:
    """Return the weights of all blocks."""
    layers = []
    for block in vit.blocks:
        assert isinstance(block, Block)
        attn, ff = block.attn, block.ff
        layer = Layer(
            block.norm1.weight, attn.to_qkv.weight, attn.to_qkv.bias, attn.to_out.weight,
            attn.to_out.bias, block.scale1, block.norm2.weight, ff.w1.weight, ff.w1.bias,
            ff.w2.weight, ff.w2.bias, block.scale2,
        )  # fmt: skip
        layers.append(layer)
    return layers


def forms_of(layer: Layer, compile_mode: CompileMode) -> RowForms:
    """Return the forms of parts that are compiled so; eager ones stay plain torch."""
    if compile_mode == CompileMode.EAGER:
        return PLAIN_ROWS
    return row_forms(layer.up_weight, layer.up_bias)


def edges_of(vit: Vit, *, makes_colours: bool) -> Edges:
    """Return the weights of the ends.

    Args:
        vit: network.
        makes_colours: whether the head makes colours in 0..1, not ImageNet's normalised ones.
    """
    post_quant_bias = vit.post_quant_conv.bias
    assert post_quant_bias is not None
    weight_PD = vit.proj_out.weight * vit.norm_out.weight
    bias_P = vit.proj_out.bias + vit.proj_out.weight @ vit.norm_out.bias
    if makes_colours:
        # Colours are restored by the head itself: y std + mean = x (W std) + (b std + mean).
        shift_C = from_imagenet(bias_P.new_zeros(1, 3, 1, 1)).view(3)
        scale_C = from_imagenet(bias_P.new_ones(1, 3, 1, 1)).view(3) - shift_C
        each = weight_PD.shape[0] // 3
        scale_P, shift_P = scale_C.repeat_interleave(each), shift_C.repeat_interleave(each)
        weight_PD, bias_P = weight_PD * scale_P[:, None], bias_P * scale_P + shift_P
    is_half = weight_PD.device.type == "cuda" and _dtype(vit) == torch.bfloat16
    return Edges(
        vit.latents_mean.flatten(), vit.latents_std.flatten(),
        vit.post_quant_conv.weight.flatten(1), post_quant_bias, vit.x_embedder.weight,
        vit.x_embedder.bias, vit.suffix(1)[0], weight_PD.half() if is_half else weight_PD, bias_P,
    )  # fmt: skip


def enter(z_BCTHW: Tensor, edges: Edges, layer: Layer, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows of normalised latents, and the first layer's q, k, v of them without bias."""
    z_BRF = rearrange(z_BCTHW, "batch channel time row col -> batch (time row col) channel")
    z_BRF = z_BRF * edges.std_F + edges.mean_F
    z_BRF = F.linear(z_BRF, edges.post_quant_weight, edges.post_quant_bias)
    tokens_BRD = F.linear(z_BRF, edges.embed_weight, edges.embed_bias)
    suffix_BSD = edges.suffix_SD.expand(len(z_BCTHW), -1, -1)
    x_RD = torch.cat([tokens_BRD, suffix_BSD], dim=1).flatten(0, 1)
    return x_RD, _projected(x_RD, layer, eps)


def between(
    x_RD: Tensor, o_RD: Tensor, layer: Layer, following: Layer, eps: float, forms: RowForms
) -> tuple[Tensor, Tensor]:
    """Finish a layer whose attention gave `o_RD`; rows, and the next q, k, v without bias."""
    if not forms.has_kernels:
        x_RD = _finished(x_RD, o_RD, layer, eps, forms)
        return x_RD, _projected(x_RD, following, eps)
    o_RD = F.linear(o_RD, layer.out_weight)
    n_RD = add_norm(x_RD, o_RD, layer.out_bias, layer.scale1_D, layer.norm2_D, eps)
    x_RD, n_RD = add_two_norm(
        x_RD, o_RD, layer.out_bias, layer.scale1_D, _fed(n_RD, layer, forms), layer.down_bias,
        layer.scale2_D, following.norm1_D, eps,
    )  # fmt: skip
    return x_RD, F.linear(n_RD, following.qkv_weight)


def leave(
    x_RD: Tensor,
    o_RD: Tensor,
    layer: Layer,
    edges: Edges,
    eps: float,
    forms: RowForms,
    *,
    batch: int,
) -> Tensor:
    """Finish the last layer; return the tokens as the head takes them."""
    x_BRD = _finished(x_RD, o_RD, layer, eps, forms).unflatten(0, (batch, -1))
    x_RD = x_BRD[:, : -edges.suffix_SD.shape[0]].flatten(0, 1)
    return F.layer_norm(x_RD, x_RD.shape[-1:], eps=eps).to(edges.head_PD.dtype)


def head(rows_RD: Tensor, edges: Edges) -> Tensor:
    """Return pixels [R, P] of what `leave` gave, fp32, without bias."""
    if rows_RD.dtype == torch.float32:
        return F.linear(rows_RD, edges.head_PD)
    return torch.mm(rows_RD, edges.head_PD.T, out_dtype=torch.float32)


def _finished(x_RD: Tensor, o_RD: Tensor, layer: Layer, eps: float, forms: RowForms) -> Tensor:
    # Biases are added by what follows a product: the compiler would first spread them over it.
    o_RD = F.linear(o_RD, layer.out_weight)
    x_RD = x_RD + (o_RD.float() + layer.out_bias) * layer.scale1_D
    down_RD = _fed(_normed(x_RD, layer.norm2_D, layer.up_weight.dtype, eps), layer, forms)
    return x_RD + (down_RD.float() + layer.down_bias) * layer.scale2_D


def _fed(n_RD: Tensor, layer: Layer, forms: RowForms) -> Tensor:
    """The feed-forward part of normalised rows, without its last bias."""
    if forms.has_gated and n_RD.shape[0] >= GATED_LEAST_ROWS:
        return F.linear(gated(n_RD, layer.up_weight, layer.up_bias), layer.down_weight)
    up_RG = F.linear(n_RD, layer.up_weight) + layer.up_bias
    gate_RG, value_RG = up_RG.chunk(2, dim=-1)
    return F.linear(value_RG * F.silu(gate_RG), layer.down_weight)


def _projected(x_RD: Tensor, layer: Layer, eps: float) -> Tensor:
    return F.linear(_normed(x_RD, layer.norm1_D, layer.qkv_weight.dtype, eps), layer.qkv_weight)


def _normed(x_RD: Tensor, weight_D: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    return F.rms_norm(x_RD, x_RD.shape[-1:], weight_D, eps).to(dtype)


def _dtype(vit: Vit) -> torch.dtype:
    block = vit.blocks[0]
    assert isinstance(block, Block)
    return block.ff.w1.weight.dtype
