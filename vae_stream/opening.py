"""Choice of the decoder that a folder of weights is made for.

Owns the marks by which tensors tell a network; file names say nothing. Invariant: what a folder
holds, and whether it is whole, is known from the heads of its files, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from graphs.compile import CompileMode
from vae_stream.causal_vit import CausalVitDecoder, Mode
from vae_stream.causal_vit.modes import lookahead_of as causal_lookahead
from vae_stream.decoder import StreamingDecoder
from vae_stream.recorded import decode_runner
from vae_stream.taeh3 import empty_taeh3, load_taeh3
from vae_stream.taehv import check_tiny_vae
from vae_stream.tiny_decoder import TinyDecoder
from vae_stream.vit_weights import empty_vit, load_vit
from vae_stream.weight_files import WeightFiles
from vae_stream.windowed import MODES, WindowedDecoder
from vae_stream.windowed import lookahead_of as windowed_lookahead


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
class DecoderKind:
    """What would be opened."""

    network: str
    mode: str
    lookahead_latents: int
    """As of the decoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Network:
    name: str
    marks: tuple[str, ...]
    """Tensors that all are there; any prefix of a name counts."""
    modes: tuple[str, ...]
    """The first is the default."""
    open: Callable[[DecoderRequest], StreamingDecoder]
    check: Callable[[WeightFiles], object]
    """Raises ValueError where the heads of files do not fit."""
    lookahead: Callable[[str], int]
    """Latents of the next chunk that a mode waits for."""


def _open_tiny(request: DecoderRequest) -> StreamingDecoder:
    return TinyDecoder.from_pretrained(
        request.folder,
        dtype=request.dtype,
        device=request.device,
        height_px=request.height_px,
        width_px=request.width_px,
    )


def _open_taeh3(request: DecoderRequest) -> StreamingDecoder:
    network = load_taeh3(WeightFiles(request.folder), dtype=request.dtype, device=request.device)
    return TinyDecoder(
        network,
        height_px=request.height_px,
        width_px=request.width_px,
        runner=decode_runner(request.device),
    )


def _open_windowed(request: DecoderRequest) -> StreamingDecoder:
    is_cuda = request.device.type == "cuda"
    return WindowedDecoder(
        load_vit(WeightFiles(request.folder), dtype=request.dtype, device=request.device),
        height_px=request.height_px,
        width_px=request.width_px,
        mode=request.mode,
        tile_batch=CUDA_TILE_BATCH if is_cuda else 1,
        compile_mode=CompileMode.BLOCKS if is_cuda else CompileMode.EAGER,
    )


def _open_causal(request: DecoderRequest) -> StreamingDecoder:
    return CausalVitDecoder(
        load_vit(WeightFiles(request.folder), dtype=request.dtype, device=request.device),
        height_px=request.height_px,
        width_px=request.width_px,
        mode=Mode(request.mode),
    )


