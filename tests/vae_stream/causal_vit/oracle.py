"""The causal ViT decoder with lists that grow, window by window: no ring, no packing, no clock."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vae_stream.causal_vit.places import CausalConfig
from vae_stream.vit import Vit, rotate


def tables(
    config, causal: CausalConfig, shift: int, latents: list[int], height: int, width: int, back: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, A] by loops, from positions in float64."""
    steps = [config.theta ** (-k / 8) for k in range(8)]

    def tau(latent: int) -> float:
        return 2 * (latent + 0.5) / causal.time_span - 1

    def local(at: int) -> float:
        return 2 * ((at + shift) % causal.window + 0.5) / causal.window - 1

    places = [
        (tau(n), local(y), local(x)) for n in latents for y in range(height) for x in range(width)
    ]
    places += [(tau(back), 0.0, 0.0)] * config.suffix_count
    angles = torch.tensor(
        [[2 * math.pi * math.fmod(at * step, 1.0) for at in place for step in steps]
         for place in places],
        dtype=torch.float64,
    )  # fmt: skip
    return angles.cos().float(), angles.sin().float()


def decode_growing(
    vit: Vit, latents_ZFHW: Tensor, causal: CausalConfig, calls: list[list[int]], *, past: int
) -> Tensor:
    """Raw frames [3, 4Z, 16h, 16w] of calls, each a list of latents; the suffix at the first."""
    config = vit.config
    _, _, height, width = latents_ZFHW.shape
    tokens, raws = height * width, []
    keys: list[list[Tensor]] = [[] for _ in vit.blocks]
    values: list[list[Tensor]] = [[] for _ in vit.blocks]
    for latents in calls:
        z_BCTHW = latents_ZFHW[latents].transpose(0, 1)[None]
        x_BRD = torch.cat([vit.embed(z_BCTHW), vit.suffix(1)], dim=1)
        for layer, block in enumerate(vit.blocks):
            shift = causal.window // 2 if layer % 2 else 0
            cos, sin = tables(config, causal, shift, latents, height, width, latents[0])
            q, k, v = (rows[0] for rows in block.qkv(x_BRD))
            q, k = (rotate(rows, cos[:, None], sin[:, None]) for rows in (q, k))
            for grown, rows in ((keys, k), (values, v)):
                grown[layer] += rows[:-5].unflatten(0, (len(latents), tokens)).unbind(0)
            seen = len(latents) + min(past, len(keys[layer]) - len(latents))
            all_k = torch.stack(keys[layer][-seen:])
            all_v = torch.stack(values[layer][-seen:])
            o = torch.empty(q.shape)
            places = torch.arange(tokens)
            window = (places // width + shift) // causal.window * 1000
            window = window + (places % width + shift) // causal.window
            for each in window.unique():
                own = (window == each).nonzero()[:, 0]
                rows = torch.cat([own + tokens * at for at in range(len(latents))])
                o[rows] = _attend(q[rows], all_k[:, own], all_v[:, own], k[-5:], v[-5:])
            o[-5:] = _attend(q[-5:], all_k, all_v, k[-5:], v[-5:])
            x_BRD = block.finish(x_BRD, o.flatten(1)[None])
        raws.append(vit.head(x_BRD[:, :-5], len(latents), height, width)[0])
    return torch.cat(raws, dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, last_k: Tensor, last_v: Tensor) -> Tensor:
    k, v = torch.cat([k.flatten(0, 1), last_k]), torch.cat([v.flatten(0, 1), last_v])
    weights = torch.softmax(torch.einsum("rnk,snk->nrs", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("nrs,snk->rnk", weights, v)
