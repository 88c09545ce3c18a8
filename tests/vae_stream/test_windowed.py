"""The original decoder, streamed: the pictures of the whole decode, in order and in time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.vae_stream.h3_tiny import CONFIG, random_vit
from vae_stream.decoder import FrameChunk
from vae_stream.geometry import first_frame
from vae_stream.tiling import Tiling
from vae_stream.vit import Vit
from vae_stream.windowed import MODES, WindowedDecoder

pytestmark = pytest.mark.cpu

SMALL = Tiling(tile_px=32, overlap_px=16)


class MarkedVit(nn.Module):
    """Stands in for the network: each raw frame has the value of its latent and of its window.

    Cheap enough for every length; what it makes depends on all latents of the window.
    """

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.register_tokens = nn.Parameter(torch.zeros(1, 4, 1))

    def forward(self, latents_BCTHW: Tensor) -> Tensor:
        values_BT = latents_BCTHW.mean(dim=(1, 3, 4))
        weights_T = torch.linspace(0.1, 0.7, values_BT.shape[1])
        values_BT = values_BT + 0.1 * (values_BT * weights_T).sum(dim=1, keepdim=True)
        frames_BF = values_BT.repeat_interleave(4, dim=1) + torch.arange(28) * 0.01
        height, width = (16 * side for side in latents_BCTHW.shape[3:])
        return frames_BF[:, None, :, None, None].expand(-1, 3, -1, height, width)


def make(
    vit: nn.Module, mode: str = "official", *, px: tuple[int, int] = (32, 32), batch: int | None = 1
) -> WindowedDecoder:
    return WindowedDecoder(
        vit, height_px=px[0], width_px=px[1], mode=mode, tiling=SMALL, tile_batch=batch
    )  # type: ignore[arg-type]


def stream(decoder: WindowedDecoder, latents: Tensor, first_latent: int = 0) -> list[FrameChunk]:
    state = decoder.new_state(first_latent)
    chunks = [c for n in range(latents.shape[2]) for c in decoder.push(state, latents[:, :, n])]
    return chunks + list(decoder.flush(state))


def pictures(chunks: Sequence[FrameChunk]) -> Tensor:
    return torch.cat([chunk.frames_THWC for chunk in chunks])


@pytest.mark.parametrize("count", range(1, 41))
def test_streamed_pictures_are_those_of_the_whole_decode(count: int) -> None:
    decoder = make(MarkedVit())
    latents = torch.randn(1, 24, count, 2, 2)

    chunks = stream(decoder, latents)

    assert [chunk.latent_index for chunk in chunks] == list(range(count))
    assert [chunk.first_frame for chunk in chunks] == [first_frame(n) for n in range(count)]
    assert torch.equal(pictures(chunks), decoder.decode_clip(latents))


@pytest.mark.parametrize("count", [1, 2, 7, 9, 13])
def test_so_they_are_with_the_network_and_tiles(count: int) -> None:
    decoder = make(random_vit(), px=(48, 48))
    latents = torch.randn(1, 24, count, 3, 3)

    assert torch.equal(pictures(stream(decoder, latents)), decoder.decode_clip(latents))


@pytest.mark.parametrize("mode", ["prefix_chunk", "prefix_latent"])
@pytest.mark.parametrize("vit", [MarkedVit(), random_vit()], ids=["marked", "network"])
def test_prefix_modes_decode_the_stream_as_if_it_ended_there(vit: Vit, mode: str) -> None:
    decoder = make(vit, mode)
    latents, state = torch.randn(1, 24, 13, 2, 2), decoder.new_state()

    for n in range(13):
        chunks = decoder.push(state, latents[:, :, n])
        if n == 12:
            chunks += decoder.flush(state)
        if chunks:
            whole = decoder.decode_clip(latents[:, :, : n + 1])
            assert chunks[-1].latent_index == n
            assert torch.equal(pictures(chunks), whole[chunks[0].first_frame :])


@pytest.mark.parametrize(
    ("mode", "counts", "flushed"),
    [
        ("official", [0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 5, 0], 3),
        ("prefix_chunk", [0, 0, 0, 0, 5, 0, 0, 0, 0, 5, 0, 0, 0], 3),
        ("prefix_latent", [1] * 13, 0),
    ],
)
def test_pictures_come_when_the_mode_says(mode: str, counts: list[int], flushed: int) -> None:
    decoder, latents = make(MarkedVit(), mode), torch.randn(1, 24, 13, 2, 2)
    state = decoder.new_state()

    assert [len(decoder.push(state, latents[:, :, n])) for n in range(13)] == counts
    assert len(decoder.flush(state)) == flushed
    with pytest.raises(ValueError, match="flushed at latent 13"):
        decoder.push(state, latents[:, :, 0])


@pytest.mark.parametrize("mode", MODES)
def test_restore_replays_and_a_later_start_only_counts_on(mode: str) -> None:
    decoder, latents = make(MarkedVit(), mode), torch.randn(1, 24, 17, 2, 2)
    expected = pictures(stream(decoder, latents))
    state = decoder.new_state()
    chunks = [c for n in range(9) for c in decoder.push(state, latents[:, :, n])]
    point = state.snapshot()
    for n in range(3):
        decoder.push(state, latents[:, :, n])

    state.restore(point)
    chunks += [c for n in range(9, 17) for c in decoder.push(state, latents[:, :, n])]
    chunks += decoder.flush(state)

    assert torch.equal(pictures(chunks), expected)
    later = stream(decoder, latents, first_latent=10)
    assert torch.equal(pictures(later), expected)
    assert [chunk.latent_index for chunk in later] == list(range(10, 27))


def test_a_later_latent_changes_no_picture_that_was_shown() -> None:
    decoder, latents = make(random_vit(), "prefix_chunk"), torch.randn(1, 24, 10, 2, 2)
    changed = latents.clone()
    changed[:, :, 5:] += 1

    before, after = (pictures(stream(decoder, each)) for each in (latents, changed))

    assert torch.equal(before[:17], after[:17])
    assert not torch.equal(before[17:], after[17:])


@pytest.mark.parametrize("batch", [2, None])
def test_batches_of_tiles_make_the_same_pictures(batch: int | None) -> None:
    latents = torch.randn(1, 24, 8, 3, 5)
    one, many = (make(random_vit(), px=(48, 80), batch=each) for each in (1, batch))

    apart = (one.decode_clip(latents).int() - many.decode_clip(latents).int()).abs()
    # Sums in another order: a value on a rounding edge may move by one grey level.
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_the_state_has_the_size_that_is_said() -> None:
    decoder = make(MarkedVit(), px=(48, 80))

    # 6 latents of 24 x 3 x 5 and 5 pictures, fp32.
    assert decoder.state_bytes() == 4 * (6 * 24 * 15 + 5 * 3 * 48 * 80)


def test_what_does_not_fit_is_refused() -> None:
    decoder = make(MarkedVit())

    with pytest.raises(ValueError, match=r"allowed: official, prefix_chunk, prefix_latent"):
        make(MarkedVit(), "pair")
    with pytest.raises(ValueError, match=r"latent_BCHW: shape \(1, 24, 2, 3\)"):
        decoder.push(decoder.new_state(), torch.zeros(1, 24, 2, 3))
    with pytest.raises(ValueError, match="1 or more latents of shape"):
        decoder.decode_clip(torch.zeros(1, 24, 0, 2, 2))
    with pytest.raises(ValueError, match="first_latent: 3"):
        decoder.new_state(3)
