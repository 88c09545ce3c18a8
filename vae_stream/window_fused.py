"""Windows of the original H3 decoder, fast: compiled rows, and attention by the device's best.

Owns `FusedWindows`, which does what `Vit.forward` does, its oracle: every token sees every other.
On CUDA with Triton q, k and v are placed by the operator of the causal decoder, of which a tile is
a slot here; elsewhere a compiled function does it. cuDNN's attention comes first: for heads of 64
channels it is faster than what torch prefers.

Legend: B tiles, C channels, T latents or frames, H height, W width, R rows, N heads, K head width,
D width, F 3D, A rotary pairs, P values of a token's pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphs.compile import CompileMode, compile_module
from vae_stream.causal_vit.window_attention import kernels_run_on, place
from vae_stream.geometry import RAW_FRAMES, SPATIAL_RATIO
from vae_stream.vit import Vit, check_window, rotate, window_rotary
from vae_stream.vit_rows import between, edges_of, enter, head, layers_of, leave

_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]  # fmt: skip


class FusedWindows:
    """Decodes windows of tiles.

    Args:
        vit: network on its device and in its dtype.
        compile_mode: of the parts between attentions.
    """

    def __init__(self, vit: Vit, compile_mode: CompileMode) -> None:
        self._config = vit.config
        self._layers = layers_of(vit)
        self._edges = edges_of(vit, makes_colours=False)
        self._has_kernels = kernels_run_on(vit.register_tokens.device)
        self._enter = compile_module(enter, compile_mode)
        self._between = compile_module(between, compile_mode)
        self._leave = compile_module(leave, compile_mode)
        self._placed = compile_module(_placed, compile_mode)
        self._painted = compile_module(_painted, compile_mode)

    def __call__(self, latents_BCTHW: Tensor) -> Tensor:
        """Return frames `[B, 3, 4T, 16H, 16W]`, ImageNet-normalised, of normalised latents.

        Raises:
            ValueError: a window of one latent.
        """
        check_window(latents_BCTHW)
        config, layers, edges = self._config, self._layers, self._edges
        batch, _, latents, height, width = latents_BCTHW.shape
        cos_R1A, sin_R1A = window_rotary(config, latents, height, width, latents_BCTHW.device)
        tables = cos_R1A.flatten(1), sin_R1A.flatten(1)
        if self._has_kernels:  # a row of a table for each row of every tile
            tables = tables[0].repeat(batch, 1), tables[1].repeat(batch, 1)
        x_RD, qkv_RF = self._enter(latents_BCTHW, edges, layers[0], config.eps)
        for index, layer in enumerate(layers):
            o_RD = self._attention(qkv_RF, layer.qkv_bias, tables, batch)
            if index < len(layers) - 1:
                x_RD, qkv_RF = self._between(x_RD, o_RD, layer, layers[index + 1], config.eps)
        rows_RD = self._leave(x_RD, o_RD, layers[-1], edges, config.eps, batch=batch)
        return self._painted(head(rows_RD, edges), edges.head_bias_P, latents, height, width)

    def _attention(
        self, qkv_RF: Tensor, bias_F: Tensor, tables: tuple[Tensor, Tensor], batch: int
    ) -> Tensor:
        """Return rows [R, D] of each tile's attention over itself."""
        config, rows, device = self._config, qkv_RF.shape[0] // batch, qkv_RF.device
        if self._has_kernels:
            key_BRD = qkv_RF.new_empty(batch, rows, config.width)
            value_BRD = torch.empty_like(key_BRD)
            q_RD, _, _ = place(
                qkv_RF, bias_F, *tables, torch.arange(batch, device=device),
                torch.arange(rows, device=device), key_BRD, value_BRD, config.head_count, 1.0,
                config.eps,
            )  # fmt: skip
            placed = q_RD.view_as(key_BRD), key_BRD, value_BRD
        else:
            placed = self._placed(
                qkv_RF.unflatten(0, (batch, rows)), bias_F, *tables, config.head_count, config.eps
            )
        q, k, v = (
            each_BRD.unflatten(-1, (config.head_count, -1)).transpose(1, 2) for each_BRD in placed
        )
        with sdpa_kernel(_ATTENTION, set_priority=True):
            o_BNRK = F.scaled_dot_product_attention(q, k, v)
        return o_BNRK.transpose(1, 2).flatten(2).flatten(0, 1)


def _placed(
    qkv_BRF: Tensor, bias_F: Tensor, cos_RA: Tensor, sin_RA: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [B, R, D]; q and k of unit RMS a head, rotated."""
    q_BRNK, k_BRNK, v_BRNK = (qkv_BRF + bias_F).unflatten(-1, (heads, 3, -1)).unbind(-2)
    q_BRNK, k_BRNK = (
        rotate(F.rms_norm(each.float(), each.shape[-1:], eps=eps), cos_RA[:, None], sin_RA[:, None])
        for each in (q_BRNK, k_BRNK)
    )
    return q_BRNK.to(v_BRNK.dtype).flatten(2), k_BRNK.to(v_BRNK.dtype).flatten(2), v_BRNK.flatten(2)


def _painted(rows_RP: Tensor, bias_P: Tensor, latents: int, height: int, width: int) -> Tensor:
    """Return frames `[B, 3, 4T, 16H, 16W]`."""
    return rearrange(
        rows_RP + bias_P,
        "(batch latent row col) (rgb frame y x) -> batch rgb (latent frame) (row y) (col x)",
        latent=latents, row=height, col=width, rgb=3, frame=RAW_FRAMES, y=SPATIAL_RATIO,
    )  # fmt: skip
