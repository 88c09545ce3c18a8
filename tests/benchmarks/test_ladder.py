"""The ladder climbed by the smallest model on a CPU; its records, its lines, its pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import climb as climbing
from benchmarks.climb import Climbed, Grounds, relative_error
from benchmarks.floor import Floor
from benchmarks.ladder import main
from benchmarks.ladder_output import as_record, fp8_share, read_share
from benchmarks.ladder_report import draw_pictures, ladder_section, read_ladders
from benchmarks.ladder_rows import DEFAULT_ROWS, PLAIN, ROW_NAMES, ROWS, LadderScenario
from benchmarks.peak import chunk_work, key_row_count, pass_work
from benchmarks.plot import Bar, draw_waterfall
from benchmarks.record import Spread, describe_machine
from engine.config import EngineConfig, Geometry, preset
from engine.errors import ConfigError
from engine.parallel import Alone
from engine.quant import Fp8Linear
from engine.schemes import linear_shapes
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu

NEEDED = {
    "preset", "geometry", "gpu", "gpu_count", "class", "row", "chunk_ms", "dit_fps", "error",
    "peak_gib", "torch", "commit",
}  # fmt: skip
TINY = ["--preset", "tiny", "--device", "cpu", "--dtype", "float32", "--chunks", "1"]


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    """Rows of a process without any library that a bare GPU machine lacks."""
    folder = tmp_path_factory.mktemp("ladder")
    script = f"""
import sys
for name in ("rich", "tyro", "structlog", "pydantic", "av", "fastapi", "matplotlib"):
    sys.modules[name] = None
from benchmarks import ladder_rows
from benchmarks.ladder import main
ladder_rows.DEFAULT_ROWS = ("prefix", "packed", "graphs", "kernels")
sys.exit(main({TINY!r} + ["--commit", "abc1234",
    "--plot", {str(folder / "plot.png")!r}, "--record", {str(folder / "ladder.jsonl")!r}]))
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout.splitlines()[-1]), result.stderr.splitlines()


