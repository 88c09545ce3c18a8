import pytest

from stream.chunk_schedule import ChunkSchedule

pytestmark = pytest.mark.cpu


def _schedule(*costs_s: float) -> ChunkSchedule:
    schedule = ChunkSchedule(fps=20.0, margin_s=0.04)
    for cost_s in costs_s:
        schedule.chunk_made(cost_s)
    return schedule


def test_the_first_chunk_starts_at_once() -> None:
    assert _schedule().wait_s(0, 100.0, now_s=100.0) == 0.0


def test_a_chunk_starts_its_cost_and_the_margin_before_the_end() -> None:
    """The 17th frame leaves 16 periods after the next one, and is shown for one."""
    wait_s = _schedule(0.2).wait_s(16, 100.0, now_s=100.0)
    assert wait_s == pytest.approx(17 * 0.05 - 0.2 - 0.04)


def test_the_end_is_known_between_two_frames() -> None:
    schedule = _schedule(0.2)
    first_s = schedule.wait_s(16, 100.0, now_s=100.03)
    assert first_s == pytest.approx(schedule.wait_s(16, 100.0, now_s=100.0) - 0.03)
    assert schedule.wait_s(15, 100.05, now_s=100.05) == pytest.approx(first_s - 0.02)


def test_when_all_is_shown_a_chunk_starts_at_once() -> None:
    assert _schedule(0.2).wait_s(0, 100.0, now_s=200.0) == 0.0


def test_when_nothing_leaves_a_chunk_starts_in_the_end() -> None:
    schedule = _schedule(0.2)
    assert schedule.wait_s(17, 100.0, now_s=100.1) > 0.0
    assert schedule.wait_s(17, 100.0, now_s=101.0) == 0.0


def test_outliers_do_not_bring_more_than_a_chunk_ahead() -> None:
    wait_s = _schedule(3.0, 3.0).wait_s(33, 100.0, now_s=100.0)
    assert wait_s == pytest.approx(17 * 0.05 - 0.04)


def test_a_model_that_is_too_slow_starts_at_once() -> None:
    assert _schedule(0.9).wait_s(16, 100.0, now_s=100.0) == 0.0
