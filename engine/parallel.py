"""One rollout on several devices: each rank has some of the rows, and in attention some heads.

    rows of a rank, all heads --to_heads--> all rows, heads of a rank --attention, its cache--
    rows of a rank, all heads <--to_rows-------------------------------------------------------

Owns the split of rows, the exchanges, and an `Attend` between the two (DeepSpeed-Ulysses). Linears
and norms see a rank's rows; positions, cameras, cache and attention see all rows of a rank's heads,
so nothing but the count of heads changes for them. Every rank makes the same draws and the same
latents. Invariants: the split follows from the number of rows alone, so that nothing is agreed upon
at run time; every rank runs the same passes in the same order.
Shape suffixes: B batch, R rows, S key rows, N heads, K head width, D width, W rank, n heads of one
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.block_ops import Rows
from engine.errors import ConfigError, UnsupportedError
from engine.kernels.exchange import merge_heads, pack_heads
from engine.model.dit import Attend

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""By name: an operator takes no process group as argument."""


class RowShare(Protocol):
    """Rows of one pass as this rank has them."""

    def own(self, x_BRD: Tensor) -> Tensor:
        """Rows of this rank, axis 1. Fewer rows than the pass has stand for runs of equal length;
        one row for all stays as it is.
        """
        ...

    def whole(self, x_BRD: Tensor) -> Tensor:
        """All rows, from the rows of each rank."""
        ...

    def attend(self, inner: Attend) -> Attend:
        """Let `inner` see all rows and this rank's heads."""
        ...


class Exchange(Protocol):
    """How the ranks of a rollout share it."""

    world_size: int

    def over(self, rows: int) -> RowShare:
        """Share of a pass over this many rows."""
        ...

    def own_heads(self, x_BSNK: Tensor) -> Tensor:
        """Heads of this rank."""
        ...

    def whole_heads(self, x_BSnK: Tensor) -> Tensor:
        """All heads, from the heads of each rank."""
        ...


class _AllRows:
    """The share of a rank that is alone."""

    def own(self, x_BRD: Tensor) -> Tensor:
        """Return `x_BRD`."""
        return x_BRD

    def whole(self, x_BRD: Tensor) -> Tensor:
        """Return `x_BRD`."""
        return x_BRD

    def attend(self, inner: Attend) -> Attend:
        """Return `inner`."""
        return inner


class Alone:
    """One rank: nothing is exchanged, nothing is wrapped."""

    world_size = 1

    def over(self, rows: int) -> RowShare:
        """All rows."""
        return _AllRows()

    def own_heads(self, x_BSNK: Tensor) -> Tensor:
        """Return `x_BSNK`."""
        return x_BSNK

    def whole_heads(self, x_BSnK: Tensor) -> Tensor:
        """Return `x_BSnK`."""
        return x_BSnK


class Ulysses:
    """Rows split evenly over the ranks of a process group, the first ranks taking one more.

    Args:
        heads: of the model; each rank takes as many.
        group: initialised; its device is that of the tensors (NCCL: CUDA, gloo: CPU).

    Raises: ConfigError where the heads do not divide among the ranks.
    """

    def __init__(self, heads: int, group: dist.ProcessGroup) -> None:
        self.world_size = group.size()
        self.rank = group.rank()
        self._group_name = str(group.group_name)
        _GROUPS[self._group_name] = group
        if heads % self.world_size:
            allowed = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            raise ConfigError(
                f"ranks are {self.world_size} for a model of {heads} heads; allowed: "
                f"{', '.join(allowed)}"
            )

    def over(self, rows: int) -> RowShare:
        """Share of a pass over this many rows.

        Raises: ConfigError for fewer rows than ranks.
        """
        if rows < self.world_size:
            raise ConfigError(f"rows are {rows}; allowed: at least one for {self.world_size} ranks")
        small, more = divmod(rows, self.world_size)
        counts = tuple(small + (rank < more) for rank in range(self.world_size))
        return _UlyssesRows(counts=counts, rank=self.rank, group_name=self._group_name)

    def own_heads(self, x_BSNK: Tensor) -> Tensor:
        """Heads of this rank."""
        return x_BSNK.tensor_split(self.world_size, dim=2)[self.rank]

    def whole_heads(self, x_BSnK: Tensor) -> Tensor:
        """All heads; each rank sends its own to every other."""
        send_nBSK = x_BSnK.permute(2, 0, 1, 3).repeat(self.world_size, 1, 1, 1)
        counts = [x_BSnK.shape[2]] * self.world_size
        received_NBSK = exchange_rows(send_nBSK, counts, counts, self._group_name)
        return received_NBSK.permute(1, 2, 0, 3)


