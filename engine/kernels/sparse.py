"""Attention that reads only a part of its keys, and the rest by summaries of blocks.

    summarize   a block of keys: mean of the keys, sum of the values, length of the longest key
    route       which blocks each tile of queries of a head reads key by key
    attend      softmax over those; every other block j weighs 2^(q mean_j) for each of its keys

A block is read key by key where its score, that of the mean query with the mean key, exceeds
mu + tau sigma over all blocks; so are, always, the first blocks (a sink) and those from one block
before the queries on, which are the last keys themselves. No block is dropped: what is not read has
the weight and the values of its mean. Scores have the factor log2(e) / sqrt(K). Sums are fp32.

q, o are [B, R, N, K], k, v [B, S, N, K] in fp32 or bf16, any strides but a dense last axis.
A block has 64 keys, or fewer (`SPARSE_BLOCKS`): a block as large as a picture of a small world has
a mean that tells nothing of what is where. A tile has twice as many queries.
On a CPU, and for blocks too short for a product on a GPU, the operators are their own oracles
(`sparse_reference`).
Owns the operators and `KeySummary`; kernels are in `sparse_triton` and, for Hopper, `sparse_gluon`.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width, J blocks of keys, T tiles
of queries.

Source: Sol Video Inference Engine report, arXiv 2606.23743 (blocks of 64 queries there: 128 are one
instruction of two groups of warps on Hopper, and read half as much).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import SPARSE_BLOCKS
from engine.errors import ConfigError
from engine.kernels import contract, sparse_reference
from engine.kernels.sparse_reference import block_count, own_block, tile_rows

LEAST_KERNEL_BLOCK = 16
"""Keys of a block in kernels: of a product on a GPU."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class KeySummary:
    """What is kept of the blocks of one window; rewritten in place."""

    mean_BNJK: Tensor
    """Means of the keys, in their dtype."""
    sum_BNJK: Tensor
    """Sums of the values."""
    reach_BNJ: Tensor
    """fp32 length of the longest key."""
    sink_1: Tensor
    """int32 count of the first blocks that are always read key by key: a tensor, because it
    follows the length of the prompt, which nothing recorded or compiled may fix."""
    block: int
    """Keys of a block."""

    @classmethod
    def of(cls, keys_BSNK: Tensor, prefix_rows: int, block: int) -> KeySummary:
        """Room for the summary of some keys; only the sink is set."""
        batch_size, keys, heads, width = keys_BSNK.shape
        shape = (batch_size, heads, block_count(keys, block), width)
        sink = block_count(prefix_rows, block)
        return cls(
            mean_BNJK=keys_BSNK.new_zeros(shape),
            sum_BNJK=keys_BSNK.new_zeros(shape),
            reach_BNJ=keys_BSNK.new_zeros(shape[:3], dtype=torch.float32),
            sink_1=keys_BSNK.new_full((1,), sink, dtype=torch.int32),
            block=block,
        )

    def first(self, keys: int) -> KeySummary:
        """Room for a shorter window, in the front of the same memory."""
        batch_size, heads, _, width = self.mean_BNJK.shape
        shape = (batch_size, heads, block_count(keys, self.block), width)
        planes = batch_size * heads * shape[2]

        def front(tensor: Tensor, count: int) -> Tensor:
            return tensor.view(-1)[:count]

        return KeySummary(
            mean_BNJK=front(self.mean_BNJK, planes * width).view(shape),
            sum_BNJK=front(self.sum_BNJK, planes * width).view(shape),
            reach_BNJ=front(self.reach_BNJ, planes).view(shape[:3]),
            sink_1=self.sink_1,
            block=self.block,
        )

    def set_sink(self, prefix_rows: int) -> None:
        """Let the first blocks be those that hold so many keys."""
        self.sink_1.fill_(block_count(prefix_rows, self.block))

    def renew(self, k_BSNK: Tensor, v_BSNK: Tensor, rows: int | None = None) -> None:
        """Summarize all keys, or what depends on the last ``rows`` of them."""
        summarize(
            k_BSNK, v_BSNK, self.mean_BNJK, self.sum_BNJK, self.reach_BNJ,
            k_BSNK.shape[1] if rows is None else rows, self.block,
        )  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.mean_BNJK, self.sum_BNJK, self.reach_BNJ, self.sink_1


def _kernels_take(x: Tensor, block: int) -> bool:
    return block >= LEAST_KERNEL_BLOCK and contract.kernels_run_on(x)


def _require_block(op: str, block: int) -> None:
    if block not in SPARSE_BLOCKS:
        allowed = ", ".join(map(str, SPARSE_BLOCKS))
        raise ConfigError(f"{op}: block is {block}; allowed: {allowed}")


def require_summary(
    op: str, k_BSNK: Tensor, mean: Tensor, sum_: Tensor, reach: Tensor, block: int
) -> None:
    """Raises: ConfigError unless there is contiguous room for the summary of such keys.

    A kernel may know no more of it than where it is, and would write past what is narrower.
    """
    _require_block(op, block)
    batch_size, keys, heads, width = k_BSNK.shape
    shape = (batch_size, heads, block_count(keys, block), width)
    contract.require_rows(op, k=k_BSNK, mean=mean, sum=sum_)
    for name, tensor, expected in (
        ("mean", mean, shape), ("sum", sum_, shape), ("reach", reach, shape[:3]),
    ):  # fmt: skip
        contract.require_shape(op, name, tensor, expected)
        if not tensor.is_contiguous():
            raise ConfigError(f"{op}: {name} has strides {tensor.stride()}; allowed: contiguous")
    if reach.dtype != torch.float32:
        raise ConfigError(f"{op}: reach is {reach.dtype}; allowed: {torch.float32}")


