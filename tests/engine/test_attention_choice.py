"""Choice of the attention backend: by measurement, sustained, once, with its reasons."""

from __future__ import annotations

import json
import logging
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from engine.attention import choice as choosing
from engine.attention.base import AttentionNeed, AttentionShape, backends
from engine.attention.choice import CANDIDATES, choose, group_shapes, measured_by, plan_attention
from engine.attention.timing import Times, bursts_over, sustained
from engine.config import preset
from engine.errors import UnsupportedError

pytestmark = pytest.mark.cpu

HOPPER = AttentionNeed(device_type="cuda", dtype=torch.bfloat16, head_dim=128, capability=(9, 0))
SHAPES = group_shapes(preset("h3_33b").model, 56, HOPPER)


class Timed:
    """A measurement that is looked up, and what was asked of it."""

    def __init__(self, **times_ms: float) -> None:
        self.times_ms = times_ms
        self.asked: list[tuple[str, str]] = []

    def __call__(self, candidates, shape) -> Times:
        self.asked += [(name, shape.group) for name in candidates]
        return Times(
            times_ms={name: ms for name, ms in self.times_ms.items() if name in candidates},
            refused={name: "no kernel" for name in candidates if name not in self.times_ms},
        )


def _plan(record: Path, measure: Timed, prefer="auto", need=HOPPER, machine="H200"):
    shapes = group_shapes(preset("h3_33b").model, 56, need)
    return plan_attention(shapes, prefer, machine=machine, record=record, measure=measure)


def test_groups_of_the_large_model():
    assert [(each.group, each.rows, each.keys) for each in SHAPES] == [
        ("conditioning", 1528 + 1008, 1528 + 1008),
        ("audio", 526, 1528 + 1008 + 526),
        ("video", 5040, 1528 + 1008 + 526 + 6 * 5040),
    ]


def test_the_fastest_is_chosen_and_says_why():
    choice = choose(SHAPES[2], Timed(sdpa=8.3, cudnn=4.6, flash=8.2))
    assert choice.name == "cudnn"
    assert choice.times_ms == {"sdpa": 8.3, "cudnn": 4.6, "flash": 8.2}
    assert "video 5040x33302x56x128 bfloat16: cudnn (cudnn 4.600 ms" in choice.reason
    assert "fa3: the package flash_attn_interface is not installed" in choice.reason


def test_a_near_tie_stays_with_torch():
    assert choose(SHAPES[0], Timed(sdpa=1.0, cudnn=0.96, flash=1.2)).name == "sdpa"


def test_a_lead_over_another_kernel_counts_sooner_than_one_over_torch():
    assert choose(SHAPES[2], Timed(sdpa=2.0, cudnn=1.317, cudnn_split=1.269)).name == "cudnn_split"
    assert choose(SHAPES[2], Timed(sdpa=2.0, cudnn=1.317, cudnn_split=1.31)).name == "cudnn"


def test_a_kernel_that_cannot_serve_is_refused_with_its_words():
    choice = choose(SHAPES[0], Timed(sdpa=1.0, flash=0.5))
    assert choice.name == "flash"
    assert choice.refused["cudnn"] == "no kernel"


def test_choices_that_another_process_wrote_meanwhile_are_kept(tmp_path):
    record = tmp_path / "attention.json"
    times = Timed(sdpa=2.0, cudnn=1.0, flash=2.0)
    others: list[str] = []

    def slowly(candidates, shape):
        if not others:
            others.append("another machine")
            _plan(record, Timed(sdpa=1.0, cudnn=2.0, flash=2.0), machine=others[0])
        return times(candidates, shape)

    _plan(record, slowly)
    again = Timed()
    assert _plan(record, again, machine=others[0]).names["video"] == "sdpa"
    assert _plan(record, again).names["video"] == "cudnn"
    assert again.asked == []


def test_the_record_is_read_again_once_nobody_else_writes_it(tmp_path, monkeypatch):
    record = tmp_path / "attention.json"
    before = {"of another": 1}
    monkeypatch.setattr(
        choosing.fcntl, "flock", lambda file, how: record.write_text(json.dumps(before))
    )
    _plan(record, Timed(sdpa=2.0, cudnn=1.0, flash=2.0))
    assert json.loads(record.read_text()).keys() > before.keys()


def test_of_two_processes_that_measure_together_the_second_follows_the_first(tmp_path, caplog):
    record, first = tmp_path / "attention.json", []

    def slowly(candidates, shape):
        if not first:
            first.append(None)
            first[0] = _plan(record, Timed(sdpa=2.0, cudnn=1.0, flash=1.1))
        return Timed(sdpa=2.0, cudnn=1.1, flash=1.0)(candidates, shape)

    with caplog.at_level(logging.INFO, logger="engine.attention.choice"):
        second = _plan(record, slowly)

    again = Timed()
    plans = [first[0], second, _plan(record, again)]
    assert [plan.names for plan in plans] == [dict.fromkeys(second.names, "cudnn")] * 3
    assert again.asked == []
    assert all(told.endswith(", as measured before") for told in caplog.messages[-3:])


