"""Prompt encoders: a prompt and the first picture in, text rows out.

Owns the interface that every text encoder has, and the word encoder that is trained together
with the mini world, which never fails on a string: unknown words share a few hashed embeddings,
which training has shown to the model as words without a meaning.
Shape suffixes: B batch, R text rows, E text width, H height, W width, C channels.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.config import ModelConfig, TextConfig

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?", re.UNICODE)
_PAD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptEncoding:
    """Text rows [1, R, E] in the dtype of the encoder, and the modality tag of each row [R]
    (1 text, 0 vision).
    """

    rows_BRE: Tensor
    tags_R: Tensor


class PromptEncoder(Protocol):
    """Anything that turns a prompt into text rows. Called from any thread."""

    def encode(self, prompt: str, picture_HWC: Tensor | None = None) -> PromptEncoding:
        """Return the rows of one prompt.

        Args:
            prompt: any text.
            picture_HWC: first picture, uint8 RGB; an encoder that sees pictures needs it.

        Raises: ConfigError for a prompt that it does not take.
        """
        ...

    def is_at_hand(self, prompt: str, picture_HWC: Tensor | None = None) -> bool:
        """Whether `encode` would return at once."""
        ...

    def close(self) -> None:
        """Free what is loaded."""
        ...


class WordEncoder(nn.Module):
    """A fixed number of rows, one embedded word each.

    Known words come first, in the order of the prompt, then unknown words hashed into buckets,
    then padding. So the words that mean something survive however long the prompt is.
    """

    def __init__(
        self, vocabulary: Sequence[str], unknown_buckets: int, rows: int, text_dim: int
    ) -> None:
        super().__init__()
        self._index = {word: i + 1 for i, word in enumerate(vocabulary)}
        self._unknown_buckets = unknown_buckets
        self._rows = rows
        self.embedding = nn.Embedding(1 + len(vocabulary) + unknown_buckets, text_dim)
        nn.init.normal_(self.embedding.weight, std=0.5)

    @classmethod
    def of(cls, model: ModelConfig) -> WordEncoder:
        """Return the encoder of a model, with random embeddings.

        For a model that reads another encoder it stands in, with as many rows as that may make: so
        random weights can be timed without a prompt encoder on disk.
        """
        text = model.text
        if not isinstance(text, TextConfig):
            text = TextConfig(rows=model.text_rows)
        return cls(text.vocabulary, text.unknown_buckets, text.rows, model.text_dim)

    def tokenize(self, prompt: str) -> list[int]:
        """Return ``rows`` word ids; repeated words count once."""
        words = list(dict.fromkeys(match.group() for match in _WORD.finditer(prompt.casefold())))
        known = [self._index[word] for word in words if word in self._index]
        first_unknown = 1 + len(self._index)
        unknown = [
            first_unknown + zlib.crc32(word.encode()) % self._unknown_buckets
            for word in words
            if word not in self._index
        ]
        ids = (known + unknown)[: self._rows]
        return ids + [_PAD] * (self._rows - len(ids))

    def forward(self, ids_BR: Tensor) -> Tensor:
        """Embed word ids: [B, R] -> [B, R, E]."""
        return self.embedding(ids_BR)

    @torch.no_grad()
    def encode(self, prompt: str, picture_HWC: Tensor | None = None) -> PromptEncoding:
        """Encode one prompt; all rows are tagged as text, and the picture is not looked at."""
        ids_BR = torch.tensor([self.tokenize(prompt)], device=self.embedding.weight.device)
        rows_BRE = self.embedding(ids_BR).float()
        return PromptEncoding(
            rows_BRE=rows_BRE,
            tags_R=torch.ones(self._rows, dtype=torch.int64, device=rows_BRE.device),
        )

    def is_at_hand(self, prompt: str, picture_HWC: Tensor | None = None) -> bool:
        """Words are looked up, not computed."""
        return True

    def close(self) -> None:
        """Nothing is loaded besides the embeddings, which belong to the model."""
