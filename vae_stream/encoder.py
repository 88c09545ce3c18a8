"""First-image encoder: one picture to the latent that a rollout starts from.

Owns: the check of the picture's size and the conversion to a normalised latent.
Invariant: the latent equals the first latent of any clip that starts with this picture.
Legend: B batch, C channels, T latent frames, H height, W width.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vae_stream.geometry import SPATIAL_RATIO
from vae_stream.pixels import from_uint8
from vae_stream.taehv import TinyVae


class ImageEncoder:
    """Encodes a picture that already has the model's size."""

    def __init__(self, vae: TinyVae) -> None:
        self._vae = vae
        vae.encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ImageEncoder:
        """Read a folder with `config.json` and `model.safetensors`.

        Raises:
            ValueError: the folder's content does not fit.
            FileNotFoundError: a file is missing.
        """
        return cls(TinyVae.from_pretrained(source, dtype=dtype, device=device))

    @torch.no_grad()
    def encode_image(self, rgb_HWC: Tensor) -> Tensor:
        """Return the normalised fp32 latent `[1, C, 1, H/16, W/16]` of a uint8 RGB picture.

        Raises:
            ValueError: not uint8 `[H, W, 3]`, or a size that 16 does not divide.
        """
        if (
            rgb_HWC.dim() != 3
            or rgb_HWC.shape[0] % SPATIAL_RATIO
            or rgb_HWC.shape[1] % SPATIAL_RATIO
        ):
            raise ValueError(
                f"rgb_HWC: shape {tuple(rgb_HWC.shape)}; allowed: [H, W, 3] with H and W multiples "
                f"of {SPATIAL_RATIO}"
            )
        device = self._vae.latents_mean.device
        frames_TCHW = from_uint8(rgb_HWC.unsqueeze(0)).to(device)
        return self._vae.encode(frames_TCHW.unsqueeze(0)).transpose(1, 2)
