"""What a figure was measured with: the commit of a checkout, and none elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.provenance import processor_name, source_commit

pytestmark = pytest.mark.cpu


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "a.txt").write_text("one")
    identity = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("init", "-q"), ("add", "a.txt"), (*identity, "commit", "-q", "-m", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return tmp_path


def test_a_checkout_has_the_hash_of_its_commit(checkout: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", source_commit(checkout))


def test_changed_files_are_told_and_new_ones_are_not(checkout: Path) -> None:
    commit = source_commit(checkout)
    (checkout / "b.txt").write_text("new")
    assert source_commit(checkout) == commit
    (checkout / "a.txt").write_text("two")
    assert source_commit(checkout) == commit + "+"


def test_a_folder_that_is_no_checkout_has_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_commit(tmp_path) == "unknown"


def test_packages_inside_of_a_checkout_have_none(checkout: Path) -> None:
    installed = checkout / "venv" / "site-packages"
    installed.mkdir(parents=True)
    assert source_commit(installed) == "unknown"


def test_a_machine_without_git_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert source_commit() == "unknown"


def test_a_processor_has_a_name() -> None:
    assert processor_name()
