"""Recording: growing file and MP4, both played back by a real decoder."""

import av
import numpy as np
import pytest

from stream.recording import PAUSE_S, Recording, export_mp4
from stream.video_encoder import Codec, EncodedFrame, VideoEncoder

pytestmark = pytest.mark.cpu


def record(recording, times_pts90, *, repeated=()):
    encoder = VideoEncoder(Codec.H264, width_px=64, height_px=48, fps=24, bitrate_bps=1_000_000)
    for index, pts90 in enumerate(times_pts90):
        pixels = np.full((48, 64, 3), index * 3 % 256, np.uint8)
        made = encoder.encode(pixels, pts90=pts90, is_key=False)
        recording.deliver(
            EncodedFrame(
                codec=Codec.H264,
                data=made.data,
                is_key=made.is_key,
                frame_id=index + 1,
                act_seq=0,
                pts90=pts90,
                epoch=0,
                created_ms=0.0,
                width_px=64,
                height_px=48,
                is_repeated=index in repeated,
            )
        )


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path / "live.ts", width_px=64, height_px=48, fps=24)
    yield made
    made.finish()


def played(path):
    with av.open(str(path)) as video:
        return [float(frame.pts * frame.time_base) for frame in video.decode(video=0)]


def test_every_frame_is_in_the_mp4_at_its_time(recording, tmp_path):
    record(recording, [i * 3750 for i in range(30)])
    recording.finish()
    assert export_mp4(recording.path, tmp_path / "live.mp4") == 30
    times_s = played(tmp_path / "live.mp4")
    assert np.diff(times_s) == pytest.approx([1 / 24] * 29, abs=1e-4)


def test_growing_recording_can_be_exported(recording, tmp_path):
    record(recording, [i * 3750 for i in range(30)])
    export_mp4(recording.path, tmp_path / "live.mp4")
    # The reader of MPEG-TS holds the last picture back until another begins or the file ends.
    assert len(played(tmp_path / "live.mp4")) >= 29


def test_pause_is_shortened(recording, tmp_path):
    record(recording, [0, 3750, 3750 + 90_000 * 60])
    recording.finish()
    export_mp4(recording.path, tmp_path / "live.mp4")
    times_s = played(tmp_path / "live.mp4")
    assert times_s[2] - times_s[1] == pytest.approx(PAUSE_S, abs=1e-3)


def test_repeated_picture_takes_no_time_and_breaks_nothing(recording, tmp_path):
    record(recording, [0, 3750, 48_750, 52_500], repeated={2})
    recording.finish()
    assert export_mp4(recording.path, tmp_path / "live.mp4") == 4
    times_s = played(tmp_path / "live.mp4")
    assert times_s[3] - times_s[1] == pytest.approx(1 / 24 + 0.001, abs=1e-3)


def test_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        Recording(tmp_path / "nowhere" / "live.ts", width_px=64, height_px=48, fps=24)


def test_empty_recording_is_an_error_and_leaves_nothing(recording, tmp_path):
    recording.finish()
    with pytest.raises(OSError, match=r"live\.ts"):
        export_mp4(recording.path, tmp_path / "live.mp4")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["live.ts"]


def test_finish_twice(recording):
    record(recording, [0])
    recording.finish()
    recording.finish()
