"""Decoders and loading in engine/h3_33b.md: what a call, a block and a file took.

Owns which records stand there and how they are rounded. Invariant: of records that agree in what
was run, the last one counts; a ratio is one of two rows that stand there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import latest_records

_FOLDER = Path(__file__).parent
CAUSAL_RECORDS = _FOLDER / "decoders.jsonl"
WINDOWED_RECORDS = _FOLDER / "windowed.jsonl"
LOADING_RECORDS = _FOLDER / "loading.jsonl"
CALL_TARGETS_MS = {
    ("832x480", "single_a1"): 12.0,
    ("1344x768", "single_a1"): 30.0,
    ("1344x768", "pair"): 50.0,
}
"""95th percentile of a recorded call on one H200, at most."""
COMPILED_GAIN = 1.8
"""Compiled against eager, with the same weights and as many tiles at once, at least."""
_WHERE = ("preset", "weights", "geometry", "gpu", "cpu")
_CALL = (*_WHERE, "mode", "form")
_BLOCK = (*_WHERE, "row")
_FILE = ("preset", "name", "blocks", "gpu", "cpu")
_LATENTS = {"single_a1": "one latent", "pair": "a pair of latents"}
_LOADED = {"bf16": "as stored", "fp8": "into eight bits, kept", "kept": "eight bits, as kept"}


def decoder_section(
    causal: Path = CAUSAL_RECORDS,
    windowed: Path = WINDOWED_RECORDS,
    loading: Path = LOADING_RECORDS,
) -> str:
    """Return the tables of what has records; nothing without any."""
    tables = (_causal(causal), _windowed(windowed), _loading(loading))
    return "\n\n".join("\n".join(lines) for lines in tables if lines)


def _causal(path: Path) -> list[str]:
    calls: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for record in latest_records(path, _CALL):
        call = tuple(record[name] for name in (*_WHERE, "mode"))
        calls.setdefault(call, {})[record["form"]] = record
    rows = [_call(forms) for forms in calls.values() if "recorded" in forms]
    if not rows:
        return []
    return [
        "| causal ViT decoder, a call | recorded, back to back: ms, median / p95 (n) | TFLOP/s "
        "| recorded, paced: ms, median / p95 (n) "
        "| compiled, plain: ms | off from fp32: most, PSNR "
        "| memory of a stream, computed / measured | class, commit |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def _call(forms: dict[str, dict[str, Any]]) -> str:
    record = forms["recorded"]
    target = CALL_TARGETS_MS.get((record["geometry"], record["mode"]))
    others = (forms.get(form) for form in ("compiled", "plain"))
    cells = [
        f"{_where(record)}, {_LATENTS[record['mode']]}",
        _spans(record["call"], record["call_p95"], most=target),
        f"{record['tflops']:.0f}",
        _spans(record.get("paced"), record.get("paced_p95"), most=target),
        ", ".join("-" if other is None else f"{other['call']['p50']:.1f}" for other in others),
        f"{record['error_max']:.0f} of 255, {record['psnr_db']:.1f} dB",
        f"{record['state_mib']:.1f} / {record['state_measured_mib']:.1f} MiB",
        f"{record['class']}, {record['commit']}",
    ]
    return "| " + " | ".join(cells) + " |"


def _spans(spans: dict[str, Any] | None, p95: float | None, *, most: float | None) -> str:
    if spans is None:
        return "-"
    return f"**{spans['p50']:.1f}** / {p95:.1f} ({spans['n']})" + _missed(p95, most=most)


def _windowed(path: Path) -> list[str]:
    records = latest_records(path, _BLOCK)
    if not records:
        return []
    return [
        "| windowed decoder, a block of 17 pictures | ms, median (n) | x autocast, tile by tile "
        "| x eager, same weights and tiles at once | x tile by tile, same form "
        "| PSNR to fp32 | peak GiB | class, commit |",
        "|---|---|---|---|---|---|---|---|",
        *(_block(record, records) for record in records),
    ]


def _block(record: dict[str, Any], records: list[dict[str, Any]]) -> str:
    block = record["block"]

    def gain(**like: object) -> float | None:
        """How many times as fast as the row which differs so."""
        wanted = {name: record[name] for name in (*_WHERE, "dtype", "compile", "tile_batch")} | like
        for other in records:
            if other is not record and all(other[name] == wanted[name] for name in wanted):
                return float(other["block"]["p50"] / block["p50"])
        return None

    over_eager = gain(compile="eager")
    least = COMPILED_GAIN if record["gpu"] is not None else None
    cells = [
        f"{_where(record)}, {record['row']} ({record['tile_count']} in all)",
        f"**{block['p50']:.0f}** ({block['n']})",
        _times(gain(dtype="autocast", compile="eager", tile_batch=1)),
        _times(over_eager) + _missed(over_eager, least=least),
        _times(gain(tile_batch=1)),
        f"{record['psnr_db']:.1f} dB",
        "-" if record["peak_gib"] is None else f"{record['peak_gib']:.1f}",
        f"{record['class']}, {record['commit']}",
    ]
    return "| " + " | ".join(cells) + " |"


def _loading(path: Path) -> list[str]:
    records = latest_records(path, _FILE)
    if not records:
        return []
    return [
        "| weights from files in the page cache | read | headers + reading + linears, s "
        "| host's peak, growth while it reads | tensors that are checked | class, commit |",
        "|---|---|---|---|---|---|",
        *map(_file, records),
    ]


def _file(record: dict[str, Any]) -> str:
    seconds = (record["headers_s"], record["read_s"], record["linears_s"])
    cells = [
        f"`{record['preset']}`, {record['blocks']} blocks, {_LOADED[record['name']]}, "
        f"{record['gpu'] or record['cpu']}",
        f"{record['gb']:.1f} GB, **{record['gb_per_s']:.1f}** GB/s",
        " + ".join(f"{each:.2f}" for each in seconds),
        f"{record['host_peak_mib']:.0f} MiB, {record['host_growth_mib']:+.0f}",
        "as in the files" if record["is_exact"] else "differ",
        f"{record['class']}, {record['commit']}",
    ]
    return "| " + " | ".join(cells) + " |"


def _where(record: dict[str, Any]) -> str:
    weights = "" if record["weights"] == "shipped" else f" ({record['weights']} weights)"
    return f"{record['geometry']}{weights}, {record['gpu'] or record['cpu']}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _missed(value: float | None, *, least: float | None = None, most: float | None = None) -> str:
    if value is not None and least is not None and value < least:
        return f" (missed: at least {least:g})"
    if value is not None and most is not None and value > most:
        return f" (missed: at most {most:g})"
    return ""
