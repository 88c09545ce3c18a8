import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.decoder_report import decoder_section
from benchmarks.session_report import session_section
from miniworld.evaluation.figures import Report
from stream.cli import read_command
from stream.live_figures import PARTS

pytestmark = pytest.mark.cpu


def _speed(**changes: object) -> str:
    record: dict[str, Any] = {
        "preset": "mini",
        "weights": "shipped",
        "geometry": "256x160",
        "gpu": None,
        "cpu": "A Processor",
        "threads": 2,
        "dtype": "bfloat16",
        "compile_blocks": False,
        "frames_per_second": 34.567,
        "chunk": {"p20": 480.4, "p50": 491.6, "p80": 502.1, "n": 40},
        "memory": {"device_peak_mib": None, "peak_mib": 901.7},
        "commit": "abc1234",
    }
    return json.dumps(record | changes) + "\n"


def _quality(path: Path) -> Path:
    environment = {"dtype": "bfloat16", "device": "A GPU", "commit": "abc1234"}
    environment |= {"torch": "2.11.0", "time_utc": "2026-01-01T00:00:00Z"}
    figures = Report(environment=environment)
    figures.add("return", "PSNR, chunk 5", 27.914, count=64, unit="dB", at_least=28.5)
    figures.add("yaw", "median error, chunk 12", 0.1234, count=64, unit="deg", at_most=0.6)
    figures.add("other", "not shown", 1.0, count=64, at_least=0.5)
    figures.add("other", "not finite", float("nan"), count=64, at_least=0.5)
    path.write_text(figures.to_json())
    return path


def _live(**changes: object) -> str:
    parts = {name: {"p50": 10.0} for names, _ in report.PART_WORDS for name in names}
    record: dict[str, Any] = {
        "preset": "mini",
        "transport": "webrtc",
        "seconds": 300,
        "cpu": "A Processor",
        "cpu_count": 2,
        "frames_per_second": 23.97,
        "fps_window_min": 23.6,
        "key_to_screen_ms": {"p50": 750.2, "p95": 1_240.0},
        "key_to_screen_first_ms": {"p50": 748.0, "p95": 1250.0},
        "key_to_screen_last_ms": {"p50": 752.0, "p95": 1240.0},
        "media_lag_growth_ms": 2.0,
        "parts_ms": parts,
        "connect_s": 0.31,
        "page_to_first_frame_s": 0.92,
        "encode_ms": 1.27,
        "cores": {"server": 0.1, "worker": 1.4, "browser": 0.3},
        "watched": {"server_cores_per_viewer": 0.021},
        "commit": "abc1234",
    }
    return json.dumps(record | changes) + "\n"


def test_live_shows_the_last_record_of_a_transport_and_marks_misses(tmp_path: Path) -> None:
    records = tmp_path / "live.jsonl"
    records.write_text(_live(seconds=999) + _live())
    missing = tmp_path / "missing"
    text = report.section(missing, missing, records, missing)
    assert "999" not in text
    assert "**24.0** (23.6) | **750** / 1240 (missed: at most 1200) ms | +2; +4 / -10 ms" in text
    assert "0.31 / 0.92 s | 0.021 cores | abc1234" in text
    assert "to the server 20, waiting for the chunk 10" in text
    assert "display 20. Encoding takes 1.3 ms a frame" in text


def test_live_names_each_part_once() -> None:
    assert [name for names, _ in report.PART_WORDS for name in names] == list(PARTS)


def test_speed_shows_the_last_record_of_each_way_of_running(tmp_path: Path) -> None:
    records = tmp_path / "engine.jsonl"
    lines = [_speed(frames_per_second=1.0), _speed(compile_blocks=True), _speed()]
    records.write_text("".join(lines))
    text = report.section(records, *[tmp_path / "missing.json"] * 3)
    assert text.count("**34.6**") == 2
    assert "**1.0**" not in text
    assert "480 / 492 / 502 (40) | 902 MiB | abc1234" in text


