"""The store of uploaded pictures: bounds of number and time; decoding is tested by the app's."""

import asyncio
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stream import uploads
from stream.error_codes import ErrorCode, ProtocolError
from stream.uploads import ImageStore
from tests.tolerances import JPEG_STEP

pytestmark = pytest.mark.cpu


RED = (200, 40, 40)


def _file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def _plain(mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.new("RGB", size, RED).convert(mode)


def _png() -> bytes:
    return _file(_plain())


def _on_its_side() -> bytes:
    """Red above green as a person sees it; stored turned by 90 degrees."""
    upright = _plain(size=(64, 64))
    upright.paste((20, 180, 60), (0, 32, 64, 64))
    exif = Image.Exif()
    exif[0x0112] = 6
    return _file(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)


def _claims(width_px: int, height_px: int) -> bytes:
    """A PNG with the header of a huge picture and the data of a small one."""
    data = bytearray(_png())
    data[16:24] = struct.pack(">II", width_px, height_px)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


async def _code(store: ImageStore, data: bytes, client: str = "a") -> ErrorCode | None:
    try:
        await store.add(data, client=client)
    except ProtocolError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "data",
    [
        _png(),
        _file(_plain(), "JPEG", quality=95),
        _file(_plain(), "WEBP", lossless=True),
        _file(_plain("RGBA")),
        _file(_plain().quantize(4)),
        _file(_plain("CMYK"), "JPEG", quality=95),
        _file(_plain(size=(256, 64))),
        _on_its_side(),
    ],
    ids=["png", "jpeg", "webp", "alpha", "palette", "cmyk", "wide", "turned"],
)
def test_picture_becomes_an_upright_png_of_the_model_size(tmp_path: Path, data: bytes) -> None:
    store = ImageStore(tmp_path, width_px=64, height_px=32)
    with Image.open(store.path(asyncio.run(store.add(data, client="a")))) as made:
        assert (made.format, made.size, made.mode, made.getexif()) == ("PNG", (64, 32), "RGB", {})
        assert (
            max(abs(a - b) for a, b in zip(made.getpixel((32, 2)), RED, strict=True)) <= JPEG_STEP
        )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg/>",
        _png()[:60],
        _file(_plain(), "JPEG")[:300],
        _file(_plain(), "GIF"),
        _file(_plain(), "BMP"),
        _file(_plain(), "TIFF"),
        b"RIFF\x00\x00\x00\x00WAVEfmt ",
        _file(_plain(), "PNG", save_all=True, append_images=[_plain("L").convert("RGB")]),
        _file(_plain(size=(8, 8))),
        _claims(60_000, 60_000),
        _claims(5_000, 10),
    ],
    ids=[
        *("empty", "svg", "cut png", "cut jpeg", "gif", "bmp", "tiff", "wave", "moving", "tiny"),
        *("bomb", "side"),
    ],
)
def test_what_is_no_usable_picture_is_refused_and_leaves_nothing(
    tmp_path: Path, data: bytes
) -> None:
    store = ImageStore(tmp_path, width_px=64, height_px=32)
    assert asyncio.run(_code(store, data)) is ErrorCode.BAD_IMAGE
    assert not list(tmp_path.iterdir())


def test_uploads_at_a_time_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "WAITING_LIMIT", 2)

    async def scenario() -> None:
        store = ImageStore(tmp_path, width_px=64, height_px=32)
        codes = await asyncio.gather(*(_code(store, _png()) for _ in range(4)))
        assert sorted(map(str, codes)) == ["None", "None", "RATE_LIMIT", "RATE_LIMIT"]
        assert await _code(store, _png()) is None

    asyncio.run(scenario())


def test_pictures_of_a_client_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PER_CLIENT", 1)

    async def scenario() -> None:
        store = ImageStore(tmp_path, width_px=64, height_px=32)
        codes = await asyncio.gather(_code(store, _png()), _code(store, _png()))
        assert codes == [None, ErrorCode.RATE_LIMIT]
        assert await _code(store, _png(), "b") is None

    asyncio.run(scenario())


def test_pictures_that_are_refused_count_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PER_CLIENT", 2)
    now_s = [1_000.0]

    async def scenario() -> None:
        store = ImageStore(tmp_path, width_px=64, height_px=32, clock_s=lambda: now_s[0])
        cut = _png()[:40]
        codes = [await _code(store, cut) for _ in range(3)]
        assert codes == [ErrorCode.BAD_IMAGE, ErrorCode.BAD_IMAGE, ErrorCode.RATE_LIMIT]
        now_s[0] += 60.0 / uploads.TRIES_PER_MIN
        assert await _code(store, _png()) is None

    asyncio.run(scenario())


def test_picture_that_takes_too_long_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "DECODE_LIMIT_S", 0.01)
    store = ImageStore(tmp_path, width_px=64, height_px=32)
    assert asyncio.run(_code(store, _png())) is ErrorCode.BAD_IMAGE
    assert not list(tmp_path.iterdir())


def test_picture_lives_an_hour_from_its_last_use(tmp_path: Path) -> None:
    now_s = [1_000.0]
    store = ImageStore(tmp_path, width_px=64, height_px=32, clock_s=lambda: now_s[0])
    image_id = asyncio.run(store.add(_png(), client="a"))
    for at_s in (4_000.0, 7_000.0):
        now_s[0] = at_s
        assert store.path(image_id).is_file()
    now_s[0] = 10_600.0
    with pytest.raises(ProtocolError):
        store.path(image_id)
    assert not list(tmp_path.iterdir())
