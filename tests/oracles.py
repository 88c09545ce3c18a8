"""Plain restatements of what the engine does cleverly.

`NaiveRollout` recomputes the prefix in every pass, concatenates everything and hides rows with one
mask over one attention. It shares the model's linears with the engine and nothing else.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.dit import MiniMaxH3Transformer
from engine.prefix import PrefixInputs

FOCAL = (969.6969696969696 / 1920, 969.6969696969696 / 1080)


def positions(config: ModelConfig, text_rows: int, latents: int) -> Tensor:
    """(t, h, w) of [text | anchor | audio | latents], straight from the formulas, float64."""
    height, width = config.geometry.latent_height, config.geometry.latent_width
    root = math.sqrt(height * width)
    ys = [16 - 16 * height / root + 64 / root * i for i in range(height // 2)]
    xs = [16 - 16 * width / root + 64 / root * i for i in range(width // 2)]
    rows = [(float(j), 0.0, 0.0) for j in range(text_rows)]
    rows += [(float(text_rows), y, x) for y in ys for x in xs]
    for edge in (xs[0], xs[-1]):
        rows += [(float(text_rows + j), 0.0, edge) for j in range(config.audio_latent_count)]
    for i in range(latents):
        frame = 17 * (i // 5) + (0, 1, 5, 9, 13)[i % 5]
        rows += [(text_rows + 5 / 3 * frame, y, x) for y in ys for x in xs]
    return torch.tensor(rows, dtype=torch.float64)


def rotate(x_BRNK: Tensor, positions_R3: Tensor, config: ModelConfig) -> Tensor:
    """Rotate pairs (d, d + half) of the leading channels."""
    frequencies = config.rope_freq_dim
    inv = torch.tensor([config.rope_theta ** (-i / frequencies) for i in range(frequencies)])
    angles = (positions_R3.float()[:, :, None] * inv.float()).flatten(1)[:, None]
    half = 3 * frequencies
    a, b = x_BRNK[..., :half], x_BRNK[..., half : 2 * half]
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.cat([*turned, x_BRNK[..., 2 * half :]], dim=-1)


def project(x_BRNK: Tensor, matrix_BR44: Tensor, config: ModelConfig) -> Tensor:
    """Multiply each group of four trailing channels by the row's matrix."""
    start = 6 * config.rope_freq_dim
    groups = x_BRNK[..., start:].unflatten(-1, (-1, 4))
    moved = torch.einsum("brij,brngj->brngi", matrix_BR44.expand(x_BRNK.shape[0], -1, 4, 4), groups)
    return torch.cat([x_BRNK[..., :start], moved.flatten(-2)], dim=-1)


def projection(view_BT44: Tensor) -> Tensor:
    """P = diag(fx, fy, 1, 1) times the view with its translation compressed."""
    view = view_BT44.clone()
    length = view[..., :3, 3].norm(dim=-1, keepdim=True)
    scale = torch.log1p(length) / (4 * length.clamp_min(1e-30))
    view[..., :3, 3] *= torch.where(length > 0, scale, 0.0)
    return torch.diag(torch.tensor([*FOCAL, 1.0, 1.0])) @ view