def test_every_row_that_ran_has_a_record(climbed):
    folder, whole, _ = climbed
    records = [json.loads(line) for line in (folder / "ladder.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == ["eager", "prefix", "packed"]
    assert records == whole["rows"][:3]
    for record in records:
        assert record.keys() >= NEEDED
        assert (record["preset"], record["geometry"]) == ("tiny", "96x64")
        assert (record["gpu"], record["gpu_count"], record["commit"]) == (None, 0, "abc1234")
        assert record["dit_fps"] == pytest.approx(17_000 / record["chunk_ms"], rel=1e-3)
        assert record["chunk"]["dropped_count"] == 9


def test_shortcuts_keep_the_bits(climbed):
    rows = climbed[1]["rows"][:3]
    assert [(row["class"], row["error"], row["error_first_chunk"]) for row in rows] == [
        ("X", 0.0, 0.0)
    ] * 3


def run_ranks(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of a script over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*command, "2", script, *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_ranks_are_measured_against_one_of_them(tmp_path):
    records, script = tmp_path / "ladder.jsonl", tmp_path / "climbs.py"
    script.write_text("""
import sys
from benchmarks import ladder, ladder_rows
ladder_rows.DEFAULT_ROWS = ("prefix", "packed", "graphs")
sys.exit(ladder.main())
""")
    options = ["--reference", "packed", "--record", str(records)]
    result = run_ranks(str(script), *TINY, *options)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.count("packed history") == 1
    packed, graphs = json.loads(result.stdout)["rows"]
    assert records.read_text() == json.dumps(packed) + "\n"
    assert (packed["rank_count"], packed["gpu_count"]) == (2, 0)
    assert packed["reference"] == "packed, one rank"
    assert packed["error"] < FP32_ROLLOUT_ATOL
    assert packed["speed_up"] == pytest.approx(
        packed["one_rank_chunk_ms"] / packed["chunk_ms"], abs=1e-3
    )
    assert "graphs is 'strict' on cpu" in graphs["reason"]


def test_a_rank_that_fails_ends_the_others(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(f"""
import os
from benchmarks import climb, ladder
real = climb._climb_row
def fail_on_one_rank(scenario, row, config, exchange, reference):
    if os.environ["RANK"] == "1" and exchange.world_size == 2:
        raise RuntimeError("this rank has had enough")
    return real(scenario, row, config, exchange, reference)
climb._climb_row = fail_on_one_rank
ladder.main({TINY!r} + ["--rows", "packed", "--reference", "packed"])
""")
    result = run_ranks(str(script))
    assert result.returncode != 0
    assert "RuntimeError: this rank has had enough" in result.stderr
    assert result.stdout == ""


def test_rows_that_need_cuda_say_so(climbed):
    _, whole, lines = climbed
    reasons = {row["row"]: row["reason"] for row in whole["rows"][3:]}
    assert "graphs is 'strict' on cpu" in reasons["graphs"]
    assert "kernels is 'fast' on cpu" in reasons["kernels"]
    assert sum("not run: " in line for line in lines) == 2


def test_records_become_a_table_and_a_picture(climbed, tmp_path):
    records = climbed[0] / "ladder.jsonl"
    assert [len(ladder) for ladder in read_ladders(records)] == [3]
    text = ladder_section(records)
    assert "| eager, prefix recomputed | **" in text
    assert "CUDA graphs" not in text
    assert "Commits abc1234." in text
    draw_pictures(records, tmp_path)
    assert f"](benchmarks/pictures/{next(tmp_path.iterdir()).name})" in text


def test_the_last_record_of_a_row_counts(climbed, tmp_path):
    lines = (climbed[0] / "ladder.jsonl").read_text().splitlines()
    again = json.loads(lines[1]) | {"dit_fps": 99.5}
    path = tmp_path / "ladder.jsonl"
    path.write_text("\n".join([lines[1], lines[0], json.dumps(again)]) + "\n")
    assert [record["row"] for record in read_ladders(path)[0]] == ["eager", "prefix"]
    assert "**99.5**" in ladder_section(path)


def test_a_row_that_changed_between_two_ladders_stands_there_twice(climbed, tmp_path):
    first, last = map(json.loads, (climbed[0] / "ladder.jsonl").read_text().splitlines()[::2])
    older = [each | {"geometry": "32x32"} for each in (first, last | {"title": "as it was"})]
    path = tmp_path / "ladder.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (*older, first, last)))
    rows = [line.split(" | ") for line in ladder_section(path).splitlines()[2:5]]
    assert [row[0] for row in rows] == ["| " + first["title"], "| as it was", "| " + last["title"]]
    assert [[cell.strip(" |") != "" for cell in row[1:]] for row in rows] == [
        [True, True], [True, False], [False, True],
    ]  # fmt: skip


def test_no_records_no_table(tmp_path):
    assert ladder_section(tmp_path / "none.jsonl") == ""


def test_a_plot_has_a_bar_as_long_as_its_time(climbed):
    with Image.open(climbed[0] / "plot.png") as picture:
        assert picture.format == "PNG"
    bars = [
        Bar(label=name, row_class=name, chunk_ms=ms, dit_fps=1.0)
        for name, ms in (("F", 400.0), ("A", 100.0))
    ]
    image = draw_waterfall(bars, title="", caption="")
    lengths = {
        name: sum(image.getpixel((x, y)) == colour for x in range(image.width))
        for name, colour, y in (("F", (58, 138, 92), 101), ("A", (196, 112, 36), 147))
    }
    assert lengths["F"] == pytest.approx(4 * lengths["A"], abs=4)


def test_rows_that_fail_are_refused_with_their_reason(monkeypatch, capsys):
    real = climbing._climb_row

    def fail_in_the_second(scenario, row, *arguments):
        if row.name == "prefix":
            raise RuntimeError("the compiler\ngave up")
        return real(scenario, row, *arguments)

    monkeypatch.setattr(climbing, "_climb_row", fail_in_the_second)
    for rows, code in (("eager,prefix", 0), ("prefix", 1)):
        assert main([*TINY, "--rows", rows]) == code
        printed = capsys.readouterr()
        whole = json.loads(printed.out.splitlines()[-1])
        assert whole["rows"][1]["reason"] == "the compiler gave up"
        assert ("none of the rows was measured" in printed.err) == (code == 1)


def test_a_ladder_can_be_climbed_in_parts(capsys):
    assert main([*TINY, "--rows", "prefix,packed", "--start", "packed"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["row"] for row in rows] == ["eager", "packed"]
    assert rows[1]["config"]["prefix_cache"]


def test_what_is_approximate_comes_last_and_blocks_everywhere_by_name():
    assert DEFAULT_ROWS[-4:] == ("kernels", "fp8_linear", "fp8_mixed", "sparse")
    assert "fp8_block" not in DEFAULT_ROWS


def test_no_row_sees_the_eight_bits_of_the_one_before():
    scenario = LadderScenario(preset="mini", weights="random")
    outputs = []
    for linear in ("fp8_rowwise", "fp8_mixed", "bf16"):
        config = EngineConfig(**PLAIN | {"device": "cpu", "dtype": "bfloat16", "linear": linear})
        engine = scenario.load(config, Alone())
        outputs.append(engine.core.model.block(4).attn.to_out[0])
        engine.close()
    assert isinstance(outputs[0], Fp8Linear)
    assert torch.equal(*(each.state_dict()["weight"] for each in outputs[1:]))


def test_an_approximate_row_that_changes_nothing_is_refused(monkeypatch, capsys):
    idle = dataclasses.replace(climbing.ROWS[1], changes={}, is_approximate=True)
    monkeypatch.setattr(climbing, "ROWS", (climbing.ROWS[0], idle))
    assert main([*TINY, "--rows", "eager,prefix"]) == 0
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert whole["rows"][1]["reason"] == "made what the row before made: it was not in use"


def test_the_error_is_relative_and_sees_a_single_bit():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected, expected) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.nextafter(expected, expected + 1), expected) > 0.0
    assert relative_error(torch.tensor([3.0, float("nan")]), expected) == float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "magic"], "rows: 'magic'; allowed: eager, "),
        (["--start", "magic"], "start: 'magic'; allowed: eager, "),
        (["--chunks", "0"], "chunks: 0; allowed: 1 to"),
        (["--geometry", "wide"], "geometry: 'wide'; allowed: WIDTHxHEIGHT"),
        (["--geometry", "100x100"], "geometry.height_px is 100"),
        (["--weights", "shipped", "--preset", "h3_33b"], "weights: none ship with h3_33b"),
        (["--rows", "kernels"], "rows: 'kernels' builds on prefix, packed; allowed: with these"),
        (["--rows", "prefix,full"], "rows: 'full' builds on packed; allowed: with these named"),
        (["--rows", "packed,graphs,kernels"], "rows: 'graphs' builds on prefix; allowed"),
        (["--rows", "prefix", "--reference", "graphs"], "rows: 'graphs' builds on packed"),
        (
            ["--rows", "eager,prefix", "--reference", "packed"],
            "rows: eager, prefix; allowed with start 'eager': one at least that is measured, of "
            "packed, full, ",
        ),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    assert main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--rows", "prefix,packed,graphs"], 2, "rows: 'graphs' never runs here: graphs is 'stric"),
        (["--rows", "prefix,packed,kernels"], 2, "rows: 'kernels' never runs here: kernels is 'f"),
        (["--reference", "kernels"], 2, "rows: 'kernels' never runs here: graphs is 'stri"),
        (["--rows", "eager,fp8_block"], 3, "rows: 'fp8_block' never runs here: linear is 'fp8_bl"),
    ],
)
def test_rows_that_were_named_and_never_run_here_are_refused_before_anything_is_measured(
    monkeypatch, options, code, message, capsys
):
    monkeypatch.setattr(climbing, "measure_floor", lambda *given, **named: pytest.fail("measured"))
    monkeypatch.setattr(climbing, "product_rate", lambda *given: pytest.fail("measured"))
    assert main([*TINY, *options]) == code
    assert message in capsys.readouterr().err


