"""`bench live`: a short run with everything real, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from stream import live_figures as figures
from stream.cli import main
from stream.live_browser import CHROMIUM_NAMES

pytestmark = pytest.mark.cpu

HAS_CHROMIUM = any(map(shutil.which, CHROMIUM_NAMES))


@pytest.mark.skipif(not HAS_CHROMIUM, reason="no Chromium on this machine")
def test_a_short_run_prints_and_appends_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("playwright.sync_api")
    path = tmp_path / "live.jsonl"
    command = ["bench", "live", "--preset", "tiny", "--seconds", "10", "--viewers", "1"]
    assert main([*command, "--record", str(path)]) == 0
    captured = capsys.readouterr()
    printed = captured.out.splitlines()[-1]
    assert path.read_text() == printed + "\n"
    record = json.loads(printed)
    assert "key to screen" in captured.err
    keys = record["key_to_screen_ms"]
    assert keys["n"] > 0
    assert record["parts_ms"].keys() == set(figures.PARTS)
    assert all(part["n"] == keys["n"] for part in record["parts_ms"].values())
    assert record["frames_per_second"] > 5
    assert 0 < record["connect_s"] < record["page_to_first_frame_s"]
    assert record["encode_ms"] > 0
    assert all(cores > 0 for cores in record["cores"].values())
    assert all(side["peak_mib"] > 10 for side in record["memory"].values())
    assert len(record["watched"]["frames_per_second"]) == 2
    assert all(rate > 5 for rate in record["watched"]["frames_per_second"])


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--seconds", "3"], "seconds: 3"), (["--viewers", "99"], "viewers: 99")],
    ids=["too-short", "too-many"],
)
def test_what_cannot_be_measured_is_one_line_and_code_2(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "live", *options]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1


def test_without_chromium_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("playwright.sync_api")
    monkeypatch.setenv("PATH", "")
    assert main(["bench", "live"]) == 3
    assert "Chromium: none of chromium" in capsys.readouterr().err


def test_without_playwright_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    assert main(["bench", "live"]) == 3
    assert "pip install playwright" in capsys.readouterr().err
