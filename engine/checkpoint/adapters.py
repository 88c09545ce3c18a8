"""Adapters on disk: which low-rank factors belong to which linear, whoever wrote them.

Owns the keys of the formats below and `Adapter`, in which all of them look alike. Invariants: keys
and shapes are checked against the model before anything is read; a file of torch's own is opened
for its tensors alone, never for code; factors are read when they are asked for, one pair at a time.

| written by | keys |
|---|---|
| PEFT, diffusers, SolarWM, LightX2V | `transformer_blocks.N.attn.to_q.lora_A.weight`, `lora_B` |
| ComfyUI, ai-toolkit | `blocks.N.attn.qkv_proj.lora_A.weight`: fused, stacked |
| DiffSynth | `blocks.N.attn.qkv_proj.lora_A.default.weight`: fused, interleaved per head |
| kohya, musubi | `lora_unet_blocks_N_attn_qkv_proj.lora_down.weight`, `lora_up`, `alpha` |
| FastVideo | as PEFT, and `.diff`, `.diff_b` to be added, `.set_weight` to be put in place |

The factor of B A is alpha / rank; alpha stands beside the factors, in the file's metadata, in an
`adapter_config.json` beside it, or is the rank. Source: the public loaders of these projects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from engine.checkpoint.adapter_files import (
    PICKLE_SUFFIX,
    PickledTensors,
    StoredTensors,
    find_adapter,
)
from engine.checkpoint.layouts import QKV, QkvLayout, to_diffusers
from engine.checkpoint.source import expected_shapes, targets_of
from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedError
from engine.model.adaln_curve import CurveShape

_log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
Part = Literal["a", "b", "alpha", "diff", "diff_b", "set"]
_SUFFIXES: tuple[tuple[str, Part], ...] = (
    (".lora_A.weight", "a"),
    (".lora_B.weight", "b"),
    (".lora_down.weight", "a"),
    (".lora_up.weight", "b"),
    (".alpha", "alpha"),
    (".diff_b", "diff_b"),
    (".diff", "diff"),
    (".set_weight", "set"),
)
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_PREFIXES = (
    "base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.",
    "transformer_ref.", "module.",
)  # fmt: skip
_FLAT_PREFIX = "lora_unet_"
_UNUSED_STEM = ".attn.to_gate_compress"
"""Gate of a sparse attention; the dense one has no place for it."""
_CONFIG = "adapter_config.json"


class Factors(NamedTuple):
    """W + scale B A."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Keys of the factors of one linear; several linears share those of a fused one."""

    a: str
    b: str
    weight: str
    """Name of the weight in the layout of the file."""
    scale: float
    rank: int
    shape: tuple[int, ...]
    """Of the linear in the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    key: str
    weight: str
    is_replacement: bool


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Adapter:
    """Low-rank factors and whole changes under the names of the model."""

    path: Path
    pairs: Mapping[str, _Pair]
    """By name of the linear."""
    changes: Mapping[str, _Change]
    """By name of the parameter."""
    content_hash: str
    _config: ModelConfig = field(repr=False)
    _qkv: QkvLayout
    _read: Callable[[str, torch.device], Tensor] = field(repr=False)

    @property
    def parameter_count(self) -> int:
        """Elements of all factors as they are used, shared ones counted for each linear."""
        return sum(pair.rank * sum(pair.shape) for pair in self.pairs.values())

    @property
    def scales(self) -> frozenset[float]:
        """Factors of B A that occur."""
        return frozenset(pair.scale for pair in self.pairs.values())

    def factors(self, linear: str, device: torch.device) -> Factors:
        """Read the factors of a linear, in the dtypes of the file."""
        pair = self.pairs[linear]
        b_NR = self._part(pair.weight, f"{linear}.weight", self._read(pair.b, device))
        return Factors(self._read(pair.a, device), b_NR, pair.scale)

    def delta(self, linear: str, device: torch.device) -> Tensor | None:
        """Return scale B A in fp32 [N, K], or None for a linear without factors."""
        if linear not in self.pairs:
            return None
        a_RK, b_NR, scale = self.factors(linear, device)
        return (b_NR.float() @ a_RK.float()).mul_(scale)

    def changed(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter as this adapter wants it, in fp32 where it adds."""
        change = self.changes[name]
        stored = self._read(change.key, value.device)
        given = self._part(change.weight, name, stored)
        return given if change.is_replacement else value.float() + given.float()

    def _part(self, weight: str, name: str, rows: Tensor) -> Tensor:
        """Rows of a fused tensor that belong to one parameter."""
        items = to_diffusers(weight, rows, self._config, self._qkv)
        return next(item.tensor for item in items if item.name == name)

    def __str__(self) -> str:
        """For people."""
        ranks = sorted({pair.rank for pair in self.pairs.values()})
        scales = ", ".join(f"{scale:g}" for scale in sorted(self.scales))
        text = f"{len(self.pairs)} linears, ranks {ranks}, scales {scales}"
        return text + (f", {len(self.changes)} whole changes" if self.changes else "")


