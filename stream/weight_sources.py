"""What a preset needs besides this code, where the public has it, and on which terms.

Owns the names of public repositories and the note on licences. Invariant: nothing is fetched from
here; what is needed, and what only helps, is told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from stream.weight_folder import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """One network of a preset."""

    role: Role
    repository: str
    """Public repository and the part of it."""
    size_gb: float
    is_needed: bool
    """Whether no world can be played without."""
    without: str
    """What is different without it."""


_H3 = (
    WeightSource(
        role=Role.TRANSFORMER,
        repository="MiniMaxAI/MiniMax-H3: transformer/ (this is FL2VA) or FL2VA/transformer/; the "
        "same in junchaoh-cs/SolarWM-H3-33B: SolarWM-h3-33B-base",
        size_gb=66.3,
        is_needed=True,
        without="nothing can be made",
    ),
    WeightSource(
        role=Role.ADAPTER,
        repository="junchaoh-cs/SolarWM-H3-33B (gated): SolarWM-h3-33B-sgf-stage2-158f-fix",
        size_gb=4.2,
        is_needed=False,
        without="the transformer was never trained to go chunk by chunk, nor for a camera: worlds "
        "fall apart; fine only where the adapter is merged already",
    ),
    WeightSource(
        role=Role.PROMPT_ENCODER,
        repository="MiniMaxAI/MiniMax-H3: text_encoder/ with tokenizer/ and processor/",
        size_gb=66.7,
        is_needed=True,
        without="prompts cannot be read, nor pictures beside them",
    ),
    WeightSource(
        role=Role.DECODER,
        repository="Efficient-Large-Model/StreamRender-H3: causal_decoder/; less good: "
        "madebyollin/taehv (TAEH3), or vae/ as below, which looks ahead",
        size_gb=6.5,
        is_needed=True,
        without="latents are made, no pictures",
    ),
    WeightSource(
        role=Role.PICTURE_ENCODER,
        repository="MiniMaxAI/MiniMax-H3: vae/ or FL2VA/video_vae/",
        size_gb=10.4,
        is_needed=True,
        without="no world can begin at a picture",
    ),
    WeightSource(
        role=Role.AUDIO_CODEC,
        repository="MiniMaxAI/MiniMax-H3: audio_vae/, which silence passes once, by diffusers",
        size_gb=0.6,
        is_needed=False,
        without="zeros stand for the latents of silence",
    ),
)

LICENCE_NOTE = (
    "The weights of MiniMax-H3, and all that is derived from them (the SolarWM adapter, the "
    "StreamRender decoder), are under the MiniMax H3 Community License. It is no open-source "
    "licence: it has conditions for commercial use, and it names territories; whether you may use "
    "the weights depends on where you are. Read it yourself before you download, use or pass on "
    "anything; this project ships none of them. TAEH3 (MIT) decodes latents of the same model. "
    "Qwen3-VL has its own licence. The code of this project is under Apache-2.0."
)


def sources_of(preset_name: str) -> tuple[WeightSource, ...]:
    """What a preset needs that does not ship with the project."""
    return _H3 if preset_name == "h3_33b" else ()
