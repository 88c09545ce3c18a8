"""Safetensors files: what their headers promise, whether they keep it, and writing large ones.

Owns headers, the choice of files in a folder, and `write_shard`. The header is read here because a
damaged file has to be refused with the tensor that it breaks off in, before anything is allocated,
and because a shard then goes to a device in pieces. Invariants: headers alone are read; no pickle
is opened; a file that is written appears under its name complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError

INDEX_PATTERN = "*.safetensors.index.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000
_ALIGNMENT = 64
_WRITE_BYTES = 64 * 2**20
SAMPLES, SAMPLE_BYTES = 8, 4096
"""Places of each tensor that `digest_samples` reads, and how much of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """Where a tensor lies in a file."""

    path: Path
    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file by its header."""

    path: Path
    records: dict[str, TensorRecord]
    metadata: dict[str, str]


def read_shard(path: Path) -> Shard:
    """Read a header and hold it against the size of the file.

    Raises: CheckpointError naming the file, and the tensor where one is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 8
        if length > min(size - 8, _HEADER_LIMIT):
            _refuse_other_formats(path, first)
            raise CheckpointError(
                f"{path} is truncated or not safetensors: expected a header of {length} bytes, got "
                f"{max(size - 8, 0)}"
            )
        text = file.read(length)
    try:
        header: Any = json.loads(text)
        metadata = {key: str(value) for key, value in header.pop("__metadata__", {}).items()}
        records = {
            name: TensorRecord(
                path=path,
                name=name,
                dtype=str(entry["dtype"]),
                shape=tuple(int(side) for side in entry["shape"]),
                start=8 + length + int(entry["data_offsets"][0]),
                stop=8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} is truncated or not safetensors: {error!r}") from error
    for record in records.values():
        _check(record, size)
    return Shard(path=path, records=records, metadata=metadata)


def _refuse_other_formats(path: Path, first: bytes) -> None:
    """Name what a file is whose first bytes are the length of no header.

    A pickle runs code when it is read; GGUF orders its bytes otherwise. Headers of 640 bytes and
    some others begin as a pickle does.
    """
    if first[:4] == b"PK\x03\x04" or first[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        raise CheckpointError(f"{path} is a pickle; expected safetensors")
    if first[:4] == b"GGUF":
        raise CheckpointError(f"{path} is GGUF; expected safetensors")


def _check(record: TensorRecord, size: int) -> None:
    if record.stop > size:
        raise CheckpointError(
            f"{record.path} is truncated or not safetensors: tensor {record.name}: expected bytes "
            f"{record.start} to {record.stop}, got {size} bytes in all"
        )
    dtype = DTYPES.get(record.dtype)
    expected = None if dtype is None else math.prod(record.shape) * dtype.itemsize
    if record.nbytes < 0 or (expected is not None and record.nbytes != expected):
        raise CheckpointError(
            f"{record.path}: tensor {record.name} is damaged: {record.dtype} "
            f"{list(record.shape)}: expected {expected} bytes, got {record.nbytes}"
        )


def find_shards(path: Path) -> list[Path]:
    """List the files of a folder that belong together, or the one file that is given.

    An index decides where there is one; else it is every safetensors file.

    Raises: CheckpointError for a file that is missing, or none at all.
    """
    if path.is_file():
        return [path]
    indexes = sorted(path.glob(INDEX_PATTERN))
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise CheckpointError(f"{path} has the indexes {names}; expected one")
    if indexes:
        return _indexed(indexes[0])
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{path} has no *.safetensors files; expected the model's shards{_pickles_in(path)}"
        )
    return found


def _pickles_in(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    pickles = sorted(each.name for each in folder.iterdir() if each.suffix in PICKLE_SUFFIXES)
    return f", got {pickles[0]}, which is a pickle" if pickles else ""


def _indexed(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name}; expected files of its own folder")
        if Path(name).suffix in PICKLE_SUFFIXES:
            raise CheckpointError(f"{index} names {name}, a pickle; expected safetensors")
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent / name} is missing; {index.name} lists it, one of {len(names)} "
                f"shards, for {_first(weight_map, name)}"
            )
    return [index.parent / name for name in names]


def check_index(folder: Path, shards: Iterable[Shard]) -> None:
    """Hold the index of a folder, where it has one, against the headers.

    Raises: CheckpointError naming the tensor that is not where the index says.
    """
    by_name = {shard.path.name: shard for shard in shards}
    for index in folder.glob(INDEX_PATTERN) if folder.is_dir() else ():
        for tensor, name in json.loads(index.read_text())["weight_map"].items():
            if tensor not in by_name[name].records:
                raise CheckpointError(
                    f"{folder / name}: tensor {tensor} is missing; {index.name} lists it there"
                )


def indexed_names(folder: Path) -> frozenset[str]:
    """Names of all tensors that the indexes of a folder list, whether or not their files are there.

    An index that cannot be read lists none here; `find_shards` refuses it.
    """
    names: set[str] = set()
    for index in folder.glob(INDEX_PATTERN):
        with suppress(OSError, ValueError, KeyError, TypeError):
            names |= set(json.loads(index.read_text())["weight_map"])
    return frozenset(names)


def _first(weight_map: Mapping[str, str], file: str) -> str:
    return min(tensor for tensor, name in weight_map.items() if name == file)


def digest_samples(digest: hashlib._Hash, records: Iterable[TensorRecord]) -> None:
    """Add names, shapes and some places of each tensor to a hash.

    Two models of one kind have the same headers, and reading 66 GB would take most of a minute.
    """
    by_file: dict[Path, list[TensorRecord]] = {}
    for record in records:
        by_file.setdefault(record.path, []).append(record)
    for path, inside in sorted(by_file.items()):
        with path.open("rb") as file:
            for record in sorted(inside, key=lambda each: each.start):
                digest.update(f"{record.name} {record.dtype} {record.shape}".encode())
                step = max(record.nbytes // SAMPLES, SAMPLE_BYTES)
                for begin in range(record.start, record.stop, step):
                    file.seek(begin)
                    digest.update(file.read(min(SAMPLE_BYTES, record.stop - begin)))


def write_shard(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterator[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of any size, tensor by tensor; it appears once it is complete.

    Args:
        path: replaced if it is there.
        entries: dtype and shape by name, in the order of ``tensors``.
        tensors: from any device; each is taken when its turn comes.
        metadata: text that the header carries.

    Raises: OSError, after which nothing is left of the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in entries.items():
        stop = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop],
        }  # fmt: skip
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for (dtype, shape), tensor in zip(entries.values(), tensors, strict=True):
                assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                for begin in range(0, flat.numel(), _WRITE_BYTES):
                    file.write(flat[begin : begin + _WRITE_BYTES].cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
