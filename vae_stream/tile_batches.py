"""Tiles in batches, on one device or shared by ranks.

Owns which rank decodes which tile, the batches of equal shape, and the gathering. Tile i is slot
i // R of rank i mod R; slots that are left over decode a tile a second time, so that every rank
runs the same batches and gathers the same amount.
Invariant: every rank passes the same tiles and gets all of them back, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def batch_plan(tiles: int, ranks: int, limit: int | None) -> tuple[int, int]:
    """Return how many batches a rank runs and the tiles in each, at most `limit`.

    As few batches as the limit allows, and these as even as possible.
    """
    slots = -(-tiles // ranks)
    batches = 1 if limit is None else -(-slots // limit)
    return batches, -(-slots // batches)


def rank_tiles(tiles: int, rank: int, ranks: int, slots: int) -> tuple[int, ...]:
    """Return the tiles in the slots of a rank; those past the end are others once more."""
    return tuple((slot * ranks + rank) % tiles for slot in range(slots))


class TileBatches:
    """Runs a function of a batch of tiles over many tiles.

    Args:
        decode: from `[B, ...]` to `[B, ...]`; B is the same in all calls for as many tiles.
        limit: most tiles in a batch; None for all at once.
        group: ranks that share the tiles; None for this process alone.
    """

    def __init__(
        self,
        decode: Callable[[Tensor], Tensor],
        *,
        limit: int | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit: {limit}; allowed: 1 or more, or None")
        self._decode = decode
        self._limit = limit
        self._group = group
        self._ranks = dist.get_world_size(group) if group is not None else 1
        self._rank = dist.get_rank(group) if group is not None else 0

    def run(self, tiles: Sequence[Tensor]) -> list[Tensor]:
        """Return what each tile becomes; tiles are of one shape, without a batch axis."""
        batches, size = batch_plan(len(tiles), self._ranks, self._limit)
        own = rank_tiles(len(tiles), self._rank, self._ranks, batches * size)
        made = [
            self._decode(torch.stack([tiles[at] for at in own[start : start + size]]))
            for start in range(0, len(own), size)
        ]
        if self._group is None:
            return [tile for batch in made for tile in batch.unbind(0)][: len(tiles)]
        mine = torch.cat(made)
        everyone = mine.new_empty(self._ranks * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(everyone, mine, group=self._group)
        by_rank = everyone.unflatten(0, (self._ranks, -1))
        return [by_rank[tile % self._ranks, tile // self._ranks] for tile in range(len(tiles))]
