"""The streaming decoder and the image encoder at their borders."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vae_stream import (
    DecoderState,
    FrameChunk,
    ImageEncoder,
    StreamingDecoder,
    TinyDecoder,
    TinyVae,
    TinyVaeConfig,
    open_decoder,
    open_encoder,
)
from vae_stream.decoder import FiniteWatch
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
def decoder(vae: TinyVae) -> TinyDecoder:
    return TinyDecoder(vae, height_px=32, width_px=48)


def latents(count: int) -> list[Tensor]:
    return list(torch.randn(count, *SHAPE))


def decoded(decoder: TinyDecoder, state: DecoderState, latent_BCHW: Tensor) -> FrameChunk:
    (chunk,) = decoder.push(state, latent_BCHW)
    return chunk


def test_frames_come_in_order_one_or_four_at_a_time(decoder: TinyDecoder) -> None:
    state = decoder.new_state()

    chunks = [decoded(decoder, state, z) for z in latents(11)]

    assert [c.frames_THWC.shape[0] for c in chunks] == [1, 4, 4, 4, 4, 1, 4, 4, 4, 4, 1]
    assert [c.first_frame for c in chunks] == [0, 1, 5, 9, 13, 17, 18, 22, 26, 30, 34]
    assert [c.latent_index for c in chunks] == list(range(11))
    assert all(c.frames_THWC.shape[1:] == (32, 48, 3) for c in chunks)
    assert all(c.frames_THWC.dtype == torch.uint8 for c in chunks)


def test_streamed_pictures_are_those_of_the_whole_decode(
    vae: TinyVae, decoder: TinyDecoder
) -> None:
    state, z = decoder.new_state(), latents(10)

    streamed = torch.cat([decoded(decoder, state, one).frames_THWC for one in z])

    whole = to_uint8(vae.decode(torch.stack(z, 1))[0][0])
    # 1e-5 of the range may cross a rounding edge: one grey level, and in few places.
    apart = (streamed.int() - whole.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_a_rerun_is_bit_identical(decoder: TinyDecoder) -> None:
    z = latents(6)

    runs = []
    for _ in range(2):
        state = decoder.new_state()
        runs.append(torch.cat([decoded(decoder, state, one).frames_THWC for one in z]))

    assert torch.equal(*runs)


def test_restore_replays_the_same_frames(decoder: TinyDecoder) -> None:
    state, z = decoder.new_state(), latents(9)
    for one in z[:4]:
        decoded(decoder, state, one)
    point = state.snapshot()
    first = [decoded(decoder, state, one) for one in z[4:]]

    state.restore(point)
    second = [decoded(decoder, state, one) for one in z[4:]]

    assert [c.latent_index for c in second] == [4, 5, 6, 7, 8]
    assert all(
        torch.equal(a.frames_THWC, b.frames_THWC) for a, b in zip(first, second, strict=True)
    )


def test_states_do_not_touch_each_other(decoder: TinyDecoder) -> None:
    z = latents(4)
    alone = decoder.new_state()
    expected = [decoded(decoder, alone, one).frames_THWC for one in z]

    state, other = decoder.new_state(), decoder.new_state()
    made = []
    for one in z:
        made.append(decoded(decoder, state, one).frames_THWC)
        decoded(decoder, other, -one)

    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_latent_that_is_not_finite_is_refused_and_changes_nothing(
    decoder: TinyDecoder, bad: float
) -> None:
    state = decoder.new_state()
    decoded(decoder, state, latents(1)[0])
    before = state.snapshot()
    latent = torch.zeros(SHAPE)
    latent[0, 3, 1, 2] = bad

    with pytest.raises(ValueError, match="NaN or Inf at latent 1"):
        decoded(decoder, state, latent)

    after = state.snapshot()
    assert after.latent_index == before.latent_index
    assert all(torch.equal(after.tensors[name], before.tensors[name]) for name in before.tensors)


class OnGpu(Tensor):
    """A latent that says so."""

    device = torch.device("cuda")


class LateEvent:
    """An event that is reached when the test says so."""

    reached = False

    def record(self, stream: object) -> None:
        """Be launched."""

    def query(self) -> bool:
        return LateEvent.reached


def test_a_gpu_that_is_behind_is_asked_about_every_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    watch, good = FiniteWatch(), torch.zeros(SHAPE)
    bad = good.clone()
    bad[0, 3, 1, 2] = torch.nan
    for index, latent in enumerate((good, bad, good)):  # none is answered yet
        watch.check(latent.as_subclass(OnGpu), index)

    monkeypatch.setattr(LateEvent, "reached", True)
    with pytest.raises(ValueError, match="NaN or Inf at latent 1"):
        watch.check(good.as_subclass(OnGpu), 3)
    watch.check(good.as_subclass(OnGpu), 3)
    watch.check(good.as_subclass(OnGpu), 4)


@pytest.mark.parametrize("shape", [(24, 2, 3), (2, 24, 2, 3), (1, 24, 3, 2), (1, 16, 2, 3)])
def test_a_latent_of_another_shape_is_refused(decoder: TinyDecoder, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"latent_BCHW: shape .*allowed: \(1, 24, 2, 3\)"):
        decoded(decoder, decoder.new_state(), torch.zeros(shape))


def test_a_picture_size_that_16_does_not_divide_is_refused(vae: TinyVae) -> None:
    with pytest.raises(ValueError, match="height_px, width_px: 40, 48"):
        TinyDecoder(vae, height_px=40, width_px=48)


def test_a_folder_gives_decoder_and_encoder(vae: TinyVae, tmp_path: Path) -> None:
    vae.save_pretrained(tmp_path)

    decoder = open_decoder(tmp_path, device="cpu", dtype=torch.bfloat16, height_px=32, width_px=48)
    encoder = open_encoder(tmp_path, device="cpu")

    latent = encoder.encode_image(torch.zeros(32, 48, 3, dtype=torch.uint8))
    (chunk,) = decoder.push(decoder.new_state(), latent[:, :, 0])
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


def test_a_flushed_stream_is_over(decoder: TinyDecoder) -> None:
    state = decoder.new_state()
    decoder.push(state, latents(1)[0])

    assert decoder.flush(state) == ()

    with pytest.raises(ValueError, match=r"flushed at latent 1; expected new_state"):
        decoder.push(state, latents(1)[0])
    with pytest.raises(ValueError, match="flushed"):
        decoder.flush(state)


def test_a_stream_that_is_over_goes_on_from_a_point_before(decoder: TinyDecoder) -> None:
    z, state = latents(2), decoder.new_state()
    decoder.push(state, z[0])
    point = state.snapshot()
    expected = decoded(decoder, state, z[1])
    decoder.flush(state)

    state.restore(point)

    assert torch.equal(decoded(decoder, state, z[1]).frames_THWC, expected.frames_THWC)


def test_a_stream_may_begin_at_a_later_block(decoder: TinyDecoder) -> None:
    state, early, z = decoder.new_state(5), decoder.new_state(), latents(2)

    chunks = [decoded(decoder, state, one) for one in z]

    assert [c.first_frame for c in chunks] == [17, 18]
    expected = [decoded(decoder, early, one) for one in z]
    assert all(
        torch.equal(a.frames_THWC, b.frames_THWC) for a, b in zip(chunks, expected, strict=True)
    )
    with pytest.raises(ValueError, match="first_latent: -1"):
        decoder.new_state(-1)


def test_a_snapshot_of_another_decoder_is_refused(vae: TinyVae, decoder: TinyDecoder) -> None:
    other = TinyDecoder(vae, height_px=48, width_px=48).new_state().snapshot()

    with pytest.raises(ValueError, match=r"memory_00 has shape .*; allowed: \(1, 16, 2, 3\)"):
        decoder.new_state().restore(other)


def test_the_memory_of_a_state_is_as_computed(decoder: TinyDecoder) -> None:
    state, latent = decoder.new_state(), torch.zeros(SHAPE)

    assert decoder.state_bytes() == sum(each.nbytes for each in (latent, *state.tensors.values()))


def test_a_state_of_another_decoder_is_refused(vae: TinyVae, decoder: TinyDecoder) -> None:
    other = TinyDecoder(vae, height_px=32, width_px=48).new_state()

    with pytest.raises(ValueError, match=r"state: of another decoder; expected one of new_state"):
        decoder.push(other, latents(1)[0])


def test_a_stream_takes_the_memory_of_one_that_ended_and_nothing_of_its_content(
    decoder: TinyDecoder,
) -> None:
    z, state = latents(3), decoder.new_state()
    first = [decoded(decoder, state, one).frames_THWC for one in z]
    places = [each.data_ptr() for each in state.tensors.values()]
    del state

    state = decoder.new_state()

    assert [each.data_ptr() for each in state.tensors.values()] == places
    second = [decoded(decoder, state, one).frames_THWC for one in z]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_tensors_of_no_known_decoder_are_refused(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(2)}, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=r"layer.weight.*allowed: tiny VAE"):
        opened(tmp_path)


def test_a_mode_that_the_network_lacks_is_refused(vae: TinyVae, tmp_path: Path) -> None:
    vae.save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=r"mode: 'fast'; allowed for the tiny VAE .*: single"):
        opened(tmp_path, mode="fast")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        opened(tmp_path)


def opened(folder: Path, mode: str | None = None) -> StreamingDecoder:
    return open_decoder(
        folder, device="cpu", dtype=torch.float32, height_px=32, width_px=48, mode=mode
    )
