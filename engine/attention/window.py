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

from engine.attention.base import AttentionBackend
from engine.attention.placement import Placement
from engine.kv_cache import WindowCache
from engine.layout import PrefixLayout


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PrefixAttend:
    """Prefix rows among themselves; leaves their placed keys and values in the cache."""

    backend: AttentionBackend
    cache: WindowCache
    layout: PrefixLayout
    placement: Placement

    def __call__(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> Tensor:
        """Attend in two groups, conditioning and audio."""
        q_BRNK = self.placement.query(q_BRNK)
        k_BRNK, v_BRNK = self.placement.key(k_BRNK), self.placement.value(v_BRNK)
        self.cache.set_prefix(layer, k_BRNK, v_BRNK)
        rows = self.layout.conditioning_rows
        conditioning = self.backend(q_BRNK[:, :rows], k_BRNK[:, :rows], v_BRNK[:, :rows])
        audio = self.backend(q_BRNK[:, rows:], k_BRNK, v_BRNK)
        return self.placement.output(torch.cat([conditioning, audio], dim=1))

    def store(self, layer: int, k_BRNK: Tensor, v_BRNK: Tensor) -> None:
        """Only leave keys and values."""
        self.cache.set_prefix(layer, self.placement.key(k_BRNK), self.placement.value(v_BRNK))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ChunkAttend:
    """Rows of the current chunk over the whole window."""

    backend: AttentionBackend
    cache: WindowCache
    keep: bool
    """True in a refresh: keys and values stay in the cache."""

    def __call__(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> Tensor:
        """Attend to prefix, history and the chunk itself."""
        placement = self.cache.placement
        keys, values = self.cache.window(layer, k_BRNK, v_BRNK, keep=self.keep)
        return placement.output(self.backend(placement.query(q_BRNK), keys, values))

    def store(self, layer: int, k_BRNK: Tensor, v_BRNK: Tensor) -> None:
        """Only leave keys and values."""
        self.cache.window(layer, k_BRNK, v_BRNK, keep=self.keep)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WholeAttend:
    """Prefix and chunk rows in one pass: the plain form, everything recomputed each time."""

    prefix: PrefixAttend
    chunk: ChunkAttend

    def __call__(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> Tensor:
        """Attend group by group; the prefix goes first because the chunk reads its keys."""
        rows = self.prefix.layout.rows
        before = self.prefix(layer, q_BRNK[:, :rows], k_BRNK[:, :rows], v_BRNK[:, :rows])
        after = self.chunk(layer, q_BRNK[:, rows:], k_BRNK[:, rows:], v_BRNK[:, rows:])
        return torch.cat([before, after], dim=1)

    def store(self, layer: int, k_BRNK: Tensor, v_BRNK: Tensor) -> None:
        """Only leave keys and values of both parts."""
        rows = self.prefix.layout.rows
        self.prefix.store(layer, k_BRNK[:, :rows], v_BRNK[:, :rows])
        self.chunk.store(layer, k_BRNK[:, rows:], v_BRNK[:, rows:])
