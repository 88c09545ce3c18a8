"""Adapters in a model: merged, beside it, or beside it with the sum inside the kernels.

    merged     W' = round(W + s B A), summed in fp32. As fast as no adapter; a small update is lost
               where it is less than half a step of the weight. With linears in eight bits the fp32
               sum is what is quantised, and nothing is lost on the way.
    separate   y = round(W x) + round(s B round(A x)): the reference.
    fused      the same products; the sum is formed, with the same rounding, by the kernel that
               reads it. The same bits as separate with the same kernels.

Linears in eight bits take merged alone: their products have no branch. Ranks that share a rollout
take merged and separate: what they exchange is one sum. Fused needs kernels, and a scale of 1.

Owns the choice, what is refused, the installation, and `adapter_report`. Whole changes of weights
that a file brings are applied in every mode. Source: the Sol-H3 report; PEFT.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from engine.checkpoint.adapters import Adapter, open_adapter
from engine.checkpoint.folder import read_config
from engine.checkpoint.reading import WeightReader
from engine.checkpoint.source import Source, open_source
from engine.config import EngineConfig, LoraChoice, ModelConfig
from engine.errors import UnsupportedError
from engine.memory import MemoryPart
from engine.model.adaln_curve import CurveShape
from engine.model.dit import MiniMaxH3Transformer
from engine.model.lora_linear import LoraLinear
from engine.quant import Fp8Linear

LoraMode = Literal["merged", "separate", "fused"]
LOST_WARNING = 0.3
"""Share of lost updates above which a merge is not what training made."""
_PROBE_ROWS = 256

_log = logging.getLogger(__name__)


def adapter_of(
    config: EngineConfig, model: ModelConfig, curve: CurveShape | None = None
) -> Adapter | None:
    """Open the adapter that is asked for; heads of files alone are read.

    Raises: CheckpointError, UnsupportedError as `open_adapter`.
    """
    return None if config.lora is None else open_adapter(Path(config.lora), model, curve)


def adapter_parts(
    adapter: Adapter | None, mode: LoraChoice, dtype: torch.dtype
) -> tuple[MemoryPart, ...]:
    """Rows of the memory plan: factors that stay beside their linears."""
    if adapter is None or mode == "merged":
        return ()
    return (MemoryPart.kept("adapter", adapter.parameter_count * dtype.itemsize),)


def resolve_mode(config: EngineConfig, adapter: Adapter, *, world_size: int = 1) -> LoraMode:
    """Choose a mode for "auto", or refuse the one that is asked for.

    Args:
        config: with `linear` resolved.
        adapter: to be used.
        world_size: ranks that share a rollout.

    Raises: UnsupportedError.
    """
    why_separate = None
    if config.linear != "bf16":
        why_separate = f"linear is {config.linear!r}, whose products have no branch"
    why_fused = why_separate
    if why_fused is None and config.kernels == "off":
        why_fused = "kernels are 'off'"
    if why_fused is None and world_size > 1:
        why_fused = f"{world_size} ranks share a rollout, and exchange sums only"
    if why_fused is None and adapter.scales != {1.0}:
        why_fused = f"scales are {sorted(adapter.scales)}, and kernels add without one"
    for mode, why in (("separate", why_separate), ("fused", why_fused)):
        if config.lora_mode == mode and why is not None:
            allowed = "'merged'" if why_separate is not None else "'merged', 'separate'"
            raise UnsupportedError(f"lora_mode is {mode!r}; allowed here: {allowed}, because {why}")
    if config.lora_mode != "auto":
        return config.lora_mode
    return "merged" if why_separate else "separate" if why_fused else "fused"


@torch.no_grad()
def change_weights(model: MiniMaxH3Transformer, adapter: Adapter) -> None:
    """Apply the whole changes that a file brings besides factors, in every mode.

    Linears that are in eight bits have them already.
    """
    parameters = dict(model.named_parameters())
    for name in adapter.changes:
        if name in parameters:
            parameters[name].copy_(adapter.changed(name, parameters[name]))


@torch.no_grad()
def install_adapter(model: MiniMaxH3Transformer, adapter: Adapter, mode: LoraMode) -> None:
    """Put factors into a model; linears that are in eight bits have them already.

    Args:
        model: on its device, in its dtypes; linears that are to be in eight bits are so.
        adapter: for this model.
        mode: "separate" and "fused" put `LoraLinear` in the place of linears.
    """
    for name in adapter.pairs:
        linear = model.get_submodule(name)
        if isinstance(linear, Fp8Linear):
            continue
        assert isinstance(linear, nn.Linear)
        if mode == "merged":
            linear.weight.copy_(merged(adapter, name, linear.weight))
            continue
        dtype, device = linear.weight.dtype, linear.weight.device
        a_RK, b_NR, scale = adapter.factors(name, device)
        owner, _, attribute = name.rpartition(".")
        branch = LoraLinear(
            linear, _own(a_RK, dtype), _own(b_NR, dtype), scale, sums_inside=mode == "fused"
        )
        setattr(model.get_submodule(owner), attribute, branch)
    _log.info("adapter_installed mode=%s %s", mode, adapter)


def merged(adapter: Adapter, name: str, weight_NK: Tensor) -> Tensor:
    """Return the weight of a linear with its update, fp32."""
    delta_NK = adapter.delta(name, weight_NK.device)
    return weight_NK.float() if delta_NK is None else delta_NK.add_(weight_NK)


def _own(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense copy that no mapped file lies behind."""
    return factor.to(dtype, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLoss:
    """What a bf16 merge does to the update of one linear."""

    name: str
    rank: int
    scale: float
    changed: int
    """Entries that are not zero in the update, of those that were looked at."""
    lost: int
    """Of them, those after which the bf16 weight is the same as before."""
    error_ratio: float
    """Norm of what the merge gets wrong over that of the update."""

    @property
    def lost_share(self) -> float:
        """0 to 1."""
        return self.lost / self.changed if self.changed else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterReport:
    """What an adapter is, and what a bf16 merge would lose of it."""

    path: Path
    summary: str
    parameter_count: int
    losses: tuple[LinearLoss, ...]
    """Empty where no weights were given to merge into."""

    @property
    def lost_share(self) -> float:
        """Over all linears."""
        changed = sum(loss.changed for loss in self.losses)
        return sum(loss.lost for loss in self.losses) / changed if changed else 0.0

    @property
    def should_stay_apart(self) -> bool:
        """Whether a bf16 merge would lose much of it."""
        return self.lost_share > LOST_WARNING


@torch.no_grad()
def adapter_report(
    file: Path,
    model_config: ModelConfig,
    weights: Path | None = None,
    *,
    device: torch.device | None = None,
    rows: int = _PROBE_ROWS,
) -> AdapterReport:
    """Read an adapter and count the updates that a bf16 merge would lose.

    Args:
        file: the adapter.
        model_config: of the preset.
        weights: the transformer that it would be merged into: the folder of its shards, or one
            file; None: keys and shapes alone.
        device: where to compute; a CPU by default.
        rows: output channels of each linear that are looked at, evenly spread.

    Raises: CheckpointError, UnsupportedError.
    """
    source: Source | None = None
    if weights is not None:
        model_config = read_config(weights, model_config)
        source = open_source(weights, model_config)
    adapter = open_adapter(file, model_config, None if source is None else source.curve)
    losses: list[LinearLoss] = []
    if source is not None:
        reader = WeightReader(source, device or torch.device("cpu"))
        losses += [
            _loss(adapter, name, reader.read(f"{name}.weight"), rows)
            for name in sorted(adapter.pairs)
        ]
    return AdapterReport(
        path=adapter.path,
        summary=str(adapter),
        parameter_count=adapter.parameter_count,
        losses=tuple(losses),
    )


def _loss(adapter: Adapter, name: str, weight_NK: Tensor, rows: int) -> LinearLoss:
    a_RK, b_NR, scale = adapter.factors(name, weight_NK.device)
    step = max(1, weight_NK.shape[0] // rows)
    before_NK = weight_NK[::step].bfloat16()
    delta_NK = (b_NR[::step].float() @ a_RK.float()) * scale
    after_NK = (before_NK.float() + delta_NK).bfloat16()
    is_changed = delta_NK != 0
    error_NK = after_NK.float() - before_NK.float() - delta_NK
    return LinearLoss(
        name=name,
        rank=a_RK.shape[0],
        scale=scale,
        changed=int(is_changed.sum()),
        lost=int((is_changed & (after_NK == before_NK)).sum()),
        error_ratio=float(error_NK.norm() / delta_NK.norm().clamp_min(1e-30)),
    )
