"""The benchmark of a session, dry: what it lists adds up, and goes through what is served."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.session_speed import (
    SessionScenario,
    Stages,
    as_record,
    main,
    measure_row,
    overlap_ms,
)
from engine.errors import ConfigError
from engine.memory import Present
from stream import plan_world

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "aiortc", "av", "diffusers", "fastapi", "prometheus_client", "pydantic", "pydantic_settings",
    "rich", "structlog", "transformers", "tyro", "uvicorn", "websockets",
)  # fmt: skip


def test_a_record_has_the_parts_of_each_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "session.jsonl"
    options = ["--preset", "tiny", "--device", "cpu", "--dtype", "float32", "--chunks", "2"]
    assert main([*options, "--record", str(record)]) == 0
    line = json.loads(record.read_text())
    assert json.loads(capsys.readouterr().out)["rows"] == [line]
    assert line["chunk"]["n"] == line["first_frame"]["n"] == 2
    assert line["frames_per_second"] > 0.0
    parts = line["first_frame_parts"]
    assert set(parts) == {
        "denoise_0", "denoise_1", "denoise_2", "denoise_3", "camera_and_draws",
        "decode_first_frames", "host",
    }  # fmt: skip
    stages = line["start_up_s"]
    assert list(stages)[:3] == ["imports", "scene", "transformer"]
    assert list(stages)[-1] == "first frame"
    assert line["first_frame_after_s"] == pytest.approx(sum(stages.values()), abs=0.1)
    planned = line["memory"]
    assert planned["planned_gib"] == max(
        planned["planned_loading_gib"], planned["planned_playing_gib"]
    )


def test_parts_of_a_first_frame_add_up_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "tiny", "--device", "cpu", "--dtype", "float32", "--chunks", "1"]
    assert main(options) == 0
    line = json.loads(capsys.readouterr().out)["rows"][0]
    total = sum(part["p50"] for part in line["first_frame_parts"].values())
    assert total == pytest.approx(line["first_frame"]["p50"], abs=0.01)


def test_a_record_says_how_sparse_attention_was_asked_for_where_it_served() -> None:
    scenario = SessionScenario(preset="tiny", device="cpu", dtype="float32", chunks=1)
    row = measure_row(scenario, "exact", Stages())
    sparse = dataclasses.replace(row, name="sparse", density=0.41)
    names = ("linear", "attention", "sparse_tau", "sparse_block", "sparse_steps", "density")
    records = [as_record(scenario, each) for each in (row, sparse)]
    assert [tuple(record[name] for name in names) for record in records] == [
        ("bf16", "auto", None, None, None, None), ("fp8_mixed", "sparse", 1.0, 64, 2, 0.41),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({"decode": 10.0, "decoded_4": 50.0, "refresh": 10.0, "end": 100.0}, 40.0),
        ({"decode": 10.0, "decoded_4": 50.0, "refresh": 60.0, "end": 100.0}, 0.0),
        ({"decode": 30.0, "decoded_4": 150.0, "refresh": 20.0, "end": 100.0}, 70.0),
    ],
    ids=["within", "after", "longer"],
)
def test_overlap(spans: dict[str, float], expected: float) -> None:
    assert overlap_ms(spans) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "preset: 'huge'; allowed: mini"),
        ({"chunks": 0}, "chunks: 0; allowed: 1 to"),
        ({"rows": "B"}, "rows: 'B'; allowed: exact, A"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SessionScenario(**changes).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(("row", "linear"), [
    ("exact", "bf16"), ("A", "fp8_rowwise"), ("mixed", "fp8_mixed"), ("block", "fp8_block"),
    ("sparse", "fp8_mixed"),
])  # fmt: skip
def test_an_h200_holds_the_large_size_with_nothing_given_up(
    row: str, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_world, "resolve_device", lambda name: torch.device("cuda"))
    scenario = SessionScenario(geometry="1344x768", dtype="bfloat16")
    # Of 139.8 GiB, what a process holds before it allocates.
    h200 = Present(device_gib=139.3, host_gib=128.0, is_cuda=True, has_fp8=True)
    plan = plan_world.plan_world(scenario.spec(row), None, h200).plan
    assert (plan.linear, plan.free_adaln) == (linear, False)
    assert plan.part_gib("window") > 50.0


def test_it_needs_no_library_of_the_service() -> None:
    options = ["--preset", "tiny", "--device", "cpu", "--dtype", "float32", "--chunks", "1"]
    program = f"""
import sys
sys.modules |= dict.fromkeys({ABSENT!r})
from benchmarks.session_speed import main
raise SystemExit(main({options!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"exact: \S+ frames/s, \S+ ms a chunk \(p95 \S+\): 4 denoise steps, refresh, decoder",
        done.stderr,
    )
