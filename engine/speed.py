"""How fast a model runs: what "auto" means on a device, and what each choice is made of.

Owns the resolution of the speed fields of `EngineConfig`, once, before anything is built; and the
parts that follow from them. Invariant: a part that is not available is left out with a reason that
is logged once, never silently; one that was asked for by name raises instead.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed, AttentionPlan, select_backend
from engine.attention.choice import group_shapes, measured_by, plan_attention
from engine.attention.placement import PlacementOps, eager_ops, place, turn
from engine.attention.sparse import require_sparse, with_sparse
from engine.attention.timing import measure_on
from engine.block_ops import BlockOps, PlainBlockOps
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, UnsupportedError
from engine.kernels.qknorm_rope import check_head
from engine.model.dit import MiniMaxH3Transformer, TransformerBlock
from engine.model.packed_linear import can_pack, pack_blocks
from engine.schemes import layer_rules, scheme_of
from graphs.capture import CudaCapture
from graphs.compile import compile_module, compile_region, keep_compiled_code
from graphs.runner import GraphRunner, RunnerLimits

_log = logging.getLogger(__name__)

_Half = Callable[..., Any]

CACHE_FOLDER = Path("~/.cache/worldstream")
"""What may be lost: compiled code, measured choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedParts:
    """What `RolloutCore` takes."""

    attention: AttentionPlan
    ops: PlacementOps
    block_ops: BlockOps | None
    is_compiled: bool
    runner: GraphRunner | None


def resolve_speed(config: EngineConfig, device: torch.device, model: ModelConfig) -> EngineConfig:
    """Replace "auto" in `compile`, `graphs` and `kernels` by what this device and model get.

    Args:
        config: its `linear` is resolved.
        device: where the model will be.
        model: its shapes.

    Raises: ConfigError for graphs or kernels where there is no CUDA, UnsupportedError for kernels
        that do not serve the model.
    """
    is_cuda = device.type == "cuda"
    wants_kernels = config.kernels in ("eager", "fast")
    for name, is_asked in (("graphs", config.records_passes), ("kernels", wants_kernels)):
        if is_asked and not is_cuda:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r} on {device}; allowed there: "
                f"{'False' if name == 'graphs' else repr('off')}"
            )
    no_kernels = kernels_refusal(config.linear, model)
    if wants_kernels and no_kernels is not None:
        raise UnsupportedError(
            f"kernels is {config.kernels!r}; allowed for this model with linear "
            f"{config.linear!r}: 'off', because {no_kernels}"
        )
    compiling, graphs, kernels = config.compile, config.graphs, config.kernels
    why = None
    pays = is_cuda or config.is_long_lived
    if pays and config.has_shortcuts and "auto" in (compiling, kernels if is_cuda else "off"):
        why = _no_compiler(device)
        if why:
            _log.warning("compile_and_kernels_left_out device=%s: %s", device, why)
    can_compile = pays and config.has_shortcuts and why is None
    if kernels == "auto":
        can_fuse = is_cuda and can_compile and compiling in ("auto", "off")
        if can_fuse and no_kernels is not None:
            _log.warning("kernels_left_out linear=%s: %s", config.linear, no_kernels)
        kernels = "fast" if can_fuse and no_kernels is None else "off"
    if compiling == "auto":
        compiling = "off"
        if can_compile and kernels == "off":
            compiling = "full" if is_cuda else "blocks"
    if graphs == "auto":
        graphs = is_cuda and config.has_shortcuts
    _log.info(
        "speed_resolved device=%s compile=%s graphs=%s kernels=%s linear=%s",
        device, compiling, graphs, kernels, config.linear,
    )  # fmt: skip
    return dataclasses.replace(config, compile=compiling, graphs=graphs, kernels=kernels)


def kernels_refusal(linear: str, model: ModelConfig) -> str | None:
    """Return why the fused kernels do not serve a model with such linears, or None."""
    rules = layer_rules(scheme_of(linear), model)
    in_blocks = any(name == "out" and rule.in_blocks for (_, name), rule in rules.items())
    width = model.attention_head_dim
    try:
        check_head(f"attention_head_dim is {width}", width, model.rotary_dim, in_blocks=in_blocks)
    except UnsupportedError as error:
        return str(error)
    return None


