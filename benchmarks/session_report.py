"""Sessions in engine/h3_33b.md: what was measured from the start to the steady window.

Owns which records stand there and how they are rounded. Invariant: of records that agree in what
was run, the last one counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import latest_records, shown_ms

RECORDS = Path(__file__).parent / "session.jsonl"
SWITCH_RECORDS = Path(__file__).parent / "switches.jsonl"
TARGETS = {
    ("h3_33b", "832x480", "exact"): {"frames_per_second": 16.5, "first_frame_ms": 800.0},
    ("h3_33b", "832x480", "sparse"): {"frames_per_second": 24.0, "first_frame_ms": 550.0},
    ("mini", "256x160", "exact"): {"chunk_ms": 12.0},
}
"""On one H200: frames a second at least, action to first frame at most, a median chunk at most."""
PLANNED_PRESET = "h3_33b"
"""Whose peak the plan is to meet; that of a small model is made of allowances larger than it is."""
PLAN_TOLERANCE = 0.1
SWITCH_RATIO = 1.5
"""First chunk at a prompt length that is new, against a steady one, at most."""
_SWITCH_KEY = (
    "preset", "geometry", "weights", "free_adaln", "linear", "kernels", "gpu", "cpu",
)  # fmt: skip
_KEY = ("preset", "row", "geometry", "weights", "dtype", "kernels", "decoder", "gpu", "cpu")


def session_section(path: Path = RECORDS, switches: Path = SWITCH_RECORDS) -> str:
    """Return the tables; a sentence without records."""
    records = latest_records(path, _KEY)
    if not records:
        return "No records yet."
    lines = [
        "| session: transformer, refresh and decoder | frames/s | ms a chunk, median / p95 (n) "
        "| action accepted to first frame, median / p95 | decoder beside the refresh "
        "| memory planned / peak reserved | commit |",
        "|---|---|---|---|---|---|---|",
        *map(_row, records),
        "",
        "| from action to first frame, ms | denoise | camera, draws | decoder | host |",
        "|---|---|---|---|---|",
        *map(_parts, records),
        "",
        "| from the start of the process to the first frame, s | stages | all |",
        "|---|---|---|",
        *map(_start_up, records),
    ]
    switched = latest_records(switches, _SWITCH_KEY)
    if switched:
        lines += [
            "",
            "| a new prompt while walking | steady chunk, ms | as many rows: prefix; next chunks "
            "| fewer rows: prefix; next chunks | first of these, x steady "
            "| as many as before: prefix; next chunks | commit |",
            "|---|---|---|---|---|---|---|",
            *map(_switch, switched),
        ]
    # Not in the first records.
    restarted = [record for record in switched if "new_seed" in record]
    if restarted:
        lines += [
            "",
            "| a walk begins anew | another seed: prefix; first latents | by what that prefix is "
            "longer, ms | the same seed: prefix; first latents | another picture: prefix; first "
            "latents | commit |",
            "|---|---|---|---|---|---|",
            *map(_restarts, restarted),
        ]
    return "\n".join(lines)


def _title(record: dict[str, Any]) -> str:
    where = record["gpu"] or record["cpu"]
    weights = "" if record["weights"] == "shipped" else f" ({record['weights']} weights)"
    return f"`{record['preset']}` {record['geometry']}{weights}, {record['row']}, {where}"


def _row(record: dict[str, Any]) -> str:
    key = (record["preset"], record["geometry"], record["row"])
    targets = {} if record["gpu"] is None else TARGETS.get(key, {})
    chunk, first, memory = record["chunk"], record["first_frame"], record["memory"]
    fps, overlap = record["frames_per_second"], record["overlap"]
    least, most = targets.get("frames_per_second", 0.0), targets.get("first_frame_ms", 1e9)
    longest = targets.get("chunk_ms", 1e9)
    cells = [
        f"{_title(record)}, {record['decoder']}",
        f"**{fps:.1f}**" + _missed(fps >= least, f"at least {least:g}"),
        f"{shown_ms(chunk['p50'])} / {shown_ms(chunk['p95'])} ({chunk['n']})"
        + _missed(chunk["p50"] <= longest, f"at most {longest:g}"),
        f"**{shown_ms(first['p50'])}** / {shown_ms(first['p95'])} ms"
        + _missed(first["p50"] <= most, f"at most {most:g}"),
        f"{shown_ms(overlap['p50'])} ms",
        _memory(memory, record["preset"] == PLANNED_PRESET),
        record["commit"],
    ]
    return "| " + " | ".join(cells) + " |"


def _memory(memory: dict[str, Any], is_bound: bool) -> str:
    if memory["off_by"] is None:
        return f"{memory['planned_gib']:.1f} GiB"
    return (
        f"{memory['planned_gib']:.1f} / {memory['reserved_peak_gib']:.1f} GiB "
        f"({memory['off_by']:+.1%})"
        + _missed(
            not is_bound or abs(memory["off_by"]) <= PLAN_TOLERANCE, f"within {PLAN_TOLERANCE:.0%}"
        )
    )


def _missed(is_met: bool, target: str) -> str:
    return "" if is_met else f" (missed: {target})"


def _parts(record: dict[str, Any]) -> str:
    parts = {name: part["p50"] for name, part in record["first_frame_parts"].items()}
    denoise = [ms for name, ms in parts.items() if name.startswith("denoise_")]
    cells = [
        _title(record),
        " + ".join(map(shown_ms, denoise)),
        f"{parts['camera_and_draws']:.1f}",
        f"{parts['decode_first_frames']:.1f}",
        f"{parts['host']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _start_up(record: dict[str, Any]) -> str:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record["start_up_s"].items())
    return f"| {_title(record)} | {stages} | {record['first_frame_after_s']:.0f} |"


def _switch_title(record: dict[str, Any]) -> str:
    where = record["gpu"] or record["cpu"]
    freed = ", modulation weights given up" if record.get("free_adaln") else ""
    return (
        f"`{record['preset']}` {record['geometry']} ({record['weights']} weights){freed}, {where}"
    )


def _switch(record: dict[str, Any]) -> str:
    ratio = record["first_chunk_ratio"]
    cells = [
        _switch_title(record),
        f"{record['steady']['p50']:.0f}",
        *(_after_switch(record[name]) for name in ("same_length", "new_length")),
        f"{ratio:.2f}" + _missed(ratio <= SWITCH_RATIO, f"at most {SWITCH_RATIO:g}"),
        # Not in the first records.
        _after_switch(record["known_length"]) if "known_length" in record else "",
        record["commit"],
    ]
    return "| " + " | ".join(cells) + " |"


def _after_switch(switch: dict[str, Any]) -> str:
    chunks = ", ".join(f"{ms:.0f}" for ms in switch["chunk_ms"])
    recorded = switch["capture_count"]
    return f"{switch['prefix_ms']:.0f}; {chunks} ms ({recorded} passes recorded)"


def _restarts(record: dict[str, Any]) -> str:
    cells = [
        _switch_title(record),
        _after_restart(record["new_seed"]),
        f"{record['new_seed_extra_ms']:.1f}",
        *(_after_restart(record[name]) for name in ("same_seed", "another_picture")),
        record["commit"],
    ]
    return "| " + " | ".join(cells) + " |"


def _after_restart(restarts: dict[str, Any]) -> str:
    prefixes, chunks = (
        ", ".join(f"{ms:.0f}" for ms in restarts[name]) for name in ("prefix_ms", "chunk_ms")
    )
    return f"{prefixes}; {chunks} ms ({restarts['capture_count']} passes recorded)"
