"""Windows of the original H3 decoder, fast: compiled rows, and attention by the device's best.

Owns `FusedWindows`, which does what `Vit.forward` does, its oracle: every token sees every other of
its tile. What lies between two attentions is of `vit_rows`, and plain torch unless it is compiled.
Where Triton runs, attention and its placing are the operators of the causal decoder: the tiles lie
in the one slot of a ring, each is a window of it, and there is no suffix apart. On an H200 that
takes 855 us where cuDNN takes 1035 (14 tiles of 1797 rows). Elsewhere torch does it.

Legend: B tiles, C channels, T latents or frames, H height, W width, R rows, N heads, K head width,
D width, F 3D, A rotary pairs, P values of a token's pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from graphs.compile import CompileMode, compile_module
from vae_stream.causal_vit.window_attention import LOG2_E, attend, place
from vae_stream.geometry import RAW_FRAMES, SPATIAL_RATIO
from vae_stream.kernel_contract import kernels_run_on
from vae_stream.vit import Vit, check_window, rotate, window_rotary
from vae_stream.vit_rows import between, edges_of, enter, forms_of, head, layers_of, leave


class _Tiles(NamedTuple):
    """Where the rows of tiles lie in a ring of one slot, as `window_attention` wants it."""

    cos_RA: Tensor
    """fp32, of the rows of all tiles."""
    sin_RA: Tensor
    row_R: Tensor
    """int64 0, 1, ... R - 1."""
    slot_1: Tensor
    """int64 0."""
    count_1: Tensor
    """int64 1."""
    token_BR: Tensor
    """int32 rows of each tile."""
    begin_B: Tensor
    size_B: Tensor


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
        self._forms = forms_of(self._layers[0], compile_mode)
        self._enter = compile_module(enter, compile_mode)
        self._between = compile_module(between, compile_mode)
        self._leave = compile_module(leave, compile_mode)
        self._attended = compile_module(_attended, compile_mode)
        self._painted = compile_module(_painted, compile_mode)

    def __call__(self, latents_BCTHW: Tensor) -> Tensor:
        """Return frames `[B, 3, 4T, 16H, 16W]`, ImageNet-normalised, of normalised latents.

        Raises:
            ValueError: a window of one latent.
        """
        check_window(latents_BCTHW)
        config, layers, edges = self._config, self._layers, self._edges
        batch, _, latents, height, width = latents_BCTHW.shape
        tables = window_rotary(config, latents, height, width, latents_BCTHW.device)
        tiles = _tiles(tables, batch) if self._has_kernels else None
        x_RD, qkv_RF = self._enter(latents_BCTHW, edges, layers[0], config.eps)
        for index, layer in enumerate(layers):
            if tiles is not None:
                o_RD = self._attention(qkv_RF, layer.qkv_bias, tiles)
            else:
                o_RD = self._attended(
                    qkv_RF, layer.qkv_bias, *tables, batch, config.head_count, config.eps
                )
            if index < len(layers) - 1:
                following = layers[index + 1]
                x_RD, qkv_RF = self._between(x_RD, o_RD, layer, following, config.eps, self._forms)
        rows_RD = self._leave(x_RD, o_RD, layers[-1], edges, config.eps, self._forms, batch=batch)
        return self._painted(head(rows_RD, edges), edges.head_bias_P, latents, height, width)

    def _attention(self, qkv_RF: Tensor, bias_F: Tensor, tiles: _Tiles) -> Tensor:
        """Return rows [R, D] of each tile's attention over itself, by Triton."""
        config = self._config
        key_1RD = qkv_RF.new_empty(1, qkv_RF.shape[0], config.width)
        value_1RD = torch.empty_like(key_1RD)
        q_RD, last_key_0D, last_value_0D = place(
            qkv_RF, bias_F, tiles.cos_RA, tiles.sin_RA, tiles.slot_1, tiles.row_R, key_1RD,
            value_1RD, config.head_count, LOG2_E * config.head_width**-0.5, config.eps,
        )  # fmt: skip
        return attend(
            q_RD, key_1RD, value_1RD, last_key_0D, last_value_0D, tiles.slot_1, tiles.count_1,
            tiles.token_BR, tiles.begin_B, tiles.size_B, config.head_count,
        )  # fmt: skip


def _tiles(tables: tuple[Tensor, Tensor], batch: int) -> _Tiles:
    cos_RA, sin_RA = (table_R1A.flatten(1).repeat(batch, 1) for table_R1A in tables)
    row_R = torch.arange(len(cos_RA), device=cos_RA.device)
    token_BR = row_R.to(torch.int32).view(batch, -1)
    begin_B = token_BR[:, 0].contiguous()
    return _Tiles(
        cos_RA=cos_RA,
        sin_RA=sin_RA,
        row_R=row_R,
        slot_1=torch.zeros_like(row_R[:1]),
        count_1=torch.ones_like(row_R[:1]),
        token_BR=token_BR,
        begin_B=begin_B,
        size_B=torch.full_like(begin_B, token_BR.shape[1]),
    )


def _attended(
    qkv_RF: Tensor, bias_F: Tensor, cos_R1A: Tensor, sin_R1A: Tensor, batch: int, heads: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Return rows [R, D] of each tile's attention over itself; q and k of unit RMS, rotated."""
    qkv_BRF = (qkv_RF + bias_F).unflatten(0, (batch, -1))
    q_BRNK, k_BRNK, v_BRNK = qkv_BRF.unflatten(-1, (heads, 3, -1)).unbind(-2)
    q_BNRK, k_BNRK = (
        rotate(F.rms_norm(each.float(), each.shape[-1:], eps=eps), cos_R1A, sin_R1A)
        .to(v_BRNK.dtype)
        .transpose(1, 2)
        for each in (q_BRNK, k_BRNK)
    )
    o_BNRK = F.scaled_dot_product_attention(q_BNRK, k_BNRK, v_BRNK.transpose(1, 2))
    return o_BNRK.transpose(1, 2).flatten(2).flatten(0, 1)


def _painted(rows_RP: Tensor, bias_P: Tensor, latents: int, height: int, width: int) -> Tensor:
    """Return frames `[B, 3, 4T, 16H, 16W]`."""
    return rearrange(
        rows_RP + bias_P,
        "(batch latent row col) (rgb frame y x) -> batch rgb (latent frame) (row y) (col x)",
        latent=latents, row=height, col=width, rgb=3, frame=RAW_FRAMES, y=SPATIAL_RATIO,
    )  # fmt: skip
