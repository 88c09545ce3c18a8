"""What comes out of a ladder: lines for people, records, bars.

Owns which figures are derived from what was measured. Invariant: times are medians, and a share is
of a rate or a floor that was measured in the same run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from benchmarks.climb import Climbed, Grounds, Refused, Step
from benchmarks.ladder_rows import LadderScenario
from benchmarks.peak import Work, chunk_work, pass_work
from benchmarks.plot import Bar
from benchmarks.record import size_name
from engine.config import SPARSE_DENSE_LAYERS, ModelConfig
from engine.memory import prefix_row_count
from engine.schemes import layer_rules, linear_shapes, scheme_of

_COLUMNS = (
    ("row", "28"), ("class", "5"), ("ms a chunk p20/p50/p80 (n)", "31"), ("DiT fps", "7"),
    ("denoise", "8"), ("refresh", "8"), ("TFLOP/s", "7"), ("ceiling", "7"), ("floor", "6"),
    ("GiB", "6"), ("kernels/calls", "13"), ("error 1", "8"), ("error 6", "8"),
)  # fmt: skip


def head(scenario: LadderScenario, grounds: Grounds) -> str:
    """Return what stands above the rows."""
    machine, floor = grounds.machine, grounds.floor
    where = f"{grounds.gpu_count} x {machine.gpu}" if machine.gpu else machine.cpu
    fp8 = grounds.fp8_product_flops
    lines = [
        f"{scenario.preset} {size_name(scenario.model.geometry)} {grounds.dtype}, "
        f"{'random' if scenario.is_random else 'shipped'} weights, "
        f"{prefix_row_count(scenario.model)} prefix rows, on {where}, torch {machine.torch}, "
        f"commit {machine.commit}",
        f"products {grounds.product_flops / 1e12:.4g} TFLOP/s"
        + ("" if fp8 is None else f", in FP8 {fp8 / 1e12:.4g}")
        + f"; attention {floor.attention_flops / 1e12:.4g}; floor of a pass: products "
        f"{floor.linear_ms:.4g} ms"
        + ("" if floor.linear_fp8_ms is None else f" (in FP8 {floor.linear_fp8_ms:.4g})")
        + f" + attention {floor.attention_ms:.4g} ms = {floor.chunk_ms(scenario.model):.5g} ms "
        "a chunk",
        _line([name for name, _ in _COLUMNS]),
    ]
    return "\n".join(lines)


def row_line(scenario: LadderScenario, grounds: Grounds, step: Step) -> str:
    """Return one row for people."""
    if isinstance(step, Refused):
        return f"{step.row.title:<28}  not run: {step.reason}"
    record = as_record(scenario, grounds, step)
    chunk, launches = step.chunk, step.launches
    cells = [
        step.row.title,
        step.row_class,
        f"{chunk.p20:.1f} / {chunk.p50:.1f} / {chunk.p80:.1f} ({chunk.n})",
        f"{step.dit_fps:.2f}",
        f"{step.denoise.p50:.1f}",
        f"{step.refresh.p50:.1f}",
        f"{record['tflops']:.4g}",
        f"{record['share_of_ceiling']:.0%}",
        f"{record['share_of_floor']:.0%}",
        f"{step.peak_gib:.1f}",
        "-" if launches is None else f"{launches.kernels}/{launches.calls}",
        *(f"{error:.2g}" for error in step.errors.values()),
    ]
    line = _line(cells)
    if step.density is not None:
        line += f"  density {step.density:.3f}"
    if step.one_rank is None:
        return line
    return (
        f"{line}  {step.speed_up:.2f} x one rank, {step.one_rank.p20:.1f} / "
        f"{step.one_rank.p50:.1f} / {step.one_rank.p80:.1f}"
    )


def _line(cells: list[str]) -> str:
    widths = [width for _, width in _COLUMNS]
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)])


def as_record(scenario: LadderScenario, grounds: Grounds, step: Climbed) -> dict[str, Any]:
    """Return the record of one row, json-ready."""
    model, floor = scenario.model, grounds.floor
    work = chunk_work(model, with_prefix=not step.config.prefix_cache)
    share = fp8_share(model, step.config.linear)
    read = read_share(model, step.density, step.config.sparse_steps)
    work = dataclasses.replace(work, attention=read * work.attention)
    floor_ms = floor.chunk_ms(model, fp8_share=share, read_share=read)
    chunk_s = step.chunk.p50 / 1e3
    first, last = step.errors.values()
    return {
        "name": "ladder",
        "row": step.row.name,
        "title": step.row.title,
        "class": step.row_class,
        "preset": scenario.preset,
        "weights": "random" if scenario.is_random else "shipped",
        "geometry": size_name(model.geometry),
        "gpu_count": grounds.gpu_count,
        "rank_count": grounds.world_size,
        "reference": scenario.reference + (", one rank" if grounds.world_size > 1 else ""),
        "dtype": grounds.dtype,
        "prefix_rows": prefix_row_count(model),
        "config": dataclasses.asdict(step.config),
        "chunk_ms": step.chunk.p50,
        "dit_fps": round(step.dit_fps, 3),
        "error": last,
        "error_first_chunk": first,
        "chunk": dataclasses.asdict(step.chunk),
        "one_rank_chunk_ms": None if step.one_rank is None else step.one_rank.p50,
        "speed_up": None if step.speed_up is None else round(step.speed_up, 3),
        "denoise": dataclasses.asdict(step.denoise),
        "refresh": dataclasses.asdict(step.refresh),
        "tflops": round(work.total / chunk_s / 1e12, 4),
        "share_of_ceiling": round(_ceiling_s(grounds, work, share) / chunk_s, 4),
        "floor_ms": round(floor_ms, 3),
        "share_of_floor": round(floor_ms / 1e3 / chunk_s, 4),
        "peak_gib": round(step.peak_gib, 3),
        "kernel_count": None if step.launches is None else step.launches.kernels,
        "launch_count": None if step.launches is None else step.launches.calls,
        "attention": step.attention,
        "density": None if step.density is None else round(step.density, 4),
        "replay_count": step.replay_count,
        "load_s": round(step.load_s, 2),
        "warm_up_s": round(step.warm_up_s, 2),
        "product_tflops": round(grounds.product_flops / 1e12, 4),
        "fp8_product_tflops": grounds.fp8_product_flops and grounds.fp8_product_flops / 1e12,
        "attention_tflops": round(floor.attention_flops / 1e12, 4),
        "floor_of_a_pass": dataclasses.asdict(floor),
        **dataclasses.asdict(grounds.machine),
    }


def fp8_share(model: ModelConfig, linear: str) -> float:
    """Share of the weights of the blocks that a scheme puts into eight bits."""
    sizes = {name: math.prod(shape) for name, shape in linear_shapes(model).items()}
    named = sum(sizes[name] for _, name in layer_rules(scheme_of(linear), model))
    return named / (model.num_layers * sum(sizes.values()))


def read_share(model: ModelConfig, density: float | None, sparse_steps: int) -> float:
    """Share of the keys that attention reads in all layers and passes of a chunk, one by one."""
    if density is None:
        return 1.0
    passes = chunk_work(model).attention / pass_work(model).attention
    sparse_layers = (model.num_layers - SPARSE_DENSE_LAYERS) / model.num_layers
    return 1.0 - sparse_steps * sparse_layers * (1.0 - density) / passes


def _ceiling_s(grounds: Grounds, work: Work, share: float) -> float:
    """Seconds that the work takes at the rates of large products and of attention alone."""
    fp8 = grounds.fp8_product_flops or grounds.product_flops
    linear_s = work.linear * ((1.0 - share) / grounds.product_flops + share / fp8)
    return linear_s / grounds.world_size + work.attention / grounds.floor.attention_flops


def as_json(scenario: LadderScenario, grounds: Grounds, steps: list[Step]) -> dict[str, Any]:
    """Return the whole ladder: records of what ran, reasons of what did not."""
    return {
        "name": "ladder",
        "rows": [
            as_record(scenario, grounds, step)
            if isinstance(step, Climbed)
            else {"row": step.row.name, "title": step.row.title, "reason": step.reason}
            for step in steps
        ],
    }


def bars(records: list[dict[str, Any]]) -> list[Bar]:
    """Return the bars of records, in their order."""
    return [
        Bar(
            label=record["title"],
            row_class=record["class"],
            chunk_ms=record["chunk_ms"],
            dit_fps=record["dit_fps"],
        )
        for record in records
    ]


def captions(records: list[dict[str, Any]]) -> tuple[str, str]:
    """Return title and caption of the picture of some rows."""
    record = records[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in records))
    where = f"{record['gpu_count']} x {record['gpu']}" if record["gpu"] else record["cpu"]
    title = f"{record['preset']} {record['geometry']}: milliseconds a chunk of 17 frames"
    caption = (
        f"{where}, {record['dtype']}, {record['weights']} weights, torch {record['torch']}, commit "
        f"{commits}; 4 denoise steps and the refresh, no decoder; each row is one change to those "
        "above"
    )
    return title, caption
