"""One packed forward pass over whole clips: teacher forcing, and replay of own rollouts.

Owns the training layout that gives every chunk of a clip, in one pass, what the streaming loop
gives it in many: rows are [prefix of each prompt | clean chunks | noisy chunks].

    prefix      text and anchor see text and anchor of their prompt; audio sees all of its prompt
    clean i     the prefix of its prompt, clean i-5..i
    noisy i     the prefix of its prompt, clean i-5..i-1, noisy i

Video rows carry absolute times, which is fine among themselves because RoPE is relative; the
prefix does not move with the window, so its keys are copied once for each position of the window
and moved along with it. The result equals the streaming loop up to rounding.

Shape suffixes: B clips, P prompts, N chunks, T latent frames, R rows, C features, D width,
H heads, K head width, 44 camera matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.layout import prefix_positions, window_positions
from engine.model.dit import (
    TAG_AUDIO,
    TAG_TEXT,
    TAG_VIDEO,
    MiniMaxH3Transformer,
    TransformerBlock,
)
from engine.model.prope import apply_prope, identity_projective, projective
from engine.model.rope import apply_rope, rope_tables
from engine.text import WordEncoder

_PREFIX, _CLEAN, _NOISY = 0, 1, 2
TIME_UNITS_PER_CHUNK = 17 * 5 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInputs:
    """Everything that one packed pass reads.

    ``clean_BNRC`` are the chunks that history shows, ``noisy_BNRC`` those to be denoised at the
    model times ``t_BT`` of their latent frames; ``views_BT44`` are relative world-to-camera views.
    """

    text_ids_BPR: Tensor
    anchor_BRC: Tensor
    audio_BRC: Tensor
    audio_t_B: Tensor
    clean_BNRC: Tensor
    noisy_BNRC: Tensor
    t_BT: Tensor
    views_BT44: Tensor


class PackedLayout:
    """Positions and visibility of the packed rows for a fixed number of chunks and prompts."""

    def __init__(
        self, config: ModelConfig, *, chunks: int, prompts: int, device: torch.device
    ) -> None:
        self.chunks, self.prompts, self.device = chunks, prompts, device
        self.text_rows = config.text_rows
        self.anchor_rows = config.rows_per_latent
        self.audio_rows = config.audio_rows
        self.prefix_rows = self.text_rows + self.anchor_rows + self.audio_rows
        self.rows_per_latent = config.rows_per_latent
        self.history_chunks = config.window_chunks - 1
        self.window_starts = max(1, chunks - self.history_chunks)
        self.rotary = 6 * config.rope_freq_dim

        prefix_R3 = prefix_positions(config, self.text_rows)
        chunk_R3 = window_positions(config, self.text_rows)[: config.rows_per_chunk]
        video_R3 = torch.cat(
            [
                chunk_R3 + torch.tensor([TIME_UNITS_PER_CHUNK * chunk, 0, 0], dtype=torch.float64)
                for chunk in range(chunks)
            ]
        )
        moved = [
            prefix_R3 + torch.tensor([TIME_UNITS_PER_CHUNK * start, 0, 0], dtype=torch.float64)
            for start in range(self.window_starts)
        ]
        queries_R3 = torch.cat([prefix_R3] * prompts + [video_R3, video_R3])
        keys_R3 = torch.cat([each for each in moved for _ in range(prompts)] + [video_R3, video_R3])
        tables = [
            rope_tables(positions, config.rope_freq_dim, config.rope_theta)
            for positions in (queries_R3, keys_R3)
        ]
        self.query_rope, self.key_rope = ((cos.to(device), sin.to(device)) for cos, sin in tables)
        self._describe_rows(config)
        # One rule over persistent tensors: a new closure for each switch would compile anew.
        self._prompt_of_chunk = torch.zeros(chunks, dtype=torch.int32, device=device)
        self._switch_chunk = -1
        self._rule = self._visible()
        self._masks: dict[int, Any] = {}

    def _describe_rows(self, config: ModelConfig) -> None:
        is_audio = torch.zeros(self.prefix_rows, dtype=torch.int32)
        is_audio[self.text_rows + self.anchor_rows :] = 1
        chunk = torch.arange(self.chunks, dtype=torch.int32).repeat_interleave(
            config.rows_per_chunk
        )
        prompt = torch.arange(self.prompts, dtype=torch.int32).repeat_interleave(self.prefix_rows)
        none = torch.zeros_like(chunk)
        copies = self.window_starts

        def row(*parts: Tensor) -> Tensor:
            return torch.cat(parts).to(self.device)

        prefix_kind = torch.full((self.prompts * self.prefix_rows,), _PREFIX, dtype=torch.int32)
        self._query_kind = row(prefix_kind, none + _CLEAN, none + _NOISY)
        self._query_chunk = row(is_audio.repeat(self.prompts), chunk, chunk)
        self._query_prompt = row(prompt, none, none)
        self._key_kind = row(prefix_kind.repeat(copies), none + _CLEAN, none + _NOISY)
        starts = torch.arange(copies, dtype=torch.int32)
        self._key_chunk = row(starts.repeat_interleave(len(prefix_kind)), chunk, chunk)
        self._key_prompt = row(prompt.repeat(copies), none, none)
        self._key_is_audio = row(is_audio.repeat(self.prompts * copies), none, none)

    def mask(self, switch_chunk: int) -> Any:
        """Visibility when chunks from ``switch_chunk`` on follow the second prompt.

        A FlexAttention block mask on CUDA, a boolean [queries, keys] elsewhere.
        """
        if switch_chunk != self._switch_chunk:
            # Only then: backward passes of the same batch still read the tensor.
            index = torch.arange(self.chunks, device=self.device)
            second = (index >= switch_chunk).int().clamp(max=self.prompts - 1)
            self._prompt_of_chunk.copy_(second)
            self._switch_chunk = switch_chunk
        if switch_chunk not in self._masks:
            queries, keys = len(self._query_kind), len(self._key_kind)
            if self.device.type == "cuda":
                from torch.nn.attention.flex_attention import create_block_mask

                made: Any = create_block_mask(
                    self._rule, None, None, queries, keys, device=self.device
                )
            else:
                q_index = torch.arange(queries, device=self.device)[:, None]
                k_index = torch.arange(keys, device=self.device)[None, :]
                zero = torch.zeros((), dtype=torch.int32, device=self.device)
                made = self._rule(zero, zero, q_index, k_index)
            self._masks[switch_chunk] = made
        return self._masks[switch_chunk]

    def _visible(self) -> Callable[..., Tensor]:
        def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query_kind, key_kind = self._query_kind[query], self._key_kind[key]
            query_chunk, key_chunk = self._query_chunk[query], self._key_chunk[key]
            is_video = query_kind != _PREFIX
            age = query_chunk - key_chunk
            prefix_to_prefix = (
                ~is_video
                & (key_kind == _PREFIX)
                & (self._key_prompt[key] == self._query_prompt[query])
                & (key_chunk == 0)
                & (self._key_is_audio[key] <= query_chunk)
            )
            prompt = self._prompt_of_chunk[torch.where(is_video, query_chunk, 0)]
            window_start = (query_chunk - self.history_chunks).clamp(min=0)
            video_to_prefix = (
                is_video
                & (key_kind == _PREFIX)
                & (self._key_prompt[key] == prompt)
                & (key_chunk == window_start)
            )
            oldest_seen = torch.where(query_kind == _NOISY, 1, 0)
            video_to_clean = (
                is_video
                & (key_kind == _CLEAN)
                & (age <= self.history_chunks)
                & (age >= oldest_seen)
            )
            noisy_to_own = (query_kind == _NOISY) & (key_kind == _NOISY) & (age == 0)
            return prefix_to_prefix | video_to_prefix | video_to_clean | noisy_to_own

        return rule


def _attention(q_BRHK: Tensor, k_BRHK: Tensor, v_BRHK: Tensor, mask: Any) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q_BRHK, k_BRHK, v_BRHK))
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    from torch.nn.attention.flex_attention import flex_attention

    out = flex_attention(q, k, v, block_mask=mask)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def packed_block(
    block: TransformerBlock,
    layout: PackedLayout,
    prefix_BRD: Tensor,
    video_BTRD: Tensor,
    temb_prefix_B3C: Tensor,
    temb_video_BTC: Tensor,
    query_BT44: Tensor,
    key_value_BT44: Tensor,
    output_BT44: Tensor,
    identity: tuple[Tensor, Tensor, Tensor],
    mask: Any,
) -> tuple[Tensor, Tensor]:
    """Run one block over prefix rows [B, P * R, D] and video rows [B, 2T, R, D]."""
    prompts, start = layout.prompts, layout.rotary
    table = block.adaln_proj(temb_prefix_B3C, 6)
    prefix_modulation = torch.cat(
        [
            table[:, 0, TAG_TEXT, None].expand(-1, layout.text_rows, -1, -1),
            table[:, 1, TAG_VIDEO, None].expand(-1, layout.anchor_rows, -1, -1),
            table[:, 2, TAG_AUDIO, None].expand(-1, layout.audio_rows, -1, -1),
        ],
        dim=1,
    ).repeat(1, prompts, 1, 1)
    video_modulation = block.adaln_proj(temb_video_BTC, 6)[:, :, TAG_VIDEO, None]
    q_prefix, k_prefix, v_prefix = block.project(prefix_BRD, prefix_modulation)
    q_video, k_video, v_video = (
        each.flatten(1, 2) for each in block.project(video_BTRD, video_modulation)
    )

    copies = layout.window_starts
    identity_query, identity_key_value, identity_output = identity
    q = apply_rope(torch.cat([q_prefix, q_video], 1), *layout.query_rope)
    k = apply_rope(torch.cat([k_prefix.repeat(1, copies, 1, 1), k_video], 1), *layout.key_rope)
    v = torch.cat([v_prefix.repeat(1, copies, 1, 1), v_video], 1)

    def with_camera(x: Tensor, identity_144: Tensor, video_BT44: Tensor) -> Tensor:
        rows = x.shape[1] - video_BTRD.shape[1] * video_BTRD.shape[2]
        return torch.cat(
            [
                apply_prope(x[:, :rows], identity_144, start),
                apply_prope(x[:, rows:], video_BT44, start),
            ],
            dim=1,
        )

    o = _attention(
        with_camera(q, identity_query, query_BT44),
        with_camera(k, identity_key_value, key_value_BT44),
        with_camera(v, identity_key_value, key_value_BT44),
        mask,
    )
    o = with_camera(o, identity_output, output_BT44)
    rows = prefix_BRD.shape[1]
    prefix_BRD = block.finish(prefix_BRD, o[:, :rows], prefix_modulation)
    video_BTRD = block.finish(
        video_BTRD, o[:, rows:].unflatten(1, video_BTRD.shape[1:3]), video_modulation
    )
    return prefix_BRD, video_BTRD


def packed_velocity(
    model: MiniMaxH3Transformer,
    text: WordEncoder,
    layout: PackedLayout,
    inputs: PackedInputs,
    switch_chunk: int,
    run_block: Callable[..., tuple[Tensor, Tensor]] = packed_block,
) -> Tensor:
    """Velocity of the noisy chunks, fp32 [B, N, rows of a chunk, C].

    Args:
        model: transformer; bf16 blocks or fp32.
        text: word encoder, trained along.
        layout: packed layout of the same number of chunks and prompts.
        inputs: see ``PackedInputs``.
        switch_chunk: first chunk that follows the second prompt.
        run_block: ``packed_block`` or a compiled form of it.
    """
    batch, chunks, _, features = inputs.noisy_BNRC.shape
    latent_frames = inputs.t_BT.shape[1]
    prefix = [
        part
        for prompt in range(layout.prompts)
        for part in (
            model.refine_text(text(inputs.text_ids_BPR[:, prompt])),
            model.embed_video(inputs.anchor_BRC),
            model.embed_audio(inputs.audio_BRC),
        )
    ]
    prefix_BRD = torch.cat(prefix, dim=1)
    rows_BTRC = torch.cat([inputs.clean_BNRC, inputs.noisy_BNRC], dim=1).view(
        batch, 2 * latent_frames, layout.rows_per_latent, features
    )
    video_BTRD = model.embed_video(rows_BTRC)
    ones = torch.ones_like(inputs.t_BT)
    anchor_t = torch.full_like(inputs.audio_t_B, model.config.sampler.anchor_t)
    prefix_t_B3 = torch.stack([torch.ones_like(anchor_t), anchor_t, inputs.audio_t_B], dim=1)
    temb_prefix = model.time_embedding(prefix_t_B3)
    temb_video = model.time_embedding(torch.cat([ones, inputs.t_BT], dim=1))
    camera_dtype = torch.float32 if model.config.camera_dtype == "float32" else model.dtype
    cameras = projective(inputs.views_BT44, camera_dtype)
    both = [
        torch.cat([each, each], dim=1)
        for each in (cameras.query, cameras.key_value, cameras.output)
    ]
    still = identity_projective(camera_dtype, inputs.t_BT.device)
    identity = tuple(each[None] for each in (still.query, still.key_value, still.output))
    mask = layout.mask(switch_chunk)
    for block in model.transformer_blocks:
        prefix_BRD, video_BTRD = run_block(
            block, layout, prefix_BRD, video_BTRD, temb_prefix, temb_video, *both, identity, mask
        )
    final = model.final_modulation(temb_video[:, latent_frames:])[:, :, None]
    velocity = model.head_video(video_BTRD[:, latent_frames:], final)
    return velocity.view(batch, chunks, -1, features)
