"""One rollout of several processes, from the command line to its files, and made again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from engine.errors import ConfigError, DeviceError
from engine.ranks import Ranks
from stream.cli import main
from stream.trace import read_trace
from stream.world_spec import world_spec
from stream.worlds import load_models
from tests.stream.test_cli import TINY

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def by_ranks(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command as two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*command, "2", "-m", "stream.cli", *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A video of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "seed.png")
    options = ["--image", "seed.png", "--actions", "w*17 left*17", "--out", "a.mp4"]
    return folder, by_ranks(folder, "generate", *options, *TINY)


def test_ranks_make_one_video_that_the_first_one_writes(made):
    folder, result = made
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sha256") == 1
    assert result.stderr.count("chunk 2/2") == 1
    with av.open(folder / "a.mp4") as video:
        assert sum(1 for _ in video.decode(video=0)) == 34
    trace = read_trace(folder / "a.trace.jsonl")
    assert (trace.header.rank_count, len(trace.chunks)) == (2, 2)
    assert trace.end is not None
    assert trace.end.digest in result.stdout


def test_as_many_ranks_make_it_again(made):
    folder, _ = made
    result = by_ranks(folder, "replay", "a.trace.jsonl")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("same as recorded: 2 of 2 chunks") == 1


@pytest.mark.parametrize(("run_id", "late"), [({}, "late\n"), ({"TORCHELASTIC_RUN_ID": "1"}, "")])
def test_a_rank_ends_before_the_interpreter_takes_anything_down(run_id, late):
    code = "import atexit, engine.ranks as r; atexit.register(print, 'late'); r.end_process(3)"
    others = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=others | run_id, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (3, late)


def test_fewer_are_refused(made, capsys):
    folder, _ = made
    assert main(["replay", str(folder / "a.trace.jsonl")]) == 2
    assert "made by 2 processes, these are 1; allowed: as many" in capsys.readouterr().err


def test_a_batch_is_for_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "jobs.jsonl").write_text("{}\n")
    assert main(["generate", "--batch", str(tmp_path / "jobs.jsonl")]) == 2
    assert "batch: several ranks" in capsys.readouterr().err


def test_a_process_by_itself_asks_nobody():
    ranks = Ranks()
    assert (ranks.count, ranks.is_first, ranks.device("cuda:3")) == (1, True, "cuda:3")
    assert [ranks.any(flag) for flag in (True, False)] == [True, False]
    assert ranks.least(2.5) == 2.5
    ranks.require_alike("auto")


class _Two:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def test_ranks_on_a_cpu_need_a_dtype_by_name():
    ranks = Ranks(own_device="cpu", group=_Two())
    assert (ranks.count, ranks.is_first, ranks.device("auto")) == (2, False, "cpu")
    with pytest.raises(ConfigError, match="dtype: auto; allowed for ranks on a CPU: float32"):
        ranks.require_alike("auto")
    ranks.require_alike("float32")


@pytest.mark.parametrize(("own", "of_both"), [(0, False), (1, True)])
def test_one_rank_speaks_for_all(monkeypatch, own, of_both):
    def all_reduce(said: torch.Tensor, how: object, group: object) -> None:
        said.fill_(max(int(said), own))

    monkeypatch.setattr("engine.ranks.dist.all_reduce", all_reduce)
    assert Ranks(group=_Two()).any(False) is of_both


@pytest.mark.parametrize(("other", "of_both"), [(99.25, 99.25), (float("inf"), 139.5)])
def test_the_least_of_all_ranks_counts(monkeypatch, other, of_both):
    def all_reduce(said: torch.Tensor, how: dist.ReduceOp, group: object) -> None:
        assert how == dist.ReduceOp.MIN
        said.fill_(min(float(said), other))

    monkeypatch.setattr("engine.ranks.dist.all_reduce", all_reduce)
    assert Ranks(group=_Two()).least(139.5) == of_both


@dataclass(frozen=True, kw_only=True, slots=True)
class _BesideAPoorOne(Ranks):
    def least(self, value: float) -> float:
        return min(value, 0.25)


def test_a_rank_plans_with_what_the_poorest_of_all_has():
    """Else one would hold bf16 linears and another eight bits."""
    spec = world_spec(
        "tiny", size=None, weights="random", renderer=False, device="cpu", dtype="float32"
    )
    with pytest.raises(DeviceError, match=r"; 0\.2 GiB are free"):
        load_models(spec, ranks=_BesideAPoorOne())
