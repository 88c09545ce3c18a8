"""Weights from disk into a model, tensor by tensor, straight on its device.

Owns `load_model`, and for every model the mapped files and the two pinned buffers through which
they go to a GPU: while one buffer travels, the next one is filled from the page cache. Invariants:
no tensor is ever whole in host memory on its way to a GPU; no more of a file is mapped than is
being read; weights in eight bits stay so where the model wants them so.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.checkpoint.shards import TensorRecord, read_shard
from engine.checkpoint.source import TEXT_PREFIX, Piece, Source, dtype_of
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.model.adaln_curve import CurveShape, install_curve
from engine.model.dit import MiniMaxH3Transformer
from engine.quant import Fp8Linear
from engine.schemes import Rule
from engine.types import LoadEvent

BUFFER_BYTES = 64 * 2**20
"""Of each of two; enough that starting a copy costs nothing beside the copy."""
_EVENT_S = 0.25

OnLoad = Callable[[LoadEvent], None]


def load_model(
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device,
    text_encoder: nn.Module | None = None,
    eight_bits: Path | None = None,
    fp8_weights: Mapping[str, Rule] | None = None,
    on_progress: OnLoad | None = None,
) -> MiniMaxH3Transformer:
    """Build the transformer and fill it.

    Args:
        source: what `open_source` found.
        dtype: of the blocks; the fp32 islands stay fp32.
        device: where the weights go.
        text_encoder: filled in place (fp32) from tensors named `text_encoder.*`.
        eight_bits: a file of linears that were quantised before (`QuantCache`); what they replace
            is not read.
        fp8_weights: those of the source that shall stay in the eight bits that they lie in, and the
            form of their factors.
        on_progress: called a few times a second.

    Raises: CheckpointError.
    """
    cached = {} if eight_bits is None else read_shard(eight_bits).records
    shapes = source.shapes
    factors = {
        name.removesuffix(".weight"): rule.factors_shape(*shapes[name])
        for name, rule in (fp8_weights or {}).items()
    } | {
        name.removesuffix(".scale"): record.shape
        for name, record in cached.items()
        if name.endswith(".scale")
    }
    model = empty_model(
        source.config, dtype=dtype, device=device, curve=source.curve, fp8_factors=factors
    )
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if text_encoder is not None:
        targets |= dict(text_encoder.named_parameters(prefix=TEXT_PREFIX.rstrip(".")))
    pieces = [piece for piece in source.pieces if any(_wanted(piece, targets))]
    if text_encoder is not None:
        pieces += source.text_pieces
    records = [*cached.values(), *(piece.record for piece in pieces)]
    records += [piece.scale for piece in pieces if piece.scale is not None]
    total = sum(record.nbytes for record in records)
    progress = LoadProgress(total, on_progress)
    missing = set(targets)
    reader = TensorReader(device, progress)
    with torch.no_grad():
        for name, record in cached.items():
            targets[name].copy_(reader.read(record))
            missing.discard(name)
        for piece in pieces:
            for name, value in _values(source, piece, reader, targets):
                targets[name].copy_(value)
                missing.discard(name)
    reader.close()
    progress.end()
    if missing:
        raise CheckpointError(
            f"{source.path}: {len(missing)} tensors are missing, first {min(missing)}; expected "
            f"{len(targets)} tensors"
        )
    return model.requires_grad_(False).eval()


def empty_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    curve: CurveShape | None = None,
    fp8_factors: Mapping[str, tuple[int, ...]] | None = None,
) -> MiniMaxH3Transformer:
    """Transformer with unwritten weights, allocated once in its final dtypes.

    Args:
        config: the model.
        dtype: of the blocks.
        device: where it is.
        curve: size of the table where modulation comes from a curve.
        fp8_factors: shape of the factors of each linear in eight bits, by its name.
    """
    with torch.device("meta"):
        model = MiniMaxH3Transformer(config)
    model.cast_blocks(dtype)
    if curve is not None:
        install_curve(model, curve)
    for name, shape in (fp8_factors or {}).items():
        owner, _, attribute = name.rpartition(".")
        weight = model.get_parameter(f"{name}.weight")
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(shape, dtype=torch.float32, device="meta")
        setattr(model.get_submodule(owner), attribute, Fp8Linear(codes, scale))
    model.to_empty(device=device)
    return model


def _names(target: str) -> tuple[str, str]:
    """Names of a weight in eight bits: codes and factors."""
    stem = target.removesuffix("weight")
    return f"{stem}codes_NK", f"{stem}scale"


def _wanted(piece: Piece, targets: Mapping[str, Tensor]) -> Iterator[bool]:
    """Whether the model has each weight of a piece in the form in which the piece has it."""
    is_fp8 = piece.record.dtype == "F8_E4M3"
    for target in piece.targets:
        yield target in targets or (is_fp8 and _names(target)[0] in targets)


def _values(
    source: Source, piece: Piece, reader: TensorReader, targets: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model that a piece fills."""
    stored = reader.read(piece.record)
    if piece.scale is None:
        yield from _known(source.split(piece, stored), targets)
        return
    factor = reader.read(piece.scale).reshape(-1)
    if any(target in targets for target in piece.targets):
        wide = stored.float() * (factor[:, None] if factor.numel() > 1 else factor)
        yield from _known(source.split(piece, wide), targets)
    if any(_names(target)[0] in targets for target in piece.targets):
        factor_N = factor.expand(stored.shape[0])
        parts = zip(source.split(piece, stored), source.split(piece, factor_N), strict=True)
        for (name, codes_NK), (_, scale_N) in parts:
            codes_name, scale_name = _names(name)
            yield codes_name, codes_NK
            # Of blocks only where one factor stands for all.
            shape = targets[scale_name].shape
            yield scale_name, scale_N if len(shape) == 1 else factor.expand(shape)


