"""Writers of pictures: MP4 (H.264, yuv420p, faststart), numbered PNG files, GIF.

Invariants: a file has its final name only when it is complete; until then it lies beside it as
`.NAME.part`, and `abort` removes it. `finish` after any number of frames makes a playable file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import StateError
from stream.script import FRAMES_PER_SECOND

GIF_FRAME_STRIDE = 2
GIF_FRAME_MS = 80
"""GIF counts in hundredths of a second: every second frame for 8 of them is 4 % too fast."""
GIF_LIMIT_S = 120
"""A GIF is held in memory until it is written."""


class FrameWriter(Protocol):
    """A place for frames, in order."""

    path: Path

    def write(self, frames_THWC: NDArray[np.uint8]) -> None:
        """Take uint8 RGB frames."""

    def finish(self) -> None:
        """Complete what was written under its final name."""

    def abort(self) -> None:
        """Remove what was written."""


class Mp4Writer:
    """H.264 in MP4 that browsers play: yuv420p, BT.709, the index before the pictures.

    Raises:
        OSError: from any method, when the disk is full or the folder cannot be written.
    """

    def __init__(self, path: Path, *, width_px: int, height_px: int) -> None:
        import av
        from av.video.reformatter import ColorRange, Colorspace

        self.path = path
        self._part = _part(path)
        self._frame_count = 0
        self._colours = {
            "format": "yuv420p",
            "dst_colorspace": Colorspace.ITU709,
            "dst_color_range": ColorRange.MPEG,
        }
        self._new_frame = av.VideoFrame.from_ndarray
        self._open = av.open
        options = {"movflags": "+faststart"}
        self._container: Any = av.open(str(self._part), "w", format="mp4", options=options)
        stream: Any = self._container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width_px, height_px, "yuv420p"
        stream.options = {"crf": "17", "preset": "veryfast"}
        context = stream.codec_context
        # 1 is BT.709 for all three in H.264's own tables (ITU-T H.273).
        context.colorspace, context.color_primaries, context.color_trc = 1, 1, 1
        context.color_range = 1
        context.thread_count = 1  # the model needs the cores; a frame takes about a millisecond
        self._stream = stream

    def write(self, frames_THWC: NDArray[np.uint8]) -> None:
        """Encode frames [T, height, width, 3]."""
        for frame_HWC in frames_THWC:
            frame = self._new_frame(np.ascontiguousarray(frame_HWC), format="rgb24")
            frame = frame.reformat(**self._colours)
            frame.pts = self._frame_count
            self._container.mux(self._stream.encode(frame))
            self._frame_count += 1

    def finish(self) -> None:
        """Write the rest and the index, check the file, give it its name."""
        if not self._frame_count:
            raise StateError(f"{self.path}: a video needs a frame; got none")
        self._container.mux(self._stream.encode(None))
        self._container.close()
        with self._open(str(self._part)) as written:
            found = written.streams.video[0].frames
        if found != self._frame_count:
            raise OSError(f"{self.path}: {found} of {self._frame_count} frames arrived on the disk")
        self._part.replace(self.path)

    def abort(self) -> None:
        """Close and remove the partial file."""
        with contextlib.suppress(OSError, ValueError):
            self._container.close()
        self._part.unlink(missing_ok=True)


class PngWriter:
    """One file a frame, `frame_000000.png` onwards, in a folder that is made if need be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[Path] = []
        path.mkdir(exist_ok=True)

    def write(self, frames_THWC: NDArray[np.uint8]) -> None:
        """Write frames [T, height, width, 3]."""
        from PIL import Image

        for frame_HWC in frames_THWC:
            target = self.path / f"frame_{len(self._written):06d}.png"
            self._written.append(target)
            Image.fromarray(frame_HWC).save(target, compress_level=3)

    def finish(self) -> None:
        """Nothing is left to do: each file is complete."""

    def abort(self) -> None:
        """Remove the files of this writer; the folder stays if it holds anything else."""
        for target in self._written:
            target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()


class GifWriter:
    """Every second frame, at 12.5 a second, 256 colours a frame, repeating for ever."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frame_count = 0
        self._pictures: list[Any] = []

    def write(self, frames_THWC: NDArray[np.uint8]) -> None:
        """Keep every second of frames [T, height, width, 3]."""
        from PIL import Image

        for frame_HWC in frames_THWC:
            if self._frame_count % GIF_FRAME_STRIDE == 0:
                picture = Image.fromarray(frame_HWC)
                self._pictures.append(picture.quantize(256, method=Image.Quantize.MEDIANCUT))
            self._frame_count += 1

    def finish(self) -> None:
        """Write the file."""
        if not self._pictures:
            raise StateError(f"{self.path}: a GIF needs a frame; got none")
        part = _part(self.path)
        self._pictures[0].save(
            part,
            format="GIF",
            save_all=True,
            append_images=self._pictures[1:],
            duration=GIF_FRAME_MS,
            loop=0,
        )
        part.replace(self.path)

    def abort(self) -> None:
        """Remove the partial file."""
        self._pictures.clear()
        _part(self.path).unlink(missing_ok=True)


class Recorder:
    """Several writers that live and end together."""

    def __init__(self, writers: Iterable[FrameWriter]) -> None:
        self._writers = list(writers)

    @property
    def paths(self) -> list[Path]:
        """What `finish` leaves."""
        return [writer.path for writer in self._writers]

    def write(self, frames_THWC: NDArray[np.uint8]) -> None:
        """Give frames to each writer."""
        for writer in self._writers:
            writer.write(frames_THWC)

    def finish(self) -> None:
        """Complete every file."""
        for writer in self._writers:
            writer.finish()

    def abort(self) -> None:
        """Remove every partial file."""
        for writer in self._writers:
            writer.abort()


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
