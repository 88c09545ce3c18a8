"""The runner over a tape: when passes are recorded, what a recording serves, when it goes."""

from __future__ import annotations

import pytest
import torch

from graphs.buffers import StaticBuffers
from graphs.key import GraphKey, Phase
from graphs.runner import GraphRunner, RunnerLimits
from tests.graphs.tape import TapeCapture

pytestmark = pytest.mark.cpu


def _key(history_rows: int = 0, phase: Phase = Phase.DENOISE) -> GraphKey:
    return GraphKey(
        phase=phase,
        rows=3,
        history_rows=history_rows,
        prefix_rows=2,
        dtype=torch.float32,
        batch=1,
    )


class Doubling:
    """A pass: twice its input, and a count of its own runs in Python."""

    def __init__(self) -> None:
        self.buffers = StaticBuffers({"x": torch.zeros(3)}, check_addresses=True)
        self.written = torch.zeros(3)
        self.runs = 0

    @property
    def fixed(self) -> tuple[torch.Tensor, ...]:
        return self.buffers["x"], self.written

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        self.written.copy_(self.buffers["x"] + 1)
        return self.buffers["x"] * 2


def _runner(**limits: object) -> tuple[GraphRunner, TapeCapture]:
    backend = TapeCapture()
    runner = GraphRunner(backend, RunnerLimits(**limits))
    runner.allow([_key(rows) for rows in range(0, 30, 3)])
    return runner, backend


def _call(runner: GraphRunner, run: Doubling, value: float, key: GraphKey | None = None):
    """One turn with one pass."""
    runner.begin_turn()
    run.buffers.copy_in(x=torch.full((3,), value))
    out = runner.run(key or _key(), run, run.fixed)
    assert torch.equal(out, torch.full((3,), 2 * value))
    assert torch.equal(run.written, torch.full((3,), value + 1))


def test_plain_then_captured_then_replayed():
    (runner, backend), run = _runner(), Doubling()
    for value in range(5):
        _call(runner, run, float(value))
    assert backend.log == [
        "warm_up", "capture", "replay", "synchronize", "replay", "replay", "replay",
    ]  # fmt: skip
    assert run.runs == 2
    assert (runner.counts.plain, runner.counts.captures, runner.counts.replays) == (1, 1, 3)


def test_nothing_is_recorded_in_the_turn_in_which_it_is_new(caplog):
    (runner, backend), run = _runner(), Doubling()
    with caplog.at_level("INFO", "graphs.runner"):
        for _ in range(4):
            runner.run(_key(), run, run.fixed)
    assert backend.log == ["warm_up"] * 4
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "graph_missing key=denoise 3 rows over 2+0, batch 1, float32: runs without a graph for now"
    ]


@pytest.mark.parametrize(("count", "captures"), [(1, [0, 1, 2]), (2, [0, 2, 3])])
def test_a_turn_records_no_more_than_it_may(count, captures):
    (runner, _), runs = _runner(captures_per_turn=count), [Doubling() for _ in range(3)]
    seen = []
    for _ in range(3):
        runner.begin_turn()
        for run in runs:
            runner.run(_key(), run, run.fixed)
        seen.append(runner.counts.captures)
    assert seen == captures


def test_other_addresses_are_another_recording():
    (runner, backend), one, two = _runner(), Doubling(), Doubling()
    for value in range(3):
        _call(runner, one, float(value))
        _call(runner, two, 10.0 + value)
    assert backend.log.count("capture") == 2
    assert len(runner.entries) == 2


def test_an_unlisted_key_runs_plainly_and_says_so_once(caplog):
    runner, run = GraphRunner(TapeCapture()), Doubling()
    for value in range(3):
        _call(runner, run, float(value))
    assert runner.counts.unlisted == 3
    assert runner.entries == ()
    assert "graph_unlisted" not in caplog.text  # at INFO, once


def test_strict_refuses_an_unlisted_key():
    (runner, _), run = _runner(is_strict=True), Doubling()
    with pytest.raises(
        RuntimeError, match=r"refresh 3 rows over 2\+0.* is not listed; allowed: de"
    ):
        _call(runner, run, 1.0, _key(phase=Phase.REFRESH))


