"""Video encoders: no delay, keyframes on demand, colours and bit rate, against real decoders."""

import io

import av
import numpy as np
import pytest
from PIL import Image

from engine.errors import ConfigError
from stream.video_encoder import (
    Codec,
    EncodedFrame,
    JpegEncoder,
    KeyGate,
    VideoEncoder,
    default_bitrate_bps,
)
from tests import tolerances

pytestmark = pytest.mark.cpu

CODECS = pytest.mark.parametrize("codec", [Codec.H264, Codec.VP8], ids=str)


def new_encoder(codec, bitrate_bps=1_000_000):
    return VideoEncoder(codec, width_px=64, height_px=48, fps=24, bitrate_bps=bitrate_bps)


def picture(index=0, *, noise=0):
    rng = np.random.default_rng(3)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    frame = np.kron(coarse, np.ones((8, 8, 1), np.uint8))
    if noise:
        frame = np.random.default_rng(index).integers(0, 256, frame.shape, dtype=np.uint8)
    return np.roll(frame, index, axis=1)


def decoder(codec):
    return av.CodecContext.create("h264" if codec is Codec.H264 else "libvpx", "r")


@CODECS
def test_each_frame_comes_out_at_once(codec):
    encoder, reader = new_encoder(codec), decoder(codec)
    for index in range(6):
        made = encoder.encode(picture(index), pts90=index * 3750, is_key=False)
        assert len(reader.decode(av.Packet(made.data))) == 1


@CODECS
def test_only_wanted_keyframes(codec):
    encoder = new_encoder(codec)
    keys = [encoder.encode(picture(i), pts90=i * 3750, is_key=i == 5).is_key for i in range(40)]
    assert [i for i, is_key in enumerate(keys) if is_key] == [0, 5]


@CODECS
def test_keyframe_starts_a_new_decoder(codec):
    encoder = new_encoder(codec)
    for index in range(4):
        encoder.encode(picture(index), pts90=index * 3750, is_key=False)
    made = encoder.encode(picture(4), pts90=4 * 3750, is_key=True)
    assert len(decoder(codec).decode(av.Packet(made.data))) == 1


@CODECS
@pytest.mark.parametrize("colour", [(200, 40, 40), (30, 160, 60), (240, 240, 240)])
def test_flat_colour_comes_back(codec, colour):
    frame = np.full((48, 64, 3), colour, np.uint8)
    made = new_encoder(codec).encode(frame, pts90=0, is_key=True)
    decoded = decoder(codec).decode(av.Packet(made.data))[0]
    space = "itu709" if codec is Codec.H264 else "itu601"
    shown = decoded.reformat(format="rgb24", src_colorspace=space).to_ndarray()
    error = np.abs(shown.astype(int) - colour).max()
    assert error <= tolerances.LIVE_FLAT_COLOUR_LEVELS


def test_h264_is_baseline_and_annex_b():
    data = new_encoder(Codec.H264).encode(picture(), pts90=0, is_key=True).data
    assert data.startswith(b"\x00\x00\x00\x01\x67")
    assert data[5] == 0x42  # profile_idc 66, Baseline


@CODECS
def test_new_bit_rate_begins_with_a_keyframe(codec):
    encoder = new_encoder(codec)
    encoder.encode(picture(), pts90=0, is_key=False)
    encoder.set_bitrate(400_000)
    assert encoder.encode(picture(1), pts90=3750, is_key=False).is_key


@CODECS
def test_bit_rate_is_kept_by_noise(codec):
    encoder = new_encoder(codec, bitrate_bps=400_000)
    made = [encoder.encode(picture(i, noise=1), pts90=i * 3750, is_key=False) for i in range(96)]
    later = sum(len(each.data) for each in made[24:] if each is not None)
    assert later * 8 / 3 <= 1.5 * 400_000


@pytest.mark.parametrize("bitrate_bps", [0, 99_999, 50_000_001])
def test_wrong_bit_rate_is_refused(bitrate_bps):
    with pytest.raises(ConfigError, match="bit rate"):
        new_encoder(Codec.H264, bitrate_bps)


@pytest.mark.parametrize(
    ("size", "bitrate_bps"), [((832, 480), 2_000_000), ((1280, 720), 4_000_000)]
)
def test_default_bit_rate_of_a_size(size, bitrate_bps):
    assert default_bitrate_bps(*size) == bitrate_bps


@pytest.mark.parametrize("size", [(63, 48), (64, 47), (0, 0)])
def test_wrong_size_is_refused(size):
    with pytest.raises(ConfigError, match="video size"):
        VideoEncoder(Codec.VP8, width_px=size[0], height_px=size[1], fps=24, bitrate_bps=1_000_000)


def test_jpeg_is_a_file_of_the_size():
    made = JpegEncoder(quality=80).encode(picture())
    with Image.open(io.BytesIO(made.data)) as image:
        assert (image.format, image.size) == ("JPEG", (64, 48))
    assert made.is_key


def test_gate_opens_with_a_keyframe_and_closes_with_a_miss():
    def frame(*, is_key):
        return EncodedFrame(
            codec=Codec.H264,
            data=b"",
            is_key=is_key,
            frame_id=1,
            act_seq=0,
            pts90=0,
            epoch=0,
            created_ms=0.0,
            width_px=64,
            height_px=48,
        )

    gate = KeyGate()
    assert not gate.passes(frame(is_key=False))
    assert gate.passes(frame(is_key=True))
    assert gate.passes(frame(is_key=False))
    gate.miss()
    assert not gate.passes(frame(is_key=False))