def test_each_group_is_measured_once_a_machine_and_keeps_its_times(tmp_path, caplog):
    record, first = tmp_path / "sub" / "attention.json", Timed(sdpa=2.0, cudnn=1.0, flash=2.0)
    plan = _plan(record, first)
    assert (plan.conditioning.name, plan.audio.name, plan.video.name) == ("cudnn",) * 3
    assert len(first.asked) == 15
    again = Timed(sdpa=1.0, cudnn=2.0, flash=2.0)
    caplog.set_level(logging.INFO)
    assert _plan(record, again).video.name == "cudnn"
    assert again.asked == []
    assert "cudnn (cudnn 1.000 ms, flash 2.000 ms, sdpa 2.000 ms" in caplog.text
    assert _plan(record, again, machine="H100").video.name == "sdpa"


@pytest.fixture
def own_kernel(tmp_path, monkeypatch) -> Path:
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(choosing, "_OWN_SOURCES", (tmp_path / "kernels",))
    kernel = tmp_path / "kernels" / "dense_gluon.py"
    kernel.write_text("rows = 64")
    return kernel


def test_a_changed_kernel_of_our_own_is_measured_anew(own_kernel, tmp_path):
    record, first = tmp_path / "attention.json", Timed(sdpa=2.0, cudnn=1.0, flash=2.0)
    assert _plan(record, first, machine=measured_by("H200")).video.name == "cudnn"
    again = Timed(sdpa=2.0, cudnn=1.0, flash=0.5)
    assert _plan(record, again, machine=measured_by("H200")).video.name == "cudnn"
    own_kernel.write_text("rows = 128")
    assert _plan(record, again, machine=measured_by("H200")).video.name == "flash"


def test_times_are_those_of_the_libraries_they_were_measured_with(monkeypatch):
    pytest.importorskip("triton")
    here = measured_by("H200")
    assert re.fullmatch(r"H200, torch \S+, cudnn \S+, triton 3\.\S+, own [0-9a-f]{12}", here)

    monkeypatch.setattr(choosing, "version", lambda name: "9.9")
    assert measured_by("H200") == re.sub(r"triton \S+,", "triton 9.9,", here)


