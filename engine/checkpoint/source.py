"""A checkpoint of the transformer, recognised by what is in it and checked by its headers.

Owns the recognition: layout, order of queries, keys and values, the pruned form, eight bits; and
`Source`, a plan of which bytes fill which weights. Invariants: names, shapes and dtypes decide,
file names never do; everything that can be wrong is found before anything is allocated.

What cannot be seen, because names, shapes and dtypes are the same: whether a fused projection is
interleaved per head (official shards) or stacked (single files). Unless the caller says otherwise,
what only repackaged files have (a prefix, the pruned form, eight bits) stands for the second, else
several files or an index for the first and one file for the second; and whether weights are FL2VA
or Ref2VA. Both are logged.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine.checkpoint.layouts import (
    CURVE_TABLE,
    DERIVED,
    QKV,
    QkvLayout,
    bare_name,
    diffusers_name,
    to_diffusers,
    to_original,
)
from engine.checkpoint.shards import (
    DTYPES,
    INDEX_PATTERN,
    Shard,
    TensorRecord,
    check_index,
    find_shards,
    read_shard,
)
from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedError
from engine.model.adaln_curve import CurveShape, install_curve
from engine.model.dit import FP32_MODULES, MiniMaxH3Transformer

TEXT_PREFIX = "text_encoder."
INT8_SCALE = ".scale"
FP8_SCALE = ".weight_scale"
FP8_FORMATS = ("float8_e4m3fn",)
DESCRIPTION = ".comfy_quant"
_SIDECARS = (FP8_SCALE, ".input_scale", DESCRIPTION)
_FLOATS = ("F32", "BF16", "F16")
_GB = 1e9

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One weight as it lies on disk."""

    record: TensorRecord
    name: str
    """In the layout of the file, without a prefix."""
    scale: TensorRecord | None
    """Of weights in eight bits."""
    targets: tuple[str, ...]
    """Weights of the model that it fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A checkpoint that fits a model."""

    path: Path
    config: ModelConfig
    layout: Literal["diffusers", "original"]
    qkv: QkvLayout
    curve: CurveShape | None
    """Where modulation comes from a curve (the pruned form)."""
    files: tuple[Path, ...]
    pieces: tuple[Piece, ...]
    text_pieces: tuple[Piece, ...]
    """Of a text encoder that lies beside the transformer."""

    @property
    def nbytes(self) -> int:
        """What is read."""
        return sum(piece.record.nbytes for piece in (*self.pieces, *self.text_pieces))

    @property
    def fp8_factors(self) -> dict[str, int]:
        """Weights that lie in eight bits, and how many factors the tensor of each has."""
        return {
            target: math.prod(piece.scale.shape)
            for piece in self.pieces
            if piece.record.dtype == "F8_E4M3" and piece.scale is not None
            for target in piece.targets
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights under the names of the model."""
        return expected_shapes(self.config, "diffusers", self.curve)

    def split(self, piece: Piece, value: Tensor) -> list[tuple[str, Tensor]]:
        """Rows of a piece, or one value a row, under the names of the model."""
        items = to_diffusers(piece.name, value, self.config, self.qkv)
        return [(item.name, item.tensor) for item in items]

    def __str__(self) -> str:
        """For people."""
        parts = [f"{self.layout} layout"]
        if self.layout == "original":
            parts.append(f"{self.qkv} qkv")
        if self.curve is not None:
            parts.append(f"pruned to a curve of {self.curve.points} x {self.curve.width}")
        if self.fp8_factors:
            parts.append("linears in eight bits")
        parts.append(f"{len(self.files)} files, {self.nbytes / _GB:.2f} GB")
        return ", ".join(parts)


def open_source(
    path: Path, config: ModelConfig, *, qkv: QkvLayout | Literal["auto"] = "auto"
) -> Source:
    """Recognise and check a checkpoint; nothing but headers is read.

    Args:
        path: a folder of shards, with or without an index, or one file.
        config: what it has to fit.
        qkv: order of fused projections; "auto": see above.

    Raises: CheckpointError naming file, tensor, expected and got; UnsupportedError for a format of
        weights that is not served.
    """
    shards = _shards(path, config)
    records = _by_name(shards)
    layout = _layout(records)
    curve = _curve(records)
    is_guessed = qkv == "auto"
    if qkv == "auto":
        is_official = len(shards) > 1 or _has_index(path)
        qkv = "interleaved" if is_official and not _is_repackaged(shards) else "stacked"
    expected = expected_shapes(config, layout, curve)
    source = Source(
        path=path,
        config=config,
        layout=layout,
        qkv=qkv,
        curve=curve,
        files=tuple(shard.path for shard in shards),
        pieces=tuple(_pieces(records, expected, path, config)),
        text_pieces=tuple(_text_pieces(records)),
    )
    _log.info("weights_found %s: %s", path, source)
    if layout == "original" and is_guessed:
        level = logging.INFO if qkv == "interleaved" else logging.WARNING
        _log.log(level, "qkv_assumed %s: names and shapes do not tell; qkv_layout chooses", qkv)
    if not source.text_pieces:
        _log.warning("weights_assumed FL2VA: files of Ref2VA have the same names and shapes")
    return source


def find_curve(path: Path, config: ModelConfig) -> CurveShape | None:
    """Size of the table of a checkpoint in the pruned form, None for any other.

    Raises: CheckpointError, UnsupportedError as `open_source`.
    """
    return _curve(_by_name(_shards(path, config)))


def _shards(path: Path, config: ModelConfig) -> list[Shard]:
    """Headers of the files that hold the transformer."""
    shards = [read_shard(file) for file in find_shards(path)]
    check_index(path, shards)
    shards = [shard for shard in shards if _has_transformer(shard, config)]
    if not shards:
        raise CheckpointError(
            f"{path} holds no transformer of {config.num_layers} blocks; expected tensors such as "
            "transformer_blocks.0.attn.to_q.weight or blocks.0.attn.qkv_proj.weight"
        )
    return shards


def _is_repackaged(shards: Iterable[Shard]) -> bool:
    """Whether there is what official shards never have."""
    names = [name for shard in shards for name in shard.records]
    return any(
        name != bare_name(name) or name == CURVE_TABLE or name.endswith((FP8_SCALE, DESCRIPTION))
        for name in names
    )


def _has_index(path: Path) -> bool:
    return path.is_dir() and any(path.glob(INDEX_PATTERN))


def _has_transformer(shard: Shard, config: ModelConfig) -> bool:
    """Whether most of a file is known: a name or two may be like those of a codec."""
    known = (
        expected_shapes(config, "diffusers", None).keys()
        | expected_shapes(config, "original", None).keys()
    )
    known |= {CURVE_TABLE, DERIVED}
    names = [bare_name(name) for name in shard.records]
    own = [name for name in names if _base(name) in known or name.startswith(TEXT_PREFIX)]
    return bool(names) and 2 * len(own) >= len(names)


def _base(name: str) -> str:
    """Name of the weight that a tensor belongs to."""
    for suffix in _SIDECARS:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ".weight"
    return name.removesuffix(INT8_SCALE)


def _by_name(shards: Iterable[Shard]) -> dict[str, TensorRecord]:
    found: dict[str, TensorRecord] = {}
    for shard in shards:
        for name, record in shard.records.items():
            bare = bare_name(name)
            if bare in found:
                raise CheckpointError(
                    f"{shard.path}: tensor {bare} is in {found[bare].path.name} as well; expected "
                    "files of one model: name one of them"
                )
            found[bare] = record
    return found


def _layout(records: dict[str, TensorRecord]) -> Literal["diffusers", "original"]:
    """Refuse files of both layouts."""
    diffusers = [name for name in records if name.startswith("transformer_blocks.")]
    original = [name for name in records if name.startswith(("blocks.", "final_layer."))]
    if diffusers and original:
        first, second = records[diffusers[0]], records[original[0]]
        raise CheckpointError(
            f"{second.path}: tensor {original[0]} is of the original layout and {diffusers[0]} of "
            f"{first.path.name} of the diffusers layout; expected one layout, got mixed ones"
        )
    return "original" if original else "diffusers"


def _curve(records: dict[str, TensorRecord]) -> CurveShape | None:
    """Size of the table of a pruned file."""
    for name, record in records.items():
        if name.endswith(("adaln_basis", "adaln_mean", "adaln_basis.weight", "folded_bias")):
            raise UnsupportedError(
                f"{record.path}: tensor {name} is of a reduced modulation that is not served; "
                f"allowed: whole weights, or a table {CURVE_TABLE}"
            )
    table = records.get(CURVE_TABLE)
    if table is None:
        return None
    if len(table.shape) != 2 or table.shape[0] < 2:
        raise CheckpointError(
            f"{table.path}: tensor {CURVE_TABLE} has a wrong shape: expected [points, columns], "
            f"got {list(table.shape)}"
        )
    return CurveShape(points=table.shape[0], width=table.shape[1])


@functools.lru_cache(maxsize=8)
def expected_shapes(
    config: ModelConfig, layout: str, curve: CurveShape | None
) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of a layout."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer(config)
    if curve is not None:
        install_curve(model, curve)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if layout == "diffusers":
        return shapes
    # Rows alone move, so columns can be left out of what is moved.
    rows = {name: torch.empty(shape[0], 0) for name, shape in shapes.items()}
    return {
        name: (moved.shape[0], *shapes[targets_of(name)[0]][1:])
        for name, moved in to_original(rows, config).items()
    }


def _pieces(
    records: dict[str, TensorRecord],
    expected: dict[str, tuple[int, ...]],
    path: Path,
    config: ModelConfig,
) -> Iterable[Piece]:
    """One piece a weight, in the order in which they lie on disk."""
    for name, record in records.items():
        if name.endswith(DESCRIPTION):
            _check_description(name, record)
    pieces = []
    for name, record in records.items():
        if name == DERIVED or name.startswith(TEXT_PREFIX):
            continue
        base = _base(name)
        if base != name and base in records:
            continue
        if name not in expected:
            raise CheckpointError(
                f"{record.path}: unknown tensor {name}; expected names of a transformer with "
                f"{config.num_layers} blocks and {config.num_refiner_layers} refiner blocks"
            )
        if record.shape != expected[name]:
            raise CheckpointError(
                f"{record.path}: tensor {name} has a wrong shape: expected "
                f"{list(expected[name])}, got {list(record.shape)}"
            )
        pieces.append(
            Piece(
                record=record,
                name=name,
                scale=_scale(records, name, record),
                targets=targets_of(name),
            )
        )
    missing = expected.keys() - {piece.name for piece in pieces}
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors are missing, first {min(missing)}; expected "
            f"{len(expected)} tensors"
        )
    return sorted(pieces, key=lambda piece: (piece.record.path, piece.record.start))


def targets_of(name: str) -> tuple[str, ...]:
    """Names in the model of a tensor of either layout."""
    new = diffusers_name(name)
    if QKV in name:
        return tuple(new.replace("qkv_proj", f"to_{letter}") for letter in "qkv")
    return (new,)


def _text_pieces(records: dict[str, TensorRecord]) -> Iterable[Piece]:
    for name, record in records.items():
        if name.startswith(TEXT_PREFIX) and not (
            name.endswith(INT8_SCALE) and name.removesuffix(INT8_SCALE) in records
        ):
            scale = _scale(records, name, record)
            yield Piece(record=record, name=name, scale=scale, targets=(name,))


def _scale(
    records: dict[str, TensorRecord], name: str, record: TensorRecord
) -> TensorRecord | None:
    """Return the factor of a weight in eight bits; refuse a dtype that does not belong there.

    Raises: CheckpointError.
    """
    is_island = diffusers_name(name).split(".")[0] in FP32_MODULES
    allowed = ("F32",) if is_island else _FLOATS
    if record.dtype in allowed:
        return None
    stem = name.removesuffix(".weight")
    scale, rows = None, record.shape[0] if record.shape else 1
    if record.dtype == "I8" and not is_island:
        scale = records.get(name + INT8_SCALE)
        if scale is None and stem + FP8_SCALE not in records:
            raise CheckpointError(
                f"{record.path}: int8 tensor {name} has no {name}{INT8_SCALE}; expected one scale "
                "for each row"
            )
    elif record.dtype == "F8_E4M3" and not is_island:
        scale = records.get(stem + FP8_SCALE)
        if scale is None:
            raise CheckpointError(
                f"{record.path}: tensor {name} is F8_E4M3; expected {stem}{FP8_SCALE} beside it"
            )
    if scale is None:
        raise CheckpointError(
            f"{record.path}: tensor {name} has a wrong dtype: expected {' or '.join(allowed)}, got "
            f"{record.dtype}"
        )
    shapes = [(rows,), (rows, 1)] if record.dtype == "I8" else [(), (1,), (rows,), (rows, 1)]
    if scale.dtype != "F32" or scale.shape not in shapes:
        raise CheckpointError(
            f"{scale.path}: tensor {scale.name} is {scale.dtype} {list(scale.shape)}; expected "
            f"F32 {' or '.join(str(list(shape)) for shape in shapes)}"
        )
    return scale


def _check_description(name: str, record: TensorRecord) -> None:
    """Refuse formats in which a weight is not what it seems, by what the file says of it."""
    with record.path.open("rb") as file:
        file.seek(record.start)
        text = file.read(record.nbytes)
    try:
        described: Any = json.loads(text)
        name_of_format = described["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{record.path}: tensor {name} is not json: {error!r}") from error
    if name_of_format not in FP8_FORMATS:
        raise UnsupportedError(
            f"{record.path}: tensor {name} says {name_of_format!r}; allowed: "
            f"{', '.join(map(repr, FP8_FORMATS))}, or plain weights"
        )


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Dtype in torch's terms."""
    return DTYPES[record.dtype]
