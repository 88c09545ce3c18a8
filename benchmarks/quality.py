"""Whether an approximation keeps the quality of the mini world: evaluations beside an exact one.

    python -m miniworld.evaluate --json exact.json
    python -m miniworld.evaluate --json fp8.json --linear fp8_rowwise
    python -m benchmarks.quality exact.json fp8.json --record benchmarks/quality.jsonl

Owns the gate: how far each figure may fall behind, and the record of a comparison. Invariants: both
sides have the same weights, cases, seeds and dtype; a target that the exact form meets is never
given up, whatever the allowance; every figure that both sides have and a limit or a target names is
judged. Exit code 1 where an approximation does not pass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from benchmarks.options import command_parser
from benchmarks.record import append_record
from engine.errors import ConfigError
from miniworld.evaluation.figures import Figure, Report, read_report

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
SAME = ("weights_hash", "dtype", "device", "torch", "settings")
"""What both sides must agree in."""
FORM = ("linear", "attention", "sparse_tau")
"""What makes them differ, where an evaluation has it."""

Figures = Mapping[tuple[str, str], Figure]
Verdict = Literal["kept", "worse", "target lost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """How far a figure may move, in its own unit."""

    below: float = math.inf
    above: float = math.inf


def _decibels(figure: Figure, figures: Figures) -> Allowance:
    """Two exports of one training, one with a little more of a stage, differ by 0.5 at chunk 12."""
    return Allowance(below=0.3)


def _ratio(figure: Figure, figures: Figures) -> Allowance:
    """Of sharpness, edges, a way walked: to both sides, because noise sharpens."""
    return Allowance(below=0.02, above=0.02)


def _share(figure: Figure, figures: Figures) -> Allowance:
    """Two standard deviations of the difference of two draws of that share, at least 0.02."""
    deviation = math.sqrt(2.0 * figure.value * (1.0 - figure.value) / figure.count)
    return Allowance(below=max(0.02, 2.0 * deviation))


def _angle(figure: Figure, figures: Figures) -> Allowance:
    """A tenth, and what the measure itself is off by."""
    own = figures[figure.item, figure.name.replace("error", "error of the measure itself")]
    return Allowance(above=0.1 * figure.value + own.value)


def _fixed(**sides: float) -> Callable[[Figure, Figures], Allowance]:
    return lambda figure, figures: Allowance(**sides)


LIMITS: tuple[tuple[str, str, Callable[[Figure, Figures], Allowance]], ...] = (
    ("rollout", "PSNR, chunk *", _decibels),
    ("rollout", "gain over the frozen frame*", _decibels),
    ("rollout", "sharpness*", _ratio),
    ("rollout", "strength of edges*", _ratio),
    ("yaw", "median error, *", _angle),
    ("yaw", "within 2 degrees*", _share),
    ("yaw", "right sign*", _share),
    ("walking", "seen / commanded, *", _ratio),
    ("walking", "right sign, *", _share),
    ("strafing", "seen / commanded, *", _ratio),
    ("strafing", "right sign, *", _share),
    ("return", "PSNR*", _decibels),
    ("prompt", "*PSNR*", _decibels),
    ("prompt", "*margin*", _decibels),
    ("prompt", "edges kept*", _fixed(below=0.02)),
    ("leading", "worst of these*", _decibels),
    # Rollouts of a minute part by rounding alone: what is the same there is what walks are like on
    # the whole. Two exports of one training differ by 0.006 in brightness and 0.2 in motion.
    ("long", "brightness difference of a clip*", _fixed(above=0.01)),
    ("long", "motion*", _fixed(below=0.2, above=0.2)),
    ("long", "latent deviation / chunk 1*", _ratio),
    ("long", "clips not empty, [0-9]*", _share),
    ("long", "sharpness*", _ratio),
    ("long", "strength of edges*", _ratio),
    ("outside", "palette distance, median*", _fixed(above=0.01)),
    ("outside", "shift of the horizon*", _fixed(above=2.0)),
    ("outside", "without collapse*", _share),
    ("endless", "without collapse*", _share),
)
"""Item, pattern of names, what is allowed. The first that fits holds; the rest is context."""


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
    verdict: Verdict

    @property
    def used(self) -> float:
        """Share of the allowance that the difference takes; above 1 is worse."""
        limit = self.allowed_below if self.difference < 0 else self.allowed_above
        return math.inf if math.isnan(self.difference) else abs(self.difference) / limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """An approximate form beside the exact one."""

    form: dict[str, Any]
    exact_form: dict[str, Any]
    environment: dict[str, Any]
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
        for item in dict.fromkeys(each.item for each in self.judgements):
            mine = [each for each in self.judgements if each.item == item]
            failed = [each for each in mine if each.verdict != "kept"]
            lines.append(f"  {item:9}{len(mine) - len(failed):3} of {len(mine):2} kept; ")
            lines[-1] += _line(max(mine, key=lambda each: each.used))
            lines += [f"    {each.verdict}: {_line(each)}" for each in failed]
        lines.append(f"  {'passed' if self.is_passed else 'NOT passed'}")
        return "\n".join(lines)


def compare(exact: Report, approximate: Report) -> Comparison:
    """Judge an approximate form.

    Raises: ConfigError where the two were not measured alike, have no figure in common, or where
        the approximation changed nothing, so that it was not in use.
    """
    for name in SAME:
        mine, other = (report.environment.get(name) for report in (exact, approximate))
        if mine != other:
            raise ConfigError(f"{name} is {other!r}; allowed beside the exact side: {mine!r}")
    known = {(each.item, each.name): each for each in exact.figures}
    pairs = [
        (known[key], each)
        for each in approximate.figures
        if (key := (each.item, each.name)) in known
    ]
    judgements = [each for pair in pairs if (each := _judge(*pair, known)) is not None]
    if not judgements:
        raise ConfigError("figures are of other items; allowed: some that both sides have")
    form, exact_form = (
        {name: report.environment.get(name) for name in FORM} for report in (approximate, exact)
    )
    if form != exact_form and all(each.difference == 0.0 for each in judgements):
        raise ConfigError(f"{_words(form)} made what the exact form made: it was not in use")
    return Comparison(
        form=form,
        exact_form=exact_form,
        environment=approximate.environment,
        judgements=tuple(judgements),
    )


def _judge(exact: Figure, approximate: Figure, known: Figures) -> Judgement | None:
    """Return None for a figure that is context."""
    limits = (
        allow(exact, known)
        for item, pattern, allow in LIMITS
        if item == exact.item and fnmatchcase(exact.name, pattern)
    )
    allowance = next(limits, None)
    if allowance is None and exact.is_met is None:
        return None
    allowance = allowance or Allowance()
    difference = approximate.value - exact.value
    verdict: Verdict = "kept"
    if not -allowance.below <= difference <= allowance.above:
        verdict = "worse"
    if exact.is_met and not approximate.is_met:
        verdict = "target lost"
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
        verdict=verdict,
    )


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
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/quality.jsonl")
    options = parser.parse_args(arguments)
    try:
        exact = read_report(options.exact)
        comparisons = [compare(exact, read_report(path)) for path in options.approximate]
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
