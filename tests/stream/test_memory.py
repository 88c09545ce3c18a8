"""Verdicts over memory, with a clock in hand."""

import pytest

from stream.memory import DRAIN_AFTER_S, MemoryUse, MemoryWatch, Pressure

pytestmark = pytest.mark.cpu

LOW = MemoryUse(resident_mib=50.0, device_bytes=5 * 2**20)
HIGH = MemoryUse(resident_mib=150.0, device_bytes=15 * 2**20)


@pytest.mark.parametrize(("rss_limit", "gpu_limit"), [(100, None), (None, 10)], ids=["rss", "gpu"])
def test_admission_ends_first_and_sessions_end_if_that_does_not_help(
    rss_limit: int | None, gpu_limit: int | None
) -> None:
    watch = MemoryWatch(rss_limit, gpu_limit)
    assert watch.judge(LOW, 0.0) is Pressure.FINE
    assert watch.judge(HIGH, 1.0) is Pressure.FULL
    assert watch.judge(HIGH, 0.9 + DRAIN_AFTER_S) is Pressure.FULL
    assert watch.judge(HIGH, 1.0 + DRAIN_AFTER_S) is Pressure.DRAIN
    assert watch.judge(LOW, 20.0) is Pressure.FINE
    assert watch.judge(HIGH, 21.0) is Pressure.FULL


def test_without_a_limit_everything_is_fine() -> None:
    assert MemoryWatch(None, None).judge(HIGH, 0.0) is Pressure.FINE
