"""`worldstream bench engine`: how fast a preset makes frames, where the time goes, what it holds.

Owns the ablations, the table and the record; `stream.measure` has the timing.
Classes: X the same bits as the plain path in float32, F the same operations with other rounding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import Machine, append_record, describe_machine, size_name
from engine.config import CompileChoice
from engine.errors import ConfigError
from engine.memory import DtypeName
from stream.measure import Measured, Scenario, measure

ABLATIONS = ("prefix_cache", "adaln_tables", "packed_history", "compile", "dtype")
"""What can be changed, one at a time: shortcuts left out, eager or compiled, the other dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """The scenario with one thing changed."""

    name: str
    row_class: str
    """X where it made the control's bits, else F: found by comparing digests."""
    measured: Measured


def parse_ablations(text: str) -> tuple[str, ...]:
    """Read "all" or names with commas between them.

    Raises: ConfigError.
    """
    names = ABLATIONS if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in ABLATIONS:
            raise ConfigError(f"ablations: {name!r}; allowed: all, {', '.join(ABLATIONS)}")
    return names


def ablate(control: Measured, names: Sequence[str]) -> list[Ablation]:
    """Measure the scenario with one thing changed at a time, then unchanged again."""
    base = control.scenario
    chosen: DtypeName = "bfloat16" if control.dtype == "bfloat16" else "float32"
    other: DtypeName = "float32" if chosen == "bfloat16" else "bfloat16"
    engine = dataclasses.replace(base.engine, dtype=chosen)
    # Whole passes need all shortcuts, one of which is left out.
    halves = dataclasses.replace(
        engine, compile="blocks" if _is_compiled(control) else "off", graphs=False
    )
    rows = []
    for name in (*names, "control"):
        label, changed = f"{name} off", engine
        if name == "control":
            label = "control, rerun"
        elif name == "compile":
            label = "eager blocks" if _is_compiled(control) else "compiled blocks"
            form: CompileChoice = "off" if _is_compiled(control) else "blocks"
            changed = dataclasses.replace(engine, compile=form, graphs=False)
        elif name == "dtype":
            label, changed = other, dataclasses.replace(engine, dtype=other)
        elif name == "prefix_cache":
            changed = dataclasses.replace(halves, prefix_cache=False)
        elif name == "adaln_tables":
            changed = dataclasses.replace(halves, adaln_tables=False)
        else:
            changed = dataclasses.replace(halves, packed_history=False)
        measured = measure(dataclasses.replace(base, engine=changed))
        row_class = "X" if measured.digest == control.digest else "F"
        rows.append(Ablation(name=label, row_class=row_class, measured=measured))
    return rows


def bench_engine(scenario: Scenario, *, ablations: Sequence[str], record: Path | None) -> str:
    """Measure, draw the table on stderr, append the record if asked; return the JSON line."""
    measured = measure(scenario)
    rows = ablate(measured, ablations) if ablations else []
    machine = describe_machine(measured.device)
    console = Console(stderr=True)
    console.print(_table(measured, machine))
    if rows:
        console.print(_ablation_table(measured, rows))
    line = as_record(measured, rows, machine)
    if record is not None:
        append_record(record, line)
    return json.dumps(line)


def as_record(
    measured: Measured, ablations: Sequence[Ablation], machine: Machine
) -> dict[str, Any]:
    """Return the record of one run, json-ready."""
    scenario, memory = measured.scenario, measured.memory
    line: dict[str, Any] = {
        "name": "engine",
        "row": "session",
        "gpu_count": int(measured.device.type == "cuda"),
        "chunk_ms": measured.chunk.p50,
        "dit_fps": round(measured.dit_fps, 3),
        # Nothing else runs here that it could be held against: the ladder does that.
        "error": None,
        "peak_gib": round(_peak_mib(measured) / 1024, 3),
        "frames_per_second": round(measured.frames_per_second, 2),
        "preset": scenario.preset,
        "weights": scenario.spec.weights,
        "geometry": size_name(scenario.size),
        "class": _resolved_class(measured),
        "device": str(measured.device),
        "dtype": measured.dtype,
        "dtype_note": measured.dtype_note,
        "compile_blocks": _is_compiled(measured),
        "has_frames": measured.has_frames,
        "config_hash": scenario.config_hash(),
        "chunk": dataclasses.asdict(measured.chunk),
        "cpu_time": dataclasses.asdict(measured.cpu),
        "parts": {name: dataclasses.asdict(part) for name, part in measured.parts.items()},
        "denoise_gflop": round(measured.denoise_gflop, 2),
        "product_gflops": round(measured.product_gflops, 1),
        "share_of_peak": round(measured.share_of_peak, 3),
        "load_s": round(measured.load_s, 3),
        "first_frame_s": round(measured.first_frame_s, 3),
        "warm_up_s": round(measured.warm_up_s, 3),
        "memory": {**dataclasses.asdict(memory), "drift_mib": round(memory.drift_mib, 1)},
        **dataclasses.asdict(machine),
    }
    if ablations:
        line["ablations"] = [
            {
                "name": each.name,
                "class": each.row_class,
                "frames_per_second": round(each.measured.frames_per_second, 2),
                "chunk": dataclasses.asdict(each.measured.chunk),
                "cpu_time": dataclasses.asdict(each.measured.cpu),
            }
            for each in ablations
        ]
        line["control_spread"] = round(_control_spread(measured, ablations), 4)
    return line


