"""Uploaded seed images: bytes of a stranger become an upright PNG of the model's size.

Owns the folder, ids, limits of number and age, and the process that decodes. Invariants: nothing a
client names reaches the file system; a picture is decoded in a process of its own with limits of
time and memory; what is kept is our own PNG without metadata.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from stream.error_codes import ErrorCode, ProtocolError
from stream.limits import BucketTable

CONTENT_TYPES = ("image/jpeg", "image/png", "image/webp")
LIFE_S = 3_600.0
PER_CLIENT = 64
TRIES_PER_MIN = 30
"""Of one client, after as many as it may keep: what is refused takes a process as well."""
WAITING_LIMIT = 8
"""Uploads that wait for a process to decode them; each holds its bytes."""
DECODE_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 2**30
SIDE_LIMIT_PX = 4_096
PIXEL_LIMIT = 16_000_000
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Image:
    path: Path
    client: str
    expires_s: float


class ImageStore:
    """Pictures by random id.

    Args:
        folder: private to the service; created by its owner.
        width_px: of the model, like `height_px`.
        height_px: every picture is brought to this size.
        parallel: decoding processes at a time.
        clock_s: monotonic, for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        width_px: int,
        height_px: int,
        parallel: int = 2,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._clock_s = clock_s
        self._size_px = (width_px, height_px)
        self._images: dict[str, _Image] = {}
        self._arriving: Counter[str] = Counter()
        self._tries = BucketTable(per_s=TRIES_PER_MIN / 60, burst=PER_CLIENT)
        self._slots = asyncio.Semaphore(parallel)

    async def add(self, data: bytes, *, client: str) -> str:
        """Decode a picture and return its id.

        Raises:
            ProtocolError: BAD_IMAGE, or RATE_LIMIT where the client has or sends too many.
        """
        now_s = self._clock_s()
        self._expire(now_s)
        kept = sum(image.client == client for image in self._images.values())
        if kept + self._arriving[client] >= PER_CLIENT:
            raise ProtocolError(ErrorCode.RATE_LIMIT, "images of this client", retry_ms=60_000)
        if self._arriving.total() >= WAITING_LIMIT:
            raise ProtocolError(ErrorCode.RATE_LIMIT, "uploads at a time", retry_ms=2_000)
        if not data.startswith(_MAGIC):
            raise ProtocolError(ErrorCode.BAD_IMAGE, "no JPEG, PNG or WebP")
        tries = self._tries.bucket(client)
        if not tries.take(now_s):
            raise ProtocolError(ErrorCode.RATE_LIMIT, "uploads", retry_ms=tries.wait_ms(now_s))
        image_id = secrets.token_urlsafe(12)
        path = self._folder / f"{image_id}.png"
        self._arriving[client] += 1
        try:
            async with self._slots:
                await self._decode(data, path)
        finally:
            self._arriving[client] -= 1
            self._arriving += Counter()  # drops what is at zero
        expires_s = self._clock_s() + LIFE_S
        self._images[image_id] = _Image(path=path, client=client, expires_s=expires_s)
        return image_id

    def path(self, image_id: str) -> Path:
        """Return the file of a picture, which is kept for another hour.

        Raises:
            ProtocolError: BAD_IMAGE for an unknown or expired id.
        """
        now_s = self._clock_s()
        self._expire(now_s)
        image = self._images.get(image_id)
        if image is None:
            raise ProtocolError(ErrorCode.BAD_IMAGE, "unknown image_id")
        self._images[image_id] = replace(image, expires_s=now_s + LIFE_S)
        return image.path

    async def _decode(self, data: bytes, path: Path) -> None:
        width_px, height_px = map(str, self._size_px)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stream.decode_upload", str(path), width_px, height_px),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, message = await asyncio.wait_for(process.communicate(data), DECODE_LIMIT_S)
        except TimeoutError:
            raise ProtocolError(ErrorCode.BAD_IMAGE, "took too long") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if process.returncode != 0:
                path.unlink(missing_ok=True)
        if process.returncode != 0:
            detail = message.decode(errors="replace").strip().splitlines()[-1:]
            raise ProtocolError(ErrorCode.BAD_IMAGE, " ".join(detail)[:200])

    def _expire(self, now_s: float) -> None:
        for image_id, image in tuple(self._images.items()):
            if image.expires_s <= now_s:
                image.path.unlink(missing_ok=True)
                del self._images[image_id]