def test_rows_that_are_taken_and_not_measured_may_be_of_another_device():
    scenario = LadderScenario(
        preset="tiny", rows=ROW_NAMES[:-1], reference="attention", start="fp8_mixed", device="cpu"
    )
    assert [row.name for row in ROWS if scenario.measures(row)] == ["attention", "fp8_mixed"]


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch, capsys):
    monkeypatch.setattr("engine.device.available_gib", lambda device: 80.0)
    monkeypatch.setattr("benchmarks.climb.measure_floor", lambda *arguments, **options: FLOOR)
    command = ["--preset", "h3_33b", "--device", "cpu", "--dtype", "bfloat16", "--rows", "eager"]
    assert main(command) == 3
    assert "GiB are free; " in capsys.readouterr().err


FLOOR = Floor(linear_ms=10.0, linear_fp8_ms=6.0, attention_ms=4.0, attention_flops=1e12)


def test_floor_of_a_chunk_is_five_passes_less_the_end_of_the_last():
    model = preset("h3_33b").model
    assert 5 * 14.0 * 0.99 < FLOOR.chunk_ms(model) < 5 * 14.0
    assert FLOOR.chunk_ms(model) - FLOOR.chunk_ms(model, fp8_share=0.5) == pytest.approx(
        2.0 * 5, rel=0.01
    )


