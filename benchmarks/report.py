"""The measured sections of README.md, the model card and the guide to the large preset, made from
records: ``python -m benchmarks.report``.

Owns which figures stand there and how they are rounded; `ladder_report` has those of the ladder,
`session_report` and `decoder_report` those of the guide.
Invariants: every number comes from a file of records in `benchmarks/` or `miniworld/figures.json`;
what has no record has no row; a test holds README.md and the model card against what this makes.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.decoder_report import decoder_section
from benchmarks.ladder_report import RECORDS as LADDER_RECORDS
from benchmarks.ladder_report import draw_pictures, ladder_section
from benchmarks.record import latest_records
from benchmarks.session_report import session_section
from engine.schemes import LINEARS
from miniworld.evaluation.figures import Figure, read_report

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MODEL_CARD = ROOT / "miniworld" / "README.md"
H3_GUIDE = ROOT / "engine" / "h3_33b.md"
LIVE_RECORDS = ROOT / "benchmarks" / "live.jsonl"
SPEED_RECORDS = ROOT / "benchmarks" / "engine.jsonl"
APPROXIMATION_RECORDS = ROOT / "benchmarks" / "quality.jsonl"
PRODUCT_RECORDS = ROOT / "benchmarks" / "sqnr.jsonl"
LADDER_PICTURES = ROOT / "benchmarks" / "pictures"
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
    ("outside", "without collapse, 20 s", "photographs that hold for 20 s, share"),
    ("endless", "without collapse, 602 s", "walks that hold for ten minutes, share"),
)
"""(item, figure, words for it)."""
APPROXIMATED_ROWS: tuple[tuple[str, str, str], ...] = (
    ("rollout", "gain over the frozen frame, chunk 3", "gain, chunk 3, dB"),
    ("rollout", "gain over the frozen frame, chunk 12", "chunk 12, dB"),
    ("rollout", "sharpness / VAE round trip, chunk 12", "sharpness, chunk 12"),
    ("yaw", "median error, chunk 12", "error of a turn, chunk 12, deg"),
    ("return", "PSNR, chunk 5", "turned and back, dB"),
    ("long", "clips not empty, 60 s", "things in view, 60 s"),
)
"""The same of the table of approximations."""
_FORM_KEY = (
    "linear", "attention", "sparse_tau", "sparse_block", "sparse_steps", "cases", "gpu",
)  # fmt: skip
_PRODUCT_KEY = ("preset", "weights", "geometry", "dtype", "linear", "gpu", "cpu")
_KEY = ("preset", "weights", "geometry", "dtype", "compile_blocks", "gpu", "cpu", "threads")
"""Records that agree in these tell of the same thing; the last one counts."""
_LIVE_KEY = ("preset", "transport", "cpu", "cpu_count")
"""The same for records of the live service."""
LIVE_TARGETS = {
    "fps_window_min": (20.0, "at least"),
    "p50_ms": (800.0, "at most"),
    "p95_ms": (1_200.0, "at most"),
    "connect_s": (2.0, "at most"),
    "page_s": (5.0, "at most"),
}
PART_WORDS = (
    (("input", "uplink"), "to the server"),
    (("wait_for_chunk",), "waiting for the chunk"),
    (("generate",), "generating"),
    (("decode_latent",), "decoding"),
    (("queue_ahead",), "waiting for its turn"),
    (("encode",), "encoding"),
    (("transport",), "transport"),
    (("decode_video", "display"), "display"),
)
"""Parts of the time from a key to the screen, and words for them."""


def section(
    speed_records: Path = SPEED_RECORDS,
    quality_record: Path = QUALITY_RECORD,
    live_records: Path = LIVE_RECORDS,
    ladder_records: Path = LADDER_RECORDS,
) -> str:
    """Return the section, markers left out."""
    parts = [
        _live(live_records),
        _speed(speed_records),
        ladder_section(ladder_records),
        _quality(quality_record),
    ]
    return "\n\n".join(part for part in parts if part) or "No records yet."


def card_section(
    quality_record: Path = QUALITY_RECORD,
    approximation_records: Path = APPROXIMATION_RECORDS,
    product_records: Path = PRODUCT_RECORDS,
) -> str:
    """Return every figure that has a target, for the model card, and what approximations cost."""
    figures, made = _figures(quality_record)
    rows = ["| item | figure | target | measured | n |", "|---|---|---|---|---|"]
    rows += [
        f"| {each.item} | {each.name} | {each.target} | {_rounded(each)} | {each.count} |"
        for each in figures.values()
        if each.is_met is not None
    ]
    rows.append("")
    rows.append(f"{made['dtype']} on {made['device']}, torch {made['torch']}, {made['time_utc']}.")
    parts = ["\n".join(rows), _approximations(approximation_records), _products(product_records)]
    return "\n\n".join(part for part in parts if part)


def _approximations(path: Path) -> str:
    """Table of the last comparison of each approximate form with the exact one."""
    records = latest_records(path, _FORM_KEY)
    if not records:
        return ""
    words = [title for _, _, title in APPROXIMATED_ROWS]
    head = ("linears, attention", *words, "figures kept", "commit")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for record in records:
        figures = {(each["item"], each["name"]): each for each in record["figures"]}
        kept = sum(each["verdict"] == "kept" for each in record["figures"])
        tau, steps = record["sparse_tau"], record.get("sparse_steps")
        # Before it had a count of steps, it served all of them and the refresh.
        where = "every pass" if steps is None else f"steps 1 to {steps}"
        form = f"{record['linear']}, {record['attention']}" + (
            "" if tau is None else f" at {tau:g} in {where}, blocks of {record['sparse_block']}"
        )
        cells = [f"{form}, {record['cases']} clips"]
        for item, name, _ in APPROXIMATED_ROWS:
            known = figures.get((item, name))
            sides = () if known is None else (known["exact"], known["approximate"])
            cells.append(" -> ".join("-" if each is None else f"{each:.3g}" for each in sides))
        cells += [f"{kept} of {len(record['figures'])}{_widened(record)}", record["commit"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _widened(record: dict[str, Any]) -> str:
    """What a control added to the allowances of a comparison, and what is kept without it."""
    control = record.get("control")
    if control is None:
        return ""
    alone = sum(each["verdict_alone"] == "kept" for each in record["figures"])
    what = control["dtype"] if control["dtype"] != record["dtype"] else "another exact run"
    return f", allowance widened by what {what} moves ({alone} without)"


def _products(path: Path) -> str:
    """Table of the least and the median that products of each kind keep, over the blocks."""
    records = latest_records(path, _PRODUCT_KEY)
    if not records:
        return ""
    head = ("products in eight bits, least / median, dB", *LINEARS, "commit")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for record in records:
        where = f"`{record['preset']}` {record['geometry']}, {record['weights']} weights"
        cells = [f"{where}, {record['linear']}"]
        for name in LINEARS:
            found = [db for key, db in record["layers"].items() if key.endswith(f".{name}")]
            cells.append(f"{min(found):.1f} / {statistics.median(found):.1f}" if found else "")
        rows.append(f"| {' | '.join((*cells, record['commit']))} |")
    return "\n".join(rows)


def guide_section() -> str:
    """Return sessions, decoders and loading, for the guide to the large preset."""
    return "\n\n".join(part for part in (session_section(), decoder_section()) if part)


def filled(readme: str, body: str) -> str:
    """Return the text of a README with the section replaced.

    Raises: ValueError without the two markers.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def _live(path: Path) -> str:
    """Table of the last record of each preset, transport and machine, and the parts of one."""
    records = latest_records(path, _LIVE_KEY)
    if not records:
        return ""
    rows = [
        "| live: page in Chromium on the machine of the service | frames/s shown (least in 10 s) "
        "| key to screen, median / p95 "
        "| last less first minute: lag of the video; keys, median / p95 "
        "| connect / page to picture | a further viewer | commit |",
        "|---|---|---|---|---|---|---|",
        *map(_live_row, records),
        "",
        _live_parts(records[0]),
    ]
    return "\n".join(rows)


