"""The gate of approximations: what passes, what does not, what is no comparison."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import LIMITS, compare, main
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
    report.add("yaw", "median error, chunk 12", angle, count=64, unit="deg", at_most=0.6)
    report.add("yaw", "median error of the measure itself, chunk 12", 0.01, count=64, unit="deg")
    report.add("long", "clips not empty, 60 s", full, count=64, at_least=0.8)
    return report


def _form(**figures: float) -> Report:
    return _report(linear="fp8_rowwise", **figures)


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
    assert main(paths[:2]) == 0


@pytest.mark.parametrize("content", ["", "[]", '{"figures": [{"item": "a"}]}'])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    assert main([str(path), str(path)]) == 2


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(_report().to_json())
    assert read_report(path) == _report()
