"""Memory plan: what an engine and what stands beside it will hold, before anything is allocated.

Owns the sizes of the transformer's side, from shapes alone; the plan, which is a table of parts;
the choice of precision and residency that fits a device. Does not own the sizes of decoder and
prompt encoder: whoever loads them gives them. Invariant: pure; nothing here touches a device.

Two moments count. While weights are read, all of them are there and no world is; while a world is
played, what was given up is gone, and windows, decoder state and graphs are there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.config import (
    SPARSE_DENSE_LAYERS,
    EngineConfig,
    Geometry,
    ModelConfig,
)
from engine.errors import DeviceError

GIB = 2**30
MIB = 2**20
CUDA_LIBRARY_BYTES, CPU_LIBRARY_BYTES = 768 * MIB, 300 * MIB
"""On CUDA kernels that are loaded at their first use, and workspaces of the libraries of products;
on a CPU a process with its libraries."""
FRAGMENTATION = 0.02
"""Share of the memory of a CUDA device that lies idle between what is allocated there."""
_BESIDE_THE_PASS_BYTES = 64 * MIB
AUTO_LINEARS = ("bf16", "fp8_mixed", "fp8_rowwise")
"""What linears may be by themselves, the one wanted most first. In eight bits the mixed ones keep
all figures by which quality is judged on the small world, those by row all but two of a hundred, in
1.6 GiB less of the large model and a little faster."""
DtypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One row of the table."""

    name: str
    loading: int
    """Bytes on the device while weights are read."""
    playing: int
    """Bytes on the device while a world is played."""
    host: int = 0
    """Bytes of the machine's memory, where the device has its own."""
    note: str = ""

    @classmethod
    def kept(cls, name: str, size: int, note: str = "") -> MemoryPart:
        """Weights: there from the first to the last moment."""
        return cls(name=name, loading=size, playing=size, note=note)

    @classmethod
    def played(cls, name: str, size: int, note: str = "") -> MemoryPart:
        """What comes with a world."""
        return cls(name=name, loading=0, playing=size, note=note)


Beside = Callable[[Geometry], tuple[MemoryPart, ...]]
"""Parts that are there besides the engine, by picture size."""


