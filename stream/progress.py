"""Progress of a rollout on stderr: a bar in a terminal, plain lines elsewhere.

Owns the figures: frames a second since the first chunk began, and the time left.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

LINE_INTERVAL_S = 2.0


class Progress:
    """Counts chunks and frames of one rollout.

    Args:
        label: in front of the figures.
        chunk_count: how many there will be.
        is_shown: False counts alone.
    """

    def __init__(self, label: str, chunk_count: int, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._label = label
        self._chunk_count = chunk_count
        self._chunks_done = 0
        self._frame_count = 0
        self._start_s = time.perf_counter()
        self._line_s = self._start_s
        self._bar = _Bar(label, chunk_count) if is_shown and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        self._start_s = self._line_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def frames_per_second(self) -> float:
        """Frames made a second so far."""
        return self._frame_count / max(time.perf_counter() - self._start_s, 1e-9)

    def chunk_done(self, frame_count: int) -> None:
        """Count one chunk of `frame_count` frames."""
        self._chunks_done += 1
        self._frame_count += frame_count
        now_s = time.perf_counter()
        left_s = (
            (now_s - self._start_s) / self._chunks_done * (self._chunk_count - self._chunks_done)
        )
        chunks_per_second = self._chunks_done / max(now_s - self._start_s, 1e-9)
        speed = f"{chunks_per_second:.2f} chunks/s"
        if self._frame_count:
            speed = f"{self.frames_per_second:.1f} fps"
        figures = f"{speed}, {left_s:.0f} s left"
        if not self._is_shown:
            return
        if self._bar is not None:
            self._bar.advance(figures)
        elif now_s - self._line_s >= LINE_INTERVAL_S or self._chunks_done == self._chunk_count:
            self._line_s = now_s
            done = f"chunk {self._chunks_done}/{self._chunk_count}"
            print(f"{self._label}: {done}, {figures}", file=sys.stderr, flush=True)


class _Bar:
    """A rich bar; rich is imported only where a terminal is there to draw on."""

    def __init__(self, label: str, chunk_count: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(label, total=chunk_count, figures="")
        self._progress.start()

    def advance(self, figures: str) -> None:
        self._progress.update(self._task, advance=1, figures=figures)

    def stop(self) -> None:
        self._progress.stop()
