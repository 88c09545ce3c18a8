"""The gate of approximations: what passes, what does not, what is no comparison."""

from __future__ import annotations

import dataclasses
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import compare, main
from benchmarks.quality_limits import LIMITS
from benchmarks.report import QUALITY_RECORD
from engine.errors import ConfigError
from miniworld.evaluation.figures import Report, read_report

pytestmark = pytest.mark.cpu

ENVIRONMENT = {
    "weights_hash": "abc", "dtype": "bfloat16", "device": "A GPU", "torch": "2.11.0",
    "settings": {"cases": 64, "seed": 0}, "linear": "bf16", "attention": "sdpa",
    "commit": "abc1234", "time_utc": "2026-01-01T00:00:00Z",
}  # fmt: skip


def _report(
    *,
    psnr: float = 20.0,
    angle: float = 0.05,
    first_angle: float = 0.05,
    sharpness: float = 0.95,
    full: float = 0.96875,
    speed: float = 200.0,
    **environment: object,
) -> Report:
    report = Report(environment=ENVIRONMENT | environment)
    report.add("rollout", "PSNR, chunk 12", psnr, count=64, unit="dB")
    report.add("rollout", "sharpness / VAE round trip, chunk 12", sharpness, count=64,
               at_least=0.9, at_most=1.1)  # fmt: skip
    report.add("rollout", "latent chunks made, all clips", speed, count=64)
    for chunk, error in ((1, first_angle), (12, angle)):
        own = f"median error of the measure itself, chunk {chunk}"
        report.add("yaw", f"median error, chunk {chunk}", error, count=64, unit="deg", at_most=0.6)
        report.add("yaw", own, 0.01, count=64, unit="deg")
    report.add("long", "clips not empty, 60 s", full, count=64, at_least=0.8)
    return report


def _form(**figures: float) -> Report:
    return _report(linear="fp8_rowwise", **figures)


def _control(**changes: Any) -> Report:
    return _report(**({"dtype": "float32"} | changes))


@pytest.mark.parametrize(
    ("figures", "verdicts"),
    [
        pytest.param({"psnr": 19.71}, [], id="error within"),
        pytest.param({"psnr": 19.69}, ["worse"], id="error beyond"),
        pytest.param({"psnr": 25.0}, [], id="less error"),
        pytest.param({"angle": 0.0649}, [], id="angle within a tenth and the measure"),
        pytest.param({"angle": 0.0651}, ["worse"], id="angle beyond"),
        pytest.param({"sharpness": 0.971}, ["worse"], id="sharper by noise"),
        # Two clips of 64: the deviation of a difference is 0.031 at this share.
        pytest.param({"full": 0.96875 - 3 / 64}, [], id="share within its draws"),
        pytest.param({"full": 0.96875 - 4 / 64}, ["worse"], id="share beyond its draws"),
        pytest.param({"psnr": float("nan")}, ["worse"], id="not finite"),
        pytest.param({"speed": 20.0, "psnr": 20.1}, [], id="context alone"),
    ],
)
def test_a_figure_may_fall_behind_so_far(figures: dict[str, float], verdicts: list[str]) -> None:
    found = compare(_report(), _form(**figures))
    assert [each.verdict for each in found.judgements if each.verdict != "kept"] == verdicts
    assert found.is_passed is not bool(verdicts)


def test_a_measure_without_error_leaves_no_allowance() -> None:
    exact, approximate = _report(angle=0.0), _form(angle=0.001)
    for report in (exact, approximate):
        (own,) = [each for each in report.figures if each.name.endswith("itself, chunk 12")]
        report.figures[report.figures.index(own)] = dataclasses.replace(own, value=0.0)
    found = compare(exact, approximate)
    assert "worse: median error, chunk 12: 0 -> 0.001" in found.table()


def test_a_target_that_was_met_is_never_given_up() -> None:
    found = compare(_report(sharpness=0.905), _form(sharpness=0.899))
    assert [each.verdict for each in found.judgements][1] == "target lost"


def test_a_target_that_was_missed_before_is_no_new_loss() -> None:
    assert compare(_report(sharpness=0.89), _form(sharpness=0.88)).is_passed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_hash": "other"}, "weights_hash is 'other'; allowed beside the exact side"),
        ({"settings": {"cases": 8, "seed": 0}}, "settings is .*'cases': 8"),
        ({"linear": "fp8_rowwise"}, "linear fp8_rowwise, attention sdpa made what the exact form"),
    ],
)
def test_what_is_no_comparison_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(_report(), _report(**changes))


@pytest.mark.parametrize(
    ("moved", "figures", "verdicts"),
    [
        pytest.param({"psnr": 19.9}, {"psnr": 19.61}, [], id="within limit and movement"),
        pytest.param({"psnr": 19.9}, {"psnr": 19.59}, ["worse"], id="beyond both"),
        pytest.param({"psnr": 20.1}, {"psnr": 19.61}, [], id="moved to the other side"),
        pytest.param({"sharpness": 0.96}, {"sharpness": 0.979}, [], id="sharper, widened above"),
        pytest.param({"angle": 0.09}, {"first_angle": 0.104}, [], id="by another chunk's movement"),
        pytest.param({"angle": 0.09}, {"first_angle": 0.106}, ["worse"], id="beyond that"),
        pytest.param({"psnr": 15.0}, {"angle": 0.066}, ["worse"], id="not by another figure's"),
    ],
)
def test_an_allowance_is_widened_by_what_a_control_moves(
    moved: dict[str, float], figures: dict[str, float], verdicts: list[str]
) -> None:
    found = compare(_report(), _form(**figures), _control(**moved))
    assert [each.verdict for each in found.judgements if each.verdict != "kept"] == verdicts
    assert [each.verdict_alone for each in found.judgements if each.verdict_alone != "kept"] == [
        "worse"
    ]


