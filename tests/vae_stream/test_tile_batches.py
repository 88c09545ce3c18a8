"""Batches of tiles, alone and shared by ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.vae_stream.h3_tiny import random_vit
from vae_stream.tile_batches import TileBatches, batch_plan, rank_tiles
from vae_stream.tiling import Tiling
from vae_stream.windowed import WindowedDecoder

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("tiles", "ranks", "limit", "plan"),
    [
        (28, 8, None, (1, 4)),  # a window at 1344x768: 4 of 32 slots are duplicates
        (196, 8, None, (1, 25)),  # seven windows together: 200 slots, 4 duplicates
        (56, 8, None, (1, 7)),  # two windows: no duplicate
        (28, 1, None, (1, 28)),
        (28, 1, 8, (4, 7)),
        (3, 2, 1, (2, 1)),
        (1, 4, 3, (1, 1)),
    ],
)
def test_batches_are_few_and_even(
    tiles: int, ranks: int, limit: int | None, plan: tuple[int, int]
) -> None:
    assert batch_plan(tiles, ranks, limit) == plan


@pytest.mark.parametrize(("tiles", "ranks"), [(196, 8), (28, 8), (5, 2), (1, 4), (7, 7)])
def test_each_tile_has_its_slot_and_left_over_slots_repeat_others(tiles: int, ranks: int) -> None:
    slots = batch_plan(tiles, ranks, None)[1]

    owned = [rank_tiles(tiles, rank, ranks, slots) for rank in range(ranks)]

    assert all(owned[tile % ranks][tile // ranks] == tile for tile in range(tiles))
    assert all(len(each) == slots for each in owned)
    counts = Counter(tile for each in owned for tile in each)
    assert set(counts) == set(range(tiles))


def test_tiles_come_back_in_order_without_the_duplicates() -> None:
    sizes: list[int] = []

    def decode(batch: Tensor) -> Tensor:
        sizes.append(batch.shape[0])
        return batch * 10

    made = TileBatches(decode, limit=2).run([torch.full((2,), float(n)) for n in range(5)])

    assert sizes == [2, 2, 2]
    assert [tile.tolist() for tile in made] == [[10.0 * n] * 2 for n in range(5)]


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="limit: 0; allowed: 1 or more"):
        TileBatches(lambda batch: batch, limit=0)


def clip(group: dist.ProcessGroup | None) -> Tensor:
    """Pictures of 8 latents pushed, and of 13 together: 3 tiles in each window."""
    decoder = WindowedDecoder(
        random_vit(),
        height_px=32,
        width_px=64,
        tiling=Tiling(tile_px=32, overlap_px=16),
        tile_batch=1,
        group=group,
    )
    generator = torch.Generator().manual_seed(1)
    latents_BCTHW = torch.randn(1, 24, 13, 2, 4, generator=generator)
    state = decoder.new_state()
    pushed = [c for n in range(8) for c in decoder.push(state, latents_BCTHW[:, :, n])]
    pushed += decoder.flush(state)
    whole = decoder.decode_clip(latents_BCTHW)
    return torch.cat([*(chunk.frames_THWC for chunk in pushed), whole])


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.save(clip(dist.group.WORLD), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_make_the_pictures_of_one_process(tmp_path: Path) -> None:
    ranks = 2  # 3 or 9 tiles: one rank decodes one twice
    mp.spawn(run_rank, args=(ranks, str(tmp_path)), nprocs=ranks)

    alone = clip(None)
    assert alone.shape == (26 + 43, 32, 64, 3)
    for rank in range(ranks):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), alone)
