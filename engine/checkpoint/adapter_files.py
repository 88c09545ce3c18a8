"""Files of adapters: safetensors, or torch's own for the averages of a training run.

Owns opening them. Invariants: tensors are read one at a time, when they are asked for; a file of
torch's own is opened for its tensors alone, never for code.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.reading import TensorReader
from engine.checkpoint.shards import SAMPLE_BYTES, SAMPLES, digest_samples, read_shard
from engine.errors import CheckpointError

PICKLE_SUFFIX = ".pt"
"""Of torch's own files, which are taken for their tensors alone."""
AVERAGES = "ema.pt"
"""Of a training run, where it wrote no safetensors."""
_FILES = ("adapter_model_ema.safetensors", "adapter_model.safetensors", AVERAGES)
_FLOATS = ("F32", "BF16", "F16")


def find_adapter(path: Path) -> Path:
    """Return the file that is given, or that of a folder as training leaves it.

    Raises: CheckpointError where there is none.
    """
    if path.is_dir():
        for name in _FILES:
            if (path / name).is_file():
                return path / name
        raise CheckpointError(f"{path} has no adapter; expected one of {', '.join(_FILES)}")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; expected an adapter")
    if path.suffix not in (".safetensors", PICKLE_SUFFIX):
        raise CheckpointError(
            f"{path} is {path.suffix or 'nameless'}; expected .safetensors or .pt"
        )
    return path


class StoredTensors:
    """Tensors of a safetensors file.

    Raises: CheckpointError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        shard = read_shard(path)
        self._records = shard.records
        self.metadata = shard.metadata
        self.shapes = {name: record.shape for name, record in shard.records.items()}
        self._readers: dict[torch.device, TensorReader] = {}
        for name, record in shard.records.items():
            if record.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{path}: tensor {name} has a wrong dtype: expected {' or '.join(_FLOATS)}, "
                    f"got {record.dtype}"
                )

    def read(self, name: str, device: torch.device) -> Tensor:
        """Return a tensor on a device."""
        if device not in self._readers:
            self._readers[device] = TensorReader(device)
        return self._readers[device].read(self._records[name])

    def content_hash(self) -> str:
        """Hash names, shapes and eight places of each tensor."""
        digest = hashlib.sha256(json.dumps(self.metadata, sort_keys=True).encode())
        digest_samples(digest, self._records.values())
        return digest.hexdigest()


class PickledTensors:
    """Tensors of a file of torch's own, mapped and not loaded.

    Raises: CheckpointError where there is more in it than tensors.
    """

    def __init__(self, path: Path) -> None:
        try:
            data: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path} is no file of tensors alone: {reason}; expected what torch.load takes "
                "with weights_only"
            ) from error
        data = data.get("shadow", data) if isinstance(data, dict) else data
        if not isinstance(data, dict) or not all(isinstance(v, Tensor) for v in data.values()):
            raise CheckpointError(f"{path} holds no tensors by name; expected them under 'shadow'")
        self._tensors: dict[str, Tensor] = data
        self.metadata: dict[str, str] = {}
        self.shapes = {str(name): tuple(tensor.shape) for name, tensor in data.items()}

    def read(self, name: str, device: torch.device) -> Tensor:
        """Return a tensor on a device."""
        return self._tensors[name].to(device)

    def content_hash(self) -> str:
        """Hash names, shapes and eight places of each tensor."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            step = max(flat.numel() // SAMPLES, SAMPLE_BYTES)
            for begin in range(0, flat.numel(), step):
                digest.update(flat[begin : begin + SAMPLE_BYTES].numpy().tobytes())
        return digest.hexdigest()
