"""Memory of packed windows: its layout, and its way from one rollout to the next.

    room for the longest prefix | ring of past chunks | newest     rows of keys and values
              ... | this prefix | slot 0, 1, ...      | chunk

Owns allocation. Invariants: a prefix ends where the ring begins, so that prefixes of any length
serve the same ring, and each length has addresses of its own that it finds again; what a lender
gives out belongs to one rollout until that has gone, and then to the next one of the same shape, at
the same addresses. So graphs that were captured over it serve again.
Shape suffixes: B batch, S key rows, R rows, N heads, K head width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import SPARSE_DENSE_LAYERS, ModelConfig
from engine.kernels.sparse import KeySummary


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferShape:
    """What decides the size of a window's memory."""

    batch_size: int
    heads: int
    prefix_room: int
    """Rows of the longest prefix."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WindowViews:
    """Windows of every layer up to the end of the open chunk, whose rows are the last."""

    keys_BSNK: tuple[Tensor, ...]
    values_BSNK: tuple[Tensor, ...]
    raw_BRNK: tuple[Tensor, ...]
    """Where a refresh leaves the rotary channels of the chunk's keys before they are rotated."""
    summaries: tuple[KeySummary | None, ...]
    """Of these keys, but for what depends on the chunk itself."""

    def renew_summaries(self, rows: int | None = None) -> None:
        """Summarize all keys, or what depends on the last ``rows`` of them."""
        for keys_BSNK, values_BSNK, summary in zip(
            self.keys_BSNK, self.values_BSNK, self.summaries, strict=True
        ):
            if summary is not None:
                summary.renew(keys_BSNK, values_BSNK, rows)


@dataclass(kw_only=True, eq=False, slots=True)
class CacheBuffers:
    """Tensors of one rollout, one a layer in each list."""

    shape: BufferShape
    keys_BSNK: list[Tensor]
    """Placed keys of prefix and window."""
    values_BSNK: list[Tensor]
    raw_BSNK: list[Tensor]
    """Rotary channels of the keys in the ring before they are rotated, slot by slot."""
    newest_BRNK: list[Tensor]
    """The same of the chunk that is being refreshed, whose slot differs while the window fills."""
    cos_SK: Tensor
    sin_SK: Tensor
    """Rotary tables of the window's slots: of the oldest chunk first."""
    summaries: list[KeySummary | None]
    """Of the blocks of a full window, where attention reads some in summary."""

    def lead(self, prefix_rows: int) -> None:
        """Let a prefix of that length stand before the ring.

        Addresses change only where it is longer than any that there was room for.
        """
        if prefix_rows > self.shape.prefix_room:
            self._make_room(prefix_rows)
        for summary in self.summaries:
            if summary is not None:
                summary.set_sink(prefix_rows)

    def _make_room(self, prefix_rows: int) -> None:
        old_room = self.shape.prefix_room
        self.shape = dataclasses.replace(self.shape, prefix_room=prefix_rows)
        for tensors in (self.keys_BSNK, self.values_BSNK):
            for layer, old_BSNK in enumerate(tensors):
                batch_size, old_total, heads, width = old_BSNK.shape
                size = (batch_size, heads, old_total - old_room + prefix_rows, width)
                new_BSNK = old_BSNK.new_empty(size).transpose(1, 2)
                new_BSNK[:, prefix_rows:] = old_BSNK[:, old_room:]
                tensors[layer] = new_BSNK
        for layer, summary in enumerate(self.summaries):
            if summary is not None:
                # One row more than is used, see `allocate`.
                keys_BSNK = self.keys_BSNK[layer][:, :-1]
                self.summaries[layer] = KeySummary.of(keys_BSNK, prefix_rows, summary.block)


def allocate(
    config: ModelConfig,
    shape: BufferShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    sparse_block: int | None = None,
) -> CacheBuffers:
    """Memory for one rollout; its content is undefined.

    With a ``sparse_block`` there is room for summaries of blocks of so many keys.
    """

    def lists(rows: int, channels: int) -> list[Tensor]:
        # Heads outermost: the rows of one head lie together, as attention reads them.
        size = (shape.batch_size, shape.heads, rows, channels)
        return [
            torch.empty(size, device=device, dtype=dtype).transpose(1, 2)
            for _ in range(config.num_layers)
        ]

    width, window_rows = config.attention_head_dim, config.window_chunks * config.rows_per_chunk
    ring_rows = config.history_chunks * config.rows_per_chunk
    # One row more than is used: a view of the full window is then strided like that of a shorter
    # one, so that one compiled pass serves all.
    rows = shape.prefix_room + window_rows + 1
    table = torch.empty(window_rows, config.rotary_dim, device=device, dtype=dtype)
    keys_BSNK = lists(rows, width)
    summaries = [
        KeySummary.of(keys[:, :-1], shape.prefix_room, sparse_block)
        if sparse_block is not None and layer >= SPARSE_DENSE_LAYERS
        else None
        for layer, keys in enumerate(keys_BSNK)
    ]
    return CacheBuffers(
        shape=shape,
        keys_BSNK=keys_BSNK,
        values_BSNK=lists(rows, width),
        raw_BSNK=lists(ring_rows, config.rotary_dim),
        newest_BRNK=lists(config.rows_per_chunk, config.rotary_dim),
        cos_SK=table,
        sin_SK=torch.empty_like(table),
        summaries=summaries,
    )


class BufferLender:
    """Keeps the memory of the rollout that ended last for the next one.

    Args:
        config: of the model.
        device: of the buffers.
        dtype: of the buffers.
        sparse_block: keys of a block, where attention reads some in summary.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        sparse_block: int | None = None,
    ) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._sparse_block = sparse_block
        self._free: CacheBuffers | None = None

    def take(self, shape: BufferShape) -> CacheBuffers:
        """Return memory of that shape: what lies ready, else new."""
        ready, self._free = self._free, None
        if ready is not None and ready.shape == shape:
            return ready
        del ready  # before the new one is made: both may not fit
        return allocate(
            self._config, shape, device=self._device, dtype=self._dtype,
            sparse_block=self._sparse_block,
        )  # fmt: skip

    def give(self, buffers: CacheBuffers) -> None:
        """Take memory back whose rollout has gone."""
        self._free = buffers

    def clear(self) -> None:
        """Free what lies ready."""
        self._free = None
