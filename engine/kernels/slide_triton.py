"""Triton kernel of `slide`; what it does stands there.

Owns the launch. One program has some rows of the ring, of some heads of one layer: neighbouring
rows of a head lie side by side, as the cache keeps them. Rows of the newest chunk are also copied.
Where blocks are summarized, a program has the rows of one block, and sums them once they stand: it
reads them again, from the cache of the GPU, in the very order of `sparse_triton.summarize`, hence
with its bits. The layers' addresses go to the device as a table. Offsets are int64.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.device import send
from engine.kernels.rows_triton import (
    AS_WRITTEN,
    BLOCK_WARPS,
    block_step,
    block_sum,
    block_sum_and_reach,
    load_wide,
    padded_side,
    rotated_pair,
    rounded,
)

_HEADS, _SUMMED_HEADS, _ROWS = 8, 1, 16
"""Heads of a program, the same where it sums blocks, and rows that are rotated at once, at most: 16
x 64 pairs are 8 a thread, one load of 16 bytes in bf16. What all programs under way have written
and not yet summed has to fit into the cache of the GPU: with two and four heads a slide of 13526
keys took 190 and 162 us a layer against 137 with one (H200)."""
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _layer_ptr(address_ptr, KIND: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(KIND)), ALIGN)


@triton.jit
def _summarize(
    address_ptr, key_ptr, value_ptr, layers, layer, plane, blocks, block, left, has_newest,
    key_row, value_row, KIND: tl.constexpr, ALIGN: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Renew the summary of a whole block of one head: of its values only where they are new."""
    row = (block * KEYS + tl.arange(0, STEP)).to(tl.int64)[:, None]
    channel = tl.arange(0, WIDTH_PAD)
    is_channel = channel < WIDTH
    at = plane * blocks + block
    key_at = key_ptr + row * key_row + channel[None, :]
    k_sum, reach = block_sum_and_reach(key_at, key_row, left, is_channel[None, :], KEYS, STEP)
    mean = tl.sum(k_sum, axis=0) / tl.minimum(left, KEYS).to(tl.float32)
    mean_ptr = _layer_ptr(address_ptr + layer, KIND, ALIGN)
    reach_ptr = _layer_ptr(address_ptr + 2 * layers + layer, tl.float32, 4)
    tl.store(mean_ptr + at * WIDTH + channel, mean.to(KIND), mask=is_channel)
    tl.store(reach_ptr + at, reach)
    if has_newest:
        value_at = value_ptr + row * value_row + channel[None, :]
        v_sum = block_sum(value_at, value_row, left, is_channel[None, :], KEYS, STEP)
        sum_ptr = _layer_ptr(address_ptr + layers + layer, KIND, ALIGN)
        sum_ = tl.sum(v_sum, axis=0)
        tl.store(sum_ptr + at * WIDTH + channel, sum_.to(KIND), mask=is_channel)


