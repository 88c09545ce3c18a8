"""Modulation of audio rows, whose model time differs from session to session.

Owns the vectors of the last sessions and, once the modulation weights are given up, the third of
them that audio times need, in the machine's memory. Vectors are made in the prefix pass, layer by
layer. Shape suffixes: B batch, C time width, D width, W output channels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from engine.errors import StateError
from engine.model.dit import TAG_AUDIO, AdaLN, MiniMaxH3Transformer
from engine.model.lora_linear import LoraLinear, low_rank
from engine.streamed_rows import StreamedRows

KEPT_TIMES = 4
"""Sessions whose vectors are kept, 3 MB each of the large model: one that begins again, or with
another picture, takes them over."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AudioTimes:
    """Times of the audio rows of a batch, and their vectors in the layers that were asked for."""

    embedding_BC: Tensor
    kept_B6D: dict[int, Tensor]


class AudioModulation:
    """Vectors of audio times.

    Args:
        model: the weights.
        keeps: keep vectors as long as their times, instead of computing them each time.
    """

    def __init__(self, model: MiniMaxH3Transformer, *, keeps: bool) -> None:
        self._model, self._keeps = model, keeps
        self._last: dict[tuple[float, ...], AudioTimes] = {}
        """Of the last sessions once the weights are given up, the newest last."""
        self.are_weights_freed = False

    def free_weights(self) -> None:
        """Give the modulation weights up; what audio times need goes to the machine's memory.

        Calling it again does nothing.
        """
        if self.are_weights_freed:
            return
        begin_s = time.perf_counter()
        layers, stream = self._model.config.num_layers, None
        for layer in range(layers):
            block = self._model.block(layer)
            whole = block.adaln_proj
            assert isinstance(whole, AdaLN)
            weight_WC = whole.linear.weight
            if stream is None and weight_WC.is_cuda:
                stream = StreamedRows(layers, len(_for_audio(weight_WC)), weight_WC)
            block.add_module("adaln_proj", AudioAdaLN(whole, layer, stream))
        self.are_weights_freed = True
        if stream is not None:
            stream.open()
            _log.info(
                "modulation_moved gib=%.2f pinned_gib=%.2f s=%.2f", stream.gib, stream.pinned_gib,
                time.perf_counter() - begin_s,
            )  # fmt: skip

    def times(self, t_B: Tensor) -> AudioTimes:
        """Times of each sample.

        Without weights those of one of the last sessions where they are the same, with its vectors.
        """
        if not self.are_weights_freed:
            return AudioTimes(embedding_BC=self._model.time_embedding(t_B), kept_B6D={})
        times = tuple(t_B.tolist())
        found = self._last.pop(times, None)
        if found is None:
            found = AudioTimes(embedding_BC=self._model.time_embedding(t_B), kept_B6D={})
        self._last[times] = found
        while len(self._last) > KEPT_TIMES:
            del self._last[next(iter(self._last))]
        return found

    def vectors(self, layer: int, audio: AudioTimes) -> Tensor:
        """Vectors of each sample's audio time [B, 6, D]."""
        if layer in audio.kept_B6D:
            return audio.kept_B6D[layer]
        projection = self._model.block(layer).adaln_proj
        if isinstance(projection, AudioAdaLN):
            vectors_B6D = projection.audio(audio.embedding_BC).to(self._model.dtype)
        else:
            vectors_B6D = self._model.modulation(layer, audio.embedding_BC)[:, TAG_AUDIO]
        if self._keeps:
            audio.kept_B6D[layer] = vectors_B6D
        return vectors_B6D


class AudioAdaLN(nn.Module):
    """What is left of a block's modulation: the rows for audio, in the machine's memory.

    Class X where they are streamed to a GPU; on a CPU one product with a third of the outputs,
    which may order its sums otherwise (F).

    Args:
        whole: what it stands for.
        layer: of the block.
        stream: takes the rows; None where they stay on the device.
    """

    def __init__(self, whole: AdaLN, layer: int, stream: StreamedRows | None) -> None:
        super().__init__()
        linear = whole.linear
        base = linear.base if isinstance(linear, LoraLinear) else linear
        self._dtype = base.weight.dtype
        self._branch: Callable[[Tensor], Tensor] | None = None
        if isinstance(linear, LoraLinear):
            self._branch = partial(low_rank, a_RK=linear.a_RK, b_NR=linear.b_NR, scale=linear.scale)
        self._product: Callable[[Tensor], Tensor]
        if stream is None:
            self._product = _third_of(base)
        else:
            stream.keep(layer, base.weight, base.bias)
            self._product = partial(stream.product, layer)

    def audio(self, temb_BC: Tensor) -> Tensor:
        """Return [B, 6, D] for silu(temb)."""
        x_BC = temb_BC.to(self._dtype)
        out = self._product(x_BC)
        if self._branch is not None:
            out = out + self._branch(x_BC).chunk(3, dim=-1)[TAG_AUDIO]
        return out.unflatten(-1, (6, -1))

    def forward(self, temb_MC: Tensor, parts: int) -> Tensor:
        """Refuse: raises StateError."""
        raise StateError(
            "modulation: the weights were given up (free_adaln) once their tables were built; "
            "expected nothing but times in the tables"
        )


def _third_of(whole: nn.Linear) -> nn.Linear:
    """Return a linear of the rows for audio alone, with weights of its own."""
    third = nn.Linear(
        whole.in_features, whole.out_features // 3, device=whole.weight.device,
        dtype=whole.weight.dtype,
    ).requires_grad_(False)  # fmt: skip
    third.weight.data = _for_audio(whole.weight).clone()
    third.bias.data = _for_audio(whole.bias).clone()
    return third


def _for_audio(of_W: Tensor) -> Tensor:
    """Return the last third of the output channels."""
    return of_W.chunk(3)[TAG_AUDIO]
