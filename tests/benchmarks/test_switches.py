"""The benchmark of new prompts, dry: what a record says. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.session_report import session_section
from benchmarks.switches import RESTARTS, main

pytestmark = pytest.mark.cpu

NEW_AND_SAME = ("new_seed", "same_seed")
TINY = ["--preset", "tiny", "--device", "cpu", "--chunks", "1"]


def test_a_walk_goes_on_under_all_prefixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "switches.jsonl"
    assert main([*TINY, "--record", str(record)]) == 0
    line = json.loads(record.read_text())
    assert json.loads(capsys.readouterr().out) == line
    same, new = line["same_length"], line["new_length"]
    assert new["text_rows"] < same["text_rows"] == line["known_length"]["text_rows"]
    assert len(same["chunk_ms"]) == len(new["chunk_ms"]) == 2
    assert line["first_chunk_ratio"] == pytest.approx(
        new["chunk_ms"][0] / line["steady"]["p50"], abs=1e-3
    )


@pytest.mark.parametrize(("asked", "expected"), [("auto", None), ("on", True), ("off", None)])
def test_a_walk_begins_anew_with_weights_and_without(
    asked: str, expected: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--free-adaln", asked]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["free_adaln"] is expected
    for name in ("new_seed", "same_seed", "another_picture"):
        found = record[name]
        assert len(found["prefix_ms"]) == len(found["chunk_ms"]) == RESTARTS
        assert found["capture_count"] == 0
    new, same = (sorted(record[name]["prefix_ms"])[RESTARTS // 2] for name in NEW_AND_SAME)
    assert record["new_seed_extra_ms"] == pytest.approx(new - same, abs=1e-3)


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "tiny", "--geometry", "wide"]) == 2
    assert "geometry: 'wide'" in capsys.readouterr().err


def test_the_guide_marks_a_first_chunk_that_takes_too_long(tmp_path: Path) -> None:
    sessions, switches = tmp_path / "session.jsonl", tmp_path / "switches.jsonl"
    guide = Path(__file__).resolve().parents[2] / "benchmarks" / "session.jsonl"
    sessions.write_text(guide.read_text())
    switch = {"text_rows": 8, "prefix_ms": 1.0, "chunk_ms": [16.0, 10.0], "capture_count": 2}
    record = {
        "preset": "tiny", "weights": "random", "geometry": "96x64", "linear": "bf16",
        "kernels": "off", "gpu": None, "cpu": "A CPU", "commit": "abc",
        "steady": {"p50": 10.0}, "same_length": switch, "new_length": switch,
        "first_chunk_ratio": 1.6,
    }  # fmt: skip
    switches.write_text(json.dumps(record) + "\n")
    assert "1.60 (missed: at most 1.5) |  | abc |" in session_section(sessions, switches)
    switches.write_text(json.dumps(record | {"known_length": switch}) + "\n")
    assert "| 1; 16, 10 ms (2 passes recorded) | abc |" in session_section(sessions, switches)
    anew = {"prefix_ms": [212.4, 208.0], "chunk_ms": [560.0, 400.25], "capture_count": 1}
    given_up = record | {name: anew for name in (*NEW_AND_SAME, "another_picture")}
    given_up |= {"free_adaln": True, "new_seed_extra_ms": 21.25}
    switches.write_text(json.dumps(record) + "\n" + json.dumps(given_up) + "\n")
    text = session_section(sessions, switches)
    assert text.count("| `tiny` 96x64 (random weights), A CPU | 10 |") == 1
    title = "| `tiny` 96x64 (random weights), modulation weights given up, A CPU "
    assert f"{title}| 10 |" in text
    shown = "212, 208; 560, 400 ms (1 passes recorded) |"
    assert f"{title}| {shown} 21.2 | {shown} {shown} abc |" in text
