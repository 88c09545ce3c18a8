import json
from pathlib import Path

import pytest

from benchmarks.record import Spread
from stream.cli import main

pytestmark = pytest.mark.cpu

SPREAD_KEYS = {"unit", "n", "dropped_count", "p20", "p50", "p80"}
RECORD_KEYS = {
    "name", "row", "gpu_count", "chunk_ms", "dit_fps", "error", "peak_gib",
    "frames_per_second", "preset", "weights", "geometry", "class", "device", "dtype",
    "dtype_note", "compile_blocks", "has_frames", "config_hash", "chunk", "cpu_time", "parts",
    "denoise_gflop", "product_gflops", "share_of_peak",
    "load_s", "first_frame_s", "warm_up_s", "memory", "cpu", "cpu_count", "threads", "spin_count",
    "gpu", "cuda", "torch", "python", "commit", "load_1min", "time_utc",
}  # fmt: skip


def test_bench_engine_prints_and_appends_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.jsonl"
    command = ["bench", "engine", "--preset", "tiny", "--dtype", "float32", "--chunks", "2"]
    assert main([*command, "--record", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert path.read_text() == printed + "\n"
    record = json.loads(printed)
    assert set(record) == RECORD_KEYS
    parts = [*(f"denoise_{step}" for step in range(4)), "refresh", "step_other"]
    parts += [*(f"decode_{index}" for index in range(5)), "decode"]
    assert list(record["parts"]) == parts
    assert all(set(part) == SPREAD_KEYS for part in record["parts"].values())
    assert (record["chunk"]["n"], record["chunk"]["dropped_count"]) == (2, 7)
    assert record["class"] == "F"
    passes_ms = sum(part["p50"] for part in [*record["parts"].values()][:5])
    assert record["dit_fps"] == pytest.approx(17e3 / passes_ms, abs=1e-3)
    assert record["chunk_ms"] == record["chunk"]["p50"]
    assert (record["row"], record["gpu_count"], record["error"]) == ("session", 0, None)
    assert record["peak_gib"] == pytest.approx(record["memory"]["peak_mib"] / 1024, abs=1e-3)


def test_ablations_tell_changed_bits_from_equal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "engine", "--preset", "tiny", "--dtype", "float32", "--chunks", "1"]
    assert main([*command, "--ablations", "packed_history,dtype"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    classes = {row["name"]: row["class"] for row in record["ablations"]}
    assert classes["packed_history off"] == classes["control, rerun"] == "X"
    assert classes["bfloat16"] == "F"


def test_the_ladder_prints_the_line_that_it_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "ladder.jsonl", tmp_path / "ladder.png"
    command = ["bench", "engine", "--ladder", "--preset", "tiny", "--dtype", "float32"]
    command += ["--device", "cpu", "--chunks", "1", "--rows", "eager"]
    assert main([*command, "--record", str(path), "--plot", str(plot)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [json.loads(kept) for kept in path.read_text().splitlines()] == line["rows"]
    assert plot.exists()


def test_spread_names_its_percentiles() -> None:
    spread = Spread.of([float(value) for value in range(101)], unit="ms", dropped_count=3)
    assert (spread.p20, spread.p50, spread.p80, spread.n) == (20.0, 50.0, 80.0, 101)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--geometry", "300x200"], "geometry.height_px is 200"),
        (["--geometry", "wide"], "geometry: 'wide'"),
        (["--geometry", "320x192"], "allowed with --weights random"),
        (["--plot", "ladder.png"], "plot: ladder.png; allowed with ladder"),
        (["--rows", "eager"], "rows: eager; allowed with ladder"),
        (["--sparse-tau", "2"], "sparse_tau is 2.0 with attention 'auto'"),
        (["--sparse-block", "8"], "sparse_block is 8 with attention 'auto'"),
        (["--sparse-steps", "3"], "sparse_steps is 3 with attention 'auto'"),
        (["--ladder", "--sparse-steps", "1"], "sparse_steps: 1; allowed without ladder"),
        (["--ladder", "--compile", "full"], "compile: full; allowed without ladder"),
        (["--ladder", "--ablations", "all"], "ablations: all; allowed without ladder"),
        (["--ladder", "--rows", "magic"], "rows: 'magic'; allowed: eager"),
        (["--ladder", "--weights", "folder"], "weights: 'folder'; allowed: auto, shipped"),
        (["--chunks", "0"], "chunks: 0"),
        (["--ablations", "magic"], "ablations: 'magic'"),
        (["--preset", "h3_33b", "--weights", "shipped"], "no weights ship with h3_33b"),
    ],
    ids=[
        "not-a-multiple",
        "not-a-size",
        "shipped-at-another-size",
        "plot-without-ladder",
        "rows-without-ladder",
        "tau-without-sparse",
        "block-without-sparse",
        "steps-without-sparse",
        "ladder-steps",
        "ladder-compile",
        "ladder-ablations",
        "ladder-unknown-row",
        "ladder-folder",
        "no-chunk",
        "unknown-ablation",
        "no-weights",
    ],
)
def test_bad_scenario_is_one_line_and_code_2(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", *options]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1


def test_large_model_is_refused_with_needed_and_present_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["bench", "engine", "--preset", "h3_33b", "--weights", "random", "--device", "cpu"]
    assert main(command) == 3
    assert "GiB are free" in capsys.readouterr().err
