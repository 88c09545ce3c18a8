import pytest

from stream.chunk_schedule import ChunkSchedule

pytestmark = pytest.mark.cpu


def _schedule(*costs_s: float) -> ChunkSchedule:
    schedule = ChunkSchedule(fps=20.0, margin_s=0.04)
    for cost_s in costs_s:
        schedule.chunk_made(cost_s)
    return schedule


def test_the_first_chunk_starts_at_once() -> None:
    assert _schedule().wait_s(0, now_s=100.0) == 0.0


def test_a_chunk_starts_its_cost_and_the_margin_before_the_end() -> None:
    assert _schedule(0.2).wait_s(17, now_s=100.0) == pytest.approx(17 * 0.05 - 0.2 - 0.04)


def test_slots_freed_early_do_not_hide_what_is_still_to_be_shown() -> None:
    schedule = _schedule(0.2)
    for _ in range(17):
        schedule.frame_made(100.0)
    assert schedule.wait_s(0, now_s=100.1) == pytest.approx(17 * 0.05 - 0.1 - 0.2 - 0.04)
    schedule.restart()
    assert schedule.wait_s(0, now_s=100.1) == 0.0


def test_a_pause_is_no_debt() -> None:
    schedule = _schedule(0.2)
    schedule.frame_made(100.0)
    schedule.frame_made(200.0)
    assert schedule.wait_s(0, now_s=200.0) == 0.0


def test_outliers_do_not_bring_more_than_a_chunk_ahead() -> None:
    duration_s = 17 * 0.05
    assert _schedule(3.0, 3.0).wait_s(34, now_s=100.0) == pytest.approx(duration_s - 0.04)


def test_a_model_that_is_too_slow_starts_at_once() -> None:
    assert _schedule(0.9).wait_s(17, now_s=100.0) == 0.0
