"""Rows and tags of a prompt against the text step of diffusers' MiniMax-H3 pipeline, bit by bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from engine.prompts.files import find_encoder
from engine.prompts.qwen3_vl import Qwen3VlEncoder
from tests.engine.prompts.tiny_qwen import READ, WIDTH, whole_model, write_qwen

pytestmark = pytest.mark.cpu


def _components(folder: Path) -> Any:
    """What the step asks of a pipeline; a whole processor would need a video library."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )
    from transformers.processing_utils import ProcessorMixin

    model = whole_model(folder)
    tokens = SimpleNamespace(
        image_token_ids=[model.config.image_token_id],
        video_token_ids=[model.config.video_token_id],
        audio_token_ids=[],
    )
    processor = SimpleNamespace(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        create_mm_token_type_ids=partial(ProcessorMixin.create_mm_token_type_ids, tokens),
    )
    return SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        processor=processor,
        text_encoder=model,
        text_encoder_layer=READ,
        text_tag=1,
        video_tag=0,
        _execution_device=torch.device("cpu"),
    )


def test_rows_and_tags_are_those_of_the_published_pipeline(tmp_path: Path) -> None:
    from diffusers.modular_pipelines import PipelineState
    from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3FL2VATextEncoderStep

    write_qwen(tmp_path)
    picture = torch.randint(0, 256, (96, 64, 3), dtype=torch.uint8)
    prompt = "  A meadow by night: \n„snow“."
    state = PipelineState()
    state.set("prompt", prompt)
    state.set("keyframes", [Image.fromarray(picture.numpy())])
    _, state = MiniMaxH3FL2VATextEncoderStep()(_components(tmp_path), state)
    encoder = Qwen3VlEncoder(
        find_encoder(tmp_path, layers=READ, text_dim=WIDTH),
        layers=READ, caption_rows=64, device=torch.device("cpu"), residency="cpu",
    )  # fmt: skip
    found = encoder.encode(prompt, picture)
    assert torch.equal(found.rows_BRE, state.get("prompt_embeds"))
    assert torch.equal(found.tags_R, state.get("text_token_tags"))
