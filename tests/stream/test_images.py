import hashlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.errors import ConfigError
from stream.images import load_seed_image

pytestmark = pytest.mark.cpu

# Lossless pictures of flat colour: Lanczos of a constant is the constant, so equality is exact.
RED, GREEN = (200, 30, 40), (20, 180, 60)


def _save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def _load(path: Path) -> np.ndarray:
    return load_seed_image(path, width_px=64, height_px=32).rgb_HWC


def _two_halves(mode: str = "RGB") -> Image.Image:
    """Left half red, right half green."""
    image = Image.new("RGB", (128, 64), RED)
    image.paste(GREEN, (64, 0, 128, 64))
    return image.convert(mode)


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing."""

    def part(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")


def test_picture_is_stretched_to_the_model_size(tmp_path: Path) -> None:
    rgb = _load(_save(tmp_path / "a.png", _two_halves().resize((100, 90))))
    assert rgb.shape == (32, 64, 3)
    assert rgb.dtype == np.uint8
    assert tuple(rgb[16, 2]) == RED
    assert tuple(rgb[16, 61]) == GREEN


def test_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.png", _two_halves())
    loaded = load_seed_image(path, width_px=64, height_px=32)
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    stored = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    upright = _two_halves()
    upright.paste((0, 0, 255), (0, 32, 64, 64))  # lower left: no two orientations look alike
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = upright if stored is None else upright.transpose(stored)
    rgb = _load(_save(tmp_path / "a.png", image, exif=exif))
    assert tuple(rgb[4, 4]) == RED
    assert tuple(rgb[28, 4]) == (0, 0, 255)
    assert tuple(rgb[16, 60]) == GREEN


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    image = _two_halves("RGBA")
    image.paste((0, 0, 0, 0), (64, 0, 128, 64))
    rgb = _load(_save(tmp_path / "a.png", image))
    assert tuple(rgb[16, 4]) == RED
    assert tuple(rgb[16, 60]) == (255, 255, 255)


def test_palette_with_transparent_colour_is_laid_over_white(tmp_path: Path) -> None:
    image = _two_halves().quantize(2)
    transparent = image.getpixel((100, 10))
    rgb = _load(_save(tmp_path / "a.png", image, transparency=transparent))
    assert tuple(rgb[16, 4]) == RED
    assert tuple(rgb[16, 60]) == (255, 255, 255)


def test_palette_keeps_its_colours(tmp_path: Path) -> None:
    rgb = _load(_save(tmp_path / "a.gif", _two_halves().quantize(2)))
    assert tuple(rgb[16, 4]) == RED
    assert tuple(rgb[16, 60]) == GREEN


def test_grey_becomes_three_equal_channels(tmp_path: Path) -> None:
    rgb = _load(_save(tmp_path / "a.png", Image.new("L", (64, 64), 77)))
    assert np.all(rgb == 77)


@pytest.mark.parametrize(("value_16", "value_8"), [(0, 0), (30_000, 117), (65_535, 255)])
def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path: Path, value_16: int, value_8: int) -> None:
    grey = np.full((64, 64), value_16, np.uint16)
    rgb = _load(_save(tmp_path / "a.png", Image.fromarray(grey)))
    assert np.all(rgb == value_8)


def test_cmyk_comes_out_as_rgb(tmp_path: Path) -> None:
    rgb = _load(_save(tmp_path / "a.tif", Image.new("CMYK", (64, 64), (0, 255, 255, 0))))
    assert tuple(rgb[0, 0]) == (255, 0, 0)


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _noise_png() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"", ["0 bytes"]),
        (b"<!DOCTYPE html><html><body>404</body></html>", ["HTML", "PNG"]),
        (b"hello", ["no picture", "PNG"]),
        (_truncated(_noise_png()), ["truncated"]),
        (_png_header(12_000, 12_000), ["12000 x 12000", "64000000"]),
        (_png_header(60_000, 60_000), ["too many pixels", "64000000"]),
        (_png_header(16_400, 100), ["16400 x 100", "16384"]),
        (_png_header(1, 1), ["1 x 1", "32"]),
        (_png_header(4_000, 16), ["4000 x 16", "32"]),
        (_png_header(4_000, 64), ["4000 x 64", "4 times"]),
    ],
    ids=[
        "empty",
        "html",
        "text",
        "truncated",
        "bomb",
        "huge-bomb",
        "wide",
        "1x1",
        "4000x16",
        "aspect",
    ],
)
def test_bad_picture_is_refused_in_one_line(tmp_path: Path, data: bytes, names: list[str]) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"^image: ") as refused:
        _load(path)
    message = str(refused.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_missing_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.png.*No such file"):
        _load(tmp_path / "gone.png")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        _load(tmp_path)
