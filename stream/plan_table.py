"""The memory plan as a table for people.

Owns its columns; `engine.memory` owns what is in it.
"""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from engine.memory import GIB, MemoryPlan, Present

_WIDTH = 100


def plan_table(plan: MemoryPlan, present: Present) -> Table:
    """One row a part; GiB while weights are read, while a world is played, of the machine."""
    size, fits = plan.geometry, plan.fits(present)
    modulation = ", modulation weights given up" if plan.free_adaln else ""
    ranks = f"; first of {plan.rank_count} ranks" if plan.rank_count > 1 else ""
    host = (
        f", {plan.host_gib:.1f} of {present.host_gib:.1f} of the machine" if plan.host_gib else ""
    )
    why = f"\nlinears {plan.linear_words}" if plan.linear_reason else ""
    table = Table(
        title=f"Memory at {size.width_px}x{size.height_px}: {plan.dtype}, linears {plan.linear}"
        f"{modulation}{ranks}",
        caption=f"{'fits' if fits else 'DOES NOT FIT'}: {plan.peak_gib:.1f} of "
        f"{present.device_gib:.1f} GiB that are free{host}{why}",
    )
    for title in ("part", "loading", "playing", "machine", "note"):
        table.add_column(title, justify="left" if title in ("part", "note") else "right")
    for part in plan.parts:
        if part.loading or part.playing or part.host:
            table.add_row(
                part.name, _gib(part.loading), _gib(part.playing), _gib(part.host), part.note
            )
    table.add_section()
    table.add_row(
        "all", f"{plan.loading_gib:.2f}", f"{plan.playing_gib:.2f}", _gib(plan.host_gib * GIB), ""
    )
    return table


def plan_text(plan: MemoryPlan, present: Present) -> str:
    """The table as plain text, for a terminal that belongs to another process."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(plan_table(plan, present))
    return captured.get().rstrip("\n")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else ""
