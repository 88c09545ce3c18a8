"""Heads of files tell which network would be opened, and whether it is whole, before it has memory.

A device that no machine has stands for memory: who asks for any on it gets another error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.vae_stream.h3_tiny import random_vit, tensors_in, write_folder
from vae_stream import TinyVae, TinyVaeConfig, open_decoder, open_encoder
from vae_stream.encoder import check_encoder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig
from vae_stream.opening import check_decoder
from vae_stream.taeh3 import Taeh3, Taeh3Config
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu

NOWHERE = "cuda:99"


def _tiny(folder: Path) -> None:
    widths = {"decoder_widths": (16, 12, 8), "encoder_widths": (8, 8, 16)}
    TinyVae(TinyVaeConfig(head_width=4, **widths)).save_pretrained(folder)


def _taeh3(folder: Path) -> None:
    network = Taeh3(Taeh3Config(decoder_widths=(12, 8, 8, 8), encoder_width=8))
    write_folder(folder, network.state_dict())


def _h3(layout: VitLayout) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        encoder: nn.Module = H3Encoder(
            H3EncoderConfig(widths=(8, 8, 8, 8, 8, 8), block_count=1, norm_groups=4)
        )
        tensors = tensors_in(random_vit(), layout) | encoder.state_dict()
        write_folder(folder, tensors, {"norm_num_groups": 4})

    return write


FOLDERS = [
    (_tiny, None, ("tiny VAE", "single", 0), "tiny VAE"),
    (_taeh3, None, ("TAEH3", "single", 0), "TAEH3"),
    (_h3(VitLayout.CAUSAL), None, ("causal H3 ViT", "hybrid_a3", 0), "H3 video autoencoder"),
    (_h3(VitLayout.CAUSAL), "pair", ("causal H3 ViT", "pair", 1), "H3 video autoencoder"),
    (_h3(VitLayout.ORIGINAL), None, ("windowed H3 ViT", "official", 2), "H3 video autoencoder"),
    (
        _h3(VitLayout.ORIGINAL), "prefix_chunk", ("windowed H3 ViT", "prefix_chunk", 0),
        "H3 video autoencoder",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("write", "mode", "decoder", "encoder"), FOLDERS)
def test_heads_tell_what_would_be_opened(
    write: Callable[[Path], None],
    mode: str | None,
    decoder: tuple[str, str, int],
    encoder: str,
    tmp_path: Path,
) -> None:
    write(tmp_path)
    found = check_decoder(tmp_path, mode)
    assert (found.network, found.mode, found.lookahead_latents) == decoder
    assert check_encoder(tmp_path) == encoder
    opened = open_decoder(
        tmp_path, device="cpu", dtype=torch.float32, height_px=32, width_px=32, mode=mode
    )
    assert opened.lookahead_latents == found.lookahead_latents


CALLS: dict[str, list[Callable[[Path], object]]] = {
    "encoder": [check_encoder, lambda folder: open_encoder(folder, device=NOWHERE)],
    "decoder": [
        check_decoder,
        lambda folder: open_decoder(
            folder, device=NOWHERE, dtype=torch.float32, height_px=32, width_px=32
        ),
    ],
}
WRITERS = [_tiny, _taeh3, _h3(VitLayout.CAUSAL), _h3(VitLayout.DIFFUSERS)]
IDS = ["tiny", "taeh3", "causal", "diffusers"]


def _change(folder: Path, part: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Change the first bias of the decoder, or of the encoder."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    is_encoder = part == "encoder"
    name = next(
        each
        for each in sorted(tensors)
        if each.startswith("encoder.") == is_encoder and each.endswith("bias")
    )
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, file)


@pytest.mark.parametrize("write", WRITERS, ids=IDS)
@pytest.mark.parametrize("part", ["decoder", "encoder"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: None, r"lacks \S+bias"),
        (lambda each: torch.zeros(3), r"bias has shape \(3,\); expected \(\d+,\)"),
        (lambda each: each.int(), r"bias is I32; expected F32 or BF16 or F16"),
        (lambda each: each.to(torch.float8_e4m3fn), r"bias is F8_E4M3; expected F32"),
    ],
    ids=["missing", "shape", "dtype", "eight-bits"],
)
def test_what_is_wrong_is_named_before_there_is_memory(
    write: Callable[[Path], None],
    part: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    write(tmp_path)
    _change(tmp_path, part, change)
    for call in CALLS[part]:
        with pytest.raises(ValueError, match=message):
            call(tmp_path)


def test_a_network_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"stem": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensors of no known decoder"):
        check_decoder(tmp_path)
    with pytest.raises(ValueError, match="tensors of no known encoder"):
        check_encoder(tmp_path)
