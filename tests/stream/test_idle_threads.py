"""How long idle threads spin: set once, and never over what the user set."""

import os

import pytest

from stream.idle_threads import LONE_SPIN_COUNT, SHARED_SPIN_COUNT, set_spin_count

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_count_is_set_for_processes_that_start_now() -> None:
    set_spin_count(LONE_SPIN_COUNT)
    assert os.environ["GOMP_SPINCOUNT"] == "200000"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    set_spin_count(SHARED_SPIN_COUNT)
    assert os.environ.get("GOMP_SPINCOUNT") == ("7" if name == "GOMP_SPINCOUNT" else None)
