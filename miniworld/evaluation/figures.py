"""Figures of an evaluation: values with their targets, and how they are shown and stored.

Owns `Figure`, the table, the json and the contact sheets. Invariant: a figure without a target is
context; it never counts as met or missed.

Shape suffixes: R rows, K columns, C colours, H height, W width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vae_stream.pixels import to_uint8


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number."""

    item: str
    name: str
    value: float
    unit: str = ""
    count: int
    """Clips, pairs or pictures behind the number."""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the target holds; None without a target."""
        if self.at_least is None and self.at_most is None:
            return None
        if not math.isfinite(self.value):
            return False
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def target(self) -> str:
        """The target in words."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f"{low:g} to {high:g}"
        if low is not None:
            return f">= {low:g}"
        return "" if high is None else f"<= {high:g}"


@dataclass(kw_only=True, slots=True)
class Report:
    """Figures as they come in, and what is known about the run."""

    environment: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        item: str,
        name: str,
        value: float | Tensor,
        *,
        count: int,
        unit: str = "",
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Append a figure."""
        figure = Figure(
            item=item,
            name=name,
            value=float(value),
            unit=unit,
            count=count,
            at_least=at_least,
            at_most=at_most,
        )
        self.figures.append(figure)

    def value(self, item: str, name: str) -> float:
        """Look a figure up.

        Raises: KeyError when it was not measured.
        """
        for figure in self.figures:
            if (figure.item, figure.name) == (item, name):
                return figure.value
        raise KeyError(f"figure {name!r} of item {item!r} was not measured")

    def table(self) -> str:
        """Return a Markdown table."""
        lines = ["| item | figure | target | measured | n | |", "|---|---|---|---|---|---|"]
        for each in self.figures:
            verdict = {None: "", True: "met", False: "missed"}[each.is_met]
            measured = f"{each.value:.3g}" if abs(each.value) < 1 else f"{each.value:.2f}"
            measured = f"{measured} {each.unit}".rstrip()
            lines.append(
                f"| {each.item} | {each.name} | {each.target} | {measured} | {each.count} "
                f"| {verdict} |"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return everything as json; a number that is not finite becomes null."""

        def plain(figure: Figure) -> dict[str, Any]:
            row = dataclasses.asdict(figure)
            row["value"] = figure.value if math.isfinite(figure.value) else None
            return row | {"is_met": figure.is_met}

        data = {
            "environment": self.environment,
            "seconds": self.seconds,
            "figures": [plain(figure) for figure in self.figures],
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def read_report(path: Path) -> Report:
    """Read what `Report.to_json` wrote.

    Raises: OSError, ValueError for a file that is no such thing.
    """
    names = [field.name for field in dataclasses.fields(Figure)]
    data = json.loads(path.read_text(encoding="utf-8"))
    try:
        figures = [
            Figure(**{name: row[name] for name in names} | _number(row["value"]))
            for row in data["figures"]
        ]
        return Report(environment=data["environment"], figures=figures, seconds=data["seconds"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error!r}; expected figures as an evaluation writes") from error


def _number(value: float | None) -> dict[str, float]:
    """A figure that is not finite is null in json; it counts as missed."""
    return {"value": math.nan if value is None else value}


class Sheet:
    """A contact sheet under way: cells are added as frames come, row by row, column by column."""

    def __init__(self, *, scale: float = 0.5) -> None:
        self._columns: list[Tensor] = []
        self._scale = scale

    def column(self, *pictures_RCHW: Tensor) -> None:
        """Add a column; several sets of pictures alternate (truth, generated, truth, ...)."""
        cells = torch.stack([p.float() for p in pictures_RCHW], 1).flatten(0, 1)
        if self._scale != 1.0:
            cells = F.interpolate(cells, scale_factor=self._scale, mode="area")
        self._columns.append(to_uint8(cells).cpu())

    def save(self, path: Path) -> None:
        """Write the sheet as PNG."""
        cells_KRHWC = torch.stack(self._columns)
        image = cells_KRHWC.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(path, optimize=True)


def share(flags: Tensor) -> float:
    """Share of True."""
    return float(flags.float().mean()) if flags.numel() else math.nan


def median(values: Tensor) -> float:
    """Median, NaN of nothing."""
    return float(values.float().median()) if values.numel() else math.nan
