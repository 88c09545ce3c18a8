"""The constant prefix of a rollout: prompt, anchor picture, silence.

Owns what the prefix rows are made of: values, modality tags, model times. Invariant: nothing here
depends on a chunk or a denoise step, so one pass per session and prompt is exact.
Shape suffixes: B batch, R rows, E text width, C channels or features, T latent frames, H height,
W width, G audio channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.layout import pack_audio, patchify

_AUDIO_SHIFT = 3.0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PrefixDraws:
    """The random numbers of a session, drawn once. Fields are in the order of drawing."""

    anchor_eps_BCTHW: Tensor
    audio_u_B: Tensor
    audio_eps_BRC: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PrefixInputs:
    """Model inputs of the prefix rows, in the order text, anchor, audio."""

    text_BRE: Tensor
    text_tags_R: Tensor
    """AdaLN tag of each text row: 1 text, 0 picture rows inside the text part."""
    anchor_rows_BRC: Tensor
    """fp32, noised."""
    audio_rows_BRC: Tensor
    """fp32, noised."""
    audio_t_B: Tensor
    """fp32 model time of the audio rows of each sample."""


def noised_anchor(anchor_BCTHW: Tensor, eps_BCTHW: Tensor, t: float) -> Tensor:
    """Anchor rows [B, R, C*4] at model time t: t * latent + (1 - t) * eps, in fp32."""
    time = torch.tensor(t, dtype=torch.float32, device=anchor_BCTHW.device)
    return patchify(time * anchor_BCTHW.float() + (1.0 - time) * eps_BCTHW.float())


def audio_time(u_B: Tensor) -> Tensor:
    """Model time of the session's silence for u in [0, 1): 1 - sigma, sigma = 3u / (1 + 2u)."""
    sigma_B = _AUDIO_SHIFT * u_B / (1.0 + (_AUDIO_SHIFT - 1.0) * u_B)
    return 1.0 - sigma_B


def silence(config: ModelConfig, batch_size: int = 1) -> Tensor:
    """Audio latents of silence [B, G, C, T]: zero, the mean of the normalised latents."""
    return torch.zeros(
        batch_size, config.audio_channel_count, config.audio_in_channels, config.audio_latent_count
    )


def anchor_shape(config: ModelConfig, batch_size: int = 1) -> tuple[int, ...]:
    """Shape of the anchor latent: one latent frame."""
    grid = config.geometry
    return (batch_size, config.in_channels, 1, grid.latent_height, grid.latent_width)


def make_prefix(
    config: ModelConfig,
    text_BRE: Tensor,
    text_tags_R: Tensor,
    anchor_BCTHW: Tensor | None,
    draws: PrefixDraws,
    *,
    silence_BGCT: Tensor | None = None,
) -> PrefixInputs:
    """Noise anchor and silence once and put the prefix together, on the device of the text.

    Raises: ConfigError when the anchor is missing, has a wrong shape or is not finite.
    """
    batch_size = text_BRE.shape[0]
    if anchor_BCTHW is None:
        raise ConfigError("anchor is None; the world needs an image: pass its encoded latent frame")
    if tuple(anchor_BCTHW.shape) != anchor_shape(config, batch_size):
        raise ConfigError(
            f"anchor has shape {tuple(anchor_BCTHW.shape)}; "
            f"allowed: {anchor_shape(config, batch_size)}"
        )
    if not bool(torch.isfinite(anchor_BCTHW).all()):
        raise ConfigError("anchor has values that are not finite; allowed: finite numbers")
    device = text_BRE.device
    if silence_BGCT is None:
        silence_BGCT = silence(config, batch_size)
    time_B11 = audio_time(draws.audio_u_B.to(device).float())[:, None, None]
    audio_rows_BRC = pack_audio(silence_BGCT.to(device).float())
    audio_eps_BRC = draws.audio_eps_BRC.to(device).float()
    return PrefixInputs(
        text_BRE=text_BRE,
        text_tags_R=text_tags_R.to(device),
        anchor_rows_BRC=noised_anchor(
            anchor_BCTHW.to(device), draws.anchor_eps_BCTHW.to(device), config.sampler.anchor_t
        ),
        audio_rows_BRC=time_B11 * audio_rows_BRC + (1.0 - time_B11) * audio_eps_BRC,
        audio_t_B=time_B11[:, 0, 0],
    )
