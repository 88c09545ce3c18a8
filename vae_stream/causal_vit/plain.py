"""The causal ViT decoder in plain torch: any device and dtype; the oracle of the fast form.

Owns one call: embedding, layers over the ring, head. A window's tokens see those of the same window
in the latents of the ring, and the suffix; the suffix sees everything, itself once.

Legend: C latents of a call, R tokens of a latent, W windows, J places of a window, S slots,
N heads, K head width, D width, A rotary pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.runner import GraphRunner
from vae_stream.causal_vit.places import (
    CallKind,
    CausalConfig,
    WindowPlan,
    frequencies,
    moment,
    plan_windows,
)
from vae_stream.causal_vit.state import CausalVitState
from vae_stream.convolutions import exact_convolutions
from vae_stream.pixels import from_imagenet, to_uint8
from vae_stream.vit import Block, Vit, rotate


class PlainCalls:
    """Runs calls of one picture size, eagerly.

    Args:
        vit: network on its device and in its dtype.
        causal: how it is used.
        height: of the grid, in tokens.
        width: of the grid, in tokens.
    """

    runner: GraphRunner | None = None

    def __init__(self, vit: Vit, causal: CausalConfig, *, height: int, width: int) -> None:
        self._vit, self._causal = vit, causal
        self._size = height, width
        device = vit.register_tokens.device
        self._plans = tuple(
            plan_windows(height, width, shift, network=vit.config, causal=causal, device=device)
            for shift in (0, causal.window // 2)
        )
        self._frequency_A = frequencies(vit.config).to(device)

    def run(self, state: CausalVitState, kind: CallKind) -> Tensor:
        """Decode the next latents of a state; returns uint8 frames `[4C, 16H, 16W, 3]`.

        Their keys and values lie in the ring then, whether or not the state goes on.
        """
        buffers, vit = state.buffers, self._vit
        slots = state.slots(kind.past, kind.latents)
        now = moment(
            buffers.clock_2, kind, self._plans, self._frequency_A,
            time_span=self._causal.time_span, suffix_rows=vit.config.suffix_count,
        )  # fmt: skip
        z_BCTHW = buffers.latents_CFHW[: kind.latents].transpose(0, 1)[None]
        with exact_convolutions():  # the embedding begins with one
            x_BRD = torch.cat([vit.embed(z_BCTHW), vit.suffix(1)], dim=1)
        tokens = x_BRD.shape[1] - vit.config.suffix_count
        for layer, block in enumerate(vit.blocks):
            assert isinstance(block, Block)
            shifted = layer % 2
            cos_RA, sin_RA = now.tables[shifted]
            q_BRNK, k_BRNK, v_BRNK = block.qkv(x_BRD)
            q_RNK, k_RNK = (
                rotate(each, cos_RA[:, None], sin_RA[:, None])[0].to(v_BRNK.dtype)
                for each in (q_BRNK, k_BRNK)
            )
            v_RNK = v_BRNK[0]
            keys_SRNK, values_SRNK = (
                _through_ring(
                    ring[layer], rows_RNK[:tokens], slots, kind.latents, self._plans[shifted].ring_R
                )
                for ring, rows_RNK in (
                    (buffers.keys_LSRD, k_RNK),
                    (buffers.values_LSRD, v_RNK),
                )
            )
            attended_RD = attend(
                q_RNK, (keys_SRNK, values_SRNK), (k_RNK[tokens:], v_RNK[tokens:]),
                self._plans[shifted],
            )  # fmt: skip
            x_BRD = block.finish(x_BRD, attended_RD[None])
        raw_BCTHW = vit.head(x_BRD[:, :tokens], kind.latents, *self._size)
        return to_uint8(from_imagenet(raw_BCTHW[0].transpose(0, 1)))

    def close(self) -> None:
        """Nothing is kept."""


def _through_ring(
    ring_SRD: Tensor, rows_RNK: Tensor, slots: list[int], latents: int, ring_R: Tensor
) -> Tensor:
    """Put the rows of a call into their slots; return all that the call sees, oldest first."""
    heads = rows_RNK.shape[1:]
    own_CRD = rows_RNK.unflatten(0, (latents, -1)).flatten(2)
    for slot, own_RD in zip(slots[-latents:], own_CRD, strict=True):
        ring_SRD[slot, ring_R] = own_RD
    return torch.stack([ring_SRD[slot, ring_R] for slot in slots]).unflatten(-1, heads)


def attend(
    q_RNK: Tensor,
    seen: tuple[Tensor, Tensor],
    suffix: tuple[Tensor, Tensor],
    plan: WindowPlan,
) -> Tensor:
    """Attention of one layer.

    Args:
        q_RNK: of the tokens of C latents, then of the suffix.
        seen: keys and values [S, R, N, K] of the tokens, oldest latent first, the call's own last.
        suffix: keys and values of the suffix.
        plan: windows of the layer.

    Returns rows [C*R + suffix, D].
    """
    suffix_rows = len(suffix[0])
    q_CRNK = q_RNK[:-suffix_rows].unflatten(0, (-1, seen[0].shape[1]))
    places = plan.token_WJ.shape[1]
    is_there_WJ = torch.arange(places, device=q_RNK.device) < plan.size_W[:, None]

    def windowed(rows_SRNK: Tensor) -> Tensor:
        """[S, R, N, K] -> [W, N, S*J, K], with some token where a place is empty."""
        rows_SWJNK = rows_SRNK[:, plan.token_WJ.long()]
        return rows_SWJNK.permute(1, 3, 0, 2, 4).flatten(2, 3)

    keys_WNSK, values_WNSK = (
        torch.cat([windowed(rows), last[None].transpose(1, 2).expand(len(plan.size_W), -1, -1, -1)],
                  dim=2)
        for rows, last in zip(seen, suffix, strict=True)
    )  # fmt: skip
    mask_WS = F.pad(is_there_WJ.repeat(1, len(seen[0])), (0, suffix_rows), value=True)
    o_WNRK = F.scaled_dot_product_attention(
        windowed(q_CRNK), keys_WNSK, values_WNSK, attn_mask=mask_WS[:, None, None]
    )
    o_CPD = o_WNRK.unflatten(2, (-1, places)).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
    tokens_RD = o_CPD[:, plan.place_R].flatten(0, 1)
    keys_NSK, values_NSK = (
        torch.cat([rows.flatten(0, 1), last]).transpose(0, 1)
        for rows, last in zip(seen, suffix, strict=True)
    )
    o_NRK = F.scaled_dot_product_attention(
        q_RNK[-suffix_rows:].transpose(0, 1)[None], keys_NSK[None], values_NSK[None]
    )[0]
    return torch.cat([tokens_RD, o_NRK.transpose(0, 1).flatten(1)])
