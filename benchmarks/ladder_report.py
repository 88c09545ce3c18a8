"""The ladder in README.md: one table of all ladders, one picture each, from `ladder.jsonl`.

Owns which records make a ladder. Invariants: of records of the same row the last one counts; rows
stand in the order in which they were climbed; the first ladder's picture is shown, the others are
linked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.ladder_output import bars, captions
from benchmarks.ladder_rows import ROW_NAMES
from benchmarks.plot import save_waterfall
from benchmarks.record import shown_ms

RECORDS = Path(__file__).parent / "ladder.jsonl"
_FOLDER = "benchmarks/pictures"
_KEY = ("preset", "geometry", "weights", "dtype", "gpu", "gpu_count", "cpu")

LadderRecords = list[dict[str, Any]]
"""Records of one ladder, row after row."""


def read_ladders(path: Path = RECORDS) -> list[LadderRecords]:
    """Return the ladders of a file of records; none where there is no file."""
    ladders: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            key = tuple(record[name] for name in _KEY)
            ladders.setdefault(key, {})[record["row"]] = record
    return [sorted(rows.values(), key=_place) for rows in ladders.values()]


def _place(record: dict[str, Any]) -> int:
    return ROW_NAMES.index(record["row"])


def ladder_section(path: Path = RECORDS) -> str:
    """Return the table of all ladders side by side, and their pictures; empty without records."""
    ladders = read_ladders(path)
    if not ladders:
        return ""
    titles = [_title(ladder[0]) for ladder in ladders]
    lines = [
        "| ladder: transformer alone, frames/s, ms a chunk, class, rel-L2 after 6 chunks | "
        + " | ".join(titles)
        + " |",
        "|---" * (1 + len(ladders)) + "|",
    ]
    for title in _row_titles(ladders):
        cells = [
            next((_cell(record) for record in ladder if record["title"] == title), "")
            for ladder in ladders
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    commits = ", ".join(dict.fromkeys(record["commit"] for rows in ladders for record in rows))
    note = (
        "X: the bits of the reference, F: other rounding, A: approximate. A reference is what the "
        "rows of its run are held against. Each row is one change to those above; 4 denoise steps "
        "and the refresh, no decoder. Several GPUs are held against one, which ran beside them. "
        f"Commits {commits}."
    )
    if len(ladders) > 1:
        others = [
            f"[{title}]({_FOLDER}/{picture_name(ladder)})"
            for title, ladder in zip(titles[1:], ladders[1:], strict=True)
        ]
        note += f" More pictures: {', '.join(others)}."
    lines += ["", note, f"![The ladder of {titles[0]}]({_FOLDER}/{picture_name(ladders[0])})"]
    return "\n".join(lines)


def _row_titles(ladders: list[LadderRecords]) -> list[str]:
    """Titles of rows in their order; what a row changes, and so its title, may be older in one."""
    records = sorted((record for ladder in ladders for record in ladder), key=_place)
    return list(dict.fromkeys(record["title"] for record in records))


def _title(record: dict[str, Any]) -> str:
    where = f"{record['gpu_count']} x {record['gpu']}" if record["gpu"] else record["cpu"]
    weights = "" if record["weights"] == "shipped" else " (random weights)"
    return f"`{record['preset']}` {record['geometry']}{weights}, {where}"


def _cell(record: dict[str, Any]) -> str:
    error = "0" if record["error"] == 0.0 else f"{record['error']:.1e}"
    # A row that its ladder's errors are against says nothing of itself.
    judged = "reference" if record["reference"] == record["row"] else f"{record['class']} {error}"
    cell = f"**{record['dit_fps']:.1f}** {shown_ms(record['chunk_ms'])} {judged}"
    # Only records of several ranks know one rank's time.
    speed_up = record.get("speed_up")
    return cell if speed_up is None else f"{cell}, {speed_up:.2f} x one GPU"


def picture_name(ladder: LadderRecords) -> str:
    """File name of a ladder's picture."""
    first = ladder[0]
    where = f"{first['gpu_count']}gpu" if first["gpu"] else "cpu"
    return f"ladder-{first['preset']}-{first['geometry']}-{first['dtype']}-{where}.png"


def draw_pictures(path: Path, folder: Path) -> None:
    """Draw the picture of each ladder into a folder."""
    for ladder in read_ladders(path):
        title, caption = captions(ladder)
        save_waterfall(folder / picture_name(ladder), bars(ladder), title=title, caption=caption)
