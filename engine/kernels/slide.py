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
Owns the operator; `slide_triton` has the kernel.
Shape suffixes: B batch, S rows of a window or a ring, R rows of a chunk, N heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract
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
    "worldstream::slide", mutates_args=("keys_BSNK", "values_BSNK", "raw_BSNK")
)
def slide(
    keys_BSNK: Sequence[Tensor],
    values_BSNK: Sequence[Tensor],
    raw_BSNK: Sequence[Tensor],
    newest_BRNK: Sequence[Tensor],
    cos_SK: Tensor,
    sin_SK: Tensor,
    prefix_rows: int,
    slot: int,
    rounding: str,
) -> None:
    """Let the newest chunk into the ring and rotate all keys in it.

    Args:
        keys_BSNK: placed keys of each layer.
        values_BSNK: values of each layer, with as many rows.
        raw_BSNK: rotary channels of the keys in the ring.
        newest_BRNK: those of the newest chunk.
        cos_SK: cosines, of the oldest chunk first.
        sin_SK: sines.
        prefix_rows: in front of the ring.
        slot: that the newest chunk takes.
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
    if not 0 <= prefix_rows <= window_rows - ring_rows - rows:
        raise ConfigError(
            f"{op}: prefix_rows is {prefix_rows}; allowed: 0 to {window_rows - ring_rows - rows}, "
            "so that ring and newest chunk have room"
        )
    for name, table in (("cos", cos_SK), ("sin", sin_SK)):
        contract.require_shape(op, name, table[:ring_rows], (ring_rows, start))
        contract.require_dense(op, name, table)
    slide_triton.slide(
        keys_BSNK, values_BSNK, raw_BSNK, newest_BRNK, cos_SK, sin_SK, prefix_rows, slot,
        rounding == "eager",
    )  # fmt: skip


@slide.register_fake
def _(
    keys_BSNK: Sequence[Tensor],
    values_BSNK: Sequence[Tensor],
    raw_BSNK: Sequence[Tensor],
    newest_BRNK: Sequence[Tensor],
    cos_SK: Tensor,
    sin_SK: Tensor,
    prefix_rows: int,
    slot: int,
    rounding: str,
) -> None:
    return None
