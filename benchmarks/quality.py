"""Whether an approximation keeps the quality of the mini world: evaluations beside an exact one.

    python -m miniworld.evaluate --json exact.json
    python -m miniworld.evaluate --json fp8.json --linear fp8_rowwise
    python -m benchmarks.quality exact.json fp8.json --record benchmarks/quality.jsonl

    python -m miniworld.evaluate --json fp32.json --dtype float32
    python -m benchmarks.quality exact.json fp8.json --control fp32.json

A control is another exact form: what it moves a figure by, rounding alone does, and the allowance
is widened by that (`benchmarks.quality_limits` says how far and why).

Owns the gate and the record of a comparison; `quality_limits` has how far each figure may fall
behind. Invariants: both sides have the same weights, cases, seeds and dtype, and a control has all
but the dtype; a target that the exact form meets is never given up, whatever the allowance, unless
the control loses it too; every figure that both sides have and a limit or a target names is judged.
Exit code 1 where an approximation does not pass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.options import command_parser
from benchmarks.quality_limits import Allowance, Figures, limit_of, movements
from benchmarks.record import append_record
from engine.errors import ConfigError
from miniworld.evaluation.figures import Figure, Report, read_report

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
SAME = ("weights_hash", "dtype", "device", "torch", "settings")
"""What both sides must agree in."""
FORM = ("linear", "attention", "sparse_tau", "sparse_block", "sparse_steps")
"""What makes them differ, where an evaluation has it."""
CONTROL_DTYPE = "float32"
"""What a control may have where it has not the dtype of the exact side."""

Verdict = Literal["kept", "worse", "target lost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """One figure on both sides."""

    item: str
    name: str
    unit: str
    count: int
    target: str
    exact: float
    approximate: float
    difference: float
    allowed_below: float
    allowed_above: float
    control_moved: float | None
    """How far the control is from the exact form, in the figure's unit; None without a control."""
    widened_by: float
    """Part of the allowance that is the control's: its largest movement over the figure's times."""
    verdict: Verdict
    verdict_alone: Verdict
    """What it would be without a control."""

    @property
    def used(self) -> float:
        """Share of the allowance that the difference takes; above 1 is worse."""
        limit = self.allowed_below if self.difference < 0 else self.allowed_above
        if self.difference == 0.0:
            return 0.0
        has_no_share = math.isnan(self.difference) or limit == 0.0
        return math.inf if has_no_share else abs(self.difference) / limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """An approximate form beside the exact one."""

    form: dict[str, Any]
    exact_form: dict[str, Any]
    environment: dict[str, Any]
    control: dict[str, Any] | None
    """Dtype, form and commit of the control; None without one."""
    judgements: tuple[Judgement, ...]

    @property
    def is_passed(self) -> bool:
        """Whether every figure is kept."""
        return all(each.verdict == "kept" for each in self.judgements)

    def record(self) -> dict[str, Any]:
        """Return the record, json-ready; what is not finite is null."""
        rows = [dataclasses.asdict(each) for each in self.judgements]
        environment = self.environment
        return {
            "name": "quality",
            "preset": "mini",
            "class": "A",
            **self.form,
            "exact": self.exact_form,
            "control": self.control,
            "cases": environment["settings"]["cases"],
            "seed": environment["settings"]["seed"],
            "is_passed": self.is_passed,
            "figures": [{key: _finite(value) for key, value in row.items()} for row in rows],
            "dtype": environment["dtype"],
            "gpu": environment["device"],
            "torch": environment["torch"],
            "weights_hash": environment["weights_hash"],
            "commit": environment["commit"],
            "time_utc": environment["time_utc"],
        }

    def table(self) -> str:
        """Return one line an item with its nearest figure to a limit, and all that are not kept."""
        lines = [f"{_words(self.form)} against {_words(self.exact_form)}:"]
        if self.control is not None:
            lines.append(f"  allowances widened by what a control moves: {_words(self.control)}")
        for item in dict.fromkeys(each.item for each in self.judgements):
            mine = [each for each in self.judgements if each.item == item]
            failed = [each for each in mine if each.verdict != "kept"]
            lines.append(f"  {item:9}{len(mine) - len(failed):3} of {len(mine):2} kept; ")
            lines[-1] += _line(max(mine, key=lambda each: each.used))
            lines += [f"    {each.verdict}: {_line(each)}" for each in failed]
            lines += [
                f"    kept as the control moves it too, {each.verdict_alone} else: {_line(each)}"
                for each in mine
                if each.verdict == "kept" != each.verdict_alone
            ]
        lines.append(f"  {'passed' if self.is_passed else 'NOT passed'}")
        return "\n".join(lines)


