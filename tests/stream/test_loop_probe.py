"""The probe of the event loop: lag, and the stack of what holds it up."""

import asyncio
import contextlib
import threading
import time

import pytest
from structlog.testing import capture_logs

from stream.loop_probe import LoopProbe

pytestmark = pytest.mark.cpu


def _hold_up() -> None:
    time.sleep(0.8)


def test_loop_that_stands_still_is_measured_and_its_stack_told_once() -> None:
    lags_s: list[float] = []
    stuck: list[int] = []

    async def scenario() -> None:
        probe = LoopProbe(lags_s.append, lambda: stuck.append(threading.get_ident()))
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(0.3)
        _hold_up()
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert max(lags_s) > 0.5
    told = [entry for entry in logs if "_hold_up" in entry.get("stack", "")]
    assert len(told) == 1
    assert len(stuck) >= 1
    assert threading.get_ident() not in stuck
    assert "loop watcher" not in [thread.name for thread in threading.enumerate()]