def test_quality_marks_what_is_missed_and_counts_all_targets(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    text = report.section(missing, _quality(tmp_path / "figures.json"), missing, missing)
    assert "| >= 28.5 | 27.91 dB (missed) | 64 |" in text
    assert "| <= 0.6 | 0.123 deg | 64 |" in text
    assert "2 of 4 targets are met" in text
    assert "A GPU" in text


def test_approximations_show_the_last_record_of_each_form(tmp_path: Path) -> None:
    shown = {"item": "yaw", "name": "median error, chunk 12", "exact": 0.0621, "verdict": "kept"}
    record = {
        "linear": "fp8_rowwise", "attention": "sdpa", "sparse_tau": None,
        "sparse_block": None, "cases": 64, "gpu": "A GPU", "commit": "abc1234",
        "figures": [shown | {"approximate": 0.07}, shown | {"name": "other", "verdict": "worse"}],
    }  # fmt: skip
    broken = record | {
        "attention": "sparse",
        "sparse_tau": 1.25,
        "sparse_block": 8,
        "sparse_steps": 2,
        "figures": [shown | {"approximate": None}],
    }
    path = tmp_path / "quality.jsonl"
    older = {name: value for name, value in broken.items() if name != "sparse_steps"}
    written = (record, broken, older, record)
    path.write_text("".join(json.dumps(each) + "\n" for each in written))
    text = report.card_section(_quality(tmp_path / "figures.json"), path, tmp_path / "missing")
    assert text.count("fp8_rowwise, sdpa, 64 clips |  |  |  | 0.0621 -> 0.07 |") == 1
    assert "| 1 of 2 | abc1234 |" in text
    assert "| fp8_rowwise, sparse at 1.25 in steps 1 to 2, blocks of 8, 64 clips |" in text
    assert "| fp8_rowwise, sparse at 1.25 in every pass, blocks of 8, 64 clips |" in text
    assert "0.0621 -> - |" in text


@pytest.mark.parametrize(
    ("dtype", "words"), [("float32", "float32"), ("bfloat16", "another exact run")]
)
def test_approximations_say_what_a_control_gave(tmp_path: Path, dtype: str, words: str) -> None:
    shown = {"item": "yaw", "name": "median error, chunk 12", "exact": 0.06, "approximate": 0.07}
    record = {
        "linear": "fp8_rowwise", "attention": "sdpa", "sparse_tau": None,
        "sparse_block": None, "cases": 64,
        "gpu": "A GPU", "commit": "abc1234", "dtype": "bfloat16", "control": {"dtype": dtype},
        "figures": [shown | {"verdict": "kept", "verdict_alone": "worse"}],
    }  # fmt: skip
    path = tmp_path / "quality.jsonl"
    path.write_text(json.dumps(record) + "\n")
    text = report.card_section(_quality(tmp_path / "figures.json"), path, tmp_path / "missing")
    assert f"| 1 of 1, allowance widened by what {words} moves (0 without) | abc1234 |" in text


def test_products_show_the_least_and_the_median_of_their_kind(tmp_path: Path) -> None:
    record = {
        "preset": "mini", "geometry": "256x160", "weights": "shipped", "dtype": "bfloat16",
        "linear": "fp8_rowwise", "gpu": None, "cpu": "A Processor", "commit": "abc1234",
        "layers": {"blocks.2.up": 28.04, "blocks.3.up": 29.0, "blocks.4.up": 31.0},
    }  # fmt: skip
    path = tmp_path / "sqnr.jsonl"
    path.write_text(json.dumps(record) + "\n")
    text = report.card_section(_quality(tmp_path / "figures.json"), tmp_path / "missing", path)
    assert (
        "| `mini` 256x160, shipped weights, fp8_rowwise |  |  | 28.0 / 29.0 |  | abc1234 |" in text
    )


def test_without_records_there_is_no_figure(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    text = report.section(missing, missing, missing, missing)
    assert not any(character.isdigit() for character in text)


def test_only_the_section_is_replaced() -> None:
    readme = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.filled(readme, "new") == readme.replace("old", "new")


def test_a_readme_without_the_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no section between"):
        report.filled("text", "new")


def test_shown_rows_are_figures_that_the_evaluation_makes() -> None:
    """A renamed figure would vanish from README without a word; the sources name each."""
    folder = Path(report.ROOT) / "miniworld" / "evaluation"
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    for item, name, _ in (*report.QUALITY_ROWS, *report.APPROXIMATED_ROWS):
        assert f'"{item}"' in sources
        assert re.sub(r", (chunk \d+|\d+ s)$", "", name) in sources


def _session(**changes: object) -> str:
    spread = {"unit": "ms", "n": 20, "p20": 600.0, "p50": 640.4, "p80": 650.0, "p95": 700.2}
    parts = dict.fromkeys(("denoise_0", "denoise_1", "camera_and_draws", "host"), spread)
    record: dict[str, Any] = {
        "preset": "h3_33b", "row": "sparse", "geometry": "832x480", "weights": "random",
        "dtype": "bfloat16", "kernels": "auto", "decoder": "causal ViT, hybrid_a3",
        "gpu": "A GPU", "cpu": "A Processor", "frames_per_second": 26.55, "chunk": spread,
        "first_frame": spread, "overlap": spread, "commit": "abc1234",
        "first_frame_parts": parts | {"decode_first_frames": spread},
        "memory": {"planned_gib": 100.0, "reserved_peak_gib": 112.0, "off_by": 0.12},
        "start_up_s": {"imports": 3.0, "transformer": 40.25}, "first_frame_after_s": 43.25,
    }  # fmt: skip
    return json.dumps(record | changes) + "\n"


def test_sessions_show_the_last_record_and_mark_misses(tmp_path: Path) -> None:
    records = tmp_path / "session.jsonl"
    records.write_text(_session(frames_per_second=1.0) + _session())
    text = session_section(records)
    assert "**26.6** |" in text
    assert "**1.0**" not in text
    assert "**640** / 700 ms (missed: at most 550)" in text
    assert "100.0 / 112.0 GiB (+12.0%) (missed: within 10%)" in text
    assert "imports 3.0, transformer 40.2 | 43 |" in text


def test_a_small_session_has_a_longest_chunk_and_a_plan_of_allowances(tmp_path: Path) -> None:
    records = tmp_path / "session.jsonl"
    chunk = {"unit": "ms", "n": 20, "p20": 8.0, "p50": 8.47, "p80": 8.6, "p95": 8.75}
    records.write_text(_session(preset="mini", row="exact", geometry="256x160", chunk=chunk))
    text = session_section(records)
    assert "| 8.5 / 8.8 (20) |" in text
    assert "missed" not in text
    slow = chunk | {"p50": 12.25}
    records.write_text(_session(preset="mini", row="exact", geometry="256x160", chunk=slow))
    assert "| 12.2 / 8.8 (20) (missed: at most 12) |" in session_section(records)


def test_sessions_elsewhere_have_no_target(tmp_path: Path) -> None:
    records = tmp_path / "session.jsonl"
    memory = {"planned_gib": 0.5, "reserved_peak_gib": 0.0, "off_by": None}
    records.write_text(_session(gpu=None, memory=memory))
    assert "missed" not in session_section(records)
    assert "| 0.5 GiB |" in session_section(records)


def test_the_guide_has_the_section_and_commands_that_are_read() -> None:
    guide = report.H3_GUIDE.read_text(encoding="utf-8")
    assert report.filled(guide, report.guide_section()) == guide
    commands = re.findall(r"^worldstream (.*)$", guide, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        read_command(shlex.split(command))


def _written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


WHERE = {
    "preset": "h3_33b", "weights": "random", "geometry": "1344x768", "gpu": "A GPU",
    "cpu": "A Processor", "psnr_db": 55.12, "commit": "abc1234",
}  # fmt: skip


def _call(form: str, p50: float, **changes: object) -> dict[str, Any]:
    call = {"unit": "ms", "n": 120, "p20": p50, "p50": p50, "p80": p50}
    return WHERE | {
        "mode": "pair", "form": form, "call": call, "call_p95": 55.04, "tflops": 541.6,
        "error_max": 2.0, "class": "F", "state_mib": 4536.74, "state_measured_mib": 4536.75,
    } | changes  # fmt: skip


def test_causal_decoders_stand_in_a_row_with_all_forms(tmp_path: Path) -> None:
    plain, compiled = _call("plain", 170.0), _call("compiled", 53.1)
    path = _written(tmp_path / "a.jsonl", _call("recorded", 9.0), plain, _call("recorded", 51.62))
    text = decoder_section(path, tmp_path / "none", tmp_path / "none")
    assert "| **51.6** / 55.0 (120) (missed: at most 50) | 542 | - | -, 170.0 | 2 of 255" in text
    paced = {"paced": {"unit": "ms", "n": 30, "p50": 42.97}, "paced_p95": 43.21}
    path = _written(path, _call("recorded", 51.62, **paced))
    text = decoder_section(path, tmp_path / "none", tmp_path / "none")
    assert "(missed: at most 50) | 542 | **43.0** / 43.2 (30) | -, - | 2 of 255, 55.1" in text
    path = _written(path, _call("recorded", 51.62, geometry="832x480"))
    text = decoder_section(path, tmp_path / "none", tmp_path / "none")
    assert "| **51.6** / 55.0 (120) | 542 | - | -, - |" in text
    path = _written(path, plain, compiled)
    assert decoder_section(path, tmp_path / "none", tmp_path / "none") == ""


def test_windowed_rows_are_held_against_both_ways_to_run_them(tmp_path: Path) -> None:
    def block(row: str, p50: float, batch: int, dtype: str, mode: str) -> dict[str, Any]:
        return WHERE | {
            "row": row, "tile_batch": batch, "tile_count": 28, "dtype": dtype, "compile": mode,
            "block": {"unit": "ms", "n": 4, "p50": p50}, "peak_gib": 8.42, "class": "F",
        }  # fmt: skip

    path = _written(
        tmp_path / "a.jsonl",
        block("autocast, tile by tile", 960.0, 1, "autocast", "eager"),
        block("eager, tile by tile", 900.0, 1, "bfloat16", "eager"),
        block("eager, 14 tiles", 800.0, 14, "bfloat16", "eager"),
        block("compiled, 14 tiles", 480.0, 14, "bfloat16", "blocks"),
        block("compiled, tile by tile", 500.0, 1, "bfloat16", "blocks"),
    )
    text = decoder_section(tmp_path / "none", path, tmp_path / "none")
    assert "**960** (4) | - | - | - | 55.1 dB" in text
    assert "**800** (4) | 1.20x | - | 1.12x |" in text
    assert "**480** (4) | 2.00x | 1.67x (missed: at least 1.8) | 1.04x |" in text
    assert "**500** (4) | 1.92x | 1.80x | - |" in text


def test_loading_shows_every_way(tmp_path: Path) -> None:
    record = WHERE | {
        "name": "kept", "blocks": 15, "gb": 17.239, "gb_per_s": 28.33, "headers_s": 0.017,
        "read_s": 0.61, "linears_s": 0.0, "host_peak_mib": 1329.0, "host_growth_mib": 64.0,
        "is_exact": True, "class": "A",
    }  # fmt: skip
    path = _written(tmp_path / "a.jsonl", record, record | {"name": "bf16", "is_exact": False})
    text = decoder_section(tmp_path / "none", tmp_path / "none", path)
    assert "| 17.2 GB, **28.3** GB/s | 0.02 + 0.61 + 0.00 | 1329 MiB, +64 | as in the files" in text
    assert "as stored, A GPU | 17.2 GB" in text
    assert "| differ |" in text