def nothing_beside(size: Geometry) -> tuple[MemoryPart, ...]:
    """Nothing but the engine."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Present:
    """Memory that is free."""

    device_gib: float
    host_gib: float = float("inf")
    """Of the machine, where the device has memory of its own."""
    is_cuda: bool = False
    has_fp8: bool = False
    """Whether the device has products in eight bits."""
    no_fp8_blocks: str | None = None
    """Why it has none with factors of blocks; None where it has them."""
    shared_by: int = 1
    """Processes that each have so much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What will be there, by parts."""

    geometry: Geometry
    dtype: DtypeName
    linear: str
    free_adaln: bool
    parts: tuple[MemoryPart, ...]
    beside_index: int = 0
    """Which of the alternatives beside the engine was taken."""
    rank_count: int = 1
    """Ranks that share a world, of which the plan is that of the first."""
    linear_reason: str = ""
    """Why the linears are none of those wanted more; empty where there are none."""

    @property
    def loading_gib(self) -> float:
        """Of the device, while weights are read."""
        return sum(part.loading for part in self.parts) / GIB

    @property
    def playing_gib(self) -> float:
        """Of the device, while a world is played."""
        return sum(part.playing for part in self.parts) / GIB

    @property
    def peak_gib(self) -> float:
        """The larger of the two."""
        return max(self.loading_gib, self.playing_gib)

    @property
    def host_gib(self) -> float:
        """Of the machine."""
        return sum(part.host for part in self.parts) / GIB

    @property
    def linear_words(self) -> str:
        """The linears and why, for people."""
        return self.linear + (f" ({self.linear_reason})" if self.linear_reason else "")

    def fits(self, present: Present) -> bool:
        """Whether there is enough of both; on CUDA some is lost between allocations."""
        is_on_device = self.needed_gib(present) <= present.device_gib
        return is_on_device and self.host_gib <= present.host_gib

    def needed_gib(self, present: Present) -> float:
        """The peak with what is lost between allocations."""
        return self.peak_gib * (1.0 + (FRAGMENTATION if present.is_cuda else 0.0))

    def part_gib(self, name: str) -> float:
        """One part while a world is played, 0 where there is none of that name."""
        return sum(part.playing for part in self.parts if part.name == name) / GIB


def choose_plan(
    model: ModelConfig,
    config: EngineConfig,
    present: Present,
    *,
    geometries: Sequence[Geometry] = (),
    world_size: int = 1,
    beside: Sequence[Beside] = (nothing_beside,),
) -> MemoryPlan:
    """Return the first plan that fits, in the order of what is given up for it.

    First of all nothing; then the modulation weights, whose tables stay; then the first place of
    what stands beside; then the bits of the linears, of as few as suffice. Only what is "auto" is
    chosen.

    Args:
        model: at the picture size asked for.
        config: its dtype is resolved.
        present: what there is.
        geometries: picture sizes to name in a refusal.
        world_size: ranks that share a rollout; each has all weights.
        beside: what else will be there; the first is wanted most.

    Raises: DeviceError with needed and present memory, and what would fit.
    """
    plans = list(_plans(model, config, present, world_size=world_size, beside=beside))
    for index, plan in enumerate(plans):
        if plan.fits(present):
            reason = _linear_reason(model, config, present, plans[: index + 1])
            return dataclasses.replace(plan, linear_reason=reason)
    least = min(plans, key=lambda plan: plan.peak_gib)
    advice = _advice(model, config, present, geometries, world_size=world_size, beside=beside)
    size = f"{model.geometry.width_px}x{model.geometry.height_px}"
    largest = sorted(least.parts, key=lambda part: -max(part.loading, part.playing))
    named = ", ".join(
        f"{part.name} {max(part.loading, part.playing) / GIB:.1f}" for part in largest[:4]
    )
    shared = "" if present.shared_by == 1 else f" for each of {present.shared_by} processes"
    host = ""
    if least.host_gib > present.host_gib:
        host = f" and {least.host_gib:.1f} GiB of the machine, of which {present.host_gib:.1f} are"
    raise DeviceError(
        f"{size} in {config.dtype} needs about {least.needed_gib(present):.1f} GiB ({named}); "
        f"{present.device_gib:.1f} GiB are free{shared}{host}; "
        f"{' and '.join(advice) or 'no picture size of this model fits'}"
    )


def _plans(
    model: ModelConfig,
    config: EngineConfig,
    present: Present,
    *,
    world_size: int,
    beside: Sequence[Beside],
) -> Iterator[MemoryPlan]:
    """All plans that the configuration allows, the one that gives up least first."""
    assert config.dtype != "auto"
    linears = [config.linear]
    if config.linear == "auto":
        refused = _refused_linears(model, config, present)
        linears = [name for name in AUTO_LINEARS if name not in refused]
    frees = [config.free_adaln is True]
    if config.free_adaln == "auto":
        frees = [False, True] if config.has_shortcuts else [False]
    for linear in linears:
        for index, others in enumerate(beside):
            for free_adaln in frees:
                chosen = dataclasses.replace(config, linear=linear, free_adaln=free_adaln)
                yield MemoryPlan(
                    geometry=model.geometry,
                    dtype=config.dtype,
                    linear=linear,
                    free_adaln=free_adaln,
                    parts=(
                        *engine_parts(
                            model, chosen, is_cuda=present.is_cuda, world_size=world_size
                        ),
                        *others(model.geometry),
                    ),
                    beside_index=index,
                    rank_count=world_size,
                )


def _refused_linears(model: ModelConfig, config: EngineConfig, present: Present) -> dict[str, str]:
    """Which of `AUTO_LINEARS` this device or this model does not have, and why."""
    from engine.schemes import layer_rules, scheme_of, width_refusal

    why_all, refused = None, dict[str, str]()
    if not (present.is_cuda and present.has_fp8):
        why_all = "the device has no products in eight bits"
    elif config.dtype != "bfloat16":
        why_all = f"dtype is {config.dtype}"
    elif config.lora_mode in ("separate", "fused"):
        why_all = f"lora_mode is {config.lora_mode}"
    for name in AUTO_LINEARS:
        scheme = scheme_of(name)
        if not scheme:
            continue
        why = why_all or width_refusal(scheme, model)
        if why is None and not layer_rules(scheme, model):
            why = f"of {model.num_layers} blocks the outer ones stay as they are"
        if why is None and any(rule.in_blocks for rule in scheme):
            why = present.no_fp8_blocks
        if why is not None:
            refused[name] = why
    return refused


def _linear_reason(
    model: ModelConfig, config: EngineConfig, present: Present, plans: Sequence[MemoryPlan]
) -> str:
    """Why the last plan has none of the linears before its own; the others do not fit."""
    if config.linear != "auto":
        return ""
    refused = _refused_linears(model, config, present)
    reasons = []
    for name in AUTO_LINEARS[: AUTO_LINEARS.index(plans[-1].linear)]:
        if name in refused:
            reasons.append(f"no {name}: {refused[name]}")
            continue
        least = min((plan for plan in plans if plan.linear == name), key=lambda plan: plan.peak_gib)
        place = "" if least.needed_gib(present) > present.device_gib else " of the machine"
        needed_gib = least.host_gib if place else least.needed_gib(present)
        reasons.append(f"{name} needs {needed_gib:.1f} GiB{place}")
    return ", ".join(reasons)


def _advice(
    model: ModelConfig,
    config: EngineConfig,
    present: Present,
    geometries: Sequence[Geometry],
    *,
    world_size: int,
    beside: Sequence[Beside],
) -> list[str]:
    """What to ask for instead, in words."""

    def fitting(size: Geometry = model.geometry, **changes: str | bool) -> MemoryPlan | None:
        sized = dataclasses.replace(model, geometry=size)
        changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
        plans = _plans(sized, changed, present, world_size=world_size, beside=beside)
        return next((plan for plan in plans if plan.fits(present)), None)

    advice = []
    sizes = [each for each in geometries if fitting(each)]
    if sizes:
        best = max(sizes, key=lambda each: each.rows_per_latent)
        advice.append(f"{best.width_px}x{best.height_px} fits")
    if config.dtype == "float32" and fitting(dtype="bfloat16"):
        advice.append("bfloat16 fits")
    if config.linear == "bf16" and (plan := fitting(linear="auto")):
        advice.append(f"linear {plan.linear} fits")
    if config.free_adaln is False and config.has_shortcuts and fitting(free_adaln="auto"):
        advice.append("free_adaln fits")
    return advice


def engine_parts(
    model: ModelConfig, config: EngineConfig, *, is_cuda: bool, world_size: int = 1
) -> tuple[MemoryPart, ...]:
    """Parts of an engine with one rollout.

    Args:
        model: shapes.
        config: dtype, linear and free_adaln are no "auto".
        is_cuda: graphs are recorded, and libraries load kernels.
        world_size: ranks that share a rollout.
    """
    size = 4 if config.dtype == "float32" else 2
    every, adaln = parameter_count(model), adaln_parameter_count(model)
    blocks_before = model.num_layers * linear_parameter_count(model) * size
    blocks = blocks_before if config.linear == "bf16" else _scheme_bytes(model, config.linear, size)
    rest = (every - adaln) * size - blocks_before
    # The third for audio times goes to the machine's memory, which is a CPU's own; a GPU has two
    # places for that of a layer, with what lies before them (`streamed_rows`).
    third = adaln * size // 3 if config.free_adaln else 0
    places = 4 * third // model.num_layers
    kept = (places if is_cuda else third) if config.free_adaln else adaln * size
    times = model.sampler.steps + 2
    vectors = model.num_layers * times * 6 * model.hidden_size * size
    working = _working_bytes(model, size, world_size)
    parts = [
        MemoryPart(
            name="blocks",
            loading=max(blocks_before, blocks),
            playing=blocks,
            note=config.dtype if config.linear == "bf16" else config.linear,
        ),
        MemoryPart.kept("embedders, refiner, heads", rest),
        MemoryPart(
            name="modulation weights",
            loading=adaln * size,
            playing=kept,
            host=third if is_cuda else 0,
            note="a third, for audio times, is kept there" if config.free_adaln else "",
        ),
        # Once by kind of row, once for video rows alone as a pass reads them.
        MemoryPart.kept("modulation tables", vectors * 4 if config.adaln_tables else 0),
        MemoryPart.played("window", window_bytes(model, size) // world_size, "keys and values"),
        MemoryPart.played("working memory", working),
    ]
    if config.attention == "sparse":
        summaries = summary_bytes(model, size, config.sparse_block)
        parts.append(MemoryPart.played("summaries", summaries // world_size))
    if is_cuda:
        # A recording keeps memory of its own for what a pass makes on its way; all share one pool.
        has_graphs = config.graphs is not False and config.has_shortcuts
        parts.append(MemoryPart.played("graphs", working if has_graphs else 0))
    libraries = CUDA_LIBRARY_BYTES if is_cuda else CPU_LIBRARY_BYTES
    parts.append(MemoryPart.kept("libraries", libraries))
    return tuple(parts)


def prefix_row_count(model: ModelConfig) -> int:
    """Rows of text, anchor and audio."""
    return model.text_rows + model.rows_per_latent + model.audio_rows


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the transformer (text encoder excluded)."""
    hidden, attention, ffn = model.hidden_size, model.attention_dim, model.ffn_dim
    mixer = 4 * hidden * attention + 3 * hidden * ffn + 2 * hidden + 2 * model.attention_head_dim
    adaln = (model.time_embed_dim + 1) * hidden
    inputs = (model.patch_features + 1) + (model.audio_in_channels + 1) + (model.text_dim + 1)
    heads = (hidden + 1) * (model.patch_features + model.audio_in_channels)
    times = (model.freq_dim + 1) * model.time_embed_hidden_dim
    times += (model.time_embed_hidden_dim + 1) * model.time_embed_dim
    blocks = model.num_layers * (mixer + 18 * adaln) + model.num_refiner_layers * mixer
    return blocks + hidden * inputs + heads + times + 2 * hidden + 2 * adaln


