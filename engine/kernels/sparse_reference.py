"""Plain forms of `sparse`: oracles of its kernels, and what runs on a CPU.

Owns the formulas in torch, and how keys and queries are parted. Shapes and names: see `sparse`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_VARIANCE_FLOOR = 1e-6


def tile_rows(block: int) -> int:
    """Queries that share a route, where so many keys share a summary."""
    return 2 * block


def block_count(keys: int, block: int) -> int:
    """Blocks of ``block`` keys, the last of which may be short."""
    return -(-keys // block)


def own_block(rows: int, keys: int, block: int) -> int:
    """First block from ``block`` keys before the queries on, which are the last of the keys."""
    return max(0, keys - rows - block) // block


def score_scale(width: int) -> float:
    """Factor of scores in powers of two, of heads of that width."""
    return math.log2(math.e) / math.sqrt(width)


def lengths(blocks: int, keys: int, block: int, like: Tensor) -> Tensor:
    """Keys of each block, [J], in the dtype of ``like``."""
    begins = torch.arange(blocks, device=like.device) * block
    return (keys - begins).clamp(max=block).to(like.dtype)


def summarize(
    k_BSNK: Tensor,
    v_BSNK: Tensor,
    mean_BNJK: Tensor,
    sum_BNJK: Tensor,
    reach_BNJ: Tensor,
    rows: int,
    block: int,
) -> None:
    """Write the summaries of the blocks from that of `own_block` on."""
    keys = k_BSNK.shape[1]
    first = own_block(rows, keys, block)
    begin = first * block
    blocks = block_count(keys, block) - first
    pad = blocks * block - (keys - begin)

    def parted(x_BSNK: Tensor) -> Tensor:
        x_BNSK = _wide(x_BSNK[:, begin:].transpose(1, 2))
        return F.pad(x_BNSK, (0, 0, 0, pad)).unflatten(2, (blocks, block))

    k_BNJsK = parted(k_BSNK)
    counts_J = lengths(block_count(keys, block), keys, block, k_BNJsK)[first:]
    mean_BNJK[:, :, first:] = k_BNJsK.sum(3) / counts_J[:, None]
    sum_BNJK[:, :, first:] = parted(v_BSNK).sum(3)
    reach_BNJ[:, :, first:] = k_BNJsK.square().sum(-1).amax(-1).sqrt()


def route(
    q_BRNK: Tensor,
    mean_BNJK: Tensor,
    sink_1: Tensor,
    tally_2: Tensor,
    own: int,
    tau: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the blocks of each tile; those from ``own`` on are always among them."""
    rows, blocks = q_BRNK.shape[1], mean_BNJK.shape[2]
    tile = tile_rows(block)
    tiles = -(-rows // tile)
    q_BNRK = F.pad(_wide(q_BRNK.transpose(1, 2)), (0, 0, 0, tiles * tile - rows))
    begins = torch.arange(tiles, device=q_BRNK.device) * tile
    counts_T = (rows - begins).clamp(max=tile).to(q_BNRK.dtype)
    mean_query_BNTK = q_BNRK.unflatten(2, (tiles, tile)).sum(3) / counts_T[:, None]
    scores_BNTJ = score_scale(q_BRNK.shape[-1]) * mean_query_BNTK @ _wide(mean_BNJK).mT
    variance = scores_BNTJ.var(-1, unbiased=False, keepdim=True)
    limit = scores_BNTJ.mean(-1, keepdim=True) + tau * (variance + _VARIANCE_FLOOR).sqrt()
    index_J = torch.arange(blocks, device=q_BRNK.device)
    exact_BNTJ = (scores_BNTJ > limit) | (index_J < sink_1) | (index_J >= own)
    tally_2[0] += exact_BNTJ.sum()
    tally_2[1] += exact_BNTJ.numel()
    listed = exact_BNTJ & (index_J < blocks - 1)
    order = torch.argsort(listed.to(torch.int8), dim=-1, descending=True, stable=True)
    return exact_BNTJ.to(torch.int8), order.to(torch.int32), listed.sum(-1, dtype=torch.int32)


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
    """Softmax over all keys and all means, of which those are masked that do not count.

    Weights are relative to the largest one and rounded to the dtype of the rows before they meet
    the values, as in any product of that dtype.
    """
    keys, dtype = k_BSNK.shape[1], q_BRNK.dtype
    q, k, v = (_wide(part.transpose(1, 2)) for part in (q_BRNK, k_BSNK, v_BSNK))
    mean, sum_ = _wide(mean_BNJK), _wide(sum_BNJK)
    counts_J, scale = lengths(mean.shape[2], keys, block, q), score_scale(q_BRNK.shape[-1])
    out = []
    # Tile by tile: scores of all rows at once would be gigabytes.
    for tile, q_tile in enumerate(q.split(tile_rows(block), dim=2)):
        is_read = exact_BNTJ[:, :, tile, None] != 0
        of_keys = scale * q_tile @ k.mT
        is_key_read = is_read.repeat_interleave(block, dim=-1)[..., :keys]
        of_keys = of_keys.masked_fill(~is_key_read, -math.inf)
        of_means = (scale * q_tile @ mean.mT).masked_fill(is_read, -math.inf)
        top = torch.maximum(of_keys.amax(-1, keepdim=True), of_means.amax(-1, keepdim=True))
        by_keys, by_means = torch.exp2(of_keys - top), torch.exp2(of_means - top)
        total = by_keys.sum(-1, keepdim=True) + (by_means * counts_J).sum(-1, keepdim=True)
        made = by_keys.to(dtype).to(q.dtype) @ v + by_means.to(dtype).to(q.dtype) @ sum_
        out.append(made / total)
    return torch.cat(out, dim=2).transpose(1, 2).to(dtype).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
