"""The window cache: order of calls, content of the window, packed against plain."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from engine.attention.placement import Placement, PlacementOps
from engine.cache_buffers import BufferShape, allocate
from engine.config import SPARSE_DENSE_LAYERS
from engine.errors import StateError
from engine.kernels.sparse import KeySummary
from engine.kv_cache import PackedCache, PlainCache, Window, WindowTables
from engine.layout import window_positions
from engine.model.prope import identity_projective, projective
from engine.model.rope import rope_tables
from tests.tiny import narrow_config, walk_views
from tests.tolerances import FP32_ATOL, FP32_RTOL

pytestmark = pytest.mark.cpu

CONFIG = narrow_config()
VIEWS = walk_views(CONFIG, 40)


def _tables(prefix_rows: int) -> WindowTables:
    cos, sin = rope_tables(window_positions(CONFIG, prefix_rows), CONFIG.rope_freq_dim)
    return WindowTables(prefix_rows=prefix_rows, cos_SK=cos, sin_SK=sin)


def _packed(prefix_rows: int = 3) -> PackedCache:
    shape = BufferShape(batch_size=1, heads=CONFIG.num_attention_heads, prefix_room=prefix_rows)
    buffers = allocate(CONFIG, shape, device=torch.device("cpu"), dtype=torch.float32)
    return PackedCache(CONFIG, _tables(prefix_rows), buffers)


def _both(prefix_rows: int = 3) -> list[PackedCache | PlainCache]:
    caches = [_packed(prefix_rows), PlainCache(CONFIG, _tables(prefix_rows))]
    for cache in caches:
        _set_prefix(cache, prefix_rows, seed=0)
    return caches


def _rows(seed: int, rows: int = CONFIG.rows_per_chunk) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, rows, CONFIG.num_attention_heads, CONFIG.attention_head_dim)
    return torch.randn(shape, generator=generator)


def _set_prefix(cache: PackedCache | PlainCache, prefix_rows: int, seed: int) -> None:
    key, value = _rows(seed, prefix_rows), _rows(seed + 1, prefix_rows)
    slot = cache.prefix_slot(0, key, _unplaced(prefix_rows))
    slot.key_BRNK.copy_(key)
    slot.value_BRNK.copy_(value)


def _unplaced(rows: int) -> Placement:
    """Return a placement that nobody asks to place anything."""
    none = torch.zeros(rows, 0)
    camera = identity_projective(torch.float32)
    return Placement(cos_RK=none, sin_RK=none, camera=camera, ops=PlacementOps())


def _enter(
    cache: PackedCache | PlainCache, seed: int, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one pass over the open chunk; queries are the keys in reverse order."""
    key, value = _rows(seed), _rows(seed + 1)
    window = cache.window(0, key.flip(1), key, value, keep=keep)
    return window.q_BRNK, window.keys_BSNK, window.values_BSNK


def _camera(chunk: int):
    return projective(VIEWS[:, 5 * chunk : 5 * chunk + 5], torch.float32)


def _advance(cache: PackedCache | PlainCache, chunk: int) -> None:
    cache.begin(chunk, _camera(chunk))
    _enter(cache, 2 * chunk, keep=True)
    cache.commit()


@pytest.mark.parametrize("index", [0, 1], ids=["packed", "plain"])
def test_history_is_the_last_five_chunks(index):
    cache = _both()[index]
    assert cache.history == []
    for chunk in range(8):
        _advance(cache, chunk)
    assert cache.history == [3, 4, 5, 6, 7]


def test_a_skipped_commit_is_refused():
    cache = _packed()
    for chunk in range(8):
        _advance(cache, chunk)
    with pytest.raises(StateError, match=r"begin of chunk 9; expected chunk 8.*\[3, 4, 5, 6, 7\]"):
        cache.begin(9, _camera(9))


def test_a_pass_before_begin_is_refused():
    with pytest.raises(StateError, match=r"no chunk is open; expected begin\(0\)"):
        _enter(_packed(), 1, keep=False)


def test_commit_without_refresh_is_refused():
    cache = _both()[0]
    cache.begin(0, _camera(0))
    _enter(cache, 1, keep=False)
    with pytest.raises(StateError, match="expected keys and values of 1 layers, got 0"):
        cache.commit()


