"""When a chunk is called slow: three times the usual, and never before five seconds."""

import pytest

from stream.chunk_watch import ChunkWatch

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("cost_ms", "limit_ms"), [(None, 5_000.0), (400.0, 5_000.0), (3_000.0, 9_000.0)]
)
def test_chunk_is_slow_beyond_its_limit(cost_ms: float | None, limit_ms: float) -> None:
    watch = ChunkWatch()
    if cost_ms is not None:
        watch.made(cost_ms)
    assert not watch.is_slow(limit_ms)
    assert watch.is_slow(limit_ms + 1.0)


def test_slow_chunk_is_told_once_and_the_next_one_again() -> None:
    watch = ChunkWatch()
    assert [watch.is_slow(6_000.0), watch.is_slow(7_000.0)] == [True, False]
    watch.made(100.0)
    assert watch.is_slow(6_000.0)