def test_a_pass_that_cannot_be_recorded_goes_on_plainly(caplog):
    backend = TapeCapture(refuse="operation not permitted when stream is capturing\nmore")
    runner, run = GraphRunner(backend), Doubling()
    runner.allow([_key()])
    for value in range(4):
        _call(runner, run, float(value))
    assert backend.log.count("capture") == 1
    assert runner.counts.failures == 1
    assert "not recorded, operation not permitted" in runner.describe()
    assert caplog.text.count("graph_refused") == 1


def test_strict_raises_what_capturing_raised():
    backend = TapeCapture(refuse="no room")
    runner, run = GraphRunner(backend, RunnerLimits(is_strict=True)), Doubling()
    runner.allow([_key()])
    _call(runner, run, 1.0)
    with pytest.raises(RuntimeError, match="no room"):
        _call(runner, run, 1.0)


@pytest.mark.parametrize("limits", [{"max_entries": 2}, {"max_bytes": 150}], ids=["count", "bytes"])
def test_the_least_recently_used_goes_first(limits):
    (runner, backend), run = _runner(**limits), Doubling()
    for history in (0, 3):
        for value in range(2):
            _call(runner, run, float(value), _key(history))
    _call(runner, run, 5.0, _key(0))  # now 3 is older
    for value in range(2):
        _call(runner, run, float(value), _key(6))
    assert [entry.key.history_rows for entry in runner.entries] == [0, 6]
    assert runner.counts.evictions == 1
    assert backend.log[backend.log.index("release") - 1] == "synchronize"
    assert (runner.entry_count, runner.size_bytes) == (2, 200)
    _call(runner, run, 7.0, _key(3))


@pytest.mark.parametrize("how", ["evicted", "cleared"])
def test_a_pass_whose_recording_went_says_that_it_is_missing_again(how, caplog):
    (runner, _), run = _runner(max_entries=1), Doubling()
    with caplog.at_level("INFO", "graphs.runner"):
        for _ in range(2):
            _call(runner, run, 1.0, _key(0))
        if how == "cleared":
            runner.clear()
        else:
            for _ in range(2):
                _call(runner, run, 2.0, _key(3))
        _call(runner, run, 3.0, _key(0))
    missing = f"graph_missing key={_key(0)}: runs without a graph for now"
    assert [record.getMessage() for record in caplog.records].count(missing) == 2


def test_clear_gives_all_up_and_begins_anew():
    (runner, backend), run = _runner(), Doubling()
    for value in range(2):
        _call(runner, run, float(value))
    runner.clear()
    assert backend.log[-3:] == ["synchronize", "release", "release_pool"]
    assert runner.entries == ()
    for value in range(3):
        _call(runner, run, float(value))
    assert runner.counts.captures == 2


def test_a_closed_runner_refuses():
    (runner, backend), run = _runner(), Doubling()
    runner.close()
    runner.close()
    assert backend.log.count("release_pool") == 1
    with pytest.raises(RuntimeError, match="the runner is closed"):
        _call(runner, run, 1.0)


def test_the_state_can_be_read():
    (runner, _), run = _runner(), Doubling()
    for value in range(3):
        _call(runner, run, float(value))
    text = runner.describe()
    assert "denoise 3 rows over 2+0, batch 1, float32: 2 replays, 0.0 MiB, captured in" in text


@pytest.mark.parametrize("name", ["captures_per_turn", "max_entries", "max_bytes"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}: 0; allowed: 1 or more"):
        RunnerLimits(**{name: 0})


def test_a_key_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="history_rows: -3; allowed: 0 or more"):
        _key(-3)


def test_a_recorded_number_stays_what_it_was():
    # The tape is honest: a pass that takes a number of Python is wrong the second time.
    backend, step = TapeCapture(), {"value": 1.0}
    runner, x = GraphRunner(backend), torch.ones(3)
    runner.allow([_key()])
    for _ in range(2):
        runner.begin_turn()
        runner.run(_key(), lambda: x * step["value"], (x,))
    step["value"] = 5.0
    out = runner.run(_key(), lambda: x * step["value"], (x,))
    assert torch.equal(out, torch.ones(3))