def _peak_mib(measured: Measured) -> float:
    """Of the tensors on a device, of the process where the machine's memory is the device's."""
    on_device = measured.memory.device_peak_mib
    return measured.memory.peak_mib if on_device is None else on_device


def _is_compiled(measured: Measured) -> bool:
    asked = measured.scenario.engine.compile
    return asked in ("blocks", "full") or (asked == "auto" and measured.device.type == "cuda")


def _resolved_class(measured: Measured) -> str:
    # On a CPU weights are packed and cameras applied by products: other orders of the same sums.
    is_eager = measured.device.type != "cpu" and not _is_compiled(measured)
    is_plain = is_eager and measured.dtype == "float32"
    return "X" if is_plain else "F"


def _control_spread(measured: Measured, ablations: Sequence[Ablation]) -> float:
    """Relative difference of the control to its rerun; smaller gains than that are no gains."""
    rerun = ablations[-1].measured.chunk.p50
    return abs(rerun - measured.chunk.p50) / measured.chunk.p50


def _table(measured: Measured, machine: Machine) -> Table:
    scenario, memory = measured.scenario, measured.memory
    where = machine.gpu or f"{machine.cpu}, {machine.threads} threads"
    compiled = ", compiled blocks" if _is_compiled(measured) else ""
    table = Table(
        title=f"{scenario.preset} {size_name(scenario.size)} {measured.dtype}{compiled} on {where}",
        caption=(
            f"{measured.frames_per_second:.1f} frames/s, transformer alone "
            f"{measured.dit_fps:.1f}; load {measured.load_s:.1f} s, first frame "
            f"{measured.first_frame_s:.2f} s later, warm-up {measured.warm_up_s:.1f} s "
            f"({measured.chunk.dropped_count} chunks, dropped); peak {memory.peak_mib:.0f} MiB, "
            f"drift {memory.drift_mib:+.1f} MiB; a denoise step reaches "
            f"{measured.share_of_peak:.0%} of the rate of plain products, "
            f"{measured.product_gflops:.0f} GFLOP/s"
        ),
    )
    for title in ("part", "n", "p20 ms", "p50 ms", "p80 ms"):
        table.add_column(title, justify="left" if title == "part" else "right")
    rows = {**measured.parts, "chunk": measured.chunk, "processor time": measured.cpu}
    for name, part in rows.items():
        figures = (f"{value:.1f}" for value in (part.p20, part.p50, part.p80))
        table.add_row(name, str(part.n), *figures, end_section=name == "decode")
    return table


def _ablation_table(measured: Measured, ablations: Sequence[Ablation]) -> Table:
    spread = _control_spread(measured, ablations)
    table = Table(title="One change at a time", caption=f"spread of the control {spread:.1%}")
    for title in ("change", "class", "p50 ms", "processor ms", "frames/s", "against control"):
        table.add_column(title, justify="left" if title == "change" else "right")
    control = Ablation(name="control", row_class=_resolved_class(measured), measured=measured)
    for each in (control, *ablations):
        chunk = each.measured.chunk
        table.add_row(
            each.name,
            each.row_class,
            f"{chunk.p50:.1f}",
            f"{each.measured.cpu.p50:.1f}",
            f"{each.measured.frames_per_second:.1f}",
            f"{chunk.p50 / measured.chunk.p50:.2f}x",
        )
    return table
