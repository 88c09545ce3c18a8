"""Files of sessions: uploaded pictures, traces, recordings, on the disk.

Owns the folders and how long files stay. Invariants: without a folder of the operator nothing
outlives the memory of its session; a download is a file of its own, so that it never changes while
it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path

import structlog

from stream.error_codes import ErrorCode, ProtocolError
from stream.recording import export_mp4
from stream.snapshots import SNAPSHOT_SUFFIX
from stream.worker_messages import SessionStarted

EXPORTS_AT_A_TIME = 2
DOWNLOADS_OF_A_SESSION = 2
"""At a time: each is a copy of everything that was recorded."""

log = structlog.get_logger(__name__)


class SessionFiles:
    """Folders of one service.

    Args:
        record: folder of the operator, which keeps traces and recordings; None keeps nothing.

    Raises:
        OSError: a folder cannot be made.
    """

    def __init__(self, record: str | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="worldstream-"))
        self._is_kept = record is not None
        self.records = self._folder / "records" if record is None else Path(record)
        self.records.mkdir(parents=True, exist_ok=True)
        self.pictures = self._folder / "pictures"
        self.pictures.mkdir()
        self._downloads = self._folder / "downloads"
        self._downloads.mkdir()
        self._exports = asyncio.Semaphore(EXPORTS_AT_A_TIME)
        self._copies: dict[str, set[Path]] = {}
        """Pictures beside the traces of each session."""

    def growing(self, session_id: str) -> Path:
        """Recording that grows while the session goes on."""
        return self.records / f"{session_id}.ts"

    def picture(self, started: SessionStarted) -> Path | None:
        """Copy of the uploaded picture that a rollout started from, beside its trace."""
        if started.start.image_path is None:
            return None
        return started.trace.with_name(Path(started.start.image_path).name)

    def keep_picture(self, started: SessionStarted) -> None:
        """Lay the picture beside the trace, which replays only as long as it is there."""
        target = self.picture(started)
        if target is not None and started.start.image_path is not None:
            self._copies.setdefault(started.session_id, set()).add(target)
            with contextlib.suppress(OSError):  # the session goes on without
                shutil.copyfile(started.start.image_path, target)

    async def download(self, session_id: str) -> Path:
        """MP4 of what a session showed so far; the caller removes it after it was sent.

        Raises:
            ProtocolError: NO_SESSION where there is no recording, RATE_LIMIT for too many at once.
        """
        if sum(1 for _ in self._downloads.glob(f"{session_id}*")) >= DOWNLOADS_OF_A_SESSION:
            raise ProtocolError(ErrorCode.RATE_LIMIT, "downloads", retry_ms=5_000)
        made = self.records / f"{session_id}.mp4"
        copy = self._downloads / f"{session_id}-{secrets.token_hex(6)}.mp4"
        try:
            copy.touch()  # takes its place while it waits
            async with self._exports:
                if made.is_file():
                    await asyncio.to_thread(shutil.copyfile, made, copy)
                else:
                    await asyncio.to_thread(export_mp4, self.growing(session_id), copy)
        except OSError as error:
            copy.unlink(missing_ok=True)
            raise ProtocolError(ErrorCode.NO_SESSION, f"no recording: {error}") from error
        return copy

    async def complete(self, session_id: str) -> None:
        """The session ended: its recording becomes an MP4 where it is kept."""
        growing = self.growing(session_id)
        if not (self._is_kept and growing.is_file()):
            return
        try:
            async with self._exports:
                await asyncio.to_thread(export_mp4, growing, growing.with_suffix(".mp4"))
        except OSError as error:
            if growing.stat().st_size:  # as it is, it plays as well
                log.error("recording_not_completed", detail=str(error))
                return
        growing.unlink(missing_ok=True)

    def forget(self, session_id: str) -> None:
        """The session is remembered no more: delete what is not kept for the operator."""
        of_session = f"{session_id}*"
        what = of_session + SNAPSHOT_SUFFIX if self._is_kept else of_session
        copies = self._copies.pop(session_id, set()).difference(*self._copies.values())
        gone = [] if self._is_kept else copies
        for path in (*self._downloads.glob(of_session), *self.records.glob(what), *gone):
            path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Delete everything that is not kept."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
