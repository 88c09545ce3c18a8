"""Batched rollouts of the transformer: begin, denoise, refresh.

Owns the passes over the model and their conditions (modulation, visibility, cache); training drives
it with many clips at once, `Engine` with one. Does not own actions, poses or random draws.
Invariants: everything that changes lives in `CoreState`; every pass runs without gradients; nothing
in the loop waits for the device.
Shape suffixes: B batch, R rows, D width, C channels, T latent frames, H height, W width, 44 a
matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed, AttentionPlan, select_backend
from engine.attention.placement import Placement, PlacementOps, eager_ops
from engine.attention.window import ChunkAttend, PrefixAttend, WholeAttend
from engine.audio_modulation import AudioTimes
from engine.block_ops import BlockOps, PlainBlockOps
from engine.cache_buffers import BufferLender, BufferShape, allocate
from engine.config import ModelConfig
from engine.denoise import denoise_chunk
from engine.device import send
from engine.errors import ConfigError
from engine.kv_cache import PackedCache, PlainCache, WindowTables
from engine.layout import (
    PrefixLayout,
    patchify,
    prefix_layout,
    prefix_positions,
    unpatchify,
    window_positions,
)
from engine.model.dit import MiniMaxH3Transformer
from engine.model.prope import Projective, identity_projective, projective
from engine.model.rope import rope_tables
from engine.modulation import LayerModulations, ModulationTables
from engine.parallel import Alone, Exchange
from engine.passes import ChunkPasses, pass_keys
from engine.prefix import PrefixInputs
from graphs.key import Phase
from graphs.runner import GraphRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreOptions:
    """The exact shortcuts, each of which can be left out."""

    prefix_cache: bool = True
    adaln_tables: bool = True
    packed_history: bool = True

    @property
    def are_all_taken(self) -> bool:
        """Whether a pass is over the chunk's rows alone, with everything else at hand."""
        return self.prefix_cache and self.adaln_tables and self.packed_history


@dataclass(kw_only=True, eq=False, slots=True)
class CoreState:
    """All that changes while a batch of rollouts runs."""

    inputs: PrefixInputs
    layout: PrefixLayout
    prefix_placement: Placement
    cache: PackedCache | PlainCache
    audio: AudioTimes

    @property
    def chunk_index(self) -> int:
        """Index of the next chunk to commit."""
        return self.cache.committed