@pytest.mark.parametrize(
    ("control", "verdict"),
    [
        pytest.param(0.95, "target lost", id="far from it"),
        pytest.param(0.901, "target lost", id="near it"),
        pytest.param(0.898, "kept", id="lost it too"),
    ],
)
def test_a_target_is_given_up_only_where_the_control_loses_it_too(
    control: float, verdict: str
) -> None:
    found = compare(_report(sharpness=0.905), _form(sharpness=0.899), _control(sharpness=control))
    assert found.judgements[1].verdict == verdict
    assert found.judgements[1].verdict_alone == "target lost"


def test_a_target_that_the_control_loses_too_leaves_the_allowance() -> None:
    found = compare(_report(sharpness=0.905), _form(sharpness=0.87), _control(sharpness=0.898))
    assert found.judgements[1].verdict == "worse"


@pytest.mark.parametrize(
    ("exact", "control", "message"),
    [
        ({}, {"linear": "fp8_rowwise"}, "control: linear is 'fp8_rowwise'; allowed: 'bf16'"),
        ({}, {"attention": "sparse"}, "control: attention is 'sparse'"),
        ({}, {"weights_hash": "other"}, "control: weights_hash is 'other'"),
        ({}, {"device": "A CPU"}, "control: device is 'A CPU'"),
        ({}, {"settings": {"cases": 64, "seed": 1}}, "control: settings is .*'seed': 1"),
        ({}, {"dtype": "float16"}, "control: dtype is 'float16'; allowed: 'bfloat16', 'float32'"),
        ({"attention": "sparse"}, {}, "exact side of a control: attention is 'sparse'"),
        ({}, {"psnr": float("nan")}, "control: rollout, PSNR, chunk 12: nan beside 20.0"),
    ],
)
def test_what_is_no_control_is_refused(
    exact: dict[str, Any], control: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(_report(**exact), _form() if not exact else _report(**exact), _control(**control))


def test_a_control_has_every_figure_that_is_judged() -> None:
    control = _control()
    control.figures = [each for each in control.figures if each.item != "long"]
    with pytest.raises(ConfigError, match="control: long, clips not empty, 60 s: missing"):
        compare(_report(), _form(psnr=19.9), control)


def test_every_limit_names_a_figure_that_the_evaluation_makes() -> None:
    """A renamed figure would become context without a word."""
    made = [(each.item, each.name) for each in read_report(QUALITY_RECORD).figures]
    for item, pattern, _ in LIMITS:
        assert any(item == own and fnmatchcase(name, pattern) for own, name in made), pattern


def test_figures_of_other_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="figures are of other items"):
        compare(_report(), Report(environment=ENVIRONMENT))


def test_the_command_tells_and_keeps_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {"exact": _report(), "good": _form(psnr=20.1), "bad": _form(psnr=19.0)}
    for name, report in reports.items():
        (tmp_path / f"{name}.json").write_text(report.to_json())
    record = tmp_path / "quality.jsonl"
    paths = [str(tmp_path / f"{name}.json") for name in reports]

    assert main([*paths, "--record", str(record)]) == 1

    out = capsys.readouterr().out
    assert "worse: PSNR, chunk 12: 20 -> 19 dB (-1, allowed -0.3)" in out
    kept = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["linear"], row["is_passed"]) for row in kept] == [
        ("fp8_rowwise", True), ("fp8_rowwise", False),
    ]  # fmt: skip
    assert kept[0]["figures"][0]["allowed_above"] is None
    assert kept[0]["control"] is None
    assert main(paths[:2]) == 0


def test_the_record_names_the_control_and_each_movement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {"exact": _report(), "form": _form(psnr=19.6), "control": _control(psnr=20.125)}
    for name, report in reports.items():
        (tmp_path / f"{name}.json").write_text(report.to_json())
    paths = {name: str(tmp_path / f"{name}.json") for name in reports}
    record = tmp_path / "quality.jsonl"
    options = ["--control", paths["control"], "--record", str(record)]

    assert main([paths["exact"], paths["form"], *options]) == 0

    out = capsys.readouterr().out
    assert "widened by what a control moves: dtype float32, linear bf16, attention sdpa" in out
    assert "kept as the control moves it too, worse else: PSNR, chunk 12: 20 -> 19.6" in out
    row = json.loads(record.read_text())
    assert row["control"] == {
        "dtype": "float32", "linear": "bf16", "attention": "sdpa", "sparse_tau": None,
        "sparse_block": None, "sparse_steps": None,
        "commit": "abc1234",
    }  # fmt: skip
    figure = row["figures"][0]
    assert (figure["control_moved"], figure["widened_by"]) == (0.125, 0.125)
    assert (figure["allowed_below"], figure["verdict_alone"]) == (0.425, "worse")


@pytest.mark.parametrize("content", ["", "[]", '{"figures": [{"item": "a"}]}'])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    assert main([str(path), str(path)]) == 2


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(_report().to_json())
    assert read_report(path) == _report()