def test_the_first_two_blocks_and_the_last_three_stay_out_of_eight_bits():
    model = preset("h3_33b").model
    assert fp8_share(model, "fp8_rowwise") == pytest.approx(45 / 50)
    sizes = {name: math.prod(shape) for name, shape in linear_shapes(model).items()}
    kept = sizes["out"] / sum(sizes.values())
    assert fp8_share(model, "fp8_mixed") == pytest.approx(45 / 50 * (1.0 - kept))
    assert fp8_share(model, "bf16") == 0.0


def test_the_first_two_blocks_and_later_steps_read_all_keys():
    model = preset("h3_33b").model
    # Five passes, the last of which is a layer short.
    assert read_share(model, 0.4, 2) == pytest.approx(1.0 - 2 * 0.96 * 0.6 / 4.98)
    assert read_share(model, None, 2) == 1.0
    less_ms = FLOOR.chunk_ms(model) - FLOOR.chunk_ms(model, read_share=0.5)
    assert less_ms == pytest.approx(2.0 * 5, rel=0.01)


def test_the_floor_of_a_sparse_row_is_that_of_its_own_steps():
    scenario = LadderScenario(preset="h3_33b")
    spread = Spread.of([500.0], unit="ms", dropped_count=0)
    step = Climbed(
        row=ROWS[-1],
        config=EngineConfig(linear="bf16", attention="sparse", sparse_steps=1),
        row_class="A", chunk=spread, denoise=spread, refresh=spread, errors={1: 0.0, 6: 0.0},
        peak_gib=1.0, launches=None, attention={}, density=0.4, replay_count=0, load_s=0.0,
        warm_up_s=0.0,
    )  # fmt: skip
    grounds = Grounds(
        machine=describe_machine(torch.device("cpu")), dtype="bfloat16", world_size=1,
        product_flops=1e12, fp8_product_flops=None, floor=FLOOR,
    )  # fmt: skip
    record, share = as_record(scenario, grounds, step), read_share(scenario.model, 0.4, 1)
    assert record["row"] == "sparse"
    assert record["floor_ms"] == round(FLOOR.chunk_ms(scenario.model, read_share=share), 3)


def test_sparse_attention_that_reads_every_block_is_refused(capsys):
    """A tiny window has no block beyond prefix and surroundings."""
    assert main([*TINY, "--rows", "prefix,packed,sparse", "--start", "packed"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert rows[-1]["row"] == "sparse"
    assert rows[-1]["reason"] == "sparse attention read 1.000 of the blocks; allowed: 0.02 to 0.98"


def test_work_of_a_pass_is_as_published():
    """38.5 GFLOP a row in linears; 1.43 MFLOP for a query and a key; prefix 21 % at 768p."""
    model = preset("h3_33b", Geometry(height_px=480, width_px=832)).model
    work = pass_work(model)
    assert work.linear == pytest.approx(38.5e9 * 1950, rel=2e-3)
    assert work.attention == pytest.approx(1.43e6 * 1950 * key_row_count(model), rel=4e-3)
    full = chunk_work(model, with_prefix=True)
    assert 1.2 < full.total / chunk_work(model).total < 1.8


def test_mini_runs_on_the_weights_that_ship():
    assert not LadderScenario(preset="mini").is_random
    assert LadderScenario(preset="mini", weights="random").is_random
    assert LadderScenario(preset="h3_33b").is_random
    with pytest.raises(ConfigError, match="weights: none ship with mini at 320x192"):
        LadderScenario(
            preset="mini", weights="shipped", geometry=Geometry(height_px=192, width_px=320)
        )
