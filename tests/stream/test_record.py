import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from engine.errors import StateError
from stream.record import GifWriter, Mp4Writer, PngWriter, Recorder
from tests.tolerances import H264_FLAT_COLOUR_LEVELS

pytestmark = pytest.mark.cpu

HEIGHT_PX, WIDTH_PX = 64, 96


def _noise(frame_count: int) -> NDArray[np.uint8]:
    shape = (frame_count, HEIGHT_PX, WIDTH_PX, 3)
    return np.random.default_rng(0).integers(0, 255, shape, np.uint8)


def _flat(colour: tuple[int, int, int], frame_count: int) -> NDArray[np.uint8]:
    return np.full((frame_count, HEIGHT_PX, WIDTH_PX, 3), colour, np.uint8)


def _mp4(path: Path) -> Mp4Writer:
    return Mp4Writer(path, width_px=WIDTH_PX, height_px=HEIGHT_PX)


def _decode(path: Path) -> list[NDArray[np.uint8]]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@contextmanager
def _file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes beyond this fail as on a full disk; the process ignores the signal by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_mp4_is_what_browsers_play(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    writer = _mp4(path)
    writer.write(_flat((0, 0, 0), 17))
    writer.finish()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == 24
        assert stream.frames == 17
        assert (stream.width, stream.height) == (WIDTH_PX, HEIGHT_PX)
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("colour", [(200, 30, 40), (20, 180, 60), (240, 240, 240), (5, 5, 90)])
def test_mp4_keeps_colours(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    path = tmp_path / "a.mp4"
    writer = _mp4(path)
    writer.write(_flat(colour, 3))
    writer.finish()
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        rgb = frame.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray()
    assert np.abs(rgb.astype(int) - np.array(colour)).max() <= H264_FLAT_COLOUR_LEVELS


def test_frames_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    writer = _mp4(path)
    for level in range(0, 200, 10):
        writer.write(_flat((level, level, level), 1))
    writer.finish()
    means = [frame.mean() for frame in _decode(path)]
    assert len(means) == 20
    assert means == sorted(means)


def test_final_name_appears_with_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    writer = _mp4(path)
    writer.write(_noise(20))
    assert not path.exists()
    writer.finish()
    assert [each.name for each in tmp_path.iterdir()] == ["a.mp4"]


def test_abort_leaves_nothing(tmp_path: Path) -> None:
    writer = _mp4(tmp_path / "a.mp4")
    writer.write(_noise(20))
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_no_frame_is_no_video(tmp_path: Path) -> None:
    writer = _mp4(tmp_path / "a.mp4")
    with pytest.raises(StateError, match="needs a frame"):
        writer.finish()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    writer = _mp4(tmp_path / "a.mp4")
    with _file_size_limit(100_000):
        frames_THWC = _noise(200)
        with pytest.raises(OSError, match="File too large"):
            writer.write(frames_THWC)
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_png_files_hold_the_exact_pixels(tmp_path: Path) -> None:
    writer = PngWriter(tmp_path / "frames")
    frames_THWC = _noise(3)
    writer.write(frames_THWC[:1])
    writer.write(frames_THWC[1:])
    writer.finish()
    names = sorted(path.name for path in (tmp_path / "frames").iterdir())
    assert names == ["frame_000000.png", "frame_000001.png", "frame_000002.png"]
    last = np.asarray(Image.open(tmp_path / "frames" / names[2]))
    assert np.array_equal(last, frames_THWC[2])


def test_png_abort_removes_its_own_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    writer = PngWriter(folder)
    writer.write(_noise(2))
    writer.abort()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_gif_shows_every_second_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    writer = GifWriter(path)
    for level in range(0, 170, 10):
        writer.write(_flat((level, 0, 0), 1))
    writer.finish()
    with Image.open(path) as gif:
        assert gif.n_frames == 9
        assert gif.info["duration"] == 80
        assert gif.info["loop"] == 0
        gif.seek(8)
        assert gif.convert("RGB").getpixel((0, 0)) == (160, 0, 0)


def test_recorder_aborts_all(tmp_path: Path) -> None:
    recorder = Recorder([_mp4(tmp_path / "a.mp4"), PngWriter(tmp_path / "frames")])
    recorder.write(_noise(2))
    recorder.abort()
    assert list(tmp_path.iterdir()) == []
