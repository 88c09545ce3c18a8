"""Modulation of rows by their model times: what is computed once, and what rows get of it.

Owns the vectors of the times that every session shares (each denoise step, clean, the anchor's),
and the weights behind them. Audio rows have a time of their own in each session.
Shape suffixes: B batch, R rows, C time width, D width, L layers, M distinct times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from engine.denoise import model_times
from engine.errors import StateError
from engine.layout import PrefixLayout
from engine.model.dit import TAG_AUDIO, TAG_VIDEO, AdaLN, MiniMaxH3Transformer
from engine.model.lora_linear import some_rows
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


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AudioTimes:
    """Times of the audio rows of a batch, and the vectors of each layer where they are kept."""

    embedding_BC: Tensor
    kept_B6D: dict[int, Tensor]
    times: tuple[float, ...] | None = None
    """Where all vectors are kept: what they are of."""


class ModulationTables:
    """Vectors of a model; its weights may go once they are there.

    Args:
        model: the weights.
        keeps_shared: keep the vectors of the shared times, instead of computing them each time.
        keeps_audio: keep those of audio times, which is of use where each pass has the prefix.
    """

    def __init__(
        self, model: MiniMaxH3Transformer, *, keeps_shared: bool, keeps_audio: bool
    ) -> None:
        self._model = model
        self._keeps_shared, self._keeps_audio = keeps_shared, keeps_shared and keeps_audio
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
        self._are_weights_freed = False

    def renew(self) -> None:
        """Forget what was computed from the weights.

        Raises: StateError when they were given up.
        """
        if self._are_weights_freed:
            raise StateError(
                "renew: the modulation weights were given up (free_adaln); expected a model that "
                "keeps them, or one that is loaded anew"
            )
        self._tables.clear()
        self._final_M2D = self._pass_tables = None

    def free_weights(self) -> None:
        """Build every table and give up the weights; the third that audio times need, one of each
        session, goes to the machine's memory.

        Raises: StateError unless tables are kept.
        """
        if not self._keeps_shared:
            raise StateError("free_weights: tables are not kept; expected adaln_tables")
        self.of_passes()
        for layer in range(self._model.config.num_layers):
            block = self._model.block(layer)
            if isinstance(block.adaln_proj, AdaLN):
                block.add_module("adaln_proj", AudioAdaLN(block.adaln_proj))
        self._are_weights_freed = True

    def audio(self, t_B: Tensor, before: AudioTimes | None = None) -> AudioTimes:
        """Times of the audio rows of each sample.

        Args:
            t_B: the times.
            before: those that the same rows had until now; without weights on the device the
                vectors of equal times are taken over, and of others made at once.
        """
        if not self._are_weights_freed:
            return AudioTimes(embedding_BC=self._model.time_embedding(t_B), kept_B6D={})
        times = tuple(t_B.tolist())
        if before is not None and before.times == times:
            return before
        embedding_BC = self._model.time_embedding(t_B)
        host_BC = embedding_BC.cpu()
        kept_B6D = {}
        for layer in range(self._model.config.num_layers):
            projection = self._model.block(layer).adaln_proj
            if isinstance(projection, AudioAdaLN):
                made_B6D = projection.audio(host_BC)
            else:
                # A short form of the weights, which stays.
                made_B6D = self._model.modulation(layer, embedding_BC)[:, TAG_AUDIO]
            kept_B6D[layer] = made_B6D.to(t_B.device, self._model.dtype)
        return AudioTimes(embedding_BC=embedding_BC, kept_B6D=kept_B6D, times=times)

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
        audio_B16D = self._audio(layer, audio)[:, None]
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

    def _audio(self, layer: int, audio: AudioTimes) -> Tensor:
        """Vectors of each sample's audio time [B, 6, D]."""
        if layer in audio.kept_B6D:
            return audio.kept_B6D[layer]
        table_B6D = self._model.modulation(layer, audio.embedding_BC)[:, TAG_AUDIO]
        if self._keeps_audio:
            audio.kept_B6D[layer] = table_B6D
        return table_B6D


class AudioAdaLN(nn.Module):
    """What is left of a block's modulation: the rows for audio, in the machine's memory.

    One product over a third of the outputs, once a session, whose sums a CPU orders otherwise than
    a GPU.
    """

    def __init__(self, whole: AdaLN) -> None:
        super().__init__()
        part = whole.linear.out_features // 3
        rows = slice(TAG_AUDIO * part, (TAG_AUDIO + 1) * part)
        self.linear = some_rows(whole.linear, rows).to("cpu")

    def audio(self, temb_BC: Tensor) -> Tensor:
        """Return [B, 6, D] for silu(temb), all on the CPU."""
        out: Tensor = self.linear(temb_BC.to(self.linear.weight.dtype))
        return out.unflatten(-1, (6, -1))

    def forward(self, temb_MC: Tensor, parts: int) -> Tensor:
        """Refuse: raises StateError."""
        raise StateError(
            "modulation: the weights were given up (free_adaln) once their tables were built; "
            "expected nothing but times in the tables"
        )