def check_attention(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse attention that this machine or this model does not have, before weights are read.

    Raises: UnsupportedError; ConfigError for more sparse steps than the model has.
    """
    need = AttentionNeed.on(device, dtype, model.attention_head_dim)
    if config.attention == "sparse":
        require_sparse(need, model, config.sparse_steps)
    else:
        select_backend(need, config.attention)


def _little(x: Tensor) -> Tensor:
    return x.sin() + 1.0


def _no_compiler(device: torch.device) -> str | None:
    """Return why nothing can be compiled for a device, or None; found by compiling a little."""
    keep_compiled_code(CACHE_FOLDER.expanduser() / "compiled")
    try:
        compile_module(_little)(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        return str(error).partition("\n")[0]
    return None


def speed_parts(
    model: MiniMaxH3Transformer, config: EngineConfig, *, world_size: int = 1
) -> SpeedParts:
    """Build what a resolved configuration asks for; plain linears may be packed in the model.

    Raises: UnsupportedError for what this machine or this model does not have.
    """
    device = model.proj_in.weight.device
    block_ops: BlockOps | None = None
    ops = eager_ops(device)
    if config.compile != "off":
        keep_compiled_code(CACHE_FOLDER.expanduser() / "compiled")
    if config.compile == "off":
        if can_pack(device):
            pack_blocks(model, model.config.rows_per_chunk)
    elif config.compile == "blocks":
        block_ops = HalvesBlockOps(model, compile_module)
        ops = PlacementOps(place=compile_module(place), turn=compile_module(turn))
    else:
        # A compiler fuses multiply-adds, and takes products as they are.
        block_ops = HalvesBlockOps(model, compile_region)
        ops = PlacementOps(place=compile_region(place), turn=compile_region(turn))
    if config.kernels in ("eager", "fast"):
        from engine.fused_ops import fused_block_ops

        block_ops = fused_block_ops(model, config.kernels)
    return SpeedParts(
        attention=_plan(model, config, world_size),
        ops=ops,
        block_ops=block_ops,
        is_compiled=config.compile == "full",
        runner=GraphRunner(CudaCapture(device), _limits(config)) if config.records_passes else None,
    )


def _limits(config: EngineConfig) -> RunnerLimits:
    """As by default, but for a chunk of three passes instead of two."""
    is_strict = config.graphs == "strict"
    if config.attention != "sparse":
        return RunnerLimits(is_strict=is_strict)
    return RunnerLimits(captures_per_turn=3, max_entries=48, is_strict=is_strict)


def _plan(model: MiniMaxH3Transformer, config: EngineConfig, world_size: int) -> AttentionPlan:
    device, sizes = model.proj_in.weight.device, model.config
    need = AttentionNeed.on(device, model.dtype, sizes.attention_head_dim)
    heads = sizes.num_attention_heads // world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    shapes = group_shapes(sizes, heads, need)
    plan = plan_attention(
        shapes,
        "auto" if config.attention == "sparse" else config.attention,
        machine=measured_by(name),
        record=CACHE_FOLDER.expanduser() / "attention.json",
        measure=measure_on(device),
    )
    if config.attention != "sparse":
        return plan
    return with_sparse(
        plan, shapes[-1], sizes, tau=config.sparse_tau, block=config.sparse_block,
        steps=config.sparse_steps, device=device,
    )  # fmt: skip


class HalvesBlockOps(PlainBlockOps):
    """The halves of a block, each compiled once for all blocks: by itself, or within the pass.

    Args:
        model: whose blocks they are.
        compiling: `compile_module` or `compile_region`.
    """

    def __init__(self, model: MiniMaxH3Transformer, compiling: Callable[[_Half], _Half]) -> None:
        super().__init__(model)
        self._compiled_project = compiling(TransformerBlock.project)
        self._compiled_finish = compiling(TransformerBlock.finish)

    def _project(
        self, layer: int, x_BRD: Tensor, modulation_BM6D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._compiled_project(self._model.block(layer), x_BRD, modulation_BM6D)

    def _finish(self, layer: int, x_BRD: Tensor, o_BRNK: Tensor, modulation_BM6D: Tensor) -> Tensor:
        return self._compiled_finish(self._model.block(layer), x_BRD, o_BRNK, modulation_BM6D)
