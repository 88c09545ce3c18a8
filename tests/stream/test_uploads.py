"""The store of uploaded pictures: bounds of number and time; decoding is tested by the app's."""

import asyncio
import io
import time
from pathlib import Path

import pytest
from PIL import Image

from stream import uploads
from stream.error_codes import ErrorCode, ProtocolError
from stream.uploads import ImageStore

pytestmark = pytest.mark.cpu


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 40, 40)).save(buffer, format="PNG")
    return buffer.getvalue()


async def _code(store: ImageStore, data: bytes, client: str = "a") -> ErrorCode | None:
    try:
        await store.add(data, client=client)
    except ProtocolError as error:
        return error.code
    return None


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


def test_picture_that_takes_too_long_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "DECODE_LIMIT_S", 0.01)
    store = ImageStore(tmp_path, width_px=64, height_px=32)
    assert asyncio.run(_code(store, _png())) is ErrorCode.BAD_IMAGE
    assert not list(tmp_path.iterdir())


def test_picture_lives_on_from_its_last_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "LIFE_S", 1.0)
    store = ImageStore(tmp_path, width_px=64, height_px=32)
    image_id = asyncio.run(store.add(_png(), client="a"))
    for _ in range(3):
        assert store.path(image_id).is_file()
        time.sleep(0.4)
    time.sleep(0.7)
    with pytest.raises(ProtocolError):
        store.path(image_id)
    assert not list(tmp_path.iterdir())
