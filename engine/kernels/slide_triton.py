"""Triton kernel of `slide`; what it does stands there.

Owns the launch. One program has some rows of some heads of one slot in one layer: neighbouring rows
of a head lie side by side, as the cache keeps them, and cosines and sines are loaded once for all
heads of the program. The program whose slot the newest chunk takes also copies what is copied. The
layers' addresses go to the device as a table. Offsets are int64.
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
from engine.kernels.rows_triton import AS_WRITTEN, load_wide, rotated_pair, rounded

_HEADS, _ROWS = 8, 16
"""Of a program, at most: 16 x 64 pairs are 8 a thread, one load of 16 bytes in bf16."""
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _layer_ptr(address_ptr, KIND: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(KIND)), ALIGN)


# No code of their own for slot 1, or for prefixes that are multiples of 16.
@triton.jit(do_not_specialize=["prefix_rows", "newest_slot"])
def _slide_kernel(
    address_ptr, cos_ptr, sin_ptr, layers, rows, prefix_rows, newest_slot,
    key_batch, key_row, key_head, value_batch, value_row, value_head,
    raw_batch, raw_row, raw_head, newest_batch, newest_row, newest_head, cos_row, sin_row,
    KIND: tl.constexpr, ALIGN: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    layer, batch = tl.program_id(2) % layers, (tl.program_id(2) // layers).to(tl.int64)
    slot, first_head = tl.program_id(1) // GROUPS, tl.program_id(1) % GROUPS * HEADS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask, wide_row = row < rows, row.to(tl.int64)
    pair, rest = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    channel = tl.arange(0, WIDTH_PAD)[None, :]
    pair_mask = row_mask & (pair < HALF)
    rest_mask = row_mask & (rest < WIDTH - 2 * HALF)
    channel_mask = row_mask & (channel < WIDTH)
    is_newest = slot == newest_slot

    place = (slot - newest_slot - 1 + SLOTS) % SLOTS
    cos = load_wide(cos_ptr + (place * rows + row) * cos_row + pair, pair_mask)
    sin = load_wide(sin_ptr + (place * rows + row) * sin_row + pair, pair_mask)
    cos, sin = rounded(cos, KIND, EAGER), rounded(sin, KIND, EAGER)

    key_ptr = _layer_ptr(address_ptr + layer, KIND, ALIGN) + batch * key_batch
    value_ptr = _layer_ptr(address_ptr + layers + layer, KIND, ALIGN) + batch * value_batch
    raw_ptr = _layer_ptr(address_ptr + 2 * layers + layer, KIND, ALIGN) + batch * raw_batch
    newest_ptr = _layer_ptr(address_ptr + 3 * layers + layer, KIND, ALIGN) + batch * newest_batch
    to_row, from_row = prefix_rows + slot * rows + wide_row, prefix_rows + SLOTS * rows + wide_row
    raw_ptr += (slot * rows + wide_row) * raw_row
    newest_ptr += wide_row * newest_row
    for index in range(HEADS):
        head = (first_head + index).to(tl.int64)
        raw_at, key_at = raw_ptr + head * raw_head, key_ptr + head * key_head
        if is_newest:
            newest_at, value_at = newest_ptr + head * newest_head, value_ptr + head * value_head
            first = load_wide(newest_at + pair, pair_mask)
            second = load_wide(newest_at + HALF + pair, pair_mask)
            tl.store(raw_at + pair, first.to(KIND), mask=pair_mask)
            tl.store(raw_at + HALF + pair, second.to(KIND), mask=pair_mask)
            tail = 2 * HALF + rest
            kept = tl.load(key_at + from_row * key_row + tail, mask=rest_mask)
            tl.store(key_at + to_row * key_row + tail, kept, mask=rest_mask)
            moved = tl.load(value_at + from_row * value_row + channel, mask=channel_mask)
            tl.store(value_at + to_row * value_row + channel, moved, mask=channel_mask)
        else:
            first = load_wide(raw_at + pair, pair_mask)
            second = load_wide(raw_at + HALF + pair, pair_mask)
        low, high = rotated_pair(first, second, cos, sin, KIND, EAGER)
        tl.store(key_at + to_row * key_row + pair, low.to(KIND), mask=pair_mask)
        tl.store(key_at + to_row * key_row + HALF + pair, high.to(KIND), mask=pair_mask)


def slide(
    keys_BSNK: Sequence[Tensor],
    values_BSNK: Sequence[Tensor],
    raw_BSNK: Sequence[Tensor],
    newest_BRNK: Sequence[Tensor],
    cos_SK: Tensor,
    sin_SK: Tensor,
    prefix_rows: int,
    slot: int,
    is_eager: bool,
) -> None:
    """Launch for checked arguments."""
    lists = (keys_BSNK, values_BSNK, raw_BSNK, newest_BRNK)
    (key, value, raw, newest), layers = (tensors[0] for tensors in lists), len(keys_BSNK)
    addresses = [tensor.data_ptr() for tensors in lists for tensor in tensors]
    align = 16 if all(address % 16 == 0 for address in addresses) else key.itemsize
    batch_size, _, heads, width = key.shape
    rows, half = newest.shape[1], cos_SK.shape[-1] // 2
    slots = raw.shape[1] // rows
    group = next(count for count in range(_HEADS, 0, -1) if heads % count == 0)
    grid = (triton.cdiv(rows, _ROWS), slots * (heads // group), layers * batch_size)
    _slide_kernel[grid](
        send(torch.tensor(addresses, dtype=torch.int64), key.device), cos_SK, sin_SK, layers, rows,
        prefix_rows, slot, *key.stride()[:3], *value.stride()[:3], *raw.stride()[:3],
        *newest.stride()[:3], cos_SK.stride(0), sin_SK.stride(0),
        KIND=_KINDS[key.dtype], ALIGN=align, SLOTS=slots, GROUPS=heads // group, HEADS=group,
        ROWS=_ROWS, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), HALF=half,
        HALF_PAD=triton.next_power_of_2(half), REST_PAD=triton.next_power_of_2(width - 2 * half),
        EAGER=is_eager, num_warps=4, **AS_WRITTEN,
    )  # fmt: skip
