"""A pass over the rows of the open chunk, from tensors alone: plain, compiled, replayed.

Owns `chunk_forward`, which reads nothing but its inputs and the weights, so that it can be compiled
as a whole and captured; and `ChunkPasses`, which decides how it runs. Nothing in it that differs
from step to step, chunk to chunk or prompt to prompt is a number of Python: the denoise step is a
tensor, cameras and tables are tensors, the open chunk is the end of the windows that are given. So
two compiled forms, denoise and refresh, serve every window and every length of prompt; a third is
for denoise steps that read a part of the window.
Shape suffixes: B batch, R rows, S key rows, C features, D width, N heads, K head width, L layers,
M distinct times, G camera groups, 44 a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionPlan
from engine.attention.placement import Placement
from engine.block_ops import BlockOps, Projected, Rows, Slot
from engine.cache_buffers import WindowViews
from engine.kv_cache import PackedCache
from engine.model.dit import MiniMaxH3Transformer
from engine.model.prope import Projective
from engine.modulation import PassTables
from engine.parallel import Exchange
from graphs.buffers import StaticBuffers
from graphs.compile import compile_module
from graphs.key import GraphKey, Phase
from graphs.runner import GraphRunner


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ChunkInputs:
    """All that a pass reads and writes besides the weights."""

    rows_BRC: Tensor
    """fp32 patches of the chunk."""
    step_1: Tensor
    """int64 index of the time of all rows."""
    placement: Placement
    windows: WindowViews
    tables: PassTables


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _WindowAttend:
    """Rows of the chunk over windows that end with them."""

    plan: AttentionPlan
    ops: BlockOps
    placement: Placement
    windows: WindowViews
    keep: bool

    def _place(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> Tensor:
        windows, rows = self.windows, self.placement.cos_RK.shape[0]
        slot = Slot(
            key_BRNK=windows.keys_BSNK[layer][:, -rows:],
            value_BRNK=windows.values_BSNK[layer][:, -rows:],
            raw_BRNK=windows.raw_BRNK[layer] if self.keep else None,
            placement=self.placement,
        )
        return self.ops.place(layer, q_BRNK, k_BRNK, v_BRNK, slot)

    def __call__(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> Rows:
        placed_BRNK = self._place(layer, q_BRNK, k_BRNK, v_BRNK)
        windows = self.windows
        o_BRNK = self.plan.over_window(
            placed_BRNK, windows.keys_BSNK[layer], windows.values_BSNK[layer],
            windows.summaries[layer],
        )  # fmt: skip
        return self.ops.output(layer, o_BRNK, self.placement)

    def store(self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected) -> None:
        self._place(layer, q_BRNK, k_BRNK, v_BRNK)


def chunk_forward(
    model: MiniMaxH3Transformer,
    ops: BlockOps,
    plan: AttentionPlan,
    exchange: Exchange,
    inputs: ChunkInputs,
    *,
    keep: bool,
) -> Tensor | None:
    """Velocity rows [B, R, C], or None for a refresh (``keep``), which leaves keys and values."""
    attend = _WindowAttend(
        plan=plan, ops=ops, placement=inputs.placement, windows=inputs.windows, keep=keep
    )
    # One gather for all layers; every row of a pass has the same time.
    modulation_L6D = inputs.tables.blocks_LM6D.index_select(1, inputs.step_1).squeeze(1)
    modulations = [vectors_6D[None, None] for vectors_6D in modulation_L6D.unbind(0)]
    share = exchange.over(inputs.rows_BRC.shape[1])
    x_BRD = model.run_blocks(
        share.own(model.embed_video(inputs.rows_BRC)),
        modulations,
        share.attend(attend),
        ops,
        keys_values_only=keep,
    )
    if keep:
        return None
    final_12D = inputs.tables.final_M2D.index_select(0, inputs.step_1)
    return model.head_video(share.whole(x_BRD), final_12D[None])


class ChunkPasses:
    """Runs passes over the chunks of packed rollouts.

    Args:
        model: its weights stay where they are.
        ops: how the blocks compute.
        plan: of the attention over the window; the passes of `Phase.SPARSE_DENOISE` alone read it
            in part.
        exchange: how ranks share the pass.
        is_compiled: compile the pass as a whole, at its first use.
        runner: replays passes from graphs; None runs each anew.
    """

    def __init__(
        self,
        model: MiniMaxH3Transformer,
        ops: BlockOps,
        plan: AttentionPlan,
        exchange: Exchange,
        *,
        is_compiled: bool = False,
        runner: GraphRunner | None = None,
    ) -> None:
        self._dtype = model.dtype
        self._is_compiled = is_compiled
        self.runner = runner
        self._is_strict = runner is not None and runner.is_strict
        dense = plan.dense

        def sparse_denoise(inputs: ChunkInputs) -> Tensor | None:
            return chunk_forward(model, ops, plan, exchange, inputs, keep=False)

        def denoise(inputs: ChunkInputs) -> Tensor | None:
            return chunk_forward(model, ops, dense, exchange, inputs, keep=False)

        def refresh(inputs: ChunkInputs) -> Tensor | None:
            return chunk_forward(model, ops, dense, exchange, inputs, keep=True)

        forms = {
            Phase.SPARSE_DENOISE: sparse_denoise, Phase.DENOISE: denoise, Phase.REFRESH: refresh,
        }  # fmt: skip
        self._forms = {
            phase: compile_module(form) if is_compiled else form for phase, form in forms.items()
        }
        self._inputs: dict[int, tuple[StaticBuffers, Placement]] = {}
        self._placed: dict[int, Placement] = {}

    def run(
        self,
        cache: PackedCache,
        rows_BRC: Tensor,
        step_1: Tensor,
        tables: PassTables,
        phase: Phase,
    ) -> Tensor | None:
        """Run one pass over the open chunk of `cache`.

        Args:
            cache: its chunk is open; a refresh marks it as kept.
            rows_BRC: fp32 patches.
            step_1: see `ChunkInputs`.
            tables: at the same addresses each time, or the runner is cleared.
            phase: a denoise step, one that reads a part of the window, or the refresh.

        Returns the velocity rows, which hold until the next pass; None for a refresh.
        """
        windows, form = cache.views, self._forms[phase]
        if self._is_compiled:
            _let_rows_vary(windows)
        if self.runner is None:
            inputs = ChunkInputs(
                rows_BRC=rows_BRC, step_1=step_1, placement=cache.placement, windows=windows,
                tables=tables,
            )  # fmt: skip
            output = form(inputs)
        else:
            inputs = self._static_inputs(cache, rows_BRC, step_1, windows, tables)
            buffers, _ = self._inputs[rows_BRC.shape[0]]
            fixed = (
                *(buffers[name] for name in buffers.names),
                *windows.keys_BSNK, *windows.values_BSNK, *windows.raw_BRNK,
                *(part for each in windows.summaries if each for part in each.tensors),
                tables.blocks_LM6D, tables.final_M2D,
            )  # fmt: skip
            output = self.runner.run(
                _key(cache, rows_BRC.shape[0], self._dtype, phase, cache.slot),
                lambda: form(inputs),
                fixed,
            )
        if phase is Phase.REFRESH:
            cache.kept()
        return output

    def begin_chunk(self) -> None:
        """Begin the passes of the next chunk."""
        if self.runner is not None:
            self.runner.begin_turn()

    def clear(self) -> None:
        """Give recorded passes up: weights or tables change."""
        if self.runner is not None:
            self.runner.clear()

    def close(self) -> None:
        """Give everything up."""
        if self.runner is not None:
            self.runner.close()
        self._inputs.clear()
        self._placed.clear()

    def _static_inputs(
        self,
        cache: PackedCache,
        rows_BRC: Tensor,
        step_1: Tensor,
        windows: WindowViews,
        tables: PassTables,
    ) -> ChunkInputs:
        """Copy what changes to where the graphs read it: rows and step each time, cameras once."""
        batch_size, placement = rows_BRC.shape[0], cache.placement
        if batch_size not in self._inputs:
            self._inputs[batch_size] = _static_buffers(
                rows_BRC, step_1, placement, check_addresses=self._is_strict
            )
        buffers, static_placement = self._inputs[batch_size]
        buffers.copy_in(rows=rows_BRC, step=step_1)
        if self._placed.get(batch_size) is not placement:
            camera = placement.camera
            buffers.copy_in(
                cos=placement.cos_RK, sin=placement.sin_RK, query=camera.query,
                key_value=camera.key_value, output=camera.output,
            )  # fmt: skip
            self._placed[batch_size] = placement
        return ChunkInputs(
            rows_BRC=buffers["rows"], step_1=buffers["step"], placement=static_placement,
            windows=windows, tables=tables,
        )  # fmt: skip


def pass_keys(
    cache: PackedCache, batch: int, dtype: torch.dtype, phases: Sequence[Phase]
) -> list[GraphKey]:
    """Keys of all passes over a cache: all phases of the steady window, then of shorter ones."""
    slots = range(cache.history_limit, -1, -1)
    return [_key(cache, batch, dtype, phase, slot) for slot in slots for phase in phases]


def _key(cache: PackedCache, batch: int, dtype: torch.dtype, phase: Phase, slot: int) -> GraphKey:
    return GraphKey(
        phase=phase,
        rows=cache.rows,
        history_rows=slot * cache.rows,
        prefix_rows=cache.tables.prefix_rows,
        dtype=dtype,
        batch=batch,
    )


def _static_buffers(
    rows_BRC: Tensor, step_1: Tensor, placement: Placement, *, check_addresses: bool
) -> tuple[StaticBuffers, Placement]:
    """Buffers shaped like these, and the placement that reads them."""
    camera = placement.camera
    like = {
        "rows": rows_BRC, "step": step_1, "cos": placement.cos_RK, "sin": placement.sin_RK,
        "query": camera.query, "key_value": camera.key_value, "output": camera.output,
    }  # fmt: skip
    buffers = StaticBuffers(
        {name: torch.empty(value.shape, dtype=value.dtype, device=value.device)
         for name, value in like.items()},
        check_addresses=check_addresses,
    )  # fmt: skip
    static = Placement(
        cos_RK=buffers["cos"],
        sin_RK=buffers["sin"],
        camera=Projective(
            query=buffers["query"], key_value=buffers["key_value"], output=buffers["output"]
        ),
        ops=placement.ops,
    )
    return buffers, static


def _let_rows_vary(windows: WindowViews) -> None:
    """Tell the compiler that windows differ in length, before it sees the first one."""
    for view_BSNK in (*windows.keys_BSNK, *windows.values_BSNK):
        if not hasattr(view_BSNK, "_dynamo_dynamic_indices"):
            torch._dynamo.mark_dynamic(view_BSNK, 1)
    for summary in windows.summaries:
        if summary is not None and not hasattr(summary.mean_BNJK, "_dynamo_dynamic_indices"):
            for blocks_BNJ in (summary.mean_BNJK, summary.sum_BNJK, summary.reach_BNJ):
                torch._dynamo.mark_dynamic(blocks_BNJ, 2)
