"""The causal ViT decoder for CUDA: compiled parts, fused attention, each call one recorded graph.

    enter | place, attend | between | place, attend | ... | between | place, attend | leave, paint

Owns `FusedCalls`. What lies between two attentions is one compiled function of tensors, so that the
same code serves all layers; attention and its placing are the operators of `window_attention`. All
that depends on the moment is derived on the device from a clock, so a graph serves every call.
Precision is that of `plain` with two differences in bf16: the head is a product of high and low
parts with fp32 sums, which leaves out 2^-16 of each term; and a product is rounded before its bias
is added, which mostly is in fp32.

Legend: R rows (tokens of C latents, then the suffix), F latent channels or 3D, D width, P values of
a token's pixels, H height, W width in tokens, T frames.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from graphs.compile import CompileMode, compile_module
from graphs.key import GraphKey, Phase
from graphs.runner import GraphRunner
from vae_stream.causal_vit.places import (
    CallKind,
    CausalConfig,
    Moment,
    frequencies,
    moment,
    plan_windows,
)
from vae_stream.causal_vit.state import CausalVitState, RingBuffers
from vae_stream.causal_vit.window_attention import attend, place
from vae_stream.geometry import RAW_FRAMES, SPATIAL_RATIO
from vae_stream.pixels import from_imagenet, to_uint8
from vae_stream.vit import Block, Vit


class _Layer(NamedTuple):
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


class _Edges(NamedTuple):
    """Weights of the way in and out, fp32; `head` may be in bf16 parts."""

    mean_F: Tensor
    std_F: Tensor
    post_quant_weight: Tensor
    post_quant_bias: Tensor
    embed_weight: Tensor
    embed_bias: Tensor
    suffix_RD: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    head: Tensor
    """[P, D], or [P, 3D] of `split_head`; it makes colours in 0..1."""
    head_bias: Tensor


def _layer(block: Block) -> _Layer:
    attn, ff = block.attn, block.ff
    return _Layer(
        block.norm1.weight, attn.to_qkv.weight, attn.to_qkv.bias, attn.to_out.weight,
        attn.to_out.bias, block.scale1, block.norm2.weight, ff.w1.weight, ff.w1.bias,
        ff.w2.weight, ff.w2.bias, block.scale2,
    )  # fmt: skip


def _edges(vit: Vit, dtype: torch.dtype) -> _Edges:
    post_quant_bias = vit.post_quant_conv.bias
    assert post_quant_bias is not None
    # Colours are restored by the head itself: y std + mean = x (W std) + (b std + mean).
    weight_PD, bias_P = vit.proj_out.weight, vit.proj_out.bias
    shift_C = from_imagenet(bias_P.new_zeros(1, 3, 1, 1)).view(3)
    scale_C = from_imagenet(bias_P.new_ones(1, 3, 1, 1)).view(3) - shift_C
    each = weight_PD.shape[0] // 3
    scale_P, shift_P = scale_C.repeat_interleave(each), shift_C.repeat_interleave(each)
    weight_PD = weight_PD * scale_P[:, None]
    return _Edges(
        vit.latents_mean.flatten(), vit.latents_std.flatten(),
        vit.post_quant_conv.weight.flatten(1), post_quant_bias,
        vit.x_embedder.weight, vit.x_embedder.bias, vit.suffix(1)[0], vit.norm_out.weight,
        vit.norm_out.bias, split_head(weight_PD) if dtype == torch.bfloat16 else weight_PD,
        bias_P * scale_P + shift_P,
    )  # fmt: skip


def split_head(weight_PD: Tensor) -> Tensor:
    """Return [high, high, low] bf16 parts [P, 3D] of fp32 weights; see `split_rows`."""
    high_PD = weight_PD.bfloat16()
    return torch.cat([high_PD, high_PD, (weight_PD - high_PD.float()).bfloat16()], dim=-1)


def split_rows(x_RD: Tensor) -> Tensor:
    """Return [high, low, high] bf16 parts [R, 3D] of fp32 rows.

    Their product with `split_head`, summed in fp32, leaves out low x low alone.
    """
    high_RD = x_RD.bfloat16()
    return torch.cat([high_RD, (x_RD - high_RD.float()).bfloat16(), high_RD], dim=-1)


def _enter(z_CFHW: Tensor, edges: _Edges, layer: _Layer, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows and the first layer's q, k, v of them, without bias."""
    z_RF = rearrange(z_CFHW, "latent channel row col -> (latent row col) channel")
    z_RF = z_RF * edges.std_F + edges.mean_F
    z_RF = F.linear(z_RF, edges.post_quant_weight, edges.post_quant_bias)
    x_RD = torch.cat([F.linear(z_RF, edges.embed_weight, edges.embed_bias), edges.suffix_RD])
    return x_RD, _project(x_RD, layer, eps)