class RolloutCore:
    """The model with its tables; shared by all rollouts, changed by none.

    After the weights changed, call `renew`.
    """

    def __init__(
        self,
        model: MiniMaxH3Transformer,
        options: CoreOptions | None = None,
        *,
        attention: AttentionPlan | None = None,
        ops: PlacementOps | None = None,
        block_ops: BlockOps | None = None,
        exchange: Exchange | None = None,
        is_compiled: bool = False,
        runner: GraphRunner | None = None,
    ) -> None:
        self.model = model
        self.config: ModelConfig = model.config
        self.options = options or CoreOptions()
        self.device = model.proj_in.weight.device
        self._ops = ops or eager_ops(self.device)
        self._block_ops: BlockOps = block_ops or PlainBlockOps(model)
        is_plain = isinstance(self._block_ops, PlainBlockOps)
        if not is_plain and not self.options.packed_history:
            raise ConfigError(
                "packed_history is False; allowed with fused block ops: True, because the plain "
                "cache keeps keys that only the plain ops make"
            )
        self._exchange = exchange or Alone()
        if attention is None:
            need = AttentionNeed.on(self.device, model.dtype, self.config.attention_head_dim)
            attention = AttentionPlan.of(select_backend(need))
        self.attention = attention
        self._passes = ChunkPasses(
            model, self._block_ops, attention, self._exchange,
            is_compiled=is_compiled, runner=runner,
        )  # fmt: skip
        if (is_compiled or runner is not None) and not self.options.are_all_taken:
            raise ConfigError(f"options are {self.options}; allowed with whole passes: all of them")
        self._lender = None
        if runner is not None:
            self._lender = BufferLender(
                self.config, self.device, model.dtype, sparse_block=self._sparse_block
            )
        self._modulation = ModulationTables(model, keeps_shared=self.options.adaln_tables)
        self.times = self._modulation.times
        self._clean = self._modulation.clean

    @property
    def camera_dtype(self) -> torch.dtype:
        """Dtype of the camera matrices."""
        return torch.float32 if self.config.camera_dtype == "float32" else self.model.dtype

    @property
    def _sparse_block(self) -> int | None:
        return None if self.attention.sparse is None else self.attention.sparse.block

    @property
    def runner(self) -> GraphRunner | None:
        """What records passes, if anything does."""
        return self._passes.runner

    def renew(self) -> None:
        """Forget what was computed from the weights.

        Raises: StateError when some were given up.
        """
        self._modulation.renew()
        self._passes.clear()

    @torch.no_grad()
    def free_adaln(self) -> None:
        """Give the modulation weights up; see `ModulationTables.free_weights`."""
        self._modulation.free_weights()

    def close(self) -> None:
        """Give graphs and spare memory up, before the weights go."""
        self._passes.close()
        if self._lender is not None:
            self._lender.clear()

    @torch.no_grad()
    def begin(self, inputs: PrefixInputs) -> CoreState:
        """Start a batch of rollouts at chunk 0 with an empty history."""
        layout, tables, placement = self._placements(inputs)
        cache: PackedCache | PlainCache
        if self.options.packed_history:
            cache = self._packed_cache(tables, inputs.text_BRE.shape[0])
        else:
            cache = PlainCache(self.config, tables, sparse_block=self._sparse_block)
        state = CoreState(
            inputs=inputs,
            layout=layout,
            prefix_placement=placement,
            cache=cache,
            audio=self._modulation.audio(inputs.audio_t_B),
        )
        self._fill_prefix(state)
        self._list_keys(state)
        return state

    @torch.no_grad()
    def switch_prefix(self, state: CoreState, inputs: PrefixInputs) -> None:
        """Replace the prefix and keep the history, whose keys are placed by the new positions."""
        state.layout, tables, state.prefix_placement = self._placements(inputs)
        state.inputs = inputs
        state.cache.renew_prefix(tables)
        state.audio = self._modulation.audio(inputs.audio_t_B)
        self._fill_prefix(state)
        self._list_keys(state)

    @torch.no_grad()
    def denoise(
        self,
        state: CoreState,
        noise_BCTHW: Tensor,
        step_noise: Sequence[Tensor],
        views_BT44: Tensor,
        *,
        leading_BCTHW: Tensor | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Make the next chunk; nothing is committed.

        Args:
            state: the rollouts.
            noise_BCTHW: fp32 start of the chunk.
            step_noise: fresh fp32 noise after every step but the last.
            views_BT44: relative world-to-camera view of each latent (`camera.relative_views`).
            leading_BCTHW: the first 0 to 4 latents, if they are given.
            on_step: called before each denoise step.

        Raises: ConfigError for a wrong shape, StateError from the cache.
        """
        self._check("noise", noise_BCTHW, self.config.latents_per_chunk)
        count = 0 if leading_BCTHW is None else leading_BCTHW.shape[2]
        if leading_BCTHW is not None:
            if count >= self.config.latents_per_chunk:
                raise ConfigError(
                    f"leading latents are {count}; allowed: 0 to "
                    f"{self.config.latents_per_chunk - 1}"
                )
            self._check("leading latents", leading_BCTHW, count)
        self.open_chunk(state, views_BT44)

        def velocity(x_BCTHW: Tensor, step: int) -> Tensor:
            if on_step is not None:
                on_step(step)
            return self.velocity(state, x_BCTHW, step, leading_count=count)

        return denoise_chunk(velocity, noise_BCTHW, step_noise, self.times, leading_BCTHW)

    @torch.no_grad()
    def refresh(
        self, state: CoreState, latents_BCTHW: Tensor, views_BT44: Tensor | None = None
    ) -> None:
        """Write keys and values of the finished chunk at t = 1 and commit it.

        Args:
            state: the rollouts.
            latents_BCTHW: the clean chunk.
            views_BT44: needed when no `denoise` opened the chunk (history that is given).
        """
        self._check("latents", latents_BCTHW, self.config.latents_per_chunk)
        if views_BT44 is not None:
            self.open_chunk(state, views_BT44)
        if isinstance(state.cache, PackedCache) and self.options.are_all_taken:
            self._pass(state.cache, latents_BCTHW, self._clean, Phase.REFRESH)
        else:
            times = [self._clean] * latents_BCTHW.shape[2]
            self._run(state, latents_BCTHW, times, Phase.REFRESH)
        state.cache.commit()

    def open_chunk(self, state: CoreState, views_BT44: Tensor) -> None:
        """Set the camera of the next chunk; `velocity` and `refresh` run under it."""
        expected = (state.inputs.text_BRE.shape[0], self.config.latents_per_chunk, 4, 4)
        if tuple(views_BT44.shape) != expected:
            raise ConfigError(f"views have shape {tuple(views_BT44.shape)}; allowed: {expected}")
        # Built where the views are: on a GPU its constants alone would make the host wait.
        camera = projective(views_BT44, self.camera_dtype)
        together = torch.stack([camera.query, camera.key_value, camera.output])
        query, key_value, output = send(together, self.device).unbind(0)
        camera = Projective(query=query, key_value=key_value, output=output)
        self._passes.begin_chunk()
        state.cache.begin(state.cache.committed, camera)

    @torch.no_grad()
    def velocity(
        self, state: CoreState, x_BCTHW: Tensor, step: int, *, leading_count: int = 0
    ) -> Tensor:
        """Velocity of the open chunk at a denoise step, fp32 [B, C, T, H, W]."""
        is_plain = leading_count > 0 or not self.options.are_all_taken
        phase = self._phase_at(step)
        if isinstance(state.cache, PackedCache) and not is_plain:
            rows_BRC = self._pass(state.cache, x_BCTHW, step, phase)
            assert rows_BRC is not None
            return unpatchify(rows_BRC, self.config.geometry)
        trailing_count = x_BCTHW.shape[2] - leading_count
        times = [self._clean] * leading_count + [step] * trailing_count
        x_BRD = self._run(state, x_BCTHW, times, phase)
        rows_BRC = self.model.head_video(x_BRD, self._modulation.final(times))
        return unpatchify(rows_BRC, self.config.geometry)

    def _phase_at(self, step: int) -> Phase:
        return Phase.SPARSE_DENOISE if self.attention.is_sparse_at(step) else Phase.DENOISE

    def _pass(self, cache: PackedCache, x_BCTHW: Tensor, time: int, phase: Phase) -> Tensor | None:
        """One pass in which all rows share a time: velocity rows, or None for a refresh."""
        return self._passes.run(
            cache,
            patchify(x_BCTHW),
            self._modulation.time_index(time),
            self._modulation.of_passes(),
            phase,
        )

    def _packed_cache(self, tables: WindowTables, batch_size: int) -> PackedCache:
        heads = self.config.num_attention_heads // self._exchange.world_size
        longest = prefix_layout(self.config, self.config.text_rows).rows
        room = max(longest, tables.prefix_rows)
        shape = BufferShape(batch_size=batch_size, heads=heads, prefix_room=room)
        if self._lender is None:
            buffers = allocate(
                self.config, shape, device=self.device, dtype=self.model.dtype,
                sparse_block=self._sparse_block,
            )  # fmt: skip
            return PackedCache(self.config, tables, buffers, ops=self._block_ops)
        buffers = self._lender.take(shape)
        cache = PackedCache(self.config, tables, buffers, ops=self._block_ops)
        weakref.finalize(cache, self._lender.give, buffers)
        return cache

    def _list_keys(self, state: CoreState) -> None:
        """Tell the runner which passes this prefix will have."""
        if self._passes.runner is not None and isinstance(state.cache, PackedCache):
            batch_size, steps = state.inputs.text_BRE.shape[0], range(len(self.times))
            # In the order of a chunk; all denoise steps may be of one kind.
            phases = dict.fromkeys([*map(self._phase_at, steps), Phase.REFRESH])
            keys = pass_keys(state.cache, batch_size, self.model.dtype, tuple(phases))
            self._passes.runner.allow(keys)

    def _check(self, name: str, latents_BCTHW: Tensor, latents: int) -> None:
        grid = self.config.geometry
        expected = (self.config.in_channels, latents, grid.latent_height, grid.latent_width)
        if tuple(latents_BCTHW.shape[1:]) != expected:
            raise ConfigError(
                f"{name} have shape {tuple(latents_BCTHW.shape)}; allowed: [batch, "
                f"{', '.join(map(str, expected))}]"
            )

    def _placements(self, inputs: PrefixInputs) -> tuple[PrefixLayout, WindowTables, Placement]:
        config, text_rows = self.config, inputs.text_BRE.shape[1]
        layout = prefix_layout(config, text_rows)

        def tables(positions_R3: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = rope_tables(positions_R3, config.rope_freq_dim, config.rope_theta)
            return cos.to(self.device, self.model.dtype), sin.to(self.device, self.model.dtype)

        cos_RK, sin_RK = tables(prefix_positions(config, text_rows))
        camera = identity_projective(self.camera_dtype, self.device)
        placement = Placement(
            cos_RK=cos_RK,
            sin_RK=sin_RK,
            camera=type(camera)(
                query=camera.query[None], key_value=camera.key_value[None],
                output=camera.output[None],
            ),
            ops=self._ops,
        )  # fmt: skip
        cos_SK, sin_SK = tables(window_positions(config, text_rows))
        window = WindowTables(prefix_rows=layout.rows, cos_SK=cos_SK, sin_SK=sin_SK, ops=self._ops)
        return layout, window, placement

    def _fill_prefix(self, state: CoreState) -> None:
        """Run the prefix alone and leave its keys and values in the cache."""
        if not self.options.prefix_cache:
            return
        share = self._exchange.over(state.layout.rows)
        self.model.run_blocks(
            share.own(self._embed_prefix(state)),
            self._modulations(lambda layer: share.own(self._prefix_modulation(state, layer))),
            share.attend(self._prefix_attend(state)),
            self._block_ops,
            keys_values_only=True,
        )

    def _run(
        self, state: CoreState, latents_BCTHW: Tensor, times: Sequence[int], phase: Phase
    ) -> Tensor:
        """One pass; ``times`` holds the index of each latent's time. Returns the chunk's rows.

        A refresh has no output to speak of.
        """
        x_BRD = self.model.embed_video(patchify(latents_BCTHW))
        ops, keep = self._block_ops, phase is Phase.REFRESH
        plan = self.attention if phase is Phase.SPARSE_DENOISE else self.attention.dense
        chunk = ChunkAttend(plan=plan, cache=state.cache, ops=ops, keep=keep)
        if self.options.prefix_cache:
            share = self._exchange.over(x_BRD.shape[1])
            modulations = self._modulations(
                lambda layer: share.own(self._modulation.chunk(layer, times))
            )
            out_BRD = self.model.run_blocks(
                share.own(x_BRD), modulations, share.attend(chunk), ops, keys_values_only=keep
            )
            return out_BRD if keep else share.whole(out_BRD)

        def whole_modulation(layer: int) -> Tensor:
            prefix_BR6D = self._prefix_modulation(state, layer)
            chunk_1R6D = self._modulation.chunk(layer, times)
            shape = (prefix_BR6D.shape[0], x_BRD.shape[1], *chunk_1R6D.shape[2:])
            return torch.cat([prefix_BR6D, chunk_1R6D.expand(shape)], dim=1)

        whole_BRD = torch.cat([self._embed_prefix(state), x_BRD], dim=1)
        attend = WholeAttend(prefix=self._prefix_attend(state), chunk=chunk)
        share = self._exchange.over(whole_BRD.shape[1])
        modulations = self._modulations(lambda layer: share.own(whole_modulation(layer)))
        out_BRD = self.model.run_blocks(
            share.own(whole_BRD), modulations, share.attend(attend), ops, keys_values_only=keep
        )
        return out_BRD if keep else share.whole(out_BRD)[:, state.layout.rows :]

    def _embed_prefix(self, state: CoreState) -> Tensor:
        inputs, model = state.inputs, self.model
        parts = [
            model.refine_text(inputs.text_BRE),
            model.embed_video(inputs.anchor_rows_BRC),
            model.embed_audio(inputs.audio_rows_BRC),
        ]
        return torch.cat(parts, dim=1)

    def _prefix_attend(self, state: CoreState) -> PrefixAttend:
        return PrefixAttend(
            plan=self.attention,
            cache=state.cache,
            layout=state.layout,
            placement=state.prefix_placement,
            ops=self._block_ops,
        )

    def _prefix_modulation(self, state: CoreState, layer: int) -> Tensor:
        return self._modulation.prefix(layer, state.inputs, state.layout, state.audio)

    def _modulations(self, of_layer: Callable[[int], Tensor]) -> LayerModulations:
        return LayerModulations(self.config.num_layers, of_layer)