def test_commit_twice_is_refused():
    cache = _both()[0]
    _advance(cache, 0)
    with pytest.raises(StateError, match="commit of chunk 1"):
        cache.commit()


def test_undo_without_commit_is_refused():
    cache = _both()[0]
    with pytest.raises(StateError, match="got 0 committed chunks and none to take back"):
        cache.undo()


def test_undo_works_once():
    cache = _both()[0]
    _advance(cache, 0)
    _advance(cache, 1)
    cache.undo()
    with pytest.raises(StateError, match="undo works once"):
        cache.undo()


def test_window_views_keep_their_addresses():
    cache = _both()[0]
    addresses = set()
    for chunk in range(9):
        cache.begin(chunk, _camera(chunk))
        _, keys, values = _enter(cache, chunk, keep=True)
        addresses.add((keys.data_ptr(), values.data_ptr()))
        cache.commit()
    assert len(addresses) == 1


def test_windows_find_their_addresses_again_where_a_prefix_fits():
    cache, addresses = _packed(5), []
    for chunk, prefix_rows in enumerate([5, 2, 5, 2]):
        cache.renew_prefix(_tables(prefix_rows))
        _set_prefix(cache, prefix_rows, seed=chunk)
        cache.begin(chunk, _camera(chunk))
        _, keys, values = _enter(cache, 2 * chunk, keep=True)
        assert keys.shape[1] == _slot_rows(chunk, prefix_rows).stop
        addresses.append((keys.data_ptr(), values.data_ptr()))
        cache.commit()
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]


def test_a_snapshot_of_another_prefix_is_refused():
    cache, other = _packed(5), _packed(5)
    other.renew_prefix(_tables(4))
    with pytest.raises(StateError, match="a cache with other layers or rows"):
        other.restore(0, cache.snapshot())


def _slot_rows(slot: int, prefix_rows: int = 3) -> slice:
    begin = prefix_rows + slot * CONFIG.rows_per_chunk
    return slice(begin, begin + CONFIG.rows_per_chunk)


