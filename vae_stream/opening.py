"""Choice of the decoder that a folder of weights is made for.

Owns the marks by which tensors tell a network; file names say nothing. Invariant: what a folder
holds is known from the heads of its files, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from vae_stream.decoder import StreamingDecoder
from vae_stream.tiny_decoder import TinyDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderRequest:
    """What `open_decoder` was asked for."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    height_px: int
    width_px: int
    mode: str
    """One of the network's modes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Network:
    name: str
    marks: tuple[str, ...]
    """Tensors that all are there; any prefix of a name counts."""
    modes: tuple[str, ...]
    """The first is the default."""
    open: Callable[[DecoderRequest], StreamingDecoder]


def _open_tiny(request: DecoderRequest) -> StreamingDecoder:
    return TinyDecoder.from_pretrained(
        request.folder,
        dtype=request.dtype,
        device=request.device,
        height_px=request.height_px,
        width_px=request.width_px,
    )


_NETWORKS = (
    _Network(
        name="tiny VAE",
        marks=("decoder.stem.weight", "decoder.pixels.weight"),
        modes=("single",),
        open=_open_tiny,
    ),
)


def open_decoder(
    folder: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    height_px: int,
    width_px: int,
    mode: str | None = None,
) -> StreamingDecoder:
    """Open the decoder whose weights lie in `folder`.

    Args:
        folder: with one or more safetensors files.
        device: of the weights and the pictures.
        dtype: of the network's products.
        height_px: picture height, a multiple of 16.
        width_px: picture width, a multiple of 16.
        mode: how latents are advanced; None for the network's default.

    Raises:
        ValueError: the tensors belong to no known decoder, do not fit, or the mode is not theirs.
        FileNotFoundError: there is no safetensors file.
        SafetensorError: a file is damaged.
    """
    folder = Path(folder)
    names = tensor_names(folder)
    found = [network for network in _NETWORKS if _is_marked(names, network.marks)]
    if not found:
        raise ValueError(
            f"{folder}: tensors of no known decoder (such as {', '.join(sorted(names)[:3])}); "
            f"allowed: {', '.join(network.name for network in _NETWORKS)}"
        )
    mode = mode or found[0].modes[0]
    for network in found:
        if mode in network.modes:
            request = DecoderRequest(
                folder=folder, device=torch.device(device), dtype=dtype, height_px=height_px,
                width_px=width_px, mode=mode,
            )  # fmt: skip
            return network.open(request)
    modes = ", ".join(mode for network in found for mode in network.modes)
    raise ValueError(f"mode: {mode!r}; allowed for the {found[0].name} in {folder}: {modes}")


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in the safetensors files of a folder.

    Raises:
        FileNotFoundError: there is none.
        SafetensorError: a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors; allowed: a folder with weights")
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return frozenset(names)


def _is_marked(names: frozenset[str], marks: tuple[str, ...]) -> bool:
    return all(any(name.startswith(mark) for name in names) for mark in marks)
