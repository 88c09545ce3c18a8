"""Token buckets with a clock in hand."""

import pytest

from stream.limits import BucketTable, TokenBucket

pytestmark = pytest.mark.cpu


def test_bucket_gives_its_burst_then_its_rate() -> None:
    bucket = TokenBucket(per_s=2.0, burst=3.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_ms(10.0) == 501
    assert bucket.take(10.5)
    assert not bucket.take(10.5)


def test_bucket_holds_no_more_than_its_burst() -> None:
    bucket = TokenBucket(per_s=1.0, burst=2.0)
    bucket.take(0.0)
    assert [bucket.take(1000.0) for _ in range(3)] == [True, True, False]


def test_table_keeps_addresses_apart_and_forgets_the_oldest() -> None:
    table = BucketTable(per_s=0.001, burst=1.0, size=2)
    assert table.bucket("a").take(0.0)
    assert not table.bucket("a").take(0.0)
    assert table.bucket("b").take(0.0)
    assert table.bucket("c").take(0.0)
    assert table.bucket("a").take(0.0)
