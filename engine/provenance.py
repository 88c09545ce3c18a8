"""What a figure was measured with: the commit of these files, the processor's name.

Owns how both are found out. Invariant: a figure is never refused for want of them.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_GIT_LIMIT_S = 10.0


def source_commit(folder: Path = _ROOT) -> str:
    """Return the short hash of a checkout's commit.

    "+" stands behind it where tracked files differ; "unknown" for a folder that is no checkout,
    such as packages that are installed somewhere inside of one.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_LIMIT_S
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder.resolve():
            return "unknown"
        commit = git("rev-parse", "--short=12", "HEAD")
        is_changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+" if is_changed else "")


def processor_name() -> str:
    """Return what the processor calls itself, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
