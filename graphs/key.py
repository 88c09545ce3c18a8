"""Names of captured graphs: which pass, over how many rows.

Owns `GraphKey`, which is also the label in logs and lists. Invariant: two passes with equal keys
run the same kernels over the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Phase(StrEnum):
    """What a pass is for."""

    SPARSE_DENOISE = "sparse denoise"
    """Reads a part of the window."""
    DENOISE = "denoise"
    REFRESH = "refresh"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    """Everything that decides the shapes of one pass.

    Raises: ValueError for a count that cannot be.
    """

    phase: Phase
    rows: int
    """Of the chunk."""
    history_rows: int
    prefix_rows: int
    dtype: torch.dtype
    batch: int

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("history_rows", 0), ("prefix_rows", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}; allowed: {least} or more")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.phase} {self.rows} rows over {self.prefix_rows}+{self.history_rows}, "
            f"batch {self.batch}, {dtype}"
        )