# No code of their own for slot 1, or for prefixes and windows that are multiples of 16.
@triton.jit(do_not_specialize=["prefix_rows", "newest_slot", "lead", "plain_layers", "blocks"])
def _slide_kernel(
    address_ptr, cos_ptr, sin_ptr, layers, rows, prefix_rows, newest_slot, lead, plain_layers,
    blocks, key_batch, key_row, key_head, value_batch, value_row, value_head,
    raw_batch, raw_row, raw_head, newest_batch, newest_row, newest_head, cos_row, sin_row,
    KIND: tl.constexpr, ALIGN: tl.constexpr, SLOTS: tl.constexpr, ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
    IS_SUMMARIZED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    layer, batch = tl.program_id(2) % layers, (tl.program_id(2) // layers).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    # Rows are counted from the start of the ring; the first block may begin in the prefix.
    begin = tl.program_id(0) * KEYS - lead
    newest_begin = newest_slot * rows
    has_newest = (begin < newest_begin + rows) & (begin + KEYS > newest_begin)
    pair, rest = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    channel = tl.arange(0, WIDTH_PAD)[None, :]

    key_ptr = _layer_ptr(address_ptr + layer, KIND, ALIGN) + batch * key_batch
    value_ptr = _layer_ptr(address_ptr + layers + layer, KIND, ALIGN) + batch * value_batch
    raw_ptr = _layer_ptr(address_ptr + 2 * layers + layer, KIND, ALIGN) + batch * raw_batch
    newest_ptr = _layer_ptr(address_ptr + 3 * layers + layer, KIND, ALIGN) + batch * newest_batch
    for part in range(KEYS // ROWS):
        row = (begin + part * ROWS + tl.arange(0, ROWS))[:, None]
        in_ring = (row >= 0) & (row < SLOTS * rows)
        slot = tl.maximum(row, 0) // rows
        is_newest = in_ring & (slot == newest_slot)
        place = (slot - newest_slot - 1 + SLOTS) % SLOTS
        table_row = place * rows + row - slot * rows
        pair_mask = in_ring & (pair < HALF)
        old_mask = pair_mask & ~is_newest
        new_mask = pair_mask & is_newest
        cos = load_wide(cos_ptr + table_row * cos_row + pair, pair_mask)
        sin = load_wide(sin_ptr + table_row * sin_row + pair, pair_mask)
        cos, sin = rounded(cos, KIND, EAGER), rounded(sin, KIND, EAGER)
        wide_row = row.to(tl.int64)
        to_row, from_row = prefix_rows + wide_row, wide_row - newest_begin
        raw_at_row, newest_at_row = raw_ptr + wide_row * raw_row, newest_ptr + from_row * newest_row
        from_row += prefix_rows + SLOTS * rows
        for index in range(HEADS):
            head = (first_head + index).to(tl.int64)
            raw_at, key_at = raw_at_row + head * raw_head, key_ptr + head * key_head
            first = load_wide(raw_at + pair, old_mask)
            second = load_wide(raw_at + HALF + pair, old_mask)
            if has_newest:
                newest_at = newest_at_row + head * newest_head
                value_at = value_ptr + head * value_head
                new_first = load_wide(newest_at + pair, new_mask)
                new_second = load_wide(newest_at + HALF + pair, new_mask)
                tl.store(raw_at + pair, new_first.to(KIND), mask=new_mask)
                tl.store(raw_at + HALF + pair, new_second.to(KIND), mask=new_mask)
                first = tl.where(is_newest, new_first, first)
                second = tl.where(is_newest, new_second, second)
                tail, tail_mask = 2 * HALF + rest, is_newest & (rest < WIDTH - 2 * HALF)
                kept = tl.load(key_at + from_row * key_row + tail, mask=tail_mask)
                tl.store(key_at + to_row * key_row + tail, kept, mask=tail_mask)
                value_mask = is_newest & (channel < WIDTH)
                moved = tl.load(value_at + from_row * value_row + channel, mask=value_mask)
                tl.store(value_at + to_row * value_row + channel, moved, mask=value_mask)
            low, high = rotated_pair(first, second, cos, sin, KIND, EAGER)
            tl.store(key_at + to_row * key_row + pair, low.to(KIND), mask=pair_mask)
            tl.store(key_at + to_row * key_row + HALF + pair, high.to(KIND), mask=pair_mask)

    if IS_SUMMARIZED:
        # Blocks that reach past the ring change with the open chunk: they are left to its passes.
        is_whole = begin + KEYS <= SLOTS * rows
        if is_whole & (layer >= plain_layers):
            tl.debug_barrier()  # what other threads of the program stored is read from here on
            block, left = (prefix_rows + begin) // KEYS, SLOTS * rows - begin
            for index in range(HEADS):
                head = (first_head + index).to(tl.int64)
                _summarize(
                    address_ptr + 4 * layers, key_ptr + head * key_head,
                    value_ptr + head * value_head, layers - plain_layers, layer - plain_layers,
                    batch * ALL_HEADS + head, blocks, block, left, has_newest, key_row, value_row,
                    KIND, ALIGN, KEYS, WIDTH, WIDTH_PAD, STEP,
                )  # fmt: skip


def slide(
    keys_BSNK: Sequence[Tensor],
    values_BSNK: Sequence[Tensor],
    raw_BSNK: Sequence[Tensor],
    newest_BRNK: Sequence[Tensor],
    cos_SK: Tensor,
    sin_SK: Tensor,
    mean_BNJK: Sequence[Tensor],
    sum_BNJK: Sequence[Tensor],
    reach_BNJ: Sequence[Tensor],
    slot: int,
    block: int,
    is_eager: bool,
) -> None:
    """Launch for checked arguments."""
    lists = (keys_BSNK, values_BSNK, raw_BSNK, newest_BRNK, mean_BNJK, sum_BNJK, reach_BNJ)
    (key, value, raw, newest), layers = (tensors[0] for tensors in lists[:4]), len(keys_BSNK)
    addresses = [tensor.data_ptr() for tensors in lists for tensor in tensors]
    wide = addresses[: len(addresses) - len(reach_BNJ)]
    align = 16 if all(address % 16 == 0 for address in wide) else key.itemsize
    batch_size, window_rows, heads, width = key.shape
    rows, half, ring_rows = newest.shape[1], cos_SK.shape[-1] // 2, raw.shape[1]
    prefix_rows, columns = window_rows - ring_rows - rows, padded_side(width)
    keys = block if mean_BNJK else _ROWS
    lead = prefix_rows % keys if mean_BNJK else 0
    most_heads = _SUMMED_HEADS if mean_BNJK else _HEADS
    group = next(count for count in range(most_heads, 0, -1) if heads % count == 0)
    grid = (triton.cdiv(lead + ring_rows, keys), heads // group, layers * batch_size)
    _slide_kernel[grid](
        send(torch.tensor(addresses, dtype=torch.int64), key.device), cos_SK, sin_SK, layers, rows,
        prefix_rows, slot, lead, layers - len(mean_BNJK),
        reach_BNJ[0].shape[2] if reach_BNJ else 0, *key.stride()[:3],
        *value.stride()[:3], *raw.stride()[:3], *newest.stride()[:3], cos_SK.stride(0),
        sin_SK.stride(0), KIND=_KINDS[key.dtype], ALIGN=align, SLOTS=ring_rows // rows,
        ALL_HEADS=heads, HEADS=group, ROWS=min(_ROWS, keys), KEYS=keys,
        STEP=block_step(keys, columns, key.itemsize), IS_SUMMARIZED=len(mean_BNJK) > 0,
        WIDTH=width, WIDTH_PAD=columns, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(width - 2 * half), EAGER=is_eager, num_warps=BLOCK_WARPS,
        **AS_WRITTEN,
    )  # fmt: skip