def _between(
    x_RD: Tensor, o_RD: Tensor, layer: _Layer, following: _Layer, eps: float
) -> tuple[Tensor, Tensor]:
    """Finish a layer whose attention gave `o_RD`; rows, and the next q, k, v without bias."""
    x_RD = _finish(x_RD, o_RD, layer, eps)
    return x_RD, _project(x_RD, following, eps)


def _leave(x_RD: Tensor, o_RD: Tensor, layer: _Layer, edges: _Edges, eps: float) -> Tensor:
    """Finish the last layer; return the tokens as the head takes them."""
    x_RD = _finish(x_RD, o_RD, layer, eps)[: -edges.suffix_RD.shape[0]]
    x_RD = F.layer_norm(x_RD, x_RD.shape[-1:], edges.norm_weight, edges.norm_bias, eps)
    return split_rows(x_RD) if edges.head.dtype == torch.bfloat16 else x_RD


def _paint(rows_RP: Tensor, bias_P: Tensor, height: int, width: int) -> Tensor:
    """Return uint8 frames `[4C, 16H, 16W, 3]`."""
    frames_TCHW = rearrange(
        rows_RP + bias_P,
        "(latent row col) (rgb frame y x) -> (latent frame) rgb (row y) (col x)",
        row=height, col=width, rgb=3, frame=RAW_FRAMES, y=SPATIAL_RATIO,
    )  # fmt: skip
    return to_uint8(frames_TCHW)


def _finish(x_RD: Tensor, o_RD: Tensor, layer: _Layer, eps: float) -> Tensor:
    # Biases are added by what follows a product: the compiler would first spread them over it.
    o_RD = F.linear(o_RD, layer.out_weight)
    x_RD = x_RD + (o_RD.float() + layer.out_bias) * layer.scale1_D
    n_RD = _normed(x_RD, layer.norm2_D, layer.up_weight.dtype, eps)
    up_RG = F.linear(n_RD, layer.up_weight) + layer.up_bias
    gate_RG, value_RG = up_RG.chunk(2, dim=-1)
    down_RD = F.linear(value_RG * F.silu(gate_RG), layer.down_weight)
    return x_RD + (down_RD.float() + layer.down_bias) * layer.scale2_D


def _project(x_RD: Tensor, layer: _Layer, eps: float) -> Tensor:
    n_RD = _normed(x_RD, layer.norm1_D, layer.qkv_weight.dtype, eps)
    return F.linear(n_RD, layer.qkv_weight)