def _live_row(record: dict[str, Any]) -> str:
    keys = record["key_to_screen_ms"]
    first, last = record["key_to_screen_first_ms"], record["key_to_screen_last_ms"]
    # Medians wander by where presses fall within chunks; the video's own lag would add up.
    grown = " / ".join(f"{last[name] - first[name]:+.0f}" for name in ("p50", "p95"))
    watched = record.get("watched")
    viewer = "" if watched is None else f"{watched['server_cores_per_viewer']:.3f} cores"
    cells = (
        f"`{record['preset']}`, {record['transport']}, {record['seconds']} s, {record['cpu']}, "
        f"{record['cpu_count']} cores",
        f"**{record['frames_per_second']:.1f}** "
        f"({_held('fps_window_min', record['fps_window_min'], '.1f')})",
        f"**{_held('p50_ms', keys['p50'], '.0f')}** / {_held('p95_ms', keys['p95'], '.0f')} ms",
        f"{record['media_lag_growth_ms']:+.0f}; {grown} ms",
        f"{_held('connect_s', record['connect_s'], '.2f')} / "
        f"{_held('page_s', record['page_to_first_frame_s'], '.2f')} s",
        viewer,
        record["commit"],
    )
    return f"| {' | '.join(cells)} |"


def _held(name: str, value: float, form: str) -> str:
    """A figure, marked where it misses its target."""
    limit, side = LIVE_TARGETS[name]
    is_met = value >= limit if side == "at least" else value <= limit
    return f"{value:{form}}" + ("" if is_met else f" (missed: {side} {limit:g})")


def _live_parts(record: dict[str, Any]) -> str:
    parts = [
        f"{words} {sum(record['parts_ms'][name]['p50'] for name in names):.0f}"
        for names, words in PART_WORDS
    ]
    cores = record["cores"]
    return (
        f"Medians of the parts, ms: {', '.join(parts)}. "
        f"Encoding takes {record['encode_ms']:.1f} ms a frame; the service takes "
        f"{cores['server']:.2f} cores, the model {cores['worker']:.2f}, the browser "
        f"{cores['browser']:.2f}."
    )


def _speed(path: Path) -> str:
    """Table of the last record of each size, device, dtype and way of running what ships."""
    records = [record for record in latest_records(path, _KEY) if record["weights"] == "shipped"]
    if not records:
        return ""
    rows = [
        "| speed: DiT and VAE, steady window | frames/s | ms a chunk, p20 / p50 / p80 (n) "
        "| peak memory | commit |",
        "|---|---|---|---|---|",
        *map(_speed_row, records),
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
    report = read_report(path)
    return {(each.item, each.name): each for each in report.figures}, report.environment


def _rounded(figure: Figure) -> str:
    number = f"{figure.value:.3g}" if abs(figure.value) < 1 else f"{figure.value:.2f}"
    verdict = " (missed)" if figure.is_met is False else ""
    return f"{number} {figure.unit}".rstrip() + verdict


def main() -> None:
    """Draw the pictures of ladders; write the sections into README.md, model card and guide."""
    draw_pictures(LADDER_RECORDS, LADDER_PICTURES)
    sections = (
        (README, section()), (MODEL_CARD, card_section()), (H3_GUIDE, guide_section()),
    )  # fmt: skip
    for path, body in sections:
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text, body), encoding="utf-8")


if __name__ == "__main__":
    main()
