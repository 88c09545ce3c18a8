"""Modulation of rows by their model times: what is computed once, and what rows get of it.

Owns the vectors of the times that every session shares (each denoise step, clean, the anchor's),
and the weights behind them; those of audio rows, whose time differs, are in `audio_modulation`.
Shape suffixes: B batch, R rows, C time width, D width, L layers, M distinct times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from engine.audio_modulation import AudioModulation, AudioTimes
from engine.denoise import model_times
from engine.errors import StateError
from engine.layout import PrefixLayout
from engine.model.dit import TAG_VIDEO, MiniMaxH3Transformer
from engine.prefix import PrefixInputs


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PassTables:
    """Vectors of the shared times for video rows, for a pass in which all rows share one."""

    blocks_LM6D: Tensor
    final_M2D: Tensor


class LayerModulations(Sequence[Tensor]):
    """Modulation of one pass, built layer by layer as the blocks ask for it.

    A list would hold the vectors of every row in every layer at once: 6 GB for the prefix of the
    large model.
    """

    def __init__(self, layers: int, of_layer: Callable[[int], Tensor]) -> None:
        self._layers = layers
        self._of_layer = of_layer

    def __len__(self) -> int:
        return self._layers

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self._of_layer(layer) for layer in range(*index.indices(self._layers))]
        return self._of_layer(index)


class ModulationTables:
    """Vectors of a model; its weights may go once they are there.

    Args:
        model: the weights.
        keeps_shared: keep vectors, instead of computing them each time.
    """

    def __init__(self, model: MiniMaxH3Transformer, *, keeps_shared: bool) -> None:
        self._model = model
        self._keeps_shared = keeps_shared
        self.times: list[float] = model_times(model.config.sampler).tolist()
        self.clean = len(self.times)
        """Index of t = 1."""
        self._anchor = len(self.times) + 1
        device = model.proj_in.weight.device
        shared = [*self.times, 1.0, model.config.sampler.anchor_t]
        self._times_M = torch.tensor(shared, dtype=torch.float32, device=device)
        self._index_M = torch.arange(len(shared), device=device)
        self._tables: dict[int, Tensor] = {}
        self._final_M2D: Tensor | None = None
        self._pass_tables: PassTables | None = None
        self._audio = AudioModulation(model, keeps=keeps_shared)

    def renew(self) -> None:
        """Forget what was computed from the weights.

        Raises: StateError when they were given up.
        """
        if self._audio.are_weights_freed:
            raise StateError(
                "renew: the modulation weights were given up (free_adaln); expected a model that "
                "keeps them, or one that is loaded anew"
            )
        self._tables.clear()
        self._final_M2D = self._pass_tables = None

    def free_weights(self) -> None:
        """Build every table and give up the weights; the third that audio times need, one of each
        session, goes to the machine's memory, from where a GPU reads it when a session begins.

        Raises: StateError unless tables are kept.
        """
        if not self._keeps_shared:
            raise StateError("free_weights: tables are not kept; expected adaln_tables")
        self.of_passes()
        self._audio.free_weights()

    def audio(self, t_B: Tensor) -> AudioTimes:
        """Times of the audio rows of each sample."""
        return self._audio.times(t_B)

    def time_index(self, time: int) -> Tensor:
        """Index of a shared time as a tensor [1]; no copy from the host."""
        return self._index_M[time : time + 1]

    def of_passes(self) -> PassTables:
        """Vectors of video rows in all layers."""
        if self._pass_tables is None:
            layers = range(self._model.config.num_layers)
            self._pass_tables = PassTables(
                blocks_LM6D=torch.stack([self._table(layer)[:, TAG_VIDEO] for layer in layers]),
                final_M2D=self._final(),
            )
        return self._pass_tables

    def chunk(self, layer: int, times: Sequence[int]) -> Tensor:
        """Vectors of the chunk's rows: [1, 1, 6, D] where all share a time, else [1, R, 6, D]."""
        return self._rows(self._table(layer)[:, TAG_VIDEO], times)

    def final(self, times: Sequence[int]) -> Tensor:
        """Vectors of the output norm, shaped as those of `chunk` with 2 for 6."""
        return self._rows(self._final(), times)

    def prefix(
        self, layer: int, inputs: PrefixInputs, layout: PrefixLayout, audio: AudioTimes
    ) -> Tensor:
        """Vectors of the prefix rows [B, R, 6, D]: text at t = 1, anchor, audio."""
        table, batch_size = self._table(layer), inputs.text_BRE.shape[0]
        text_R6D = table[self.clean][inputs.text_tags_R]
        anchor_R6D = table[self._anchor, TAG_VIDEO].expand(layout.anchor_rows, -1, -1)
        conditioning_R6D = torch.cat([text_R6D, anchor_R6D])
        audio_B16D = self._audio.vectors(layer, audio)[:, None]
        return torch.cat(
            [
                conditioning_R6D.expand(batch_size, -1, -1, -1),
                audio_B16D.expand(batch_size, layout.audio_rows, -1, -1),
            ],
            dim=1,
        )

    def _rows(self, table: Tensor, times: Sequence[int]) -> Tensor:
        if len(set(times)) == 1:
            return table[times[0]][None, None]
        parts = torch.stack([table[time] for time in times])
        return parts.repeat_interleave(self._model.config.rows_per_latent, dim=0)[None]

    def _table(self, layer: int) -> Tensor:
        """Vectors of the shared times [M, 3 tags, 6, D]."""
        if layer in self._tables:
            return self._tables[layer]
        table = self._model.modulation(layer, self._model.time_embedding(self._times_M))
        if self._keeps_shared:
            self._tables[layer] = table
        return table

    def _final(self) -> Tensor:
        """Vectors of the output norm at the shared times [M, 2, D]."""
        if self._final_M2D is not None:
            return self._final_M2D
        table = self._model.final_modulation(self._model.time_embedding(self._times_M))
        if self._keeps_shared:
            self._final_M2D = table
        return table