def compare(exact: Report, approximate: Report, control: Report | None = None) -> Comparison:
    """Judge an approximate form.

    Args:
        exact: what it is held against.
        approximate: the form to judge.
        control: another exact form, in the same dtype or in float32.

    Raises: ConfigError where they were not measured alike, have no figure in common, where the
        approximation changed nothing, so that it was not in use, or where the control is none.
    """
    _check_alike(exact, approximate, "", SAME)
    if control is not None:
        _check_control(exact, control)
    known = _by_name(exact)
    others = None if control is None else _by_name(control)
    pairs = [
        (known[key], each)
        for each in approximate.figures
        if (key := (each.item, each.name)) in known
    ]
    judgements = [each for pair in pairs if (each := _judge(*pair, known, others)) is not None]
    if not judgements:
        raise ConfigError("figures are of other items; allowed: some that both sides have")
    form, exact_form = _form(approximate), _form(exact)
    if form != exact_form and all(each.difference == 0.0 for each in judgements):
        raise ConfigError(f"{_words(form)} made what the exact form made: it was not in use")
    return Comparison(
        form=form,
        exact_form=exact_form,
        environment=approximate.environment,
        control=None
        if control is None
        else {
            "dtype": control.environment["dtype"],
            **_form(control),
            "commit": control.environment["commit"],
        },
        judgements=tuple(judgements),
    )


def _check_alike(exact: Report, other: Report, side: str, names: Sequence[str]) -> None:
    for name in names:
        mine, found = (report.environment.get(name) for report in (exact, other))
        if mine != found:
            raise ConfigError(f"{side}{name} is {found!r}; allowed beside the exact side: {mine!r}")


def _check_control(exact: Report, control: Report) -> None:
    """Refuse what moves figures by more than rounding: an approximation on either side."""
    _check_alike(exact, control, "control: ", [name for name in SAME if name != "dtype"])
    dtype, allowed = control.environment.get("dtype"), exact.environment["dtype"]
    if dtype not in (allowed, CONTROL_DTYPE):
        raise ConfigError(f"control: dtype is {dtype!r}; allowed: {allowed!r}, {CONTROL_DTYPE!r}")
    for side, report in (("control", control), ("exact side of a control", exact)):
        linear, attention = (report.environment.get(name) for name in ("linear", "attention"))
        if linear != "bf16":
            raise ConfigError(f"{side}: linear is {linear!r}; allowed: 'bf16', which is exact")
        if attention == "sparse":
            raise ConfigError(f"{side}: attention is 'sparse'; allowed: any other, which are exact")


def _by_name(report: Report) -> Figures:
    return {(each.item, each.name): each for each in report.figures}


def _form(report: Report) -> dict[str, Any]:
    return {name: report.environment.get(name) for name in FORM}


def _judge(
    exact: Figure, approximate: Figure, known: Figures, control: Figures | None
) -> Judgement | None:
    """Return None for a figure that is context."""
    limit = limit_of(exact, known)
    if limit is None and exact.is_met is None:
        return None
    limit = limit or Allowance()
    moved, widened_by = (None, 0.0) if control is None else movements(known, control, exact)
    allowance = limit.widened(widened_by)
    is_lost = bool(exact.is_met) and not approximate.is_met
    is_lost_too = control is not None and not control[exact.item, exact.name].is_met
    difference = approximate.value - exact.value
    return Judgement(
        item=exact.item,
        name=exact.name,
        unit=exact.unit,
        count=exact.count,
        target=exact.target,
        exact=exact.value,
        approximate=approximate.value,
        difference=difference,
        allowed_below=allowance.below,
        allowed_above=allowance.above,
        control_moved=moved,
        widened_by=widened_by,
        verdict=_verdict(difference, allowance, is_lost and not is_lost_too),
        verdict_alone=_verdict(difference, limit, is_lost),
    )


def _verdict(difference: float, allowance: Allowance, is_lost: bool) -> Verdict:
    if is_lost:
        return "target lost"
    return "kept" if -allowance.below <= difference <= allowance.above else "worse"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _words(form: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in form.items() if value is not None)


def _line(each: Judgement) -> str:
    sides = [
        f"{sign}{value:.3g}"
        for sign, value in (("-", each.allowed_below), ("+", each.allowed_above))
        if math.isfinite(value)
    ]
    bounds = f"allowed {' '.join(sides)}" if sides else f"target {each.target}"
    return (
        f"{each.name}: {each.exact:.4g} -> {each.approximate:.4g} {each.unit} "
        f"({each.difference:+.3g}, {bounds})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare as the command line says and return the exit code."""
    parser = command_parser("benchmarks.quality", __doc__)
    parser.add_argument("exact", type=Path, help="figures of the exact form")
    parser.add_argument("approximate", type=Path, nargs="+", help="figures of approximate forms")
    parser.add_argument("--control", type=Path, help="figures of another exact form: in float32")
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/quality.jsonl")
    options = parser.parse_args(arguments)
    try:
        exact = read_report(options.exact)
        control = None if options.control is None else read_report(options.control)
        comparisons = [compare(exact, read_report(path), control) for path in options.approximate]
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    for each in comparisons:
        print(each.table(), flush=True)
        if options.record is not None:
            append_record(options.record, each.record())
    print(json.dumps({_words(each.form): each.is_passed for each in comparisons}), flush=True)
    return EXIT_OK if all(each.is_passed for each in comparisons) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