def open_adapter(path: Path, config: ModelConfig, curve: CurveShape | None = None) -> Adapter:
    """Recognise an adapter and check it against a model; no factor is read.

    Args:
        path: a file, or a folder as training leaves it.
        config: the model.
        curve: where its modulation comes from a curve.

    Raises: CheckpointError naming file, tensor, expected and got; UnsupportedError.
    """
    file = find_adapter(path)
    store = PickledTensors(file) if file.suffix == PICKLE_SUFFIX else StoredTensors(file)
    shapes: dict[str, Shapes] = {
        layout: expected_shapes(config, layout, curve) for layout in ("diffusers", "original")
    }
    stems = _by_stem(file, store.shapes, shapes)
    layout = _layout(file, stems, shapes)
    pairs: dict[str, _Pair] = {}
    changes: dict[str, _Change] = {}
    alphas = _Alphas(file, store)
    linears = {name: _linears(shapes[name]) for name in shapes}
    for stem, keys in stems.items():
        if "a" in keys or "b" in keys:
            pair = _pair(file, store.shapes, stem, keys, linears[layout].get(stem), alphas)
            pairs |= {
                name: dataclasses.replace(pair, shape=linears["diffusers"][name])
                for name in (each.removesuffix(".weight") for each in targets_of(pair.weight))
            }
        changes |= _changes(file, store.shapes, stem, keys, shapes[layout])
    if not pairs and not changes:
        raise CheckpointError(f"{file} has no factors; expected keys such as ....lora_A.weight")
    is_interleaved = any(".default." in key and QKV in key for key in store.shapes)
    scales = sorted((name, pair.scale) for name, pair in pairs.items())
    label = f"{store.content_hash()} {scales} {is_interleaved}"
    adapter = Adapter(
        path=file, pairs=pairs, changes=changes,
        content_hash=hashlib.sha256(label.encode()).hexdigest(),
        _config=config, _qkv="interleaved" if is_interleaved else "stacked", _read=store.read,
    )  # fmt: skip
    _log.info("adapter_found %s: %s", file, adapter)
    return adapter


def _layout(
    file: Path, stems: Mapping[str, Mapping[Part, str]], shapes: Mapping[str, Shapes]
) -> str:
    """Layout that all names are of.

    Raises: CheckpointError for names of both.
    """
    of_both = _names(shapes["diffusers"]) & _names(shapes["original"])
    by_layout = {
        layout: [stem for stem in stems if stem in _names(shapes[layout]) - of_both]
        for layout in shapes
    }
    if all(by_layout.values()):
        first, second = (next(iter(stems[names[0]].values())) for names in by_layout.values())
        raise CheckpointError(
            f"{file}: tensor {first} is of the diffusers layout and {second} of the original one; "
            "expected one layout, got mixed ones"
        )
    return "original" if by_layout["original"] else "diffusers"


def _names(shapes: Shapes) -> set[str]:
    """Names of modules."""
    return {name.removesuffix(".weight").removesuffix(".bias") for name in shapes}


