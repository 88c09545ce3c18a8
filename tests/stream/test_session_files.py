"""Files of sessions: what stays after a session, and what does not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from stream import session_files
from stream.error_codes import ErrorCode, ProtocolError
from stream.recording import Recording
from stream.session_files import SessionFiles
from stream.video_encoder import Codec, EncodedFrame, VideoEncoder
from stream.worker_messages import SessionStarted, StartFrom

pytestmark = pytest.mark.cpu


def _record(path: Path) -> None:
    """A recording of one picture."""
    encoder = VideoEncoder(Codec.H264, width_px=64, height_px=48, fps=24.0, bitrate_bps=500_000)
    picture = encoder.encode(np.zeros((48, 64, 3), np.uint8), pts90=0, is_key=True)
    assert picture is not None
    recording = Recording(path, width_px=64, height_px=48, fps=24.0)
    recording.deliver(
        EncodedFrame(
            codec=Codec.H264,
            data=picture.data,
            is_key=True,
            frame_id=1,
            act_seq=0,
            pts90=0,
            epoch=0,
            created_ms=0.0,
            width_px=64,
            height_px=48,
        )
    )
    recording.finish()


def _started(files: SessionFiles, session_id: str, picture: str) -> SessionStarted:
    path = files.pictures / picture
    path.write_bytes(b"picture")
    return SessionStarted(
        session_id=session_id,
        epoch=0,
        start=StartFrom(image_path=str(path)),
        prompt="",
        seed=0,
        trace=files.records / f"{session_id}-e0.trace.jsonl",
    )


def test_a_recording_that_is_kept_becomes_an_mp4(tmp_path: Path) -> None:
    files = SessionFiles(str(tmp_path))
    _record(files.growing("a"))
    asyncio.run(files.complete("a"))
    assert [each.name for each in tmp_path.iterdir()] == ["a.mp4"]


def test_a_recording_that_cannot_be_copied_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SessionFiles(str(tmp_path))
    _record(files.growing("a"))

    def full(recording: Path, target: Path) -> int:
        raise OSError("no space left on the device")

    monkeypatch.setattr(session_files, "export_mp4", full)
    asyncio.run(files.complete("a"))
    assert [each.name for each in tmp_path.iterdir()] == ["a.ts"]


def test_a_recording_of_nothing_leaves_nothing(tmp_path: Path) -> None:
    files = SessionFiles(str(tmp_path))
    Recording(files.growing("a"), width_px=64, height_px=48, fps=24.0).finish()
    asyncio.run(files.complete("a"))
    assert not list(tmp_path.iterdir())


def test_downloads_of_a_session_are_bounded() -> None:
    async def scenario() -> None:
        files = SessionFiles(None)
        _record(files.growing("a"))
        _record(files.growing("b"))
        made = await asyncio.gather(
            *(files.download("a") for _ in range(4)), return_exceptions=True
        )
        sent = [each for each in made if isinstance(each, Path)]
        refused = [each.code for each in made if isinstance(each, ProtocolError)]
        assert (len(sent), refused) == (2, [ErrorCode.RATE_LIMIT] * 2)
        assert (await files.download("b")).stat().st_size
        sent[0].unlink()
        assert (await files.download("a")).stat().st_size
        await files.close()

    asyncio.run(scenario())


def test_a_download_of_nothing_leaves_nothing() -> None:
    async def scenario() -> None:
        files = SessionFiles(None)
        for _ in range(3):
            with pytest.raises(ProtocolError, match="NO_SESSION"):
                await files.download("a")
        await files.close()

    asyncio.run(scenario())


def test_the_copy_of_a_picture_goes_with_the_last_session_that_began_with_it() -> None:
    files = SessionFiles(None)
    for session_id in ("a", "b"):
        files.keep_picture(_started(files, session_id, "shared.png"))
    files.keep_picture(_started(files, "a", "own.png"))
    files.forget("a")
    assert [each.name for each in files.records.iterdir()] == ["shared.png"]
    files.forget("b")
    assert not list(files.records.iterdir())
    asyncio.run(files.close())


def test_pictures_stay_beside_traces_that_the_operator_keeps(tmp_path: Path) -> None:
    files = SessionFiles(str(tmp_path))
    files.keep_picture(_started(files, "a", "own.png"))
    files.forget("a")
    assert [each.name for each in tmp_path.iterdir()] == ["own.png"]
