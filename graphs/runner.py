"""Passes that are recorded once and replayed after.

    plain, in the first turn  ->  capture, first replay  ->  replay ...  ->  evicted

A turn is what its owner makes in one go, such as a chunk: recording takes a while, so a turn with a
pass that is new runs plainly, and a later one records no more than a few passes.

Owns which passes are recorded, in which state each is, and when a recording goes. Does not own the
inputs: passes read buffers at fixed addresses. Invariants: a recording is stored only after its
first replay; every call returns what the plain pass would, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from graphs.capture import CaptureBackend, Captured, Pass
from graphs.key import GraphKey

_log = logging.getLogger(__name__)
_GIB = 2**30
_MISSING = "graph_missing key=%s: runs without a graph for now"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerLimits:
    """What the recordings may cost."""

    captures_per_turn: int = 2
    """The two passes of a chunk: it then takes about half as long again."""
    max_entries: int = 32
    """Two phases of six windows, for two lengths of prompt and some of a third."""
    max_bytes: int = 16 * _GIB
    is_strict: bool = False
    """Raise where a pass cannot be recorded, instead of running it plainly."""

    def __post_init__(self) -> None:
        for name in ("captures_per_turn", "max_entries", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; allowed: 1 or more")


@dataclass(kw_only=True, eq=False, slots=True)
class GraphEntry:
    """One recording."""

    key: GraphKey
    captured: Captured
    capture_ms: float
    """Recording and first replay."""
    size_bytes: int
    """Growth of the memory in use; near nothing where the pool already had room."""
    replay_count: int = 1


@dataclass(kw_only=True, slots=True)
class RunnerCounts:
    """What happened since the runner was made; each call counts in one of them, but `evictions`."""

    plain: int = 0
    """Not recorded yet, or never because that failed."""
    captures: int = 0
    replays: int = 0
    evictions: int = 0
    unlisted: int = 0
    """Plain calls because the key is not listed."""
    failures: int = 0
    """Recordings that failed; the pass ran plainly."""


_Identity = tuple[GraphKey, tuple[int, ...]]


class GraphRunner:
    """Runs passes, recorded where that pays. One thread at a time; figures from any.

    Args:
        backend: of the device.
        limits: what the recordings may cost.
    """

    def __init__(self, backend: CaptureBackend, limits: RunnerLimits | None = None) -> None:
        self._backend = backend
        self._limits = limits or RunnerLimits()
        self._entries: OrderedDict[_Identity, GraphEntry] = OrderedDict()
        self._first_turns: dict[_Identity, int] = {}
        self._refused: dict[_Identity, str] = {}
        self._allowed: set[GraphKey] = set()
        self._said: set[tuple[GraphKey, str]] = set()
        self._turn = 0
        self._captures_left = self._limits.captures_per_turn
        self._is_closed = False
        self.counts = RunnerCounts()
        self.size_bytes = 0
        """Memory of all recordings."""

    @property
    def entries(self) -> tuple[GraphEntry, ...]:
        """Recordings, least recently used first."""
        return tuple(self._entries.values())

    @property
    def entry_count(self) -> int:
        """Recordings that there are."""
        return len(self._entries)

    @property
    def is_strict(self) -> bool:
        """Whether a pass that cannot be recorded raises."""
        return self._limits.is_strict

    def allow(self, keys: Iterable[GraphKey]) -> None:
        """List keys that may be recorded."""
        self._allowed.update(keys)

    def begin_turn(self) -> None:
        """Begin the next turn."""
        self._turn += 1
        self._captures_left = self._limits.captures_per_turn

    def run(self, key: GraphKey, run: Pass, fixed: Sequence[Tensor]) -> Tensor | None:
        """Run a pass: replay it, record it, or run it plainly.

        Args:
            key: its shapes; one that is not listed runs plainly.
            run: the pass. It reads and writes `fixed` and what never moves, like weights.
            fixed: every tensor that may lie elsewhere another time. A recording serves its own
                addresses alone.

        Returns what the pass returned; it holds until the next run with this key.

        Raises:
            RuntimeError: closed; or strict, and the key is not listed or cannot be recorded.
        """
        if self._is_closed:
            raise RuntimeError("run: the runner is closed; expected calls before close()")
        identity = key, tuple(tensor.data_ptr() for tensor in fixed)
        entry = self._entries.get(identity)
        if entry is not None:
            self._entries.move_to_end(identity)
            entry.captured.replay()
            entry.replay_count += 1
            self.counts.replays += 1
            return entry.captured.output
        if key not in self._allowed:
            return self._run_unlisted(key, run)
        first_turn = self._first_turns.setdefault(identity, self._turn)
        is_due = first_turn < self._turn and identity not in self._refused
        if not is_due or self._captures_left == 0:
            if first_turn == self._turn:
                self._say_once(key, _MISSING)
            self.counts.plain += 1
            return self._backend.warm_up(run)
        self._captures_left -= 1
        return self._capture(identity, run)

    def describe(self) -> str:
        """Table of the recordings and the counters, for people."""
        lines = [
            f"{entry.key}: {entry.replay_count} replays, {entry.size_bytes / 2**20:.1f} MiB, "
            f"captured in {entry.capture_ms:.1f} ms"
            for entry in self._entries.values()
        ]
        lines += [f"{key}: not recorded, {why}" for (key, _), why in self._refused.items()]
        return "\n".join([*lines, str(self.counts)])

    def clear(self) -> None:
        """Give all recordings up: what they read has gone or moved."""
        self._backend.synchronize()
        for entry in self._entries.values():
            entry.captured.release()
        self._entries.clear()
        self.size_bytes = 0
        self._first_turns.clear()
        self._refused.clear()
        self._said.clear()
        self._backend.release_pool()

    def close(self) -> None:
        """Give everything up, before the weights go. Calling it again does nothing."""
        if not self._is_closed:
            self.clear()
            self._is_closed = True

    def _run_unlisted(self, key: GraphKey, run: Pass) -> Tensor | None:
        if self._limits.is_strict:
            listed = "; ".join(sorted(map(str, self._allowed))) or "none"
            raise RuntimeError(f"key: {key} is not listed; allowed: {listed}")
        self._say_once(key, "graph_unlisted key=%s: runs without a graph")
        self.counts.unlisted += 1
        return run()

    def _capture(self, identity: _Identity, run: Pass) -> Tensor | None:
        key = identity[0]
        self._make_room()
        begin_s, before = time.perf_counter(), self._backend.used_bytes()
        try:
            captured = self._backend.capture(run)
            captured.replay()
            # An error of a kernel shows only here.
            self._backend.synchronize()
        except RuntimeError as error:
            # The reason lies with the pass or the driver; the plain pass still serves.
            self.counts.failures += 1
            if self._limits.is_strict:
                raise
            self._refused[identity] = str(error).partition("\n")[0]
            _log.warning("graph_refused key=%s: %s", key, self._refused[identity])
            return run()
        entry = GraphEntry(
            key=key,
            captured=captured,
            capture_ms=(time.perf_counter() - begin_s) * 1e3,
            size_bytes=max(0, self._backend.used_bytes() - before),
        )
        self._entries[identity] = entry
        self.size_bytes += entry.size_bytes
        del self._first_turns[identity]
        self.counts.captures += 1
        _log.info(
            "graph_captured key=%s ms=%.1f mib=%.1f",
            key,
            entry.capture_ms,
            entry.size_bytes / 2**20,
        )
        return captured.output

    def _make_room(self) -> None:
        """Evict until one more entry fits; nothing runs meanwhile."""
        limits, had_entries = self._limits, bool(self._entries)
        while self._entries and (
            len(self._entries) >= limits.max_entries or self.size_bytes > limits.max_bytes
        ):
            self._backend.synchronize()
            _, entry = self._entries.popitem(last=False)
            self.size_bytes -= entry.size_bytes
            entry.captured.release()
            self._said.discard((entry.key, _MISSING))
            self.counts.evictions += 1
            _log.info("graph_evicted key=%s replays=%d", entry.key, entry.replay_count)
        if had_entries and not self._entries:
            self._backend.release_pool()

    def _say_once(self, key: GraphKey, message: str) -> None:
        if (key, message) not in self._said:
            self._said.add((key, message))
            _log.info(message, key)
