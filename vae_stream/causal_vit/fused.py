"""The causal ViT decoder for CUDA: compiled parts, fused attention, each call one recorded graph.

    enter | place, attend | between | place, attend | ... | between | place, attend | leave, paint

Owns `FusedCalls`. What lies between two attentions is of `vit_rows`, compiled, with the operators
of `row_ops`; attention and its placing are those of `window_attention`. All that depends on the
moment is derived on the device from a clock, so a graph serves every call. Precision is that of
`plain` but for what `vit_rows` says.

Legend: R rows (tokens of C latents, then the suffix), F latent channels or 3D, D width, P values of
a token's pixels, H height, W width in tokens, T frames.
"""

from __future__ import annotations

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
from vae_stream.causal_vit.window_attention import LOG2_E, attend, place
from vae_stream.geometry import RAW_FRAMES, SPATIAL_RATIO
from vae_stream.pixels import to_uint8
from vae_stream.vit import Vit
from vae_stream.vit_rows import between, edges_of, enter, forms_of, head, layers_of, leave


def _paint(rows_RP: Tensor, bias_P: Tensor, height: int, width: int) -> Tensor:
    """Return uint8 frames `[4C, 16H, 16W, 3]`."""
    frames_TCHW = rearrange(
        rows_RP + bias_P,
        "(latent row col) (rgb frame y x) -> (latent frame) rgb (row y) (col x)",
        row=height, col=width, rgb=3, frame=RAW_FRAMES, y=SPATIAL_RATIO,
    )  # fmt: skip
    return to_uint8(frames_TCHW)


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
        self._config, self._causal, self.runner = config, causal, runner
        self._size = height, width
        self.plans = tuple(
            plan_windows(height, width, shift, network=config, causal=causal, device=device)
            for shift in (0, causal.window // 2)
        )
        self._frequency_A = frequencies(config).to(device)
        self._layers = layers_of(vit)
        self._dtype = self._layers[0].qkv_weight.dtype
        self._edges = edges_of(vit, makes_colours=True)
        self._forms = forms_of(self._layers[0], compile_mode)
        self._moment = compile_module(moment, compile_mode)
        self._enter = compile_module(enter, compile_mode)
        self._between = compile_module(between, compile_mode)
        self._leave = compile_module(leave, compile_mode)
        self._paint = compile_module(_paint, compile_mode)

    def run(self, state: CausalVitState, kind: CallKind) -> Tensor:
        """Decode the next latents of a state; returns uint8 frames `[4C, 16H, 16W, 3]`.

        Their keys and values lie in the ring then. The frames hold until the next call.
        """
        buffers = state.buffers

        def call() -> Tensor:
            return self._call(buffers, kind)

        if self.runner is None:
            return call()
        key = self._key(kind)
        self.runner.allow([key])
        self.runner.begin_turn()
        frames_THWC = self.runner.run(key, call, buffers.fixed)
        assert frames_THWC is not None
        return frames_THWC

    def close(self) -> None:
        """Give recorded calls up."""
        if self.runner is not None:
            self.runner.close()

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
        z_BCTHW = z_CFHW.transpose(0, 1)[None]
        return self._enter(z_BCTHW, self._edges, self._layers[0], self._config.eps)

    def place(
        self, layer: int, qkv_RF: Tensor, ring: tuple[Tensor, Tensor], now: Moment
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put keys and values into the ring of a layer; q, and k and v of the suffix."""
        return place(
            qkv_RF, self._layers[layer].qkv_bias, *now.tables[layer % 2], now.own_C,
            self.plans[layer % 2].ring_R, *ring, self._config.head_count,
            LOG2_E * self._config.head_width**-0.5, self._config.eps,
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
            plan.begin_W, plan.size_W, self._config.head_count,
        )  # fmt: skip

    def between(self, layer: int, x_RD: Tensor, o_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Rows after a layer, and the next one's q, k, v of them without bias."""
        layers = self._layers
        return self._between(
            x_RD, o_RD, layers[layer], layers[layer + 1], self._config.eps, self._forms
        )

    def leave(self, x_RD: Tensor, o_RD: Tensor) -> Tensor:
        """Frames of what the last attention gave."""
        edges = self._edges
        rows_RD = self._leave(
            x_RD, o_RD, self._layers[-1], edges, self._config.eps, self._forms, batch=1
        )
        return self._paint(head(rows_RD, edges), edges.head_bias_P, *self._size)

    def _key(self, kind: CallKind) -> GraphKey:
        tokens = self._size[0] * self._size[1]
        return GraphKey(
            phase=Phase.DECODE, rows=kind.latents * tokens, history_rows=kind.past * tokens,
            prefix_rows=self._config.suffix_count, dtype=self._dtype, batch=1,
        )  # fmt: skip