def _normed(x_RD: Tensor, weight_D: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    return F.rms_norm(x_RD, x_RD.shape[-1:], weight_D, eps).to(dtype)


class FusedCalls:
    """Runs calls of one picture size.

    Args:
        vit: network on its device and in its dtype.
        causal: how it is used.
        height: of the grid, in tokens.
        width: of the grid, in tokens.
        compile_mode: of the parts between attentions.
        runner: records calls; None runs each anew.
    """

    def __init__(
        self,
        vit: Vit,
        causal: CausalConfig,
        *,
        height: int,
        width: int,
        compile_mode: CompileMode,
        runner: GraphRunner | None,
    ) -> None:
        config, device = vit.config, vit.register_tokens.device
        self._config, self._causal, self._runner = config, causal, runner
        self._size = height, width
        self.plans = tuple(
            plan_windows(height, width, shift, network=config, causal=causal, device=device)
            for shift in (0, causal.window // 2)
        )
        self._frequency_A = frequencies(config).to(device)
        blocks = [block for block in vit.blocks if isinstance(block, Block)]
        self._layers = [_layer(block) for block in blocks]
        self._dtype = self._layers[0].qkv_weight.dtype
        self._edges = _edges(vit, self._dtype)
        self._moment = compile_module(moment, compile_mode)
        self._enter = compile_module(_enter, compile_mode)
        self._between = compile_module(_between, compile_mode)
        self._leave = compile_module(_leave, compile_mode)
        self._paint = compile_module(_paint, compile_mode)

    def run(self, state: CausalVitState, kind: CallKind) -> Tensor:
        """Decode the next latents of a state; returns uint8 frames `[4C, 16H, 16W, 3]`.

        Their keys and values lie in the ring then. The frames hold until the next call.
        """
        buffers = state.buffers

        def call() -> Tensor:
            return self._call(buffers, kind)

        if self._runner is None:
            return call()
        key = self._key(kind)
        self._runner.allow([key])
        self._runner.begin_turn()
        frames_THWC = self._runner.run(key, call, buffers.fixed)
        assert frames_THWC is not None
        return frames_THWC

    @property
    def graph_count(self) -> int:
        """Calls that are recorded."""
        return 0 if self._runner is None else len(self._runner.entries)

    def close(self) -> None:
        """Give recorded calls up."""
        if self._runner is not None:
            self._runner.close()

    def _call(self, buffers: RingBuffers, kind: CallKind) -> Tensor:
        now = self.moment(buffers.clock_2, kind)
        x_RD, qkv_RF = self.enter(buffers.latents_CFHW[: kind.latents])
        last = len(self._layers) - 1
        for index in range(last + 1):
            ring = buffers.keys_LSRD[index], buffers.values_LSRD[index]
            placed = self.place(index, qkv_RF, ring, now)
            o_RD = self.attend(index, placed, ring, now)
            if index < last:
                x_RD, qkv_RF = self.between(index, x_RD, o_RD)
        return self.leave(x_RD, o_RD)

    def moment(self, clock_2: Tensor, kind: CallKind) -> Moment:
        """Slots and tables of a call, see `places.moment`."""
        return self._moment(
            clock_2, kind, self.plans, self._frequency_A, time_span=self._causal.time_span,
            suffix_rows=self._config.suffix_count,
        )  # fmt: skip

    def enter(self, z_CFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of latents, and the first layer's q, k, v of them without bias."""
        return self._enter(z_CFHW, self._edges, self._layers[0], self._config.eps)

    def place(
        self, layer: int, qkv_RF: Tensor, ring: tuple[Tensor, Tensor], now: Moment
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put keys and values into the ring of a layer; q, and k and v of the suffix."""
        return place(
            qkv_RF, self._layers[layer].qkv_bias, *now.tables[layer % 2], now.own_C, *ring,
            self._config.head_count, self._config.eps,
        )  # fmt: skip

    def attend(
        self,
        layer: int,
        placed: tuple[Tensor, Tensor, Tensor],
        ring: tuple[Tensor, Tensor],
        now: Moment,
    ) -> Tensor:
        """Attention of a layer over its ring."""
        (q_RD, last_key_RD, last_value_RD), plan = placed, self.plans[layer % 2]
        return attend(
            q_RD, *ring, last_key_RD, last_value_RD, now.slots_S, now.count_1, plan.token_WJ,
            plan.size_W, self._config.head_count,
        )  # fmt: skip

    def between(self, layer: int, x_RD: Tensor, o_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Rows after a layer, and the next one's q, k, v of them without bias."""
        layers = self._layers
        return self._between(x_RD, o_RD, layers[layer], layers[layer + 1], self._config.eps)

    def leave(self, x_RD: Tensor, o_RD: Tensor) -> Tensor:
        """Frames of what the last attention gave."""
        edges = self._edges
        rows_RD = self._leave(x_RD, o_RD, self._layers[-1], edges, self._config.eps)
        if edges.head.dtype == torch.bfloat16:
            rows_RP = torch.mm(rows_RD, edges.head.T, out_dtype=torch.float32)
        else:
            rows_RP = F.linear(rows_RD, edges.head)
        return self._paint(rows_RP, edges.head_bias, *self._size)

    def _key(self, kind: CallKind) -> GraphKey:
        tokens = self._size[0] * self._size[1]
        return GraphKey(
            phase=Phase.DECODE, rows=kind.latents * tokens, history_rows=kind.past * tokens,
            prefix_rows=self._config.suffix_count, dtype=self._dtype, batch=1,
        )  # fmt: skip
