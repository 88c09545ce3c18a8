"""How the work around the products of a block is done: the seam between plain and fused forms.

Owns `BlockOps`, its plain form, and the values that cross it. Invariant: what `project` hands to
`place`, `output` to `finish` and `finish` to the next `project` is an affair of one `BlockOps`
alone; callers only carry it. The plain form hands over normalised queries and keys, and leaves
everything to `engine.model` and `engine.attention.placement`; it is the oracle.
Shape suffixes: B batch, R rows, D width, N heads, K head width, M runs of rows with one modulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.placement import Placement
from engine.cache_buffers import CacheBuffers, WindowViews
from engine.model.dit import MiniMaxH3Transformer
from engine.model.rope import apply_rope


class Fp8Rows(NamedTuple):
    """Rows [..., K] as e4m3 codes with fp32 factors: [..., 1], or in blocks [..., K / 128]."""

    codes: Tensor
    scale: Tensor


Rows = Tensor | Fp8Rows
"""Rows that enter a linear."""


class Sum(NamedTuple):
    """Two tensors alike that stand for their sum, rounded to their dtype."""

    base: Tensor
    delta: Tensor


Projected = Tensor | Sum
"""Queries, keys or values [B, R, N, K] on their way from `project` to `place`."""


class Gated(NamedTuple):
    """Rows and a branch that stand for their sum x + gate (branch + delta), part 5 the gate."""

    x_BRD: Tensor
    branch_BRD: Tensor
    delta_BRD: Tensor | None
    modulation_BM6D: Tensor


Residual = Tensor | Gated
"""Rows [B, R, D] on their way from `finish` to the next `project`, or to `settle`."""


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate parts of one kind along the rows, axis 1."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    if plain:
        return torch.cat(plain, dim=1)
    codes, scales = zip(*parts, strict=True)
    return Fp8Rows(torch.cat(codes, dim=1), torch.cat(scales, dim=1))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Slot:
    """Where the keys and values of a run of rows go; views that are written in place."""

    key_BRNK: Tensor
    value_BRNK: Tensor
    raw_BRNK: Tensor | None
    """Takes the normalised rotary channels of the keys; None where nobody will rotate them anew."""
    placement: Placement


class RowOps(Protocol):
    """Moves rows in and out of the frame of attention; needs no weights of linears."""

    def place(
        self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected, slot: Slot
    ) -> Tensor:
        """Write keys and values into the slot and return the placed queries."""
        ...

    def output(self, layer: int, o_BRNK: Tensor, placement: Placement) -> Rows:
        """Bring the attention output into the query rows' own frames."""
        ...

    def rotate(self, raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor) -> None:
        """Write the rotary channels of keys whose place in time is another one."""
        ...

    def slide(self, buffers: CacheBuffers, window: WindowViews, slot: int) -> None:
        """Move a full window on by one chunk, in all layers, and renew the summaries of its ring.

        Args:
            buffers: of the window.
            window: the newest chunk is refreshed and lies behind the ring.
            slot: of the oldest chunk in the ring, which the newest one takes. The chunks are then
                in the order of time from the slot after it on, around the ring.
        """
        ...


class BlockOps(RowOps, Protocol):
    """All of a block but the attention product."""

    def project(
        self, layer: int, x: Residual, modulation_BM6D: Tensor
    ) -> tuple[Tensor, Projected, Projected, Projected]:
        """Return the rows x [B, R, D] themselves, and q, k, v [B, R, N, K] for `place`.

        Each of M modulations serves R / M rows.
        """
        ...

    def finish(self, layer: int, x_BRD: Tensor, o: Rows, modulation_BM6D: Tensor) -> Residual:
        """Add the attention branch, then the feed-forward branch; ``o`` comes from `output`."""
        ...

    def settle(self, x: Residual) -> Tensor:
        """Return the rows that `finish` left behind the last block."""
        ...


class PlainRowOps:
    """The form of `engine.attention.placement`."""

    def place(
        self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected, slot: Slot
    ) -> Tensor:
        """Take normalised queries and keys; nothing is left to be summed."""
        assert isinstance(q_BRNK, Tensor)
        assert isinstance(k_BRNK, Tensor)
        assert isinstance(v_BRNK, Tensor)
        placement = slot.placement
        slot.key_BRNK.copy_(placement.key(k_BRNK))
        slot.value_BRNK.copy_(placement.value(v_BRNK))
        if slot.raw_BRNK is not None:
            slot.raw_BRNK.copy_(k_BRNK[..., : slot.raw_BRNK.shape[-1]])
        return placement.query(q_BRNK)

    def output(self, layer: int, o_BRNK: Tensor, placement: Placement) -> Rows:
        """Return [B, R, N, K]."""
        return placement.output(o_BRNK)

    def rotate(self, raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor) -> None:
        """Rotate and copy."""
        key_BRNK[..., : cos_RK.shape[-1]] = apply_rope(raw_BRNK, cos_RK, sin_RK)

    def slide(self, buffers: CacheBuffers, window: WindowViews, slot: int) -> None:
        """Layer by layer: what is final moves, and one rotation goes over the whole ring."""
        rows, ring_rows = (part[0].shape[1] for part in (buffers.newest_BRNK, buffers.raw_BSNK))
        source, start = slice(-rows, None), buffers.cos_SK.shape[-1]
        raw_rows = slice(slot * rows, (slot + 1) * rows)
        # Slot by slot: the tables begin with the oldest chunk, the ring with slot 0.
        cos_SK, sin_SK = (
            table_SK[:ring_rows].roll(raw_rows.stop, dims=0)
            for table_SK in (buffers.cos_SK, buffers.sin_SK)
        )
        for keys, values, raw_keys, newest_keys in zip(
            window.keys_BSNK, window.values_BSNK, buffers.raw_BSNK, buffers.newest_BRNK,
            strict=True,
        ):  # fmt: skip
            ring = slice(keys.shape[1] - ring_rows - rows, keys.shape[1] - rows)
            target = slice(ring.start + raw_rows.start, ring.start + raw_rows.stop)
            values[:, target] = values[:, source]
            keys[:, target, :, start:] = keys[:, source, :, start:]
            raw_keys[:, raw_rows] = newest_keys
            self.rotate(raw_keys, cos_SK, sin_SK, keys[:, ring])
        window.renew_summaries(ring_rows + rows)


class PlainBlockOps(PlainRowOps):
    """The code of the model itself; M is 1 or the number of rows."""

    def __init__(self, model: MiniMaxH3Transformer) -> None:
        self._model = model

    def project(
        self, layer: int, x: Residual, modulation_BM6D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x, normalised q and k, and v."""
        x_BRD = self.settle(x)
        return x_BRD, *self._project(layer, x_BRD, modulation_BM6D)

    def finish(self, layer: int, x_BRD: Tensor, o: Rows, modulation_BM6D: Tensor) -> Tensor:
        """Take the attention output [B, R, N, K]."""
        assert isinstance(o, Tensor)
        return self._finish(layer, x_BRD, o, modulation_BM6D)

    def settle(self, x: Residual) -> Tensor:
        """Return x: nothing is left to be summed."""
        assert isinstance(x, Tensor)
        return x

    def _project(
        self, layer: int, x_BRD: Tensor, modulation_BM6D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._model.block(layer).project(x_BRD, modulation_BM6D)

    def _finish(self, layer: int, x_BRD: Tensor, o_BRNK: Tensor, modulation_BM6D: Tensor) -> Tensor:
        return self._model.block(layer).finish(x_BRD, o_BRNK, modulation_BM6D)
