"""Snapshots of a rollout, so that a world comes back without every chunk being made again.

Owns the file: safetensors with the state of the world, and what belongs to it as metadata.
Invariants: a file under its final name is whole; one that is damaged, or of another chunk than its
trace has, counts as none; tensors come back with the layout in memory that they had, as kernels
choose by it and bits depend on kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stream.session import WorldState
from stream.trace import TRACE_SUFFIX

if TYPE_CHECKING:
    from torch import Tensor

SNAPSHOT_CHUNKS = 16
"""So many chunks at most are made again; 11 s of play."""
SNAPSHOT_LIMIT_BYTES = 2**30
"""Of the state: the window of the large model has 24 to 61 GiB, which no disk takes in while
somebody plays. The small world's state has 25 MiB."""
SNAPSHOT_SUFFIX = ".snapshot"
_LAST_FRAME = "last_frame"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A rollout between two chunks."""

    chunk_index: int
    """Of the next chunk."""
    frame_count: int
    digest: str
    """Of everything that was made before."""
    prompt: str
    state: WorldState
    last_frame_HWC: Tensor
    """uint8 RGB, to show until the next chunk."""


def snapshot_file(trace: Path) -> Path:
    """File of the newest snapshot of the rollout that writes this trace."""
    return trace.with_name(trace.name.removesuffix(TRACE_SUFFIX) + SNAPSHOT_SUFFIX)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot of before.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {**snapshot.state.tensors, _LAST_FRAME: snapshot.last_frame_HWC}
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head = {
        "chunk_index": snapshot.chunk_index,
        "frame_count": snapshot.frame_count,
        "digest": snapshot.digest,
        "prompt": snapshot.prompt,
        "values": snapshot.state.values,
        "strides": {name: tensor.stride() for name, tensor in tensors.items()},
        "sha256": _sha256(stored),
    }
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(stored, part, metadata={"snapshot": json.dumps(head)})
    except SafetensorError as error:  # its form of a full disk
        raise OSError(f"{path}: {error}") from error
    os.replace(part, path)


def read_snapshot(path: Path) -> Snapshot | None:
    """Return the snapshot, or None where there is none that is whole."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads(file.metadata()["snapshot"])
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if head["sha256"] != _sha256(stored):
            return None
        tensors = {
            name: torch.empty_strided(
                tensor.shape, head["strides"][name], dtype=tensor.dtype
            ).copy_(tensor)
            for name, tensor in stored.items()
        }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    last_frame_HWC = tensors.pop(_LAST_FRAME)
    return Snapshot(
        chunk_index=head["chunk_index"],
        frame_count=head["frame_count"],
        digest=head["digest"],
        prompt=head["prompt"],
        state=WorldState(tensors=tensors, values=head["values"]),
        last_frame_HWC=last_frame_HWC,
    )


def _sha256(tensors: dict[str, Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()
