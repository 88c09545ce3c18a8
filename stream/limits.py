"""Token buckets: how often somebody may do something. Pure; the clock is an argument."""

from __future__ import annotations

from collections import OrderedDict


class TokenBucket:
    """Refills at `per_s` up to `burst`; each use takes one or more.

    Args:
        per_s: tokens a second.
        burst: tokens when full, as it is at first.
    """

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at_s: float | None = None

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Take `amount`, or nothing and return False."""
        self._refill(now_s)
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def wait_ms(self, now_s: float, amount: float = 1.0) -> int:
        """Milliseconds until `take(amount)` would succeed."""
        self._refill(now_s)
        return int(max(0.0, amount - self._left) / self._per_s * 1_000) + 1

    def _refill(self, now_s: float) -> None:
        if self._at_s is not None:
            gained = max(0.0, now_s - self._at_s) * self._per_s
            self._left = min(self._burst, self._left + gained)
        self._at_s = now_s


class BucketTable:
    """A bucket for each key (an address), of the `size` keys used last."""

    def __init__(self, *, per_s: float, burst: float, size: int = 4_096) -> None:
        self._per_s, self._burst, self._size = per_s, burst, size
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def bucket(self, key: str) -> TokenBucket:
        """Return the bucket of `key`."""
        bucket = self._buckets.pop(key, None) or TokenBucket(per_s=self._per_s, burst=self._burst)
        self._buckets[key] = bucket
        if len(self._buckets) > self._size:
            self._buckets.popitem(last=False)
        return bucket
