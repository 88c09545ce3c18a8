"""The prompt encoder of a model that reads a Qwen3-VL: kept encodings first, then the model.

Owns the order in which an encoding is looked for, memory, disk, model; and which of the three there
are. Where everything asked for is on disk, neither the weights nor transformers are needed.
Invariant: an encoding has the same bits wherever it comes from.
Shape suffixes: H height, W width, C channels.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.reading import OnLoad
from engine.config import PromptOptions, PromptResidency, Qwen3VlTextConfig
from engine.errors import CheckpointError, ConfigError
from engine.memory import MemoryPart
from engine.prompts.files import PromptFiles, find_encoder, holds_encoder
from engine.prompts.qwen3_vl import Qwen3VlEncoder
from engine.prompts.store import EncodingStore, encoding_key, kept_model
from engine.text import PromptEncoding

REFINEMENT_PROMPT = "4K, refined, high quality, cinematic detail, clean textures, natural motion"
"""One prompt for all worlds: says how pictures look and nothing of what they show, which the first
picture says. Encoded once, it does without an encoder at run time, and changes what a world looks
like. Source: Sol-H3, second stage."""
KEPT_IN_MEMORY = 4
"""Encodings of 15 MB each: that of the world, and what it may be switched to."""
_log = logging.getLogger(__name__)


class CachedPrompts:
    """Encodings from memory, from disk, or from a model, which may be missing.

    Args:
        model_hash: of the encoder whose encodings count.
        encoder: None serves what is kept alone.
        store: None keeps nothing on disk.
        refines: every prompt stands for `REFINEMENT_PROMPT`.
    """

    def __init__(
        self,
        *,
        model_hash: str,
        encoder: Qwen3VlEncoder | None,
        store: EncodingStore | None,
        refines: bool = False,
    ) -> None:
        self._model_hash = model_hash
        self._encoder = encoder
        self._store = store
        self._refines = refines
        self._newest: OrderedDict[str, PromptEncoding] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def model_hash(self) -> str:
        """Of all that makes rows of a prompt and a picture."""
        return f"{self._model_hash} refinement" if self._refines else self._model_hash

    def encode(self, prompt: str, picture_HWC: Tensor | None = None) -> PromptEncoding:
        """Return the rows of a prompt and a picture, on the CPU.

        Raises: ConfigError without a picture or for a prompt that the encoder does not take,
            CheckpointError for one that is not kept where there is no encoder.
        """
        prompt, picture_HWC, key = self._asked(prompt, picture_HWC)
        encoding = self._recall(key)
        if encoding is None:
            encoding = self._store.read(key) if self._store is not None else None
            if encoding is None:
                encoding = self._compute(prompt, picture_HWC)
                if self._store is not None:
                    self._store.write(key, encoding)
            self._remember(key, encoding)
        return encoding

    def is_at_hand(self, prompt: str, picture_HWC: Tensor | None = None) -> bool:
        """Whether the encoding is in memory."""
        _, _, key = self._asked(prompt, picture_HWC)
        return self._recall(key) is not None

    def close(self) -> None:
        """Free the encoder."""
        if self._encoder is not None:
            self._encoder.close()

    def _asked(self, prompt: str, picture_HWC: Tensor | None) -> tuple[str, Tensor, str]:
        """Prompt and picture as they are encoded, and the name of their encoding."""
        if picture_HWC is None:
            raise ConfigError("picture is None; the prompt encoder looks at it: pass its pixels")
        prompt = REFINEMENT_PROMPT if self._refines else prompt
        return prompt, picture_HWC, encoding_key(self._model_hash, prompt, picture_HWC)

    def _compute(self, prompt: str, picture_HWC: Tensor) -> PromptEncoding:
        if self._encoder is None:
            raise CheckpointError(
                "prompt: this prompt with this picture is not among the kept encodings, and there "
                "is no encoder to make it; needed: --prompt-encoder with the folder of a Qwen3-VL"
            )
        return self._encoder.encode(prompt, picture_HWC)

    def _recall(self, key: str) -> PromptEncoding | None:
        with self._lock:
            if key in self._newest:
                self._newest.move_to_end(key)
            return self._newest.get(key)

    def _remember(self, key: str, encoding: PromptEncoding) -> None:
        with self._lock:
            self._newest[key] = encoding
            while len(self._newest) > KEPT_IN_MEMORY:
                self._newest.popitem(last=False)


def find_files(
    text: Qwen3VlTextConfig, text_dim: int, options: PromptOptions, beside: tuple[Path, ...] = ()
) -> PromptFiles | None:
    """Files of the encoder that `open_prompts` reads; None where there are none.

    Args:
        text: what the model reads.
        text_dim: width that it takes.
        options: a folder that is named there is the only one that counts.
        beside: folders of the transformer's weights, with which the encoder may lie.

    Raises: CheckpointError for a folder that is named and holds none, or for damaged files.
    """
    if options.encoder is not None:
        return find_encoder(Path(options.encoder), layers=text.layer, text_dim=text_dim)
    for folder in beside:
        if holds_encoder(folder):
            return find_encoder(folder, layers=text.layer, text_dim=text_dim)
    return None


def open_prompts(
    files: PromptFiles | None,
    text: Qwen3VlTextConfig,
    options: PromptOptions,
    *,
    device: torch.device,
    on_progress: OnLoad | None = None,
) -> CachedPrompts:
    """Open the encoder, or what is kept of one.

    Args:
        files: what `find_files` found.
        text: what the model reads.
        options: the residency is no "auto".
        device: of the engine.
        on_progress: called while weights are read.

    Raises: CheckpointError when there is neither; UnsupportedError without transformers.
    """
    folder = Path(options.cache).expanduser()
    keeps = options.cache_mib > 0
    encoder = None
    if files is not None:
        model_hash: str | None = files.model_hash
        encoder = Qwen3VlEncoder(
            files,
            layers=text.layer,
            caption_rows=text.caption_rows,
            device=device,
            residency=options.residency,
            on_progress=on_progress,
        )
    else:
        model_hash = kept_model(folder) if keeps else None
        _log.info("prompts_kept_alone encoder=%s", model_hash)
    if model_hash is None:
        raise CheckpointError(
            f"prompt encoder: none is beside the weights, and the encodings kept in {folder} are "
            "not of exactly one; needed: --prompt-encoder with the folder of the Qwen3-VL of "
            "MiniMax-H3 (text_encoder, tokenizer, processor)"
        )
    store = EncodingStore(folder, model_hash, limit_mib=options.cache_mib) if keeps else None
    return CachedPrompts(
        model_hash=model_hash, encoder=encoder, store=store, refines=options.refinement
    )


def residencies(options: PromptOptions, device: torch.device) -> tuple[PromptOptions, ...]:
    """What "auto" may become, the first is wanted most.

    Raises: ConfigError for "gpu" without one.
    """
    if options.residency == "gpu" and device.type != "cuda":
        raise ConfigError(f"prompt_residency is 'gpu' on {device}; allowed there: 'cpu', 'free'")
    if options.residency != "auto":
        return (options,)
    names: tuple[PromptResidency, ...] = ("gpu" if device.type == "cuda" else "cpu", "free")
    return tuple(dataclasses.replace(options, residency=name) for name in names)


def prompt_parts(
    files: PromptFiles | None, options: PromptOptions, device: torch.device, *, rows: int
) -> tuple[MemoryPart, ...]:
    """Memory of the encoder, for the plan.

    Args:
        files: what `find_files` found.
        options: the residency is no "auto".
        device: of the engine.
        rows: of the longest prompt.
    """
    if files is None:
        return ()
    text = files.config["text_config"]
    # Hidden states, their normed copies in fp32, and the feed-forward part of one layer.
    working = 2 * rows * (8 * int(text["hidden_size"]) + 3 * int(text["intermediate_size"]))
    name = "prompt encoder"
    if options.residency == "free":
        size = files.largest_part_bytes + working
        return (MemoryPart.played(name, size, "read for each new prompt"),)
    if options.residency == "cpu" and device.type != "cpu":
        return (MemoryPart(name=name, loading=0, playing=0, host=files.size_bytes + working),)
    return (MemoryPart.kept(name, files.size_bytes + working),)
