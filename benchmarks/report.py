"""The measured sections of both READMEs, made from records: ``python -m benchmarks.report``.

Owns which figures stand there and how they are rounded. Invariants: every number comes from
`benchmarks/engine.jsonl` or `miniworld/figures.json`; what has no record has no row; a test holds
README.md and the model card against what this makes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from miniworld.evaluation.figures import Figure

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MODEL_CARD = ROOT / "miniworld" / "README.md"
SPEED_RECORDS = ROOT / "benchmarks" / "engine.jsonl"
QUALITY_RECORD = ROOT / "miniworld" / "figures.json"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

QUALITY_ROWS: tuple[tuple[str, str, str], ...] = (
    ("vae", "PSNR, chunk 12", "autoencoder alone, chunk 12"),
    ("rollout", "gain over the frozen frame, chunk 3", "gain over the first frame held, chunk 3"),
    ("rollout", "gain over the frozen frame, chunk 12", "the same, chunk 12"),
    ("rollout", "sharpness / VAE round trip, chunk 12", "sharpness against the autoencoder alone"),
    ("yaw", "median error, chunk 12", "error of a turn by 9.6 degrees, chunk 12"),
    ("walking", "seen / commanded, median, chunk 12", "way walked, seen / commanded, chunk 12"),
    ("return", "PSNR, chunk 5", "turned by 41 degrees and back"),
    ("prompt", "PSNR to the new style, chunk 5", "new prompt, the chunk after it"),
    ("long", "clips not empty, 60 s", "walks with things in view after 60 s, share"),
    ("long", "sharpness / VAE round trip, 60 s", "sharpness after 60 s, as above"),
    ("outside", "without collapse, 20 s", "photographs that hold for 20 s, share"),
    ("endless", "without collapse, 602 s", "walks that hold for ten minutes, share"),
)
"""(item, figure, words for it)."""
_KEY = ("preset", "weights", "geometry", "dtype", "compile_blocks", "gpu", "cpu", "threads")
"""Records that agree in these tell of the same thing; the last one counts."""


def section(speed_records: Path = SPEED_RECORDS, quality_record: Path = QUALITY_RECORD) -> str:
    """Return the section, markers left out."""
    parts = [_speed(speed_records), _quality(quality_record)]
    return "\n\n".join(part for part in parts if part) or "No records yet."


def card_section(quality_record: Path = QUALITY_RECORD) -> str:
    """Return every figure that has a target, for the model card."""
    figures, made = _figures(quality_record)
    rows = ["| item | figure | target | measured | n |", "|---|---|---|---|---|"]
    rows += [
        f"| {each.item} | {each.name} | {each.target} | {_rounded(each)} | {each.count} |"
        for each in figures.values()
        if each.is_met is not None
    ]
    rows.append("")
    rows.append(f"{made['dtype']} on {made['device']}, torch {made['torch']}, {made['time_utc']}.")
    return "\n".join(rows)


def filled(readme: str, body: str) -> str:
    """Return the text of a README with the section replaced.

    Raises: ValueError without the two markers.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def _speed(path: Path) -> str:
    """Table of the last record of each preset, size, device, dtype and way of running."""
    if not path.exists():
        return ""
    latest: dict[tuple[object, ...], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        key = tuple(record[name] for name in _KEY)
        latest[key] = record
    rows = [
        "| speed: DiT and VAE, steady window | frames/s | ms a chunk, p20 / p50 / p80 (n) "
        "| peak memory | commit |",
        "|---|---|---|---|---|",
        *map(_speed_row, latest.values()),
    ]
    return "\n".join(rows)


def _speed_row(record: dict[str, Any]) -> str:
    chunk, memory = record["chunk"], record["memory"]
    where = record["gpu"] or f"{record['cpu']}, threads: {record['threads']}"
    blocks = "compiled blocks" if record["compile_blocks"] else "eager"
    weights = "" if record["weights"] == "shipped" else " (random weights)"
    what = f"`{record['preset']}` {record['geometry']}{weights}, {record['dtype']}, {blocks}"
    peak_mib = memory["device_peak_mib"] or memory["peak_mib"]
    times = f"{chunk['p20']:.0f} / {chunk['p50']:.0f} / {chunk['p80']:.0f} ({chunk['n']})"
    return (
        f"| {what}, {where} | **{record['frames_per_second']:.1f}** | {times} | {peak_mib:.0f} MiB "
        f"| {record['commit']} |"
    )


def _quality(path: Path) -> str:
    """Table of the figures in `QUALITY_ROWS`, and how many of all targets are met."""
    if not path.exists():
        return ""
    figures, made = _figures(path)
    rows = ["| quality: held-out walks, own history | target | measured | n |", "|---|---|---|---|"]
    for item, name, words in QUALITY_ROWS:
        figure = figures.get((item, name))
        if figure is not None:
            rows.append(f"| {words} | {figure.target} | {_rounded(figure)} | {figure.count} |")
    judged = [each.is_met for each in figures.values() if each.is_met is not None]
    rows.append("")
    rows.append(
        f"{sum(judged)} of {len(judged)} targets are met; `miniworld/README.md` has all of them. "
        f"Measured in {made['dtype']} on {made['device']}, commit {made['commit']}."
    )
    return "\n".join(rows)


def _figures(path: Path) -> tuple[dict[tuple[str, str], Figure], dict[str, Any]]:
    """Figures of a record by item and name, and where they were measured."""
    record = json.loads(path.read_text(encoding="utf-8"))
    names = [field.name for field in dataclasses.fields(Figure)]
    figures = {
        (row["item"], row["name"]): Figure(**{key: row[key] for key in names})
        for row in map(_with_number, record["figures"])
    }
    return figures, record["environment"]


def _with_number(row: dict[str, Any]) -> dict[str, Any]:
    """A figure that is not finite is null in json; it counts as missed."""
    return row | {"value": math.nan if row["value"] is None else row["value"]}


def _rounded(figure: Figure) -> str:
    number = f"{figure.value:.3g}" if abs(figure.value) < 1 else f"{figure.value:.2f}"
    verdict = " (missed)" if figure.is_met is False else ""
    return f"{number} {figure.unit}".rstrip() + verdict


def main() -> None:
    """Write the sections into README.md and the model card."""
    for path, body in ((README, section()), (MODEL_CARD, card_section())):
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text, body), encoding="utf-8")


if __name__ == "__main__":
    main()