class NaiveRollout:
    """A batch of rollouts without any shortcut, fp32."""

    def __init__(self, model: MiniMaxH3Transformer, inputs: PrefixInputs) -> None:
        self.model, self.config, self.inputs = model, model.config, inputs
        self.history: list[list[tuple[Tensor, Tensor]]] = []
        self.history_views: list[Tensor] = []

    def _pass(
        self, x_BCTHW: Tensor, t: Tensor, views_BT44: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        model, config, inputs = self.model, self.config, self.inputs
        batch_size, _, latents = x_BCTHW.shape[:3]
        rows_per_latent = config.rows_per_latent
        patches = x_BCTHW.unflatten(3, (-1, 2)).unflatten(5, (-1, 2))
        rows = patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch_size, -1, config.patch_features)
        x = torch.cat(
            [
                model.refine_text(inputs.text_BRE),
                model.embed_video(inputs.anchor_rows_BRC),
                model.embed_audio(inputs.audio_rows_BRC),
                model.embed_video(rows),
            ],
            dim=1,
        )
        text_rows = inputs.text_BRE.shape[1]
        counts = (text_rows, rows_per_latent, config.audio_rows, rows.shape[1])
        prefix_rows = sum(counts[:3])
        tags = torch.cat(
            [
                inputs.text_tags_R,
                torch.zeros(counts[1]).long(),
                torch.full((counts[2],), 2),
                torch.zeros(counts[3]).long(),
            ]
        )
        row_t = torch.cat(
            [
                torch.ones(batch_size, text_rows),
                torch.full((batch_size, counts[1]), config.sampler.anchor_t),
                inputs.audio_t_B[:, None].expand(-1, counts[2]),
                t.repeat_interleave(rows_per_latent)[None].expand(batch_size, -1),
            ],
            dim=1,
        )
        temb = model.time_embedding(row_t)
        past = len(self.history)
        where = positions(config, text_rows, latents * (past + 1))
        key_where = torch.cat([where[:prefix_rows], where[prefix_rows:]])
        query_where = torch.cat([where[:prefix_rows], where[-counts[3] :]])
        identity = projection(torch.eye(4)).expand(batch_size, prefix_rows, 4, 4)
        per_row = [
            projection(v).repeat_interleave(rows_per_latent, dim=1)
            for v in (*self.history_views, views_BT44)
        ]
        key_p = torch.cat([identity, *per_row], dim=1)
        query_p = torch.cat([identity, per_row[-1]], dim=1)
        key_inverse = torch.linalg.inv(key_p.double()).float()
        group = torch.tensor([0] * (text_rows + counts[1]) + [1] * counts[2] + [2] * counts[3])
        key_group = torch.cat([group[:prefix_rows], torch.full((counts[3] * (past + 1),), 2)])
        seen = key_group[None, :] <= group[:, None]
        kept = []
        for layer, block in enumerate(model.transformer_blocks):
            table = model.modulation(layer, temb)
            vectors = table[:, torch.arange(tags.numel()), tags]
            q, k, v = block.project(x, vectors)
            kept.append((k[:, prefix_rows:], v[:, prefix_rows:]))
            old = [chunk[layer] for chunk in self.history]
            keys = torch.cat(
                [k[:, :prefix_rows], *(pair[0] for pair in old), k[:, prefix_rows:]], dim=1
            )
            values = torch.cat(
                [v[:, :prefix_rows], *(pair[1] for pair in old), v[:, prefix_rows:]], dim=1
            )
            q = project(rotate(q, query_where, config), query_p.mT, config)
            keys = project(rotate(keys, key_where, config), key_inverse, config)
            values = project(values, key_inverse, config)
            logits = torch.einsum("brnk,bsnk->bnrs", q, keys) / math.sqrt(q.shape[-1])
            weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
            out = project(torch.einsum("bnrs,bsnk->brnk", weights, values), query_p, config)
            x = block.finish(x, out, vectors)
        final = model.final_modulation(temb)[:, prefix_rows:]
        velocity_rows = model.head_video(x[:, prefix_rows:], final)
        grid = config.geometry
        shape = (batch_size, latents, grid.latent_height // 2, grid.latent_width // 2, -1, 2, 2)
        velocity = velocity_rows.reshape(shape).permute(0, 4, 1, 2, 5, 3, 6)
        return velocity.reshape(x_BCTHW.shape), kept

    @torch.no_grad()
    def step(
        self, noise: list[Tensor], views_BT44: Tensor, leading_BCTHW: Tensor | None = None
    ) -> Tensor:
        """Make one chunk and keep its keys and values."""
        count = 0 if leading_BCTHW is None else leading_BCTHW.shape[2]
        sigmas = [12 * s / (1 + 11 * s) for s in np.linspace(1, 0, 5)[:-1]]
        x = noise[0].clone()
        for step, sigma in enumerate(sigmas):
            t = torch.full((x.shape[2],), 1 - sigma, dtype=torch.float32)
            t[:count] = 1.0
            if leading_BCTHW is not None:
                x[:, :, :count] = leading_BCTHW
            velocity, _ = self._pass(x, t, views_BT44)
            x0 = x + sigma * velocity
            if step < 3:
                x = (1 - sigmas[step + 1]) * x0 + sigmas[step + 1] * noise[step + 1]
        if leading_BCTHW is not None:
            x0[:, :, :count] = leading_BCTHW
        _, kept = self._pass(x0, torch.ones(x0.shape[2]), views_BT44)
        limit = self.config.window_chunks - 1
        self.history = [*self.history, kept][-limit:]
        self.history_views = [*self.history_views, views_BT44][-limit:]
        return x0
