"""Keys and values of the window: the constant prefix, at most five past chunks, the current one.

    slot      0   1   2   3   4   5
    [prefix | 0   1   2 | 3         ]   filling: chunk 3 is open; each is in the slot of its index
    [prefix | 0   1   2   3   4 | 5 ]   steady: the past is a ring, the open chunk behind it
    [prefix | 5   6   2   3   4 | 7 ]   chunk 6 took the slot of chunk 1: chunk c is in slot c % 5

Owns the order `begin(chunk) -> window(layer, q, k, v)... -> commit()`, eviction, and two layouts of
the same content: `PackedCache` keeps what attention reads; `PlainCache` keeps what the projections
gave, places everything anew at each call, and is the oracle of the first. Invariants: whole chunks,
first in first out, no gaps; buffers keep their addresses; index arithmetic is in Python ints. The
slide of the window waits until the next chunk begins, or `settle`, so that the last commit can be
undone until then.

Where a chunk sits says nothing of its age: its keys are rotated by its place in time, the oldest
chunk's by the first rows of the tables. Attention sums over the keys, so their order is free but
for the rounding of that sum (class F against oldest first). Both layouts have the order of the
ring, hence equal bits; a slide moves one chunk where the order of age would move five.
Shape suffixes: B batch, S key rows, R rows, N heads, K head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.placement import Placement, PlacementOps
from engine.block_ops import PlainRowOps, Projected, RowOps, Slot
from engine.cache_buffers import CacheBuffers, WindowViews
from engine.config import SPARSE_DENSE_LAYERS, ModelConfig
from engine.errors import StateError
from engine.kernels.sparse import KeySummary
from engine.model.prope import Projective


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WindowTables:
    """Row count of the prefix and rotary tables of a full window, which depend on it."""

    prefix_rows: int
    cos_SK: Tensor
    sin_SK: Tensor
    ops: PlacementOps = field(default_factory=PlacementOps)


class Window(NamedTuple):
    """What attention reads: placed queries [B, R, N, K], placed keys and values [B, S, N, K]."""

    q_BRNK: Tensor
    keys_BSNK: Tensor
    values_BSNK: Tensor
    summary: KeySummary | None
    """Room for that of the keys; None in a layer whose keys are all read."""


class WindowCache(Protocol):
    """What attention needs from a cache."""

    @property
    def placement(self) -> Placement:
        """Where the rows of the current chunk sit."""
        ...

    def prefix_slot(self, layer: int, k_BRNK: Projected, placement: Placement) -> Slot:
        """Room for placed keys and values of the prefix, shaped like ``k_BRNK``."""
        ...

    def window(
        self,
        layer: int,
        q_BRNK: Projected,
        k_BRNK: Projected,
        v_BRNK: Projected,
        *,
        keep: bool,
    ) -> Window:
        """Place the current chunk and return what attention reads."""
        ...


class CacheOrder:
    """The state machine that both caches share; holds no tensors but the current placement."""

    def __init__(self, config: ModelConfig, tables: WindowTables) -> None:
        self.layer_count = config.num_layers
        self.rows = config.rows_per_chunk
        self.history_limit = config.history_chunks
        self.start = config.rotary_dim
        self.tables = tables
        self.committed = 0
        self._written: set[int] = set()
        self._placement: Placement | None = None
        self._can_undo = False

    @property
    def slot(self) -> int:
        """Slot of the current chunk in the window."""
        return min(self.committed, self.history_limit)

    @property
    def history(self) -> list[int]:
        """Chunks that the current one can see, oldest first."""
        return list(range(self.committed - self.slot, self.committed))

    @property
    def placement(self) -> Placement:
        """Where the rows of the current chunk sit.

        Raises: StateError before `begin`.
        """
        if self._placement is None:
            raise StateError(
                f"no chunk is open; expected begin({self.committed}) first, got a pass over it"
            )
        return self._placement

    @property
    def ring(self) -> list[int]:
        """The same chunks in the order of their slots."""
        return sorted(self.history, key=lambda chunk: chunk % self.history_limit)

    def angles(self, place: int) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of a chunk; place 0 is that of the oldest one in the window."""
        rows = slice(place * self.rows, (place + 1) * self.rows)
        return self.tables.cos_SK[rows], self.tables.sin_SK[rows]

    def _placement_of(self, place: int, camera: Projective) -> Placement:
        cos_RK, sin_RK = self.angles(place)
        return Placement(cos_RK=cos_RK, sin_RK=sin_RK, camera=camera, ops=self.tables.ops)

    def begin(self, chunk_index: int, camera: Projective) -> None:
        """Open a chunk. Beginning the same chunk again drops what its passes wrote.

        Raises: StateError unless it is the chunk after the last committed one.
        """
        if chunk_index != self.committed:
            raise StateError(
                f"begin of chunk {chunk_index}; expected chunk {self.committed}, because chunks "
                f"{self.history} are committed"
            )
        self.settle()
        self._written.clear()
        self._placement = self._placement_of(self.slot, camera)

    def settle(self) -> None:
        """Slide where a slide is due: the last commit can no longer be undone."""
        if self._can_undo:
            self._slide()
        self._can_undo = False

    def commit(self) -> None:
        """Close the chunk and make it history.

        Raises: StateError when no chunk is open or a layer was not kept.
        """
        if len(self._written) != self.layer_count or self._placement is None:
            raise StateError(
                f"commit of chunk {self.committed}; expected keys and values of "
                f"{self.layer_count} layers, got {len(self._written)}"
            )
        self._commit(self._placement)
        self.committed += 1
        self._can_undo = True
        self._placement = None

    def undo(self) -> None:
        """Take the last commit back, so that its chunk can be made again.

        Raises: StateError when the next chunk has begun or nothing is committed.
        """
        if not self._can_undo:
            raise StateError(
                "undo works once, between a commit and the next begin; expected a fresh commit, "
                f"got {self.committed} committed chunks and none to take back"
            )
        self.committed -= 1
        self._can_undo = False
        self._undo()

    def _mark(self, layer: int) -> None:
        self._written.add(layer)

    def _slide(self) -> None:
        raise NotImplementedError

    def _commit(self, placement: Placement) -> None:
        """Keep what the passes left, unless it lies where it is to stay."""

    def _undo(self) -> None:
        """Drop what the last `_commit` kept."""


