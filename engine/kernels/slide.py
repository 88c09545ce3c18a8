"""The window moves on by one chunk, in all layers by one launch.

    prefix | ring: slot 0, 1, ... H-1 | newest            rows of keys and values
             raw:  slot 0, 1, ... H-1 , newest raw        rotary channels of keys, not rotated

Slot s of the ring holds the oldest chunk. The newest one takes its place: its values, the channels
of its keys from S on and its raw channels are copied there. Then the chunk in slot j is at place
p = (j - s - 1) mod H in time, and the S rotary channels of its keys are written from their raw
form by rows p R .. (p + 1) R of the tables, as `qknorm_rope.rotate` does. Keys and values are
[B, rows, N, K] a layer, raw channels [B, H R, N, S] and [B, R, N, S], tables [>= H R, S] of which
the first half counts. What is copied stays bit for bit; what is between load and store of a
rotation is fp32, see `reference` for `rounding`. Layers lie anywhere but have equal strides.
The last layers may have summaries of their blocks (`sparse`). Those of blocks with rows of the ring
and none behind it are renewed, with the bits of `sparse.summarize`: means and reaches of all, sums
where values changed; those of a block that no row of the newest chunk came to are what they were.
Owns the operator; `slide_triton` has the kernel.
Shape suffixes: B batch, S rows of a window or a ring, R rows of a chunk, N heads, K head width, J
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract, sparse
from engine.kernels.qknorm_rope import check_head


def _check_layers(op: str, **lists: Sequence[Tensor]) -> None:
    """Refuse lists that differ in length, and layers of a list that differ in form."""
    counts = {name: len(tensors) for name, tensors in lists.items()}
    if min(counts.values()) == 0 or len(set(counts.values())) > 1:
        raise ConfigError(f"{op}: layers are {counts}; allowed: one at least, as many in all lists")
    contract.require_rows(op, **{name: tensors[0] for name, tensors in lists.items()})
    for name, tensors in lists.items():
        forms = [(each.dtype, tuple(each.shape), each.stride()) for each in tensors]
        for form in forms:
            if form != forms[0]:
                raise ConfigError(
                    f"{op}: {name} has dtype, shape, strides {form} in a layer; allowed: "
                    f"{forms[0]}, as in the first one"
                )


@torch.library.custom_op(
    "worldstream::slide",
    mutates_args=("keys_BSNK", "values_BSNK", "raw_BSNK", "mean_BNJK", "sum_BNJK", "reach_BNJ"),
)
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
    rounding: str,
) -> None:
    """Let the newest chunk into the ring and rotate all keys in it.

    Args:
        keys_BSNK: placed keys of each layer, up to the newest chunk.
        values_BSNK: values of each layer, with as many rows.
        raw_BSNK: rotary channels of the keys in the ring.
        newest_BRNK: those of the newest chunk.
        cos_SK: cosines, of the oldest chunk first.
        sin_SK: sines.
        mean_BNJK: summaries of the last layers, contiguous, if any.
        sum_BNJK: of the same layers.
        reach_BNJ: of the same layers.
        slot: that the newest chunk takes.
        block: keys that share a summary.
        rounding: see `reference`.

    Raises: ConfigError, UnsupportedError.
    """
    from engine.kernels import slide_triton

    op, start = "slide", cos_SK.shape[-1]
    _check_layers(op, keys=keys_BSNK, values=values_BSNK, raw=raw_BSNK, newest=newest_BRNK)
    contract.require_kernels(op, keys_BSNK[0])
    contract.require_rounding(op, rounding)
    batch_size, window_rows, heads, width = keys_BSNK[0].shape
    rows, ring_rows = newest_BRNK[0].shape[1], raw_BSNK[0].shape[1]
    check_head(op, width, start)
    contract.require_shape(op, "values", values_BSNK[0], tuple(keys_BSNK[0].shape))
    contract.require_shape(op, "newest", newest_BRNK[0], (batch_size, rows, heads, start))
    contract.require_shape(op, "raw", raw_BSNK[0], (batch_size, ring_rows, heads, start))
    slots = ring_rows // rows
    if ring_rows % rows or not 0 <= slot < slots:
        raise ConfigError(
            f"{op}: slot is {slot} in a ring of {ring_rows} rows, {rows} a chunk; allowed: whole "
            f"chunks, 0 to {slots - 1}"
        )
    if window_rows < ring_rows + rows:
        raise ConfigError(
            f"{op}: keys have {window_rows} rows; allowed: {ring_rows + rows} at least, so that "
            "ring and newest chunk have room"
        )
    for name, table in (("cos", cos_SK), ("sin", sin_SK)):
        contract.require_shape(op, name, table[:ring_rows], (ring_rows, start))
        contract.require_dense(op, name, table)
    counts = [len(tensors) for tensors in (mean_BNJK, sum_BNJK, reach_BNJ)]
    if len(set(counts)) > 1 or counts[0] > len(keys_BSNK):
        raise ConfigError(
            f"{op}: summaries are {counts}; allowed: as many in all lists, of {len(keys_BSNK)} "
            "layers at most"
        )
    for mean, sum_, reach in zip(mean_BNJK, sum_BNJK, reach_BNJ, strict=True):
        sparse.require_summary(op, keys_BSNK[0], mean, sum_, reach, block)
    if mean_BNJK and block < sparse.LEAST_KERNEL_BLOCK:
        raise ConfigError(
            f"{op}: block is {block}; allowed: {sparse.LEAST_KERNEL_BLOCK} at least, what kernels "
            "summarize"
        )
    slide_triton.slide(
        keys_BSNK, values_BSNK, raw_BSNK, newest_BRNK, cos_SK, sin_SK, mean_BNJK, sum_BNJK,
        reach_BNJ, slot, block, rounding == "eager",
    )  # fmt: skip


@slide.register_fake
def _(
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
    rounding: str,
) -> None:
    return None
