"""What each process of the tests of `engine.parallel` runs; results go to one file a rank."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from engine.attention.placement import PlacementOps
from engine.config import Geometry, ModelConfig
from engine.core import CoreOptions, RolloutCore
from engine.kernels.exchange import merge_heads_reference, pack_heads_reference
from engine.parallel import Alone, Exchange, Ulysses
from engine.prefix import PrefixInputs
from graphs.capture import CudaCapture
from graphs.runner import GraphRunner
from tests.tiny import chunk_noise, random_prefix, tiny_config, unpacked_model, walk_views

CHUNKS = 8
PLAIN = CoreOptions(prefix_cache=False, adaln_tables=False, packed_history=False)
CASES = {"cached": (CoreOptions(), CHUNKS, 2), "plain": (PLAIN, 2, 1)}
"""Options, chunks, batch."""
CPU = torch.device("cpu")


def ranks_config() -> ModelConfig:
    """6 heads; 15 rows a chunk and 29 of the prefix, so that neither 2 nor 3 ranks share both."""
    return tiny_config(
        num_attention_heads=6,
        attention_head_dim=32,
        rope_freq_dim=4,
        num_layers=2,
        audio_latent_count=7,
        geometry=Geometry(height_px=32, width_px=96),
    )


def rollout(
    exchange: Exchange,
    options: CoreOptions,
    chunks: int,
    batch_size: int,
    *,
    device: torch.device = CPU,
    runner: GraphRunner | None = None,
) -> Tensor:
    """Latents of a walk with given latents, an undo and another prompt of another length."""
    config = ranks_config()
    model = unpacked_model(config).to(device)
    core = RolloutCore(model, options, ops=PlacementOps(), exchange=exchange, runner=runner)

    def prefix(**changes: int) -> PrefixInputs:
        made = random_prefix(config, batch_size=batch_size, **changes)
        names = [field.name for field in dataclasses.fields(made)]
        return PrefixInputs(**{name: getattr(made, name).to(device) for name in names})

    views_BT44 = walk_views(config, chunks).expand(batch_size, -1, -1, -1)
    state = core.begin(prefix())
    made = []
    for index in range(chunks):
        start, *step_noise = (each.to(device) for each in chunk_noise(config, index, batch_size))
        views = views_BT44[:, 5 * index : 5 * index + 5]
        if index == chunks - 1:
            core.switch_prefix(state, prefix(seed=1, text_rows=7))
        latents_BCTHW = core.denoise(state, start, step_noise, views)
        core.refresh(state, latents_BCTHW)
        if index == 1:
            state.cache.undo()
            latents_BCTHW = core.denoise(
                state, start, step_noise, views, leading_BCTHW=latents_BCTHW[:, :, :2]
            )
            core.refresh(state, latents_BCTHW)
        made.append(latents_BCTHW)
    return torch.stack(made).cpu()


def movements(exchange: Ulysses, device: torch.device = CPU) -> dict[str, bool]:
    """Whether each exchange moves every bit to where the permutes say."""
    generator = torch.Generator().manual_seed(3)
    rows, heads, ranks, rank = 11, 6, exchange.world_size, exchange.rank
    outcome = {}
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = torch.randn(3, 2, rows, heads, 8, generator=generator).to(device, dtype)
        share = exchange.over(rows)
        mine = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        got = share.to_heads(*(share.own(part) for part in (q, k, v)))
        expected = [part[:, :, mine] for part in (q, k, v)]
        outcome[f"to_heads {dtype}"] = all(map(torch.equal, got, expected))
        outcome[f"to_rows {dtype}"] = torch.equal(share.to_rows(q[:, :, mine]), share.own(q))
        outcome[f"whole {dtype}"] = torch.equal(share.whole(share.own(v.flatten(2))), v.flatten(2))
        outcome[f"own heads {dtype}"] = torch.equal(exchange.own_heads(q), q[:, :, mine])
        outcome[f"whole heads {dtype}"] = torch.equal(exchange.whole_heads(q[:, :, mine]), q)
        packed = pack_heads_reference([q, k], ranks)
        joined = merge_heads_reference(packed)
        together = torch.cat([q.unflatten(2, (ranks, -1)), k.unflatten(2, (ranks, -1))], dim=-1)
        outcome[f"references {dtype}"] = torch.equal(joined, together.flatten(2, 3))
    return outcome


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """Do everything above as one of several ranks."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    exchange = Ulysses(6, group)
    latents = {name: rollout(exchange, *case) for name, case in CASES.items()}
    torch.save((latents, movements(exchange)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run_cuda_rank(rank: int, ranks: int, folder: str) -> None:
    """The same over NCCL, with and without graphs, and what one rank alone makes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    store = f"file://{folder}/store"
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=ranks, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    exchange = Ulysses(6, group)
    options = CoreOptions()
    latents = {
        "single": rollout(Alone(), options, CHUNKS, 1, device=device),
        "shared": rollout(exchange, options, CHUNKS, 1, device=device),
    }
    runner = GraphRunner(CudaCapture(device))
    latents["graphs"] = rollout(exchange, options, CHUNKS, 1, device=device, runner=runner)
    moved = movements(exchange, device) | {"recorded": len(runner.entries) > 0}
    runner.close()
    torch.save((latents, moved), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run_ranks(
    ranks: int, folder: Path, run: Callable[[int, int, str], None] = run_rank
) -> list[tuple[dict[str, Tensor], dict[str, bool]]]:
    """Start the ranks and return what each has made."""
    mp.start_processes(run, args=(ranks, str(folder)), nprocs=ranks, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def alone() -> dict[str, Tensor]:
    """The same rollouts by one process without any exchange."""
    return {name: rollout(Alone(), *case) for name, case in CASES.items()}