def test_a_machine_without_triton_has_times_too(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(choosing, "version", missing)
    assert "triton none, own" in measured_by("H200")


def test_a_remembered_backend_that_has_gone_is_measured_anew(tmp_path):
    record = tmp_path / "attention.json"
    kept = {"name": "fa3", "times_ms": {"fa3": 0.5}, "candidates": CANDIDATES}
    record.write_text(json.dumps({f"H200, {shape}": kept for shape in SHAPES}))
    assert _plan(record, Timed(sdpa=2.0, cudnn=1.0, flash=2.0)).video.name == "cudnn"


def test_a_choice_among_others_is_made_anew(tmp_path):
    record = tmp_path / "attention.json"
    kept = {"name": "flash", "times_ms": {"flash": 0.5}, "candidates": ["sdpa", "flash"]}
    record.write_text(json.dumps({f"H200, {shape}": kept for shape in SHAPES}))
    assert _plan(record, Timed(sdpa=2.0, cudnn=1.0, flash=2.0)).video.name == "cudnn"


@pytest.mark.parametrize(
    "kept", ["sdpa", {"name": "sdpa"}, {"name": "sdpa", "times_ms": {"a": "b"}}]
)
def test_a_damaged_entry_is_measured_anew(tmp_path, kept):
    record = tmp_path / "attention.json"
    record.write_text(json.dumps({f"H200, {shape}": kept for shape in SHAPES}))
    assert _plan(record, Timed(sdpa=2.0, cudnn=1.0, flash=2.0)).video.name == "cudnn"


@pytest.mark.parametrize("text", ["", "[1]"])
def test_a_damaged_record_is_done_without(tmp_path, text):
    record = tmp_path / "attention.json"
    record.write_text(text)
    assert _plan(record, Timed(sdpa=2.0, cudnn=1.0, flash=2.0)).video.name == "cudnn"


def test_a_record_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    _plan(tmp_path / "file" / "attention.json", Timed(sdpa=1.0, cudnn=2.0, flash=2.0))
    assert "attention_not_remembered" in caplog.text


def test_a_name_is_taken_without_measuring(tmp_path):
    measure = Timed()
    assert _plan(tmp_path / "a", measure, prefer="flash").audio.name == "flash"
    assert measure.asked == []


def test_a_name_that_refuses_says_why(tmp_path):
    with pytest.raises(UnsupportedError, match=r"fa4 refuses .*the package flash_attn\.cute is n"):
        _plan(tmp_path / "a", Timed(), prefer="fa4")


def test_a_cpu_measures_nothing(tmp_path):
    need = AttentionNeed(device_type="cpu", dtype=torch.float32, head_dim=64)
    measure = Timed()
    assert _plan(tmp_path / "a", measure, need=need).video.name == "sdpa"
    assert measure.asked == []


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("cudnn", {"device_type": "cpu"}, "made for cuda, not cpu"),
        ("cudnn", {"dtype": torch.float32}, "made for bfloat16 and float16, not torch.float32"),
        ("cudnn", {"head_dim": 256}, "multiples of 8 up to 128"),
        ("flash", {"capability": (7, 5)}, r"capability \(7, 5\); needed: \(8, 0\)"),
        ("fa3", {"capability": (10, 0)}, r"capability \(10, 0\); needed: \(9, 0\)"),
        ("flex", {"device_type": "cpu"}, "made for cuda, not cpu"),
        ("flex", {"head_dim": 96}, "powers of two"),
        ("products", {}, "made for cpu, not cuda"),
        ("gluon", {"device_type": "cpu"}, "made for cuda, not cpu"),
        ("gluon", {"dtype": torch.float16}, "made for bfloat16, not torch.float16"),
        ("gluon", {"head_dim": 64}, "heads are 64 wide; allowed: 128"),
        ("gluon", {"capability": (10, 0)}, r"capability \(10, 0\); needed: \(9, 0\)"),
    ],
)
def test_refusals(name, changes, reason):
    need = AttentionNeed(
        **{"device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 128, "capability": (9, 0)}
        | changes
    )
    assert re.search(reason, backends()[name].refusal(need))


class Clock:
    """A device whose calls take what they are said to, longer while it is cold or hot."""

    def __init__(self, warmth=lambda call: 1.0) -> None:
        self.warmth, self.queue, self.waited = warmth, [], 0
        self._now_ms, self._call = 0.0, 0

    def backend(self, name: str, ms: float):
        def burst(count: int) -> None:
            self.queue.append((name, count))
            for _ in range(count):
                self._now_ms += ms * self.warmth(self._call)
                self._call += 1

        return burst

    def timer(self, burst, count: int):
        begin_ms = self._now_ms
        burst(count)
        took_ms = self._now_ms - begin_ms

        def elapsed_ms() -> float:
            self.waited += 1
            return took_ms

        return elapsed_ms


def _queued(clock: Clock, **times_ms: float) -> Times:
    return sustained({n: clock.backend(n, ms) for n, ms in times_ms.items()}, clock.timer)


def test_backends_are_timed_in_turn_and_nothing_waits_between():
    clock = Clock()
    times = _queued(clock, cudnn=1.5, cudnn_split=1.25)
    assert times.times_ms == pytest.approx({"cudnn": 1.5, "cudnn_split": 1.25})
    bursts = clock.queue[4:]
    assert bursts == [("cudnn", 3), ("cudnn_split", 4)] * 24
    assert clock.waited == 4 + 2 * 16


def test_what_is_far_behind_is_not_measured_further():
    clock = Clock()
    assert _queued(clock, sdpa=8.0, cudnn=4.0).times_ms == {"sdpa": 8.0, "cudnn": 4.0}
    assert [name for name, _ in clock.queue].count("sdpa") == 2


def test_the_time_is_that_of_a_settled_clock():
    clock = Clock(lambda call: 1.0 if call < 30 else 1.25)
    assert _queued(clock, cudnn=1.0, cudnn_split=0.8).times_ms == pytest.approx(
        {"cudnn": 1.25, "cudnn_split": 1.0}
    )


def test_a_long_shape_stays_within_the_budget():
    clock = Clock()
    _queued(clock, cudnn=60.0, cudnn_split=50.0)
    assert clock.queue[4:] == [("cudnn", 1), ("cudnn_split", 1)] * 8


@pytest.mark.parametrize("kind", [RuntimeError, UnsupportedError])
def test_a_backend_that_raises_is_refused_in_its_words(kind):
    def raises(count: int) -> None:
        raise kind("no kernel for this\nmore")

    clock = Clock()
    times = sustained({"fa3": raises, "cudnn": clock.backend("cudnn", 1.0)}, clock.timer)
    assert times == Times(times_ms={"cudnn": 1.0}, refused={"fa3": "no kernel for this"})
    assert sustained({"fa3": raises}, clock.timer).times_ms == {}


def test_another_output_than_torchs_is_refused_with_the_figure():
    need = AttentionNeed(device_type="cpu", dtype=torch.float32, head_dim=16)
    shape = AttentionShape(group="video", rows=9, keys=41, heads=2, need=need)
    exact = backends()["math"]
    candidates = {"math": exact, "gluon": lambda q, k, v: 1.01 * exact(q, k, v)}
    bursts = bursts_over(candidates, shape, torch.device("cpu"))
    bursts["math"](2)
    with pytest.raises(UnsupportedError, match=r"differs from sdpa by 0\.0100; allowed: 0\.005"):
        bursts["gluon"](2)


def test_a_backend_whose_package_is_missing_says_so(monkeypatch):
    monkeypatch.setattr("engine.attention.dense.has_gluon", lambda: False)
    assert backends()["gluon"].refusal(HOPPER) == "Triton has no Gluon for Hopper here"