def _linears(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Linears of a layout by name, without `.weight`."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def _by_stem(file: Path, keys: Shapes, shapes: Mapping[str, Shapes]) -> dict[str, dict[Part, str]]:
    """Keys of each linear or parameter, by the name that its layout has for it."""
    known = _names(shapes["diffusers"]) | _names(shapes["original"])
    flat = {name.replace(".", "_"): name for name in known}
    found: dict[str, dict[Part, str]] = {}
    unused_count = 0
    for key in keys:
        stem, part = _split(file, key)
        if stem.startswith(_FLAT_PREFIX):
            stem = flat.get(stem.removeprefix(_FLAT_PREFIX), stem)
        if stem.endswith(_UNUSED_STEM):
            unused_count += 1
            continue
        if stem not in known:
            raise CheckpointError(
                f"{file}: unknown tensor {key}; expected linears of this transformer, such as "
                "transformer_blocks.0.attn.to_q or blocks.0.attn.qkv_proj"
            )
        parts = found.setdefault(stem, {})
        if part in parts:
            raise CheckpointError(f"{file}: tensors {parts[part]} and {key} are the same factor")
        parts[part] = key
    if unused_count:
        _log.warning("adapter_part_unused tensors=%d: attention is dense here", unused_count)
    return found


def _split(file: Path, key: str) -> tuple[str, Part]:
    name = key.replace(".default.", ".")
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while prefix := next((each for each in _PREFIXES if name.startswith(each)), None):
        name = name[len(prefix) :]
    for suffix, part in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    if "dora_scale" in key or "lora_magnitude_vector" in key:
        raise UnsupportedError(f"{file}: tensor {key} is of DoRA; allowed: factors A and B alone")
    raise CheckpointError(
        f"{file}: unknown tensor {key}; expected names that end in "
        f"{', '.join(suffix for suffix, _ in _SUFFIXES)}"
    )


class _Alphas:
    """What B A is multiplied by."""

    def __init__(self, file: Path, store: StoredTensors | PickledTensors) -> None:
        self._store = store
        described = _described(file, store.metadata)
        for name in ("use_dora", "alpha_pattern"):
            if described.get(name):
                raise UnsupportedError(
                    f"{file}: {name} is {described[name]!r}; allowed: one alpha for all factors"
                )
        alpha = described.get("lora_alpha", described.get("alpha"))
        try:
            self._alpha = None if alpha is None else float(alpha)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: alpha is {alpha!r}; expected a number") from error
        self._is_stabilised = bool(described.get("use_rslora"))

    def scale(self, key: str | None, rank: int) -> float:
        """Factor for a pair of a rank; `key` is of its own alpha."""
        alpha = self._alpha if self._alpha is not None else float(rank)
        if key is not None:
            alpha = float(self._store.read(key, torch.device("cpu")).reshape(-1)[0])
        return alpha / (math.sqrt(rank) if self._is_stabilised else rank)


def _described(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What the file, or one beside it, says of all its factors."""
    path = file.with_name(_CONFIG)
    texts = {"ss_network_alpha": "alpha", "lora_alpha": "lora_alpha", "alpha": "alpha"}
    found: dict[str, Any] = {new: metadata[old] for old, new in texts.items() if old in metadata}
    try:
        if path.is_file():
            found = dict(json.loads(path.read_text())) | found
        if "lora_adapter_metadata" in metadata:
            given = dict(json.loads(metadata["lora_adapter_metadata"]))
            found |= {name.rpartition(".")[2]: value for name, value in given.items()}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: its description is not usable: {error}") from error
    return found


def _pair(
    file: Path,
    found: Shapes,
    stem: str,
    keys: Mapping[Part, str],
    shape: tuple[int, ...] | None,
    alphas: _Alphas,
) -> _Pair:
    """Factors of a linear as it is in the file."""
    key_a, key_b = keys.get("a"), keys.get("b")
    if key_a is None or key_b is None:
        raise CheckpointError(
            f"{file}: tensor {key_a or key_b} has no partner; expected both factors of {stem}"
        )
    if shape is None:
        raise CheckpointError(f"{file}: tensor {key_a} is for {stem}; expected a linear")
    rank = found[key_a][0] if found[key_a] else 0
    if found[key_a] != (rank, shape[1]) or rank < 1:
        _refuse(file, key_a, stem, f"[rank, {shape[1]}]", found[key_a])
    if found[key_b] != (shape[0], rank):
        _refuse(file, key_b, stem, f"[{shape[0]}, {rank}]", found[key_b])
    scale = alphas.scale(keys.get("alpha"), rank)
    return _Pair(a=key_a, b=key_b, weight=f"{stem}.weight", scale=scale, rank=rank, shape=shape)


def _changes(
    file: Path, found: Shapes, stem: str, keys: Mapping[Part, str], shapes: Shapes
) -> dict[str, _Change]:
    """Whole changes of a module, by parameter."""
    changes: dict[str, _Change] = {}
    for key, name in (
        (keys.get("diff"), "weight"), (keys.get("set"), "weight"), (keys.get("diff_b"), "bias"),
    ):  # fmt: skip
        if key is None:
            continue
        weight = f"{stem}.{name}"
        if found[key] != shapes.get(weight):
            _refuse(file, key, weight, str(list(shapes.get(weight, ()))), found[key])
        for target in targets_of(weight):
            changes[target] = _Change(key=key, weight=weight, is_replacement=key == keys.get("set"))
    return changes


def _refuse(file: Path, key: str, what: str, expected: str, got: tuple[int, ...]) -> NoReturn:
    raise CheckpointError(
        f"{file}: tensor {key} has a wrong shape: expected {expected} for {what}, got {list(got)}"
    )
