"""The causal ViT decoder as a stream: order, causality, time, state, ends, wrong input."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tolerances import VIT_RAW_ATOL
from tests.vae_stream.causal_vit.oracle import decode_growing
from tests.vae_stream.h3_tiny import random_vit, tensors_in, write_folder
from vae_stream import TinyDecoder, TinyVae, TinyVaeConfig, open_decoder
from vae_stream.causal_vit import CausalConfig, CausalVitDecoder, Mode, plain
from vae_stream.causal_vit.state import ring_shape
from vae_stream.decoder import FrameChunk
from vae_stream.vit import Vit, VitConfig
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu

CONFIG = VitConfig(layer_count=3, head_count=1, ffn_width=32)
CAUSAL = CausalConfig(window=4)
HEIGHT, WIDTH = 3, 6
SINGLES = [Mode.SINGLE_A1, Mode.SINGLE_A4, Mode.SINGLE_A5, Mode.PREVIEW_COMMIT_A2]


@pytest.fixture(scope="module")
def vit() -> Vit:
    return random_vit(CONFIG)


def opened(vit: Vit, mode: Mode) -> CausalVitDecoder:
    return CausalVitDecoder(
        vit, height_px=16 * HEIGHT, width_px=16 * WIDTH, mode=mode, causal=CAUSAL
    )


def latents(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 24, HEIGHT, WIDTH, generator=generator)


def decoded(
    decoder: CausalVitDecoder, z_ZBFHW: Tensor, *, first: int = 0, ends: bool = True
) -> list[FrameChunk]:
    state = decoder.new_state(first)
    chunks = [chunk for z in z_ZBFHW for chunk in decoder.push(state, z)]
    return chunks + list(decoder.flush(state) if ends else ())


def frames(chunks: list[FrameChunk]) -> Tensor:
    return torch.cat([chunk.frames_THWC for chunk in chunks])


@pytest.fixture
def raws(monkeypatch) -> list[Tensor]:
    """Raw frames [4C, 3, 16h, 16w] of each call."""
    kept: list[Tensor] = []
    restored = plain.from_imagenet

    def recorded(raw_TCHW: Tensor) -> Tensor:
        kept.append(raw_TCHW.clone())
        return restored(raw_TCHW)

    monkeypatch.setattr(plain, "from_imagenet", recorded)
    return kept


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_frames_come_once_in_order_with_the_same_cadence(vit: Vit, mode: Mode, count: int) -> None:
    chunks = decoded(opened(vit, mode), latents(count))
    assert [chunk.latent_index for chunk in chunks] == list(range(count))
    counts = [1, 4, 4, 4, 4] * 2
    assert [len(chunk.frames_THWC) for chunk in chunks] == counts[:count]
    assert [chunk.first_frame for chunk in chunks] == [sum(counts[:n]) for n in range(count)]
    assert chunks[0].frames_THWC.dtype == torch.uint8
    assert chunks[0].frames_THWC.shape[1:] == (16 * HEIGHT, 16 * WIDTH, 3)


@pytest.mark.parametrize("mode", Mode)
def test_no_frame_waits_for_more_than_is_said(vit: Vit, mode: Mode) -> None:
    decoder, z = opened(vit, mode), latents(10)
    state, made = decoder.new_state(), 0
    for index in range(10):
        made += len(decoder.push(state, z[index]))
        if index % 5 == 4:
            assert made >= index + 1 - decoder.lookahead_latents


def test_pairs_equal_the_decode_with_growing_lists(vit: Vit, raws: list[Tensor]) -> None:
    z = latents(12)
    decoded(opened(vit, Mode.PAIR), z)
    calls = [[n, n + 1] for n in range(0, 12, 2)]
    expected = decode_growing(vit, z[:, 0], CAUSAL, calls, past=4)
    raw = torch.cat(raws).transpose(0, 1)
    torch.testing.assert_close(raw, expected, atol=VIT_RAW_ATOL, rtol=0)


def test_singles_equal_the_decode_with_growing_lists(vit: Vit, raws: list[Tensor]) -> None:
    z = latents(12)
    decoded(opened(vit, Mode.SINGLE_A4), z)
    expected = decode_growing(vit, z[:, 0], CAUSAL, [[n] for n in range(12)], past=4)
    raw = torch.cat(raws).transpose(0, 1)
    torch.testing.assert_close(raw, expected, atol=VIT_RAW_ATOL, rtol=0)


def test_the_ring_holds_what_a_growing_list_would_for_200_latents(vit: Vit, monkeypatch) -> None:
    """Same products over the same keys: bit for bit, wherever in the ring they lie."""
    grown: list[list[list[Tensor]]] = [[] for _ in range(CONFIG.layer_count)]
    attend, count, layers = plain.attend, 0, CONFIG.layer_count

    def checked(q_RNK, seen, suffix, plan):
        nonlocal count
        layer, call = count % layers, count // layers
        count += 1
        grown[layer].append([rows_SRNK[-1].clone() for rows_SRNK in seen])
        for rows_SRNK, which in zip(seen, (0, 1), strict=True):
            expected = torch.stack([own[which] for own in grown[layer][-min(6, call + 1) :]])
            assert torch.equal(rows_SRNK, expected)
        return attend(q_RNK, seen, suffix, plan)

    monkeypatch.setattr(plain, "attend", checked)
    decoded(opened(vit, Mode.SINGLE_A1), latents(200))
    assert count == 200 * layers


@pytest.mark.parametrize("mode", Mode)
def test_a_later_latent_never_enters_an_earlier_frame(vit: Vit, mode: Mode) -> None:
    z, changed = latents(8), latents(8)
    changed[6:] += 1.0
    decoder = opened(vit, mode)
    before, after = decoded(decoder, z), decoded(decoder, changed)
    assert torch.equal(frames(before[:6]), frames(after[:6]))
    assert not torch.equal(frames(before[6:]), frames(after[6:]))


@pytest.mark.parametrize("mode", [Mode.PAIR, Mode.SINGLE_A1])
def test_the_time_of_a_stream_does_not_matter(vit: Vit, mode: Mode, raws: list[Tensor]) -> None:
    z = latents(8)
    for first in (0, 100, 1000, 10**6):
        decoded(opened(vit, mode), z, first=first)
    runs = torch.stack(raws).unflatten(0, (4, -1))
    # Scores depend on differences of times; what is left is the rounding of the tables.
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", [Mode.PREVIEW_COMMIT_A2, Mode.HYBRID_A3])
def test_previews_leave_the_pairs_as_they_are(vit: Vit, mode: Mode) -> None:
    z = latents(20)
    pairs, other = opened(vit, Mode.PAIR), opened(vit, mode)
    state, previewed = pairs.new_state(), other.new_state()
    shown: dict[int, list[Tensor]] = {n: [] for n in range(20)}
    for index, latent in enumerate(z):
        for decoder, at in ((pairs, state), (other, previewed)):
            for chunk in decoder.push(at, latent):
                shown[chunk.latent_index].append(chunk.frames_THWC)
        if index % 2:
            ours, theirs = previewed.snapshot(), state.snapshot()
            assert ours.values == theirs.values
            for name, tensor in theirs.tensors.items():
                assert torch.equal(ours.tensors[name], tensor)
    approximate = set(range(0, 20, 2)) if mode == Mode.PREVIEW_COMMIT_A2 else {4, 14}
    for latent, pair in shown.items():
        assert torch.equal(*pair) == (latent not in approximate), latent


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("at", [0, 3, 5, 8])
def test_a_snapshot_replays_the_same_frames(vit: Vit, mode: Mode, at: int) -> None:
    decoder, z = opened(vit, mode), latents(15)
    state = decoder.new_state(5)
    for latent in z[:at]:
        decoder.push(state, latent)
    point = state.snapshot()
    first = [chunk for latent in z[at:] for chunk in decoder.push(state, latent)]

    state.restore(point)
    second = [chunk for latent in z[at:] for chunk in decoder.push(state, latent)]
    other = decoder.new_state()
    other.restore(point)
    third = [chunk for latent in z[at:] for chunk in decoder.push(other, latent)]

    for run in (second, third):
        assert [chunk.latent_index for chunk in run] == [chunk.latent_index for chunk in first]
        assert torch.equal(frames(run), frames(first))


def test_streams_do_not_touch_each_other(vit: Vit) -> None:
    decoder, z, noise = opened(vit, Mode.HYBRID_A3), latents(10), latents(10, seed=2)
    expected = frames(decoded(decoder, z))
    state, other = decoder.new_state(), decoder.new_state()
    made = []
    for latent, disturbing in zip(z, noise, strict=True):
        made += decoder.push(state, latent)
        decoder.push(other, disturbing)
    assert torch.equal(frames(made), expected)


def test_a_new_stream_has_nothing_of_the_one_whose_memory_it_takes(vit: Vit) -> None:
    decoder, z = opened(vit, Mode.SINGLE_A5), latents(9)
    expected = frames(decoded(decoder, z))
    state = decoder.new_state()
    for latent in latents(9, seed=3):
        decoder.push(state, latent)
    address = state.buffers.keys_LSRD.data_ptr()
    del state
    gc.collect()
    state = decoder.new_state()
    assert state.buffers.keys_LSRD.data_ptr() == address
    state.buffers.keys_LSRD.fill_(torch.nan)
    state.buffers.values_LSRD.fill_(torch.nan)
    again = [chunk for latent in z for chunk in decoder.push(state, latent)]
    assert torch.equal(frames(again), expected)


def test_memory_of_a_state_is_as_computed(vit: Vit) -> None:
    decoder = opened(vit, Mode.PAIR)
    fixed = decoder.new_state().buffers.fixed
    assert decoder.state_bytes() == sum(each.numel() * each.element_size() for each in fixed)


def test_memory_at_the_released_size() -> None:
    config = VitConfig(layer_count=24)
    sizes = {(480, 832): 1.71, (720, 1280): 3.96, (768, 1344): 4.43}
    for (height_px, width_px), gib in sizes.items():
        shape = ring_shape(config, torch.bfloat16, height=height_px // 16, width=width_px // 16)
        assert round(shape.size_bytes / 2**30, 2) == gib


def test_a_long_stream_keeps_its_memory_and_its_block_starts_bright(vit: Vit) -> None:
    """A still scene: the one latent again and again."""
    decoder = CausalVitDecoder(vit, height_px=16, width_px=16, mode=Mode.PAIR, causal=CAUSAL)
    state, z = decoder.new_state(), latents(1)[0][:, :, :1, :1]
    begun = state.buffers.fixed
    grey = []
    for _ in range(300):
        grey += [chunk.frames_THWC.float().mean() for chunk in decoder.push(state, z)]
    assert all(a is b for a, b in zip(begun, state.buffers.fixed, strict=True))
    # From a full ring on, equal sights: only tables differ, in their rounding.
    for parity in (0, 1):
        starts = torch.stack([grey[n] for n in range(10, 300) if n % 10 == 5 * parity])
        assert (starts - starts[0]).abs().max() <= 0.01


def test_a_flushed_stream_is_over(vit: Vit) -> None:
    decoder = opened(vit, Mode.PAIR)
    state = decoder.new_state()
    decoder.push(state, latents(1)[0])
    assert len(decoder.flush(state)) == 1
    with pytest.raises(ValueError, match="flushed at latent 1"):
        decoder.push(state, latents(1)[0])


@pytest.mark.parametrize(
    ("latent", "message"),
    [
        (torch.zeros(1, 24, WIDTH, HEIGHT), r"shape \(1, 24, 6, 3\); allowed: \(1, 24, 3, 6\)"),
        (torch.full((1, 24, HEIGHT, WIDTH), torch.nan), "NaN or Inf at latent 2"),
    ],
    ids=["shape", "nan"],
)
def test_a_wrong_latent_changes_nothing(vit: Vit, latent: Tensor, message: str) -> None:
    decoder, z = opened(vit, Mode.PAIR), latents(4)
    expected = frames(decoded(decoder, z))
    state = decoder.new_state()
    chunks = [chunk for one in z[:2] for chunk in decoder.push(state, one)]
    with pytest.raises(ValueError, match=message):
        decoder.push(state, latent)
    chunks += [chunk for one in z[2:] for chunk in decoder.push(state, one)]
    assert torch.equal(frames(chunks), expected)


def test_a_state_of_another_decoder_is_refused(vit: Vit) -> None:
    decoder = opened(vit, Mode.PAIR)
    tiny = TinyDecoder(TinyVae(TinyVaeConfig()), height_px=48, width_px=96)
    for state in (opened(vit, Mode.PAIR).new_state(), tiny.new_state()):
        with pytest.raises(ValueError, match="state: of another decoder"):
            decoder.push(state, latents(1)[0])


def test_a_snapshot_of_another_mode_is_refused(vit: Vit) -> None:
    decoder, single = opened(vit, Mode.PAIR), opened(vit, Mode.SINGLE_A1)
    state = single.new_state()
    for latent in latents(5):
        single.push(state, latent)
    with pytest.raises(ValueError, match=r"keys has shape \(3, 5, 18, 64\); allowed: \(3, 4, 18"):
        decoder.new_state().restore(state.snapshot())


def test_a_picture_size_that_16_does_not_divide_is_refused(vit: Vit) -> None:
    with pytest.raises(ValueError, match="height_px, width_px: 40, 48"):
        CausalVitDecoder(vit, height_px=40, width_px=48)


@pytest.mark.parametrize("window", [0, 1, 5])
def test_windows_that_cannot_be_moved_by_half_are_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"window: {window}"):
        CausalConfig(window=window)


@pytest.mark.parametrize("layout", VitLayout)
def test_a_folder_is_opened_by_its_tensors(vit: Vit, layout: VitLayout, tmp_path: Path) -> None:
    write_folder(tmp_path, tensors_in(vit, layout))
    decoder = open_decoder(
        tmp_path, device="cpu", dtype=torch.float32, height_px=16 * HEIGHT, width_px=16 * WIDTH,
        mode="pair",
    )  # fmt: skip
    assert isinstance(decoder, CausalVitDecoder)
    ours = CausalVitDecoder(vit, height_px=16 * HEIGHT, width_px=16 * WIDTH, mode=Mode.PAIR)
    z = latents(4)
    assert torch.equal(frames(decoded(decoder, z)), frames(decoded(ours, z)))


def test_the_default_mode_shows_a_chunk_with_its_last_latent(vit: Vit, tmp_path: Path) -> None:
    write_folder(tmp_path, tensors_in(vit, VitLayout.CAUSAL))
    decoder = open_decoder(
        tmp_path, device="cpu", dtype=torch.bfloat16, height_px=48, width_px=96
    )  # fmt: skip
    assert decoder.name == "causal ViT, hybrid_a3"
    assert decoder.lookahead_latents == 0
    assert len(decoded(decoder, latents(5), ends=False)) == 5
