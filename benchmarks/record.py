"""Records of measurements: spreads, the machine they come from, picture sizes, JSON lines.

Owns the fields that every record has. Invariants: a file of records is only appended to; a figure
stands beside its unit, its count and what was dropped.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import Geometry
from engine.errors import ConfigError
from engine.provenance import processor_name, source_commit

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Percentiles of repeated measurements of one thing."""

    unit: str
    n: int
    dropped_count: int
    """Measurements before these, left out as warm-up."""
    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float], *, unit: str, dropped_count: int) -> Spread:
        """Percentiles of `values`, at least one."""
        p20, p50, p80 = (float(p) for p in np.percentile(np.asarray(values), (20, 50, 80)))
        return cls(
            unit=unit,
            n=len(values),
            dropped_count=dropped_count,
            p20=round(p20, 3),
            p50=round(p50, 3),
            p80=round(p80, 3),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where and with what a record was made."""

    cpu: str
    cpu_count: int
    threads: int
    spin_count: str | None
    """How long idle OpenMP threads spin (GOMP_SPINCOUNT)."""
    gpu: str | None
    cuda: str | None
    torch: str
    python: str
    commit: str
    """See `source_commit`."""
    load_1min: float | None
    """Runnable processes a minute before: on a busy machine wall times say little."""
    time_utc: str


def describe_machine(device: torch.device, *, commit: str | None = None) -> Machine:
    """Look at this machine; ``commit`` is told where the files are no checkout."""
    is_cuda = device.type == "cuda"
    return Machine(
        cpu=processor_name(),
        cpu_count=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        spin_count=os.environ.get("GOMP_SPINCOUNT"),
        gpu=torch.cuda.get_device_name(device) if is_cuda else None,
        cuda=torch.version.cuda if is_cuda else None,
        torch=torch.__version__,
        python=platform.python_version(),
        commit=commit or source_commit(),
        load_1min=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def parse_geometry(text: str) -> Geometry:
    """Read WIDTHxHEIGHT.

    Raises: ConfigError.
    """
    match = re.fullmatch(r"(\d{2,4})x(\d{2,4})", text)
    if match is None:
        raise ConfigError(f"geometry: {text!r}; allowed: WIDTHxHEIGHT, multiples of 32")
    return Geometry(width_px=int(match[1]), height_px=int(match[2]))


def shown_ms(milliseconds: float) -> str:
    """Milliseconds in a table: with a digit behind the point below 100."""
    return f"{milliseconds:.1f}" if milliseconds < 100.0 else f"{milliseconds:.0f}"


def size_name(size: Geometry) -> str:
    """WIDTHxHEIGHT."""
    return f"{size.width_px}x{size.height_px}"


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line to a file of records."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def latest_records(path: Path, key: Sequence[str]) -> list[dict[str, Any]]:
    """Return the last record of each thing, which records that agree in `key` tell of.

    There is none where there is no file. What a record lacks, because it is older, is None.
    """
    latest: dict[tuple[object, ...], dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            latest[tuple(record.get(name) for name in key)] = record
    return list(latest.values())


def resident_mib() -> float:
    """Memory of this process that is resident now (its peak where the system tells no more)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    return peak_resident_mib()


def peak_resident_mib() -> float:
    """Most memory of this process that was ever resident."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak * 1024 / _MIB
