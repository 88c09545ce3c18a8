"""A small Qwen3-VL as released ones lie on disk: random weights, a real tokenizer, a processor.

Two heads, four layers of text of which two are read, two of vision with one tap. Written by
transformers itself, so that what we read is what it writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LAYERS, READ = 4, 2
WIDTH = 64
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SHORTEST_PIXELS = 1024
"""Released: 65,536. Small pictures stay as they are."""


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a byte-level tokenizer without merges; return the ids of the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return {name: tokenizer.token_to_id(name) for name in SPECIAL}


def write_qwen(folder: Path, *, seed: int = 0) -> None:
    """Write text_encoder, tokenizer and processor below a folder."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = write_tokenizer(folder / "tokenizer")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": SHORTEST_PIXELS, "longest_edge": 16_777_216},
    }  # fmt: skip
    (folder / "processor").mkdir()
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(processor))
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 320, "hidden_size": WIDTH, "intermediate_size": 96,
            "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32, "rope_parameters": rope,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "out_hidden_size": WIDTH, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and parameter.ndim == 1
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    model.bfloat16().save_pretrained(folder / "text_encoder", max_shard_size="200KB")


def whole_model(folder: Path) -> Any:
    """Return the model as transformers loads it, with every layer and the head."""
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval()
