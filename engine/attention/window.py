"""The `attend` that a rollout hands to the transformer.

Owns who sees whom, by three full attentions instead of a mask:

    text and anchor rows  see  text, anchor
    audio rows            see  text, anchor, audio
    chunk rows            see  text, anchor, audio, history, their own chunk

So nothing flows from video to the prefix, and a prefix pass can be done once.
Shape suffixes: B batch, R rows, N heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionPlan
from engine.attention.placement import Placement
from engine.block_ops import Projected, RowOps, Rows, join_rows
from engine.kv_cache import WindowCache
from engine.layout import PrefixLayout


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PrefixAttend:
    """Prefix rows among themselves; leaves their placed keys and values in the cache."""

    plan: AttentionPlan
    cache: WindowCache
    layout: PrefixLayout
    placement: Placement
    ops: RowOps

    def __call__(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> Rows:
        """Attend in two groups, conditioning and audio."""
        slot = self.cache.prefix_slot(layer, k_BRNK, self.placement)
        placed_BRNK = self.ops.place(layer, q_BRNK, k_BRNK, v_BRNK, slot)
        keys, values = slot.key_BRNK, slot.value_BRNK
        rows = self.layout.conditioning_rows
        conditioning = self.plan.conditioning(
            placed_BRNK[:, :rows], keys[:, :rows], values[:, :rows]
        )
        audio = self.plan.audio(placed_BRNK[:, rows:], keys, values)
        return self.ops.output(layer, torch.cat([conditioning, audio], dim=1), self.placement)

    def store(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> None:
        """Only leave keys and values."""
        slot = self.cache.prefix_slot(layer, k_BRNK, self.placement)
        self.ops.place(layer, q_BRNK, k_BRNK, v_BRNK, slot)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ChunkAttend:
    """Rows of the current chunk over the whole window."""

    plan: AttentionPlan
    """Of this very pass: dense, or with sparse attention."""
    cache: WindowCache
    ops: RowOps
    keep: bool
    """True in a refresh: keys and values stay in the cache."""

    def __call__(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> Rows:
        """Attend to prefix, history and the chunk itself."""
        window = self.cache.window(layer, q_BRNK, k_BRNK, v_BRNK, keep=self.keep)
        keys_BSNK, values_BSNK, summary = window.keys_BSNK, window.values_BSNK, window.summary
        if summary is not None and self.plan.sparse is not None:
            # All of it: in a pass over the prefix as well, the prefix may be new.
            summary.renew(keys_BSNK, values_BSNK)
        o_BRNK = self.plan.over_window(window.q_BRNK, keys_BSNK, values_BSNK, summary)
        return self.ops.output(layer, o_BRNK, self.cache.placement)

    def store(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> None:
        """Only leave keys and values."""
        self.cache.window(layer, q_BRNK, k_BRNK, v_BRNK, keep=self.keep)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WholeAttend:
    """Prefix and chunk rows in one pass: the plain form, everything recomputed each time."""

    prefix: PrefixAttend
    chunk: ChunkAttend

    def __call__(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> Rows:
        """Attend group by group; the prefix goes first because the chunk reads its keys."""
        rows = self.prefix.layout.rows
        before = self.prefix(layer, q_BRNK[:, :rows], k_BRNK[:, :rows], v_BRNK[:, :rows])
        after = self.chunk(layer, q_BRNK[:, rows:], k_BRNK[:, rows:], v_BRNK[:, rows:])
        return join_rows([before, after])

    def store(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> None:
        """Only leave keys and values of both parts."""
        rows = self.prefix.layout.rows
        self.prefix.store(layer, q_BRNK[:, :rows], k_BRNK[:, :rows], v_BRNK[:, :rows])
        self.chunk.store(layer, q_BRNK[:, rows:], k_BRNK[:, rows:], v_BRNK[:, rows:])
