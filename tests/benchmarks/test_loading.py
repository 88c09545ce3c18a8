"""The benchmark of loading: what it writes is a release, and what it loads is what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loading import main, sized_config, write_checkpoint
from engine.checkpoint.source import open_source

pytestmark = pytest.mark.cpu


def test_the_model_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    config = sized_config("tiny", 0.005)
    size = write_checkpoint(tmp_path / "t", config)
    assert 0.005e9 <= size < 0.006e9


def test_what_is_written_is_recognised_as_a_release(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.loading.SHARD_BYTES", 10**6)
    config = sized_config("tiny", 0.003)
    write_checkpoint(tmp_path / "t", config)
    source = open_source(tmp_path / "t", config)
    assert (source.layout, source.qkv) == ("original", "interleaved")
    assert len(source.files) > 2


def test_every_row_is_exact_and_recorded(tmp_path: Path, capsys) -> None:
    record = tmp_path / "loading.jsonl"
    arguments = ["--preset", "tiny", "--gb", "0.004", "--device", "cpu", "--record", str(record)]
    assert main([*arguments, "--folder", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in rows] == ["bf16", "fp8", "kept"]
    assert all(row["is_exact"] for row in rows)
    assert rows[2]["gb"] < rows[1]["gb"] == rows[0]["gb"]
    assert [json.loads(line) for line in record.read_text().splitlines()] == rows
    assert [each.name for each in tmp_path.iterdir()] == ["loading.jsonl"]


def test_a_device_that_is_not_there_is_refused(capsys) -> None:
    assert main(["--preset", "tiny", "--device", "cuda:99"]) == 3
    assert "device is 'cuda:99'" in capsys.readouterr().err
