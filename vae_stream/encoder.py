"""First-image encoder: one picture to the latent that a rollout starts from.

Owns the check of the picture, and the choice of the encoder that a folder of weights is made for.
Invariant: the latent equals the first latent of any clip that starts with this picture.
Legend: B batch, C channels, T latent frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vae_stream.geometry import SPATIAL_RATIO
from vae_stream.h3_encoder import check_h3_encoder, is_h3_encoder, load_h3_encoder
from vae_stream.pixels import from_uint8
from vae_stream.taeh3 import empty_taeh3, is_taeh3, load_taeh3
from vae_stream.taehv import TinyVae, check_tiny_vae
from vae_stream.weight_files import WeightFiles

_TINY_MARK = "encoder.stem.weight"


class PictureNetwork(Protocol):
    """A network that makes a latent of a picture."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def prepare_streaming(self) -> None:
        """Lay the weights out as one picture is encoded fastest with."""
        ...

    def encode_picture(self, rgb_1CHW: Tensor) -> Tensor:
        """Return the normalised fp32 latent `[1, C, 1, H, W]` of a picture in 0..1, fp32."""
        ...


class ImageEncoder:
    """Encodes a picture that already has the model's size."""

    def __init__(self, network: PictureNetwork) -> None:
        self._network = network
        network.prepare_streaming()

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
        return self._network.encode_picture(
            from_uint8(rgb_HWC.unsqueeze(0)).to(self._network.device)
        )


def holds_encoder(names: Container[str]) -> bool:
    """Tell whether one of the known encoders is among tensors."""
    return is_h3_encoder(names) or is_taeh3(names) or _TINY_MARK in names


def choose_encoder(places: Sequence[Path]) -> Path:
    """Return where the encoder lies that is wanted most: the H3 one before tiny ones.

    Raises:
        ValueError: two are alike.
    """
    shapes = {place: WeightFiles(place).shapes for place in places}
    found = [place for place, names in shapes.items() if is_h3_encoder(names)] or list(places)
    if len(found) > 1:
        raise ValueError(f"{found[0]} and {found[1]} both hold such an encoder; expected one")
    return found[0]


def open_encoder(
    folder: str | Path, *, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> ImageEncoder:
    """Open the encoder whose weights lie in `folder`, which its tensors tell.

    Args:
        folder: with one or more safetensors files, in it or one folder below.
        device: of the weights and the latent.
        dtype: of a tiny network; the H3 encoder is fp32 as released.

    Raises:
        ValueError: the tensors belong to no known encoder or do not fit, or a file is damaged.
        FileNotFoundError: there is no safetensors file.
    """
    files = WeightFiles(folder)
    if is_h3_encoder(files.shapes):
        return ImageEncoder(load_h3_encoder(files, device=device))
    if is_taeh3(files.shapes):
        return ImageEncoder(load_taeh3(files, dtype=dtype, device=device))
    if _TINY_MARK in files.shapes:
        return ImageEncoder(TinyVae.from_pretrained(folder, dtype=dtype, device=device))
    raise _unknown(files)


def check_encoder(folder: str | Path) -> str:
    """Check by the heads of files that an encoder is whole; return its network, for people.

    Raises:
        ValueError, FileNotFoundError: as `open_encoder`.
    """
    files = WeightFiles(folder)
    if is_h3_encoder(files.shapes):
        check_h3_encoder(files)
        return "H3 video autoencoder"
    if is_taeh3(files.shapes):
        empty_taeh3(files)
        return "TAEH3"
    if _TINY_MARK in files.shapes:
        check_tiny_vae(files.source)
        return "tiny VAE"
    raise _unknown(files)


def _unknown(files: WeightFiles) -> ValueError:
    return ValueError(
        f"{files.source}: tensors of no known encoder (such as "
        f"{', '.join(sorted(files.shapes)[:3])}); allowed: H3 video autoencoder, TAEH3, tiny VAE"
    )
