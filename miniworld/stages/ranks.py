"""Processes that train together, one on each GPU; a single process is the same code.

Owns: rank, device, averaging of gradients, common decisions. Start several with
``torchrun --nproc-per-node N -m miniworld.train ...``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def start(cls) -> Ranks:
        """Join the processes that torchrun started, or be the only one."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        has_cuda = torch.cuda.is_available()
        device = torch.device("cuda", local) if has_cuda else torch.device("cpu")
        if has_cuda:
            torch.cuda.set_device(device)
        if count > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if has_cuda else "gloo")
        return cls(rank=int(os.environ.get("RANK", "0")), count=count, device=device)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over all processes in place, as one message."""
        if self.count == 1:
            return
        flat = torch.cat([each.flatten() for each in tensors])
        dist.all_reduce(flat)
        flat /= self.count
        parts = flat.split([each.numel() for each in tensors])
        torch._foreach_copy_(
            list(tensors), [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]
        )

    def first_says(self, value: float) -> float:
        """Return the first process's value on all of them, so that they stop together."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared.item())

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()
