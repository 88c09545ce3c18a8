"""Types of the page's modules, where a TypeScript compiler is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

OLDEST_TSC = 5
WEB_CLIENT = Path(__file__).parents[2] / "web_client"


def test_modules_pass_the_type_checker() -> None:
    tsc = shutil.which("tsc")
    if tsc is None:
        pytest.skip("no tsc on this machine")
    version = subprocess.run([tsc, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.split()[-1].partition(".")[0]) < OLDEST_TSC:
        pytest.skip(f"tsc {version.split()[-1]} does not know the browser's media interfaces")
    result = subprocess.run(
        [tsc, "-p", str(WEB_CLIENT / "jsconfig.json")], capture_output=True, text=True, check=False
    )
    assert result.stdout == ""
    assert result.returncode == 0
