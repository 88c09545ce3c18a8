"""What is told while models are loaded: the memory plan, the stages, how reading goes.

Owns who hears of it. Whoever loads for people passes a form of its own; `LoadNews` tells nobody.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from stream.worker_messages import Failed, FailureCode, Loading, Planned, Report

if TYPE_CHECKING:
    from engine.memory import MemoryPlan, Present
    from engine.types import LoadEvent

LINE_INTERVAL_S = 2.0
READ_PERCENT = 40.0
"""Share of a start that reading weights takes, in a bar."""


class LoadNews:
    """Listens, and says nothing."""

    def planned(self, plan: MemoryPlan, present: Present) -> None:
        """What will be loaded fits; comes before anything is."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """One stage, for as long as it takes."""
        return nullcontext()

    def read(self, event: LoadEvent) -> None:
        """Weights of the stage are being read; comes a few times a second."""

    def failed(self, error: BaseException) -> None:
        """It comes to nothing, and would the next time; from any thread."""


class TerminalNews(LoadNews):
    """Says on stderr how reading goes, where it takes long enough to ask."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def read(self, event: LoadEvent) -> None:
        """A line now and then."""
        now_s = time.monotonic()
        if now_s - self._told_s >= LINE_INTERVAL_S:
            self._told_s = now_s
            print(f"reading weights: {event}", file=sys.stderr, flush=True)


class WorkerNews(LoadNews):
    """Passes on what a worker loads, with the time since it began.

    Args:
        report: takes `Loading`, `Planned` and `Failed`.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._begin_s = time.monotonic()
        self._is_over = False

    def tell(self, stage: str, percent: float) -> None:
        """Tell how far the start is."""
        seconds = time.monotonic() - self._begin_s
        self._report(Loading(stage=stage, percent=percent, seconds=seconds))

    def planned(self, plan: MemoryPlan, present: Present) -> None:
        """Draw the table here: the service, which prints it, has no torch."""
        from stream.plan_table import plan_text

        self._report(Planned(text=plan_text(plan, present)))

    def read(self, event: LoadEvent) -> None:
        """Tell how far reading is."""
        self.tell(f"reading weights: {event}", READ_PERCENT * event.share)

    def warming_up(self, share: float) -> None:
        """Tell how far the window is filled, 0 to 1."""
        self.tell("warming up", READ_PERCENT + (100.0 - READ_PERCENT) * share)

    def over(self) -> None:
        """Everything is loaded: what fails from now on may work the next time."""
        self._is_over = True

    def failed(self, error: BaseException) -> None:
        """Tell the operator, and that no other worker should try."""
        if not self._is_over:
            detail = f"{type(error).__name__}: {error}"
            code = FailureCode.LOAD_FAILED
            self._report(Failed(session_id=None, code=code, is_fatal=True, detail=detail))
