"""The streaming decoder and the image encoder at their borders."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from vae_stream import ImageEncoder, StreamingDecoder, TinyVae, TinyVaeConfig
from vae_stream.pixels import to_uint8

pytestmark = pytest.mark.cpu

SHAPE = (1, 24, 2, 3)


@pytest.fixture(scope="module")
def vae() -> TinyVae:
    torch.manual_seed(4)
    config = TinyVaeConfig(
        decoder_widths=(16, 12, 8), head_width=4, encoder_widths=(8, 8, 16), latents_std=(2.0,) * 24
    )
    return TinyVae(config).eval().requires_grad_(False)


@pytest.fixture
def decoder(vae: TinyVae) -> StreamingDecoder:
    return StreamingDecoder(vae, height_px=32, width_px=48)


def latents(count: int) -> list[Tensor]:
    return list(torch.randn(count, *SHAPE))


def test_frames_come_in_order_one_or_four_at_a_time(decoder: StreamingDecoder) -> None:
    state = decoder.new_state()

    chunks = [decoder.decode(state, z) for z in latents(11)]

    assert [c.frames_THWC.shape[0] for c in chunks] == [1, 4, 4, 4, 4, 1, 4, 4, 4, 4, 1]
    assert [c.first_frame for c in chunks] == [0, 1, 5, 9, 13, 17, 18, 22, 26, 30, 34]
    assert [c.latent_index for c in chunks] == list(range(11))
    assert all(c.frames_THWC.shape[1:] == (32, 48, 3) for c in chunks)
    assert all(c.frames_THWC.dtype == torch.uint8 for c in chunks)


def test_streamed_pictures_are_those_of_the_whole_decode(
    vae: TinyVae, decoder: StreamingDecoder
) -> None:
    state, z = decoder.new_state(), latents(10)

    streamed = torch.cat([decoder.decode(state, one).frames_THWC for one in z])

    whole = to_uint8(vae.decode(torch.stack(z, 1))[0][0])
    # 1e-5 of the range may cross a rounding edge: one grey level, and in few places.
    apart = (streamed.int() - whole.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_a_rerun_is_bit_identical(decoder: StreamingDecoder) -> None:
    z = latents(6)

    runs = []
    for _ in range(2):
        state = decoder.new_state()
        runs.append(torch.cat([decoder.decode(state, one).frames_THWC for one in z]))

    assert torch.equal(*runs)


def test_restore_replays_the_same_frames(decoder: StreamingDecoder) -> None:
    state, z = decoder.new_state(), latents(9)
    for one in z[:4]:
        decoder.decode(state, one)
    point = state.snapshot()
    first = [decoder.decode(state, one) for one in z[4:]]

    state.restore(point)
    second = [decoder.decode(state, one) for one in z[4:]]

    assert [c.latent_index for c in second] == [4, 5, 6, 7, 8]
    assert all(
        torch.equal(a.frames_THWC, b.frames_THWC) for a, b in zip(first, second, strict=True)
    )


def test_states_do_not_touch_each_other(decoder: StreamingDecoder) -> None:
    z = latents(4)
    alone = decoder.new_state()
    expected = [decoder.decode(alone, one).frames_THWC for one in z]

    state, other = decoder.new_state(), decoder.new_state()
    made = []
    for one in z:
        made.append(decoder.decode(state, one).frames_THWC)
        decoder.decode(other, -one)

    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_latent_that_is_not_finite_is_refused_and_changes_nothing(
    decoder: StreamingDecoder, bad: float
) -> None:
    state = decoder.new_state()
    decoder.decode(state, latents(1)[0])
    before = state.snapshot()
    latent = torch.zeros(SHAPE)
    latent[0, 3, 1, 2] = bad

    with pytest.raises(ValueError, match="NaN or Inf at latent 1"):
        decoder.decode(state, latent)

    assert state.snapshot() is not before
    assert state.latent_index == before.latent_index
    assert all(a is b for a, b in zip(state.memories, before.memories, strict=True))


@pytest.mark.parametrize("shape", [(24, 2, 3), (2, 24, 2, 3), (1, 24, 3, 2), (1, 16, 2, 3)])
def test_a_latent_of_another_shape_is_refused(
    decoder: StreamingDecoder, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"latent_BCHW: shape .*allowed: \(1, 24, 2, 3\)"):
        decoder.decode(decoder.new_state(), torch.zeros(shape))


def test_a_picture_size_that_16_does_not_divide_is_refused(vae: TinyVae) -> None:
    with pytest.raises(ValueError, match="height_px, width_px: 40, 48"):
        StreamingDecoder(vae, height_px=40, width_px=48)


def test_a_folder_gives_decoder_and_encoder(vae: TinyVae, tmp_path: Path) -> None:
    vae.save_pretrained(tmp_path)

    decoder = StreamingDecoder.from_pretrained(
        tmp_path, dtype=torch.bfloat16, height_px=32, width_px=48
    )
    encoder = ImageEncoder.from_pretrained(tmp_path)

    latent = encoder.encode_image(torch.zeros(32, 48, 3, dtype=torch.uint8))
    chunk = decoder.decode(decoder.new_state(), latent[:, :, 0])
    assert latent.shape == (1, 24, 1, 2, 3)
    assert chunk.frames_THWC.shape == (1, 32, 48, 3)


def test_an_image_has_the_latent_of_a_clip_that_starts_with_it(vae: TinyVae) -> None:
    image = torch.randint(0, 256, (32, 48, 3), dtype=torch.uint8)
    clip = torch.rand(1, 17, 3, 32, 48)
    clip[:, 0] = image.permute(2, 0, 1) / 255

    latent = ImageEncoder(vae).encode_image(image)

    # Batched over frames, the kernel may add in another order.
    torch.testing.assert_close(latent[:, :, 0], vae.encode(clip)[:, 0])


@pytest.mark.parametrize(
    "image",
    [torch.zeros(30, 48, 3).byte(), torch.zeros(32, 48).byte(), torch.zeros(32, 48, 3)],
    ids=["size", "grey", "float"],
)
def test_other_pictures_are_refused(vae: TinyVae, image: Tensor) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ImageEncoder(vae).encode_image(image)
