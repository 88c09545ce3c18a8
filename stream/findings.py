"""Findings of the doctor: one thing that was looked at, and what came out.

Owns the verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """Verdict on one thing."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing depends on it."""
    MISSING = "missing"
    """Without it the preset cannot be served here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    section: str
    name: str
    health: Health
    detail: str


def findings_of(section: str) -> Callable[[str, Health, str], Finding]:
    """Return what makes findings of a section, of a name, a verdict and a detail."""
    return lambda name, health, detail: Finding(
        section=section, name=name, health=health, detail=detail
    )
