"""What a Qwen3-VL gets to read: a picture with its label, then the prompt as it is.

    <Picture 1>: <|vision_start|><|image_pad|> x N<|vision_end|>prompt
    1 1 1 1 1 1  0               0              0             1 ...       tag of each row

Owns tokens, tags, patches. No chat template, no special tokens besides those around the picture.
Invariant: a prompt cannot pretend to be a picture.
Source: MiniMax-H3 release, first-and-last-frame text encoder; SolarWM, MiniMax-H3 backend.
Shape suffixes: R rows, P patches, C features of a patch, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.model.dit import TAG_TEXT, TAG_VIDEO

LABEL = "<Picture 1>: "
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
_RESERVED = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Presentation:
    """Tokens of one picture and one prompt."""

    ids_R: Tensor
    """int64."""
    is_picture_R: Tensor
    """int64: 1 where a token stands for a piece of the picture, 0 elsewhere."""
    tags_R: Tensor
    """int64 modality of each row for the transformer: 1 text, 0 for the picture with its start and
    end."""
    patches_PC: Tensor
    """Pixels of the picture, fp32 about -1 to 1, in the order in which patches merge."""
    grid_13: Tensor
    """Patches in time, height and width."""


class Presenter:
    """Tokenizer and picture processor of a model.

    Args:
        tokenizer: folder of the tokenizer that came with the weights; another one lacks tokens.
        processor: folder of `preprocessor_config.json`.
        caption_rows: most tokens of a prompt.

    Raises: CheckpointError when one of them cannot be opened or is of another model.
    """

    def __init__(self, tokenizer: Path, processor: Path, *, caption_rows: int) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._caption_rows = caption_rows
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        # The library under it raises nothing more special for a damaged file.
        except Exception as error:
            raise CheckpointError(f"{tokenizer}: no tokenizer can be read: {error}") from error
        try:
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(
                processor, local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{processor}: no processor can be read: {error}") from error
        known = self._tokenizer.get_vocab()
        missing = [name for name in _RESERVED if name not in known]
        if missing:
            raise CheckpointError(
                f"{tokenizer}: token {missing[0]} is missing; expected the tokenizer of a Qwen3-VL"
            )
        self._ids = {name: int(known[name]) for name in _RESERVED}

    @property
    def image_pad_id(self) -> int:
        """Token that stands for a piece of a picture."""
        return self._ids[IMAGE_PAD]

    def present(self, prompt: str, picture_HWC: Tensor) -> Presentation:
        """Lay out one picture and one prompt.

        Args:
            prompt: any text; it may be empty.
            picture_HWC: uint8 RGB.

        Raises: ConfigError for a prompt that is too long or holds a token of pictures, or a picture
            of another kind.
        """
        if picture_HWC.dtype != torch.uint8 or picture_HWC.ndim != 3 or picture_HWC.shape[2] != 3:
            raise ConfigError(
                f"picture is {picture_HWC.dtype} {list(picture_HWC.shape)}; allowed: uint8 "
                "[height, width, 3]"
            )
        caption = self._tokens(prompt)
        for name, number in self._ids.items():
            if number in caption:
                raise ConfigError(f"prompt: it holds {name}; allowed: text without that")
        if len(caption) > self._caption_rows:
            raise ConfigError(
                f"prompt: {len(caption)} tokens; allowed: at most {self._caption_rows}"
            )
        pixels = self._processor(
            images=[picture_HWC.cpu().numpy()],
            input_data_format="channels_last",
            return_tensors="pt",
        )
        grid_13 = pixels["image_grid_thw"]
        count = int(grid_13.prod()) // self._processor.merge_size**2
        label = self._tokens(LABEL)
        start, pad, end = (self._ids[name] for name in (VISION_START, IMAGE_PAD, VISION_END))
        picture = [start, *([pad] * count), end]
        ids_R = torch.tensor([*label, *picture, *caption])
        tags_R = torch.full_like(ids_R, TAG_TEXT)
        tags_R[len(label) : len(label) + len(picture)] = TAG_VIDEO
        return Presentation(
            ids_R=ids_R,
            is_picture_R=(ids_R == pad).long(),
            tags_R=tags_R,
            patches_PC=pixels["pixel_values"],
            grid_13=grid_13,
        )

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