class PlainCache(CacheOrder):
    """Normalised keys and values in lists, placed in the plain form and joined at every call."""

    def __init__(
        self, config: ModelConfig, tables: WindowTables, *, sparse_block: int | None = None
    ) -> None:
        super().__init__(config, tables)
        self._sparse_block = sparse_block
        self._prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self._current: dict[int, tuple[Tensor, Tensor]] = {}
        self._chunks: list[dict[int, tuple[Tensor, Tensor]]] = []
        self._cameras: list[Projective] = []

    def raw(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys (before RoPE and PRoPE) and values of the cached chunks, oldest first."""
        return [chunk[layer] for chunk in self._chunks[-self.history_limit :]]

    def prefix_slot(self, layer: int, k_BRNK: Projected, placement: Placement) -> Slot:
        """Room for placed keys and values of the prefix."""
        assert isinstance(k_BRNK, Tensor)
        key, value = (torch.empty_like(k_BRNK) for _ in range(2))
        self._prefix[layer] = (key, value)
        return Slot(key_BRNK=key, value_BRNK=value, raw_BRNK=None, placement=placement)

    def renew_prefix(self, tables: WindowTables) -> None:
        """Forget the prefix; the history is placed by the new tables from now on."""
        self.tables = tables
        self._prefix.clear()
        self._placement = None

    def window(
        self,
        layer: int,
        q_BRNK: Projected,
        k_BRNK: Projected,
        v_BRNK: Projected,
        *,
        keep: bool,
    ) -> Window:
        """Place and concatenate prefix, history and the current chunk."""
        assert isinstance(q_BRNK, Tensor)
        assert isinstance(k_BRNK, Tensor)
        assert isinstance(v_BRNK, Tensor)
        placement = self.placement
        if keep:
            self._current[layer] = (k_BRNK, v_BRNK)
            self._mark(layer)
        prefix_k, prefix_v = self._prefix[layer]
        keys, values = [prefix_k], [prefix_v]
        for chunk in self.ring:
            place = chunk - self.history[0]
            past = self._placement_of(place, self._cameras[place])
            k_past, v_past = self._chunks[place][layer]
            keys.append(past.key(k_past))
            values.append(past.value(v_past))
        keys.append(placement.key(k_BRNK))
        values.append(placement.value(v_BRNK))
        keys_BSNK, values_BSNK = torch.cat(keys, dim=1), torch.cat(values, dim=1)
        summary = None
        if self._sparse_block is not None and layer >= SPARSE_DENSE_LAYERS:
            summary = KeySummary.of(keys_BSNK, self.tables.prefix_rows, self._sparse_block)
        return Window(placement.query(q_BRNK), keys_BSNK, values_BSNK, summary)

    def _slide(self) -> None:
        del self._chunks[: -self.history_limit], self._cameras[: -self.history_limit]

    def _commit(self, placement: Placement) -> None:
        self._chunks.append(self._current)
        self._cameras.append(placement.camera)
        self._current = {}

    def _undo(self) -> None:
        self._chunks.pop()
        self._cameras.pop()


class PackedCache(CacheOrder):
    """One contiguous buffer a layer with everything placed; a denoise step writes only its chunk.

    Values and the PRoPE channels of keys are final once written, because a pose is relative to the
    first frame for life. The place in time of a past chunk moves by one with each chunk, so the
    rotary channels of its keys are also kept raw, and rotated anew once per slide.

    Where blocks of keys are summarized, that of the past is kept from one chunk to the next, and
    `_is_summarized` says that it is right for the window of the next pass: a slide of a full window
    renews what it moves, and whatever else writes to the past or changes the window's length takes
    the mark away. What the open chunk's rows touch, each pass renews by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        tables: WindowTables,
        buffers: CacheBuffers,
        *,
        ops: RowOps | None = None,
    ) -> None:
        super().__init__(config, tables)
        self._ops: RowOps = ops or PlainRowOps()
        self._buffers = buffers
        self._views: dict[int, WindowViews] = {}
        self._is_summarized = False
        self._adopt(tables)

    def _adopt(self, tables: WindowTables) -> None:
        """Make room for the prefix, and copy the tables to where slides read them."""
        buffers = self._buffers
        buffers.lead(tables.prefix_rows)
        buffers.cos_SK.copy_(tables.cos_SK)
        buffers.sin_SK.copy_(tables.sin_SK)
        self.tables = replace(tables, cos_SK=buffers.cos_SK, sin_SK=buffers.sin_SK)

    @property
    def views(self) -> WindowViews:
        """Windows for a pass over the open chunk; the same objects whenever it has this slot.

        Raises: StateError before `begin`.
        """
        _ = self.placement
        return self._next_views

    @property
    def _next_views(self) -> WindowViews:
        if self.slot not in self._views:
            rows, buffers = slice(self._front, self._rows_of(self.slot).stop), self._buffers
            count = rows.stop - rows.start
            self._views[self.slot] = WindowViews(
                keys_BSNK=tuple(keys[:, rows] for keys in buffers.keys_BSNK),
                values_BSNK=tuple(values[:, rows] for values in buffers.values_BSNK),
                raw_BRNK=tuple(buffers.newest_BRNK),
                summaries=tuple(each and each.first(count) for each in buffers.summaries),
            )
        return self._views[self.slot]

    def settle(self) -> None:
        """Slide where a slide is due, and summarize what was not summarized since."""
        super().settle()
        if not self._is_summarized:
            self._next_views.renew_summaries()
        self._is_summarized = True

    def kept(self) -> None:
        """Note that a refresh wrote every layer through `views`."""
        self._written.update(range(self.layer_count))

    @property
    def _front(self) -> int:
        """First row of the prefix in the buffers."""
        return self._buffers.shape.prefix_room - self.tables.prefix_rows

    def _rows_of(self, slot: int) -> slice:
        begin = self._buffers.shape.prefix_room + slot * self.rows
        return slice(begin, begin + self.rows)

    def prefix_slot(self, layer: int, k_BRNK: Projected, placement: Placement) -> Slot:
        """Room for placed keys and values of the prefix: right before the ring."""
        rows = slice(self._front, self._front + self.tables.prefix_rows)
        self._is_summarized = False
        return Slot(
            key_BRNK=self._buffers.keys_BSNK[layer][:, rows],
            value_BRNK=self._buffers.values_BSNK[layer][:, rows],
            raw_BRNK=None,
            placement=placement,
        )

    def renew_prefix(self, tables: WindowTables) -> None:
        """Make room for another prefix and rotate the history by the new tables."""
        if tables.prefix_rows != self.tables.prefix_rows:
            self._views.clear()
        self._adopt(tables)
        self._placement = None
        self._is_summarized = False
        # The newest chunk stands behind the history of the one before it until the slide.
        before = self.committed - self._can_undo
        past = range(max(0, before - self.history_limit), before)
        for place, chunk in enumerate(past):
            slot = chunk % self.history_limit
            raw_rows = slice(slot * self.rows, (slot + 1) * self.rows)
            self._rotate([raw[:, raw_rows] for raw in self._buffers.raw_BSNK], slot, place)
        if self._can_undo:
            self._rotate(self._buffers.newest_BRNK, len(past), len(past))

    def window(
        self,
        layer: int,
        q_BRNK: Projected,
        k_BRNK: Projected,
        v_BRNK: Projected,
        *,
        keep: bool,
    ) -> Window:
        """Place the current chunk in its slot and return views up to its end."""
        views = self.views
        keys_BSNK, values_BSNK = views.keys_BSNK[layer], views.values_BSNK[layer]
        slot = Slot(
            key_BRNK=keys_BSNK[:, -self.rows :],
            value_BRNK=values_BSNK[:, -self.rows :],
            raw_BRNK=views.raw_BRNK[layer] if keep else None,
            placement=self.placement,
        )
        placed_BRNK = self._ops.place(layer, q_BRNK, k_BRNK, v_BRNK, slot)
        if keep:
            self._mark(layer)
        return Window(placed_BRNK, keys_BSNK, values_BSNK, views.summaries[layer])

    def snapshot(self) -> dict[str, Tensor]:
        """Buffers by name, shared; the last commit can no longer be undone."""
        self.settle()
        return {
            f"{name}.{layer}": buffer
            for name, buffers in self._named_buffers()
            for layer, buffer in enumerate(buffers)
        }

    def restore(self, committed: int, buffers: Mapping[str, Tensor]) -> None:
        """Go on from a snapshot of a cache with the same prefix, `committed` chunks old.

        Raises: StateError where the buffers are others.
        """
        own = self.snapshot()
        if {name: buffer.shape for name, buffer in own.items()} != {
            name: buffer.shape for name, buffer in buffers.items()
        }:
            raise StateError("restore: the snapshot is of a cache with other layers or rows")
        for name, buffer in own.items():
            buffer.copy_(buffers[name])
        self.committed = committed
        self._written.clear()
        self._placement = None
        self._is_summarized = False

    def _named_buffers(self) -> tuple[tuple[str, list[Tensor]], ...]:
        """What has to be kept between two chunks."""
        buffers = self._buffers
        return (
            ("keys", [keys[:, self._front :] for keys in buffers.keys_BSNK]),
            ("values", [values[:, self._front :] for values in buffers.values_BSNK]),
            ("raw", buffers.raw_BSNK),
        )

    def _rotate(self, raw_BRNK: Sequence[Tensor], slot: int, place: int) -> None:
        """Rotate the keys in a slot, in all layers, for a place in time."""
        (cos_RK, sin_RK), rows = self.angles(place), self._rows_of(slot)
        for keys, raw_keys in zip(self._buffers.keys_BSNK, raw_BRNK, strict=True):
            self._ops.rotate(raw_keys, cos_RK, sin_RK, keys[:, rows])

    def _slide(self) -> None:
        newest, buffers = self.committed - 1, self._buffers
        if newest < self.history_limit:
            # The window still fills: the chunk sits in its slot, and so do its angles; the next
            # window is longer, and its summary lies elsewhere.
            self._is_summarized = False
            rows = slice(newest * self.rows, (newest + 1) * self.rows)
            for raw_keys, newest_keys in zip(buffers.raw_BSNK, buffers.newest_BRNK, strict=True):
                raw_keys[:, rows] = newest_keys
        elif self.history_limit > 0:
            self._ops.slide(buffers, self._next_views, newest % self.history_limit)