def _known(
    parts: list[tuple[str, Tensor]], targets: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in parts:
        if name in targets:
            yield name, value


class WeightReader:
    """Single weights of a source under the names of the model, for whoever wants few of them."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source = source
        self._reader = TensorReader(device)
        self._pieces = {target: piece for piece in source.pieces for target in piece.targets}

    def read(self, name: str) -> Tensor:
        """Return a weight; eight bits are multiplied out. Holds until the next call."""
        wanted = {name: torch.empty(0)}
        values = dict(_values(self._source, self._pieces[name], self._reader, wanted))
        return values[name]


class LoadProgress:
    """Counts bytes and tells about it now and then."""

    def __init__(self, total_bytes: int, on_progress: OnLoad | None) -> None:
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._on_progress = on_progress
        self._begin_s = self._told_s = time.perf_counter()

    def add(self, count: int) -> None:
        """Count bytes that were read."""
        self._done_bytes += count
        if time.perf_counter() - self._told_s >= _EVENT_S:
            self._tell()

    def end(self) -> None:
        """Tell the last time."""
        self._tell()

    def _tell(self) -> None:
        self._told_s = time.perf_counter()
        if self._on_progress is not None:
            self._on_progress(
                LoadEvent(
                    done_bytes=self._done_bytes,
                    total_bytes=self._total_bytes,
                    elapsed_s=self._told_s - self._begin_s,
                )
            )


class TensorReader:
    """Tensors of files on a device."""

    def __init__(self, device: torch.device, progress: LoadProgress | None = None) -> None:
        self._device, self._progress = device, progress or LoadProgress(0, None)
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        if device.type == "cuda":
            self._buffers = [
                (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]
        self._turn = 0

    def read(self, record: TensorRecord) -> Tensor:
        """Return a tensor in the dtype of the file; on a CPU it is a view of the mapped file."""
        dtype = dtype_of(record)
        if self._device.type == "cuda":
            flat = self._send(record)
        else:
            flat = _mapped(record, 0, record.nbytes)
            # A header of an odd length leaves tensors where their dtype cannot be read in place.
            flat = flat if record.start % dtype.itemsize == 0 else flat.clone()
            self._progress.add(record.nbytes)
        return flat.view(dtype).view(record.shape)

    def _send(self, record: TensorRecord) -> Tensor:
        """Bytes of a tensor on the GPU, through the buffers in turn."""
        flat = torch.empty(record.nbytes, dtype=torch.uint8, device=self._device)
        for begin in range(0, record.nbytes, BUFFER_BYTES):
            part = _mapped(record, begin, min(begin + BUFFER_BYTES, record.nbytes))
            buffer, is_free = self._buffers[self._turn]
            self._turn = 1 - self._turn
            is_free.synchronize()
            staged = buffer[: part.numel()].copy_(part)
            flat[begin : begin + part.numel()].copy_(staged, non_blocking=True)
            is_free.record(torch.cuda.current_stream(self._device))
            self._progress.add(part.numel())
        return flat

    def close(self) -> None:
        """Wait for what is under way."""
        for _, is_free in self._buffers:
            is_free.synchronize()


def _mapped(record: TensorRecord, begin: int, end: int) -> Tensor:
    """Map some bytes of a tensor; they count as memory of this process as long as it is held.

    A private mapping counts as writable, which torch wants; nobody writes to it. It is small,
    because a system may refuse one that is larger than its memory.
    """
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    first = record.start + begin
    skipped = first % mmap.ALLOCATIONGRANULARITY
    with record.path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), end - begin + skipped, access=mmap.ACCESS_COPY, offset=first - skipped
        )
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        mapped.madvise(mmap.MADV_SEQUENTIAL)
    return torch.frombuffer(mapped, dtype=torch.uint8)[skipped:]