CUDA_TILE_BATCH = 14
"""Divides the 28 tiles of a window at 1344x768 and the 56 of two."""
_NETWORKS = (
    _Network(
        name="tiny VAE",
        marks=("decoder.stem.weight", "decoder.pixels.weight"),
        modes=("single",),
        open=_open_tiny,
        check=lambda files: check_tiny_vae(files.source),
        lookahead=lambda mode: 0,
    ),
    _Network(
        name="causal H3 ViT",
        marks=("x_embedder.weight", "blocks."),
        modes=tuple(Mode),
        open=_open_causal,
        check=empty_vit,
        lookahead=lambda mode: causal_lookahead(Mode(mode)),
    ),
    _Network(
        name="TAEH3",
        marks=("decoder.22.weight", "decoder.3.conv.0.weight"),
        modes=("single",),
        open=_open_taeh3,
        check=empty_taeh3,
        lookahead=lambda mode: 0,
    ),
    _Network(
        name="windowed H3 ViT",
        marks=("decoder.x_embedder.weight", "decoder.transformer_blocks."),
        modes=MODES,
        open=_open_windowed,
        check=empty_vit,
        lookahead=windowed_lookahead,
    ),
    _Network(
        name="windowed H3 ViT in the layout of diffusers",
        marks=("decoder.proj_in.weight", "decoder.transformer_blocks."),
        modes=MODES,
        open=_open_windowed,
        check=empty_vit,
        lookahead=windowed_lookahead,
    ),
    # Distilled weights may come under the names of the original, too.
    _Network(
        name="causal H3 ViT under the names of the original",
        marks=("decoder.proj_out.weight", "decoder.transformer_blocks."),
        modes=tuple(Mode),
        open=_open_causal,
        check=empty_vit,
        lookahead=lambda mode: causal_lookahead(Mode(mode)),
    ),
)
"""Those that are wanted most come first."""


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
        folder: with one or more safetensors files, in it or one folder below.
        device: of the weights and the pictures.
        dtype: of the network's products.
        height_px: picture height, a multiple of 16.
        width_px: picture width, a multiple of 16.
        mode: how latents are advanced; None for the network's default.

    Raises:
        ValueError: the tensors belong to no known decoder, do not fit, the mode is not theirs, or a
            file is damaged.
        FileNotFoundError: there is no safetensors file.
    """
    folder = Path(folder)
    network, mode = _find(WeightFiles(folder), mode)
    request = DecoderRequest(
        folder=folder, device=torch.device(device), dtype=dtype, height_px=height_px,
        width_px=width_px, mode=mode,
    )  # fmt: skip
    return network.open(request)


def check_decoder(folder: str | Path, mode: str | None = None) -> DecoderKind:
    """Check by the heads of files that a decoder is whole; return what `open_decoder` would open.

    Raises:
        ValueError, FileNotFoundError: as `open_decoder`.
    """
    files = WeightFiles(folder)
    network, mode = _find(files, mode)
    network.check(files)
    return DecoderKind(network=network.name, mode=mode, lookahead_latents=network.lookahead(mode))


def _find(files: WeightFiles, mode: str | None) -> tuple[_Network, str]:
    """Network of these files that has a mode, None for the first one's default; and the mode."""
    names = frozenset(files.shapes)
    found = [network for network in _NETWORKS if _is_marked(names, network.marks)]
    if not found:
        raise ValueError(
            f"{files.source}: tensors of no known decoder (such as "
            f"{', '.join(sorted(names)[:3])}); "
            f"allowed: {', '.join(network.name for network in _NETWORKS)}"
        )
    mode = mode or found[0].modes[0]
    for network in found:
        if mode in network.modes:
            return network, mode
    modes = ", ".join(mode for network in found for mode in network.modes)
    raise ValueError(f"mode: {mode!r}; allowed for the {found[0].name} in {files.source}: {modes}")


def decoder_of(names: Iterable[str]) -> str | None:
    """Return the network whose decoder these tensors are, None where they are of none."""
    known = frozenset(names)
    return next((each.name for each in _NETWORKS if _is_marked(known, each.marks)), None)


def choose_decoder(places: Sequence[Path], mode: str | None = None) -> Path:
    """Return where the decoder lies that is wanted most, of several that there are.

    Args:
        places: folders or files, each with a decoder.
        mode: one that the decoder must have; None for any.

    Raises:
        ValueError: no decoder has the mode, or two are of the same network.
    """
    ranks: dict[Path, int] = {}
    for place in places:
        names = frozenset(WeightFiles(place).shapes)
        for rank, network in enumerate(_NETWORKS):
            if _is_marked(names, network.marks) and mode in (None, *network.modes):
                ranks.setdefault(place, rank)
    if not ranks:
        modes = sorted({mode for network in _NETWORKS for mode in network.modes})
        there = ", ".join(map(str, places))
        raise ValueError(f"mode: {mode!r}; no decoder in {there} has it; known: {', '.join(modes)}")
    best = min(ranks.values())
    found = [place for place, rank in ranks.items() if rank == best]
    if len(found) > 1:
        raise ValueError(
            f"{found[0]} and {found[1]} both hold a {_NETWORKS[best].name}; expected one"
        )
    return found[0]


def _is_marked(names: frozenset[str], marks: tuple[str, ...]) -> bool:
    return all(any(name.startswith(mark) for name in names) for mark in marks)