def adaln_parameter_count(model: ModelConfig) -> int:
    """Parameters behind the modulation of the blocks, which depends on times alone."""
    return model.num_layers * 18 * (model.time_embed_dim + 1) * model.hidden_size


def linear_parameter_count(model: ModelConfig) -> int:
    """Weights of the linears of one block."""
    return 4 * model.hidden_size * model.attention_dim + 3 * model.hidden_size * model.ffn_dim


def window_bytes(model: ModelConfig, size: int) -> int:
    """Packed window of one rollout: see `cache_buffers.allocate`.

    Placed keys and values of prefix, history and current chunk, and the rotary channels of the
    chunks' keys once more.
    """
    window_rows = model.window_chunks * model.rows_per_chunk
    channels = 2 * (prefix_row_count(model) + window_rows + 1) * model.attention_head_dim
    channels += window_rows * model.rotary_dim
    tables = 2 * window_rows * model.rotary_dim
    return (model.num_layers * model.num_attention_heads * channels + tables) * size


def summary_bytes(model: ModelConfig, size: int, block: int) -> int:
    """Summaries of the blocks of one window: see `kernels.sparse.KeySummary`."""
    from engine.kernels.sparse_reference import block_count

    keys = prefix_row_count(model) + model.window_chunks * model.rows_per_chunk
    block_bytes = 2 * model.attention_head_dim * size + 4
    layers = model.num_layers - SPARSE_DENSE_LAYERS
    return layers * model.num_attention_heads * block_count(keys, block) * block_bytes


def _working_bytes(model: ModelConfig, size: int, world_size: int) -> int:
    """Widest moment of a pass: hidden states and their normed copies in fp32, q, k, v and output,
    placed and not, both halves of the feed-forward part and their product.
    """
    rows = max(prefix_row_count(model), model.rows_per_chunk)
    widest = 8 * model.hidden_size + 10 * model.attention_dim + 4 * model.ffn_dim
    return rows * widest * size // world_size + _BESIDE_THE_PASS_BYTES


def _scheme_bytes(model: ModelConfig, linear: str, size: int) -> int:
    """Linears of all blocks where a scheme puts some into eight bits, with their fp32 factors."""
    from engine.schemes import layer_rules, linear_shapes, scheme_of

    shapes, total = linear_shapes(model), model.num_layers * linear_parameter_count(model) * size
    for (_, name), rule in layer_rules(scheme_of(linear), model).items():
        total -= math.prod(shapes[name]) * (size - 1)
        total += 4 * math.prod(rule.factors_shape(*shapes[name]))
    return total