def forget(group: dist.ProcessGroup) -> None:
    """Let go of a group that ends: one that outlives the interpreter takes the process with it."""
    _GROUPS.pop(str(group.group_name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _UlyssesRows:
    """A split of rows and its exchanges."""

    counts: tuple[int, ...]
    rank: int
    group_name: str

    @property
    def _own_count(self) -> int:
        return self.counts[self.rank]

    @property
    def _even(self) -> list[int]:
        """What goes to, or comes from, each rank when this rank's rows travel."""
        return [self._own_count] * len(self.counts)

    def own(self, x_BRD: Tensor) -> Tensor:
        """Rows of this rank."""
        if x_BRD.shape[1] == 1:
            return x_BRD
        run = sum(self.counts) // x_BRD.shape[1]
        if run > 1:
            x_BRD = x_BRD.repeat_interleave(run, dim=1)
        start = sum(self.counts[: self.rank])
        return x_BRD[:, start : start + self._own_count]

    def whole(self, x_BRD: Tensor) -> Tensor:
        """All rows. The shares differ in size, so each rank sends its own to every other."""
        send_RBD = x_BRD.transpose(0, 1).repeat(len(self.counts), 1, 1)
        received_RBD = exchange_rows(send_RBD, self._even, self.counts, self.group_name)
        return received_RBD.transpose(0, 1)

    def attend(self, inner: Attend) -> Attend:
        """Exchange before and after."""
        return _UlyssesAttend(inner=inner, rows=self)

    def to_heads(self, *parts_BRNK: Tensor) -> tuple[Tensor, ...]:
        """Parts [B, R, N, K] of own rows and all heads -> views of all rows and own heads."""
        packed_WRBnC = pack_heads(parts_BRNK, len(self.counts))
        received_RBnC = exchange_rows(
            packed_WRBnC.flatten(0, 1), self._even, self.counts, self.group_name
        )
        return received_RBnC.transpose(0, 1).chunk(len(parts_BRNK), dim=-1)

    def to_rows(self, o_BRNK: Tensor) -> Tensor:
        """Attention output of all rows and own heads -> own rows and all heads."""
        # Without a batch the transpose moves nothing: the attention output is already in order.
        send_RBnK = o_BRNK.transpose(0, 1).contiguous()
        received_RBnK = exchange_rows(send_RBnK, self.counts, self._even, self.group_name)
        return merge_heads(received_RBnK.unflatten(0, (len(self.counts), -1)))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _UlyssesAttend:
    """Attention of all rows and own heads, between two exchanges."""

    inner: Attend
    rows: _UlyssesRows

    def __call__(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> Rows:
        """One exchange for queries, keys and values together, one for the output.

        Raises: UnsupportedError for an output in FP8, whose scales would cover a rank's heads only.
        """
        out = self.inner(layer, *self.rows.to_heads(q_BRNK, k_BRNK, v_BRNK))
        if not isinstance(out, Tensor):
            raise UnsupportedError(
                "attention output is FP8; allowed where ranks share a rollout: plain rows"
            )
        return self.rows.to_rows(out)

    def store(self, layer: int, q_BRNK: Tensor, k_BRNK: Tensor, v_BRNK: Tensor) -> None:
        """Leave keys and values where they belong."""
        self.inner.store(layer, *self.rows.to_heads(q_BRNK, k_BRNK, v_BRNK))


@torch.library.custom_op("worldstream::exchange_rows", mutates_args=())
def exchange_rows(
    send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group_name: str
) -> Tensor:
    """Send runs of the first axis to the ranks in turn; return what they sent, in their order.

    An operator, so that a compiler sees one opaque call; its kernels can be captured in a graph,
    since all sizes are fixed by the arguments. Every rank has to call it in the same order.

    Args:
        send: dense.
        send_counts: rows for each rank; their sum is the first axis.
        receive_counts: rows from each rank.
        group_name: of the process group.
    """
    received = send.new_empty((sum(receive_counts), *send.shape[1:]))
    dist.all_to_all_single(received, send, receive_counts, send_counts, group=_GROUPS[group_name])
    return received


@exchange_rows.register_fake
def _(
    send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group_name: str
) -> Tensor:
    return send.new_empty((sum(receive_counts), *send.shape[1:]))
