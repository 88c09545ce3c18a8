"""What is told while models are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import EngineConfig, Geometry
from engine.memory import MemoryPart, MemoryPlan, Present
from engine.types import LoadEvent
from stream import load_news
from stream.load_news import TerminalNews, WorkerNews
from stream.plan_table import plan_text
from stream.worker_messages import Failed, FailureCode, Loading, Planned, Report
from stream.world_source import LoadedWorlds
from stream.world_spec import WorldSpec, read_start

pytestmark = pytest.mark.cpu

EVENT = LoadEvent(done_bytes=30 * 10**9, total_bytes=60 * 10**9, elapsed_s=10.0)
PLAN = MemoryPlan(
    geometry=Geometry(height_px=480, width_px=832),
    dtype="bfloat16",
    linear="fp8_rowwise",
    free_adaln=True,
    parts=(
        MemoryPart(name="blocks", loading=36 * 2**30, playing=20 * 2**30),
        MemoryPart.played("window", 25 * 2**30, "keys and values"),
        MemoryPart(name="prompt encoder", loading=0, playing=0, host=47 * 2**30),
    ),
)


def _worker() -> tuple[WorkerNews, list[Report]]:
    reports: list[Report] = []
    return WorkerNews(reports.append), reports


def test_reading_is_told_with_rate_and_time_left() -> None:
    news, reports = _worker()
    news.read(EVENT)
    (report,) = reports
    assert isinstance(report, Loading)
    assert report.stage == "reading weights: 30.0 of 60.0 GB, 3.0 GB/s, 10 s left"
    assert report.percent == 20.0


def test_the_bar_of_a_start_ends_full() -> None:
    news, reports = _worker()
    news.warming_up(1.0)
    assert [report.percent for report in reports if isinstance(report, Loading)] == [100.0]


def test_what_fails_while_loading_would_fail_again_and_what_fails_later_may_not() -> None:
    news, reports = _worker()
    news.failed(RuntimeError("no way between the GPUs"))
    (report,) = reports
    assert isinstance(report, Failed)
    assert (report.code, report.is_fatal) == (FailureCode.LOAD_FAILED, True)
    assert report.detail == "RuntimeError: no way between the GPUs"
    news.over()
    news.failed(RuntimeError("no way between the GPUs"))
    assert len(reports) == 1


def test_the_plan_comes_as_a_table_before_the_weights_are_made() -> None:
    news, reports = _worker()
    spec = WorldSpec(
        source="model",
        preset="tiny",
        geometry=Geometry(height_px=64, width_px=96),
        weights="random",
        engine=EngineConfig(device="cpu", dtype="float32"),
    )
    source = LoadedWorlds(spec, news)
    source.open(read_start(spec, image=None, scene="meadow-lake"))
    (report,) = reports
    assert isinstance(report, Planned)
    assert "Memory at 96x64: float32, linears bf16" in report.text
    source.close()


def test_the_table_names_parts_totals_and_what_is_free() -> None:
    present = Present(device_gib=80.0, host_gib=120.0, is_cuda=True, has_fp8=True)
    text = plan_text(PLAN, present)
    words = " ".join(text.split())
    assert "832x480: bfloat16, linears fp8_rowwise, modulation weights given up" in words
    assert "fits: 45.0 of 80.0 GiB that are free, 47.0 of 120.0 of the machine" in words
    for name, figures in (("blocks", ("36.00", "20.00")), ("window", ("25.00",))):
        line = next(line for line in text.splitlines() if f" {name} " in line)
        assert all(figure in line for figure in figures)
    assert "DOES NOT FIT" in plan_text(PLAN, Present(device_gib=40.0))


def test_the_table_says_why_linears_are_in_eight_bits() -> None:
    present = Present(device_gib=64.0)
    assert "linears fp8_rowwise (" not in plan_text(PLAN, present)
    chosen = replace(PLAN, linear_reason="bf16 needs 64.9 GiB")
    assert "linears fp8_rowwise (bf16 needs 64.9 GiB)" in plan_text(chosen, present)


def test_a_terminal_hears_of_long_reads_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(load_news.time, "monotonic", lambda: now_s[0])
    news = TerminalNews()
    for second in (0.5, 1.9, 2.0, 2.1):
        now_s[0] = second
        news.read(EVENT)
    assert capsys.readouterr().err.count("reading weights: 30.0 of 60.0 GB") == 1
