"""How far a figure of an approximate form may fall behind that of the exact one.

Owns the limits, and what a control adds to them. Invariant: the first limit that names a figure
holds; a figure that none names is context, or has its target alone.

Why a control: a rollout feeds on itself, so that exact forms whose sums are rounded otherwise (fp32
instead of bfloat16) part as well, and figures over a few clips move with them. An approximation
that did no more than round would move a figure d as far as another exact form does: both are draws
of one spread s about the exact form. So the allowance is ``limit + m``, where the limit is what an
approximation may lose and m = |control - exact| is what rounding moves the figure by. One draw of
a normal spread says little, as it lies below s / 4 one time in five; the largest of four draws does
so one time in 660. Hence m is the largest movement over the times at which the figure was taken
("median error" after chunks 1, 3, 6 and 12), which supposes that one spread holds at all of them:
where rollouts part with time it is wide for the early ones. The record keeps both, the movement of
the figure itself and m.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine.errors import ConfigError
from miniworld.evaluation.figures import Figure

Figures = Mapping[tuple[str, str], Figure]
"""By item and name."""
_TIME = re.compile(r", (chunk \d+|\d+ s)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """How far a figure may move, in its own unit."""

    below: float = math.inf
    above: float = math.inf

    def widened(self, by: float) -> Allowance:
        """Return what is allowed where rounding alone moves the figure that far."""
        return Allowance(below=self.below + by, above=self.above + by)


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


def limit_of(figure: Figure, figures: Figures) -> Allowance | None:
    """Return what a figure of the exact form may lose; None where no limit names it."""
    found = (
        allow(figure, figures)
        for item, pattern, allow in LIMITS
        if item == figure.item and fnmatchcase(figure.name, pattern)
    )
    return next(found, None)


def movements(exact: Figures, control: Figures, of: Figure) -> tuple[float, float]:
    """Return how far the control is from a figure, and the most over that figure's times.

    Raises: ConfigError for a figure that the control lacks or that is not finite on a side.
    """
    own = math.nan
    largest = 0.0
    for key, figure in exact.items():
        if key[0] != of.item or _TIME.sub("", key[1]) != _TIME.sub("", of.name):
            continue
        other = control.get(key)
        moved = math.nan if other is None else abs(other.value - figure.value)
        if not math.isfinite(moved):
            value = "missing" if other is None else other.value
            raise ConfigError(
                f"control: {key[0]}, {key[1]}: {value} beside {figure.value}; "
                "allowed: what the exact side has, finite on both"
            )
        largest = max(largest, moved)
        if figure is of:
            own = moved
    return own, largest