@torch.library.custom_op(
    "worldstream::summarize", mutates_args=("mean_BNJK", "sum_BNJK", "reach_BNJ")
)
def summarize(
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    rows: int,
    block: int,
) -> None:
    """Write the summaries of the blocks that hold the last ``rows`` of the keys, and of those that
    `route` always reads with them.

    Raises: ConfigError.
    """
    op = "summarize"
    require_summary(op, k_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, block)
    contract.require_rows(op, k=k_BSNK, v=v_BSNK)
    contract.require_shape(op, "v", v_BSNK, tuple(k_BSNK.shape))
    keys = k_BSNK.shape[1]
    if not 1 <= rows <= keys:
        raise ConfigError(f"{op}: rows are {rows}; allowed: 1 to {keys}, the number of keys")
    given = (k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, rows, block)
    if not _kernels_take(k_BSNK, block):
        sparse_reference.summarize(*given)
        return
    from engine.kernels import sparse_triton

    sparse_triton.summarize(*given)


@summarize.register_fake
def _(
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    rows: int,
    block: int,
) -> None:
    return None


@torch.library.custom_op("worldstream::route", mutates_args=("tally_2",))
def route(
    q_BRNK: Tensor,
    mean_BNJK: Tensor,
    sink_1: Tensor,
    tally_2: Tensor,
    keys: int,
    tau: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the blocks that are read key by key.

    Args:
        q_BRNK: the last rows of the window.
        mean_BNJK: of `summarize`.
        sink_1: int32 count of first blocks that are always read.
        tally_2: int64 counts of blocks that were read and of all, which are added to.
        keys: of the window.
        tau: larger reads less.
        block: keys that share a mean.

    Returns int8 [B, N, T, J], 1 where a block is read; int32 [B, N, T, J] and [B, N, T]: the
    numbers of these blocks but the last of all, in order, and their count.

    Raises: ConfigError.
    """
    op = "route"
    batch_size, rows, heads, width = q_BRNK.shape
    _require_block(op, block)
    contract.require_rows(op, q=q_BRNK, mean=mean_BNJK)
    shape = (batch_size, heads, block_count(keys, block), width)
    contract.require_shape(op, "mean", mean_BNJK, shape)
    if not 1 <= rows <= keys or not mean_BNJK.is_contiguous():
        raise ConfigError(
            f"{op}: {rows} queries, {keys} keys, means with strides {mean_BNJK.stride()}; allowed: "
            "as many keys as queries at least, contiguous means"
        )
    for name, tensor, dtype, count in (
        ("sink", sink_1, torch.int32, 1), ("tally", tally_2, torch.int64, 2),
    ):  # fmt: skip
        contract.require_shape(op, name, tensor, (count,))
        if tensor.dtype != dtype:
            raise ConfigError(f"{op}: {name} is {tensor.dtype}; allowed: {dtype}")
    own = own_block(rows, keys, block)
    if not _kernels_take(q_BRNK, block):
        return sparse_reference.route(q_BRNK, mean_BNJK, sink_1, tally_2, own, tau, block)
    from engine.kernels import sparse_triton

    return sparse_triton.route(q_BRNK, mean_BNJK, sink_1, tally_2, own, tau, block)


@route.register_fake
def _(
    q_BRNK: Tensor,
    mean_BNJK: Tensor,
    sink_1: Tensor,
    tally_2: Tensor,
    keys: int,
    tau: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch_size, rows, heads, _ = q_BRNK.shape
    shape = (batch_size, heads, -(-rows // tile_rows(block)), mean_BNJK.shape[2])
    return (
        q_BRNK.new_empty(shape, dtype=torch.int8),
        q_BRNK.new_empty(shape, dtype=torch.int32),
        q_BRNK.new_empty(shape[:3], dtype=torch.int32),
    )


@torch.library.custom_op("worldstream::sparse_attend", mutates_args=())
def attend(
    q_BRNK: Tensor,
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    exact_BNTJ: Tensor,
    list_BNTJ: Tensor,
    count_BNT: Tensor,
    block: int,
) -> Tensor:
    """Return contiguous [B, R, N, K]; summary and routes are those of these very arguments.

    Raises: ConfigError.
    """
    op = "sparse_attend"
    batch_size, rows, heads, width = q_BRNK.shape
    contract.require_rows(op, q=q_BRNK, k=k_BSNK, v=v_BSNK)
    contract.require_shape(op, "k", k_BSNK, (batch_size, k_BSNK.shape[1], heads, width))
    contract.require_shape(op, "v", v_BSNK, tuple(k_BSNK.shape))
    require_summary(op, k_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, block)
    routes = (batch_size, heads, -(-rows // tile_rows(block)), mean_BNJK.shape[2])
    contract.require_shape(op, "exact", exact_BNTJ, routes)
    contract.require_shape(op, "list", list_BNTJ, routes)
    contract.require_shape(op, "count", count_BNT, routes[:3])
    given = (
        q_BRNK, k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, exact_BNTJ, list_BNTJ, count_BNT,
        block,
    )  # fmt: skip
    if not _kernels_take(q_BRNK, block):
        return sparse_reference.attend(*given)
    from engine.kernels import sparse_triton

    if sparse_triton.is_for_hopper(q_BRNK, block):
        from engine.kernels import sparse_gluon

        return sparse_gluon.attend(*given)
    return sparse_triton.attend(*given)


@attend.register_fake
def _(
    q_BRNK: Tensor,
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    exact_BNTJ: Tensor,
    list_BNTJ: Tensor,
    count_BNT: Tensor,
    block: int,
) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)