def _placed(chunk: int, place: int, prefix_rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `_advance` at a place in time, from the definition."""
    tables, rows = _tables(prefix_rows), _slot_rows(place, 0)
    placement = Placement(
        cos_RK=tables.cos_SK[rows], sin_RK=tables.sin_SK[rows], camera=_camera(chunk),
        ops=tables.ops,
    )  # fmt: skip
    return placement.key(_rows(2 * chunk)), placement.value(_rows(2 * chunk + 1))


@pytest.mark.parametrize("index", [0, 1], ids=["packed", "plain"])
@pytest.mark.parametrize(
    ("chunks", "slots"),
    [
        (0, [0]), (1, [0, 1]), (5, [0, 1, 2, 3, 4, 5]), (6, [5, 1, 2, 3, 4, 6]),
        (8, [5, 6, 7, 3, 4, 8]), (10, [5, 6, 7, 8, 9, 10]), (13, [10, 11, 12, 8, 9, 13]),
    ],
)  # fmt: skip
def test_a_window_is_prefix_ring_and_current_chunk(chunks, slots, index):
    cache = _both()[index]
    for chunk in range(chunks):
        _advance(cache, chunk)
    cache.begin(chunks, _camera(chunks))
    _, keys, values = _enter(cache, 2 * chunks, keep=False)
    assert torch.equal(values[:, :3], _rows(1, 3))
    assert keys.shape[1] == values.shape[1] == _slot_rows(len(slots) - 1).stop
    for slot, chunk in enumerate(slots):
        rows, (key, value) = _slot_rows(slot), _placed(chunk, chunk - min(slots))
        assert torch.equal(keys[:, rows], key), f"keys of chunk {chunk}"
        assert torch.equal(values[:, rows], value), f"values of chunk {chunk}"


@pytest.mark.parametrize("chunks", range(5, 11))
def test_the_order_of_the_keys_is_free_but_for_rounding(chunks):
    cache = _both()[0]
    for chunk in range(chunks):
        _advance(cache, chunk)
    cache.begin(chunks, _camera(chunks))
    query, keys, values = _enter(cache, 2 * chunks, keep=False)
    by_age = [slice(0, 3)]
    by_age += [_slot_rows(chunk % 5) for chunk in cache.history] + [_slot_rows(5)]

    def attend(keys, values):
        heads = (each.transpose(1, 2) for each in (query, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(*heads)

    ring = attend(keys, values)
    ordered = attend(*(torch.cat([each[:, rows] for rows in by_age], 1) for each in (keys, values)))
    assert torch.allclose(ring, ordered, atol=FP32_ATOL, rtol=FP32_RTOL)


@pytest.mark.parametrize("prefix_rows", [3, 5], ids=["same", "longer"])
@pytest.mark.parametrize("chunks", range(4, 12))
def test_a_prefix_that_changes_while_a_slide_is_due_leaves_undo(chunks, prefix_rows):
    caches = _both()
    for cache in caches:
        for chunk in range(chunks):
            _advance(cache, chunk)
        cache.renew_prefix(_tables(prefix_rows))
        _set_prefix(cache, prefix_rows, seed=90)
        cache.undo()
        cache.begin(chunks - 1, _camera(20))
    windows = [_enter(cache, 70, keep=True) for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(*windows, strict=True))
    for cache in caches:
        cache.commit()
        cache.begin(chunks, _camera(chunks))
    windows = [_enter(cache, 72, keep=True) for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(*windows, strict=True))


@pytest.mark.parametrize("chunks", range(1, 13))
def test_a_cache_goes_on_from_a_snapshot_at_every_phase_of_the_ring(chunks):
    cache, plain = _both()
    for each in (cache, plain):
        for chunk in range(chunks):
            _advance(each, chunk)
    moved = _packed()
    moved.restore(chunks, {name: buffer.clone() for name, buffer in cache.snapshot().items()})
    for chunk in range(chunks, chunks + 6):
        windows = []
        for each in (moved, cache, plain):
            each.begin(chunk, _camera(chunk))
            windows.append(_enter(each, 2 * chunk, keep=True))
            each.commit()
        for parts in zip(*windows, strict=True):
            assert torch.equal(parts[0], parts[1])
            assert torch.equal(parts[0], parts[2])


class CacheMachine(RuleBasedStateMachine):
    """Any allowed order of calls leaves the packed cache equal to the plain one, bit for bit."""

    @initialize()
    def new(self) -> None:
        self.prefix_rows, self.seed = 3, 0
        self.caches = _both()
        self.is_open = False
        self.can_undo = False

    @property
    def chunk(self) -> int:
        return self.caches[1].committed

    @precondition(lambda self: self.chunk < 30)
    @rule()
    def begin(self) -> None:
        for cache in self.caches:
            cache.begin(self.chunk, _camera(self.chunk))
        self.is_open, self.can_undo = True, False

    @precondition(lambda self: self.is_open)
    @rule()
    def denoise(self) -> None:
        self.seed += 2
        windows = [_enter(cache, self.seed, keep=False) for cache in self.caches]
        assert all(torch.equal(a, b) for a, b in zip(*windows, strict=True))

    @precondition(lambda self: self.is_open)
    @rule()
    def refresh(self) -> None:
        self.seed += 2
        for cache in self.caches:
            _enter(cache, self.seed, keep=True)
            cache.commit()
        self.is_open, self.can_undo = False, True

    @precondition(lambda self: not self.is_open and self.chunk < 30)
    @rule(chunks=st.integers(1, 4))
    def several_chunks(self, chunks: int) -> None:
        for _ in range(chunks):
            self.begin()
            self.denoise()
            self.refresh()

    @precondition(lambda self: self.can_undo)
    @rule()
    def undo(self) -> None:
        for cache in self.caches:
            cache.undo()
        self.can_undo = False

    @precondition(lambda self: not self.is_open)
    @rule()
    def move_to_another_cache(self) -> None:
        """By a snapshot, which settles what it is taken of."""
        packed, plain = self.caches
        moved = _packed(self.prefix_rows)
        moved.restore(packed.committed, packed.snapshot())
        plain.settle()
        self.caches, self.can_undo = [moved, plain], False

    @precondition(lambda self: not self.is_open)
    @rule(prefix_rows=st.integers(1, 6))
    def renew_prefix(self, prefix_rows: int) -> None:
        self.seed += 2
        self.prefix_rows = prefix_rows
        for cache in self.caches:
            cache.renew_prefix(_tables(prefix_rows))
            _set_prefix(cache, prefix_rows, self.seed)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, database=None
)


DEEP = dataclasses.replace(CONFIG, num_layers=SPARSE_DENSE_LAYERS + 1)
"""Its last layer is summarized, in blocks of `BLOCK` keys."""
BLOCK = 8


def _summarized(prefix_rows: int) -> PackedCache:
    shape = BufferShape(batch_size=1, heads=DEEP.num_attention_heads, prefix_room=prefix_rows)
    buffers = allocate(
        DEEP, shape, device=torch.device("cpu"), dtype=torch.float32, sparse_block=BLOCK
    )
    return PackedCache(DEEP, _tables(prefix_rows), buffers)


class SummaryMachine(RuleBasedStateMachine):
    """Any allowed order of calls leaves each pass the summary of its whole window, bit for bit."""

    @initialize()
    def new(self) -> None:
        self.seed, self.is_open, self.can_undo = 0, False, False
        self.cache = _summarized(3)
        self.renew_prefix(3)

    @precondition(lambda self: self.cache.committed < 30)
    @rule()
    def begin(self) -> None:
        self.cache.begin(self.cache.committed, _camera(self.cache.committed))
        self.is_open, self.can_undo = True, False

    def _pass(self, *, keep: bool) -> Window:
        for layer in range(DEEP.num_layers):
            self.seed += 2
            key, value = _rows(self.seed), _rows(self.seed + 1)
            window = self.cache.window(layer, key, key, value, keep=keep)
        return window

    @precondition(lambda self: self.is_open)
    @rule()
    def denoise(self) -> None:
        window = self._pass(keep=False)
        keys_BSNK, summary = window.keys_BSNK, window.summary
        assert summary is not None
        summary.renew(keys_BSNK, window.values_BSNK, DEEP.rows_per_chunk)
        anew = KeySummary.of(keys_BSNK, self.cache.tables.prefix_rows, BLOCK)
        anew.renew(keys_BSNK, window.values_BSNK)
        assert all(torch.equal(*pair) for pair in zip(summary.tensors, anew.tensors, strict=True))

    @precondition(lambda self: self.is_open)
    @rule()
    def refresh(self) -> None:
        self._pass(keep=True)
        self.cache.commit()
        self.is_open, self.can_undo = False, True

    @precondition(lambda self: not self.is_open and self.cache.committed < 30)
    @rule(chunks=st.integers(1, 7))
    def several_chunks(self, chunks: int) -> None:
        for _ in range(chunks):
            self.begin()
            self.denoise()
            self.refresh()

    @precondition(lambda self: self.can_undo)
    @rule()
    def undo(self) -> None:
        self.cache.undo()
        self.can_undo = False

    @precondition(lambda self: not self.is_open)
    @rule(is_other=st.booleans())
    def restore(self, is_other: bool) -> None:
        """What a snapshot kept, over a window of other chunks where `is_other`."""
        committed, kept = self.cache.committed, self.cache.snapshot()
        kept = {name: buffer.clone() for name, buffer in kept.items()}
        if is_other:
            self.several_chunks(2)
        self.cache.restore(committed, kept)
        self.can_undo = False

    @rule(prefix_rows=st.integers(1, 19))
    def renew_prefix(self, prefix_rows: int) -> None:
        self.cache.renew_prefix(_tables(prefix_rows))
        self.write_prefix()

    @precondition(lambda self: self.is_open and self.cache.tables.prefix_rows > 1)
    @rule()
    def cut_prefix(self) -> None:
        """Of what is there the last rows stay."""
        self.cache.renew_prefix(_tables(self.cache.tables.prefix_rows - 1))
        self.begin()
        self.denoise()

    @rule()
    def write_prefix(self) -> None:
        prefix_rows = self.cache.tables.prefix_rows
        for layer in range(DEEP.num_layers):
            self.seed += 2
            key = _rows(self.seed, prefix_rows)
            slot = self.cache.prefix_slot(layer, key, _unplaced(prefix_rows))
            slot.key_BRNK.copy_(key)
            slot.value_BRNK.copy_(_rows(self.seed + 1, prefix_rows))
        self.is_open = False


TestSummaryMachine = SummaryMachine.TestCase
TestSummaryMachine.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
