"""Layer rules of the packages, and imports without side effects."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "graphs", "vae_stream", "stream", "miniworld", "benchmarks")


def _modules(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


@pytest.fixture
def _loggers_as_before() -> Iterator[None]:
    """Import-linter disables every logger that there is; later tests read what they say."""
    yield
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.mark.usefixtures("_loggers_as_before")
def test_import_linter_contracts_hold() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_what_it_owns(package: str) -> None:
    text = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
    assert "Owns:" in text
    assert "Does not own:" in text


@pytest.mark.parametrize("package", PACKAGES)
def test_import_changes_no_global_state(package: str) -> None:
    program = f"""
import importlib, logging, os, sys
import torch
def state():
    return (dict(os.environ), logging.root.level, list(logging.root.handlers),
            torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.initial_seed(),
            torch.backends.cuda.matmul.allow_tf32, torch.cuda.is_initialized())
before = state()
for name in {_modules(package)!r}:
    importlib.import_module(name)
    assert state() == before, name
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
