"""What the doctor found, for people.

Owns layout and colours alone.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from stream.doctor import Report
from stream.findings import Health
from stream.plan_table import plan_table

_MARKS = {
    Health.OK: "[green]ok[/]",
    Health.NOTE: "[yellow]note[/]",
    Health.MISSING: "[red]MISSING[/]",
}


def print_report(report: Report, console: Console) -> None:
    """Print everything; what is missing comes last, where it is seen."""
    table = Table(title=f"worldstream doctor: {report.preset}")
    for title in ("section", "what", "", "detail"):
        table.add_column(title, overflow="fold")
    section = ""
    for each in report.findings:
        if each.section != section and section:
            table.add_section()
        shown = each.section if each.section != section else ""
        table.add_row(shown, each.name, _MARKS[each.health], _plain(each.detail))
        section = each.section
    console.print(table)
    for size in report.sizes:
        if size.plan is not None:
            console.print(plan_table(size.plan, report.present))
    if report.licence:
        console.print(f"Licence: {_plain(report.licence)}")
    if report.is_ready:
        console.print(f"[green]{report.preset} can be served here[/]")
        return
    console.print(f"[red]{report.preset} cannot be served here yet:[/]")
    for each in report.missing:
        console.print(f"- {each.section}, {each.name}: {_plain(each.detail)}")


def _plain(text: str) -> str:
    """Text in which brackets mean themselves."""
    return text.replace("[", r"\[")
