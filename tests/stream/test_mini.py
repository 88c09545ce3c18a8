"""The shipped mini world through the command line, against the renderer's true frames."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stream.cli import main
from stream.trace import read_trace
from tests.tolerances import MINI_FIRST_FRAME_DB, MINI_WALK_GAIN_DB

pytestmark = pytest.mark.cpu

OPTIONS = ["--scene", "meadow-forest", "--actions", "w*34 right*17", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chunks of the model and the true frames of the same walk."""
    folder = tmp_path_factory.mktemp("mini")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, options in {"made": [], "truth": ["--renderer"]}.items():
            outputs = ["--out", f"{name}.mp4", "--png", name]
            assert main(["generate", *OPTIONS, *outputs, *options]) == 0
    return folder


def _frames(folder: Path) -> np.ndarray:
    pictures = [np.asarray(Image.open(path), np.float32) for path in sorted(folder.iterdir())]
    return np.stack(pictures) / 255.0


def _psnr_db(first: np.ndarray, second: np.ndarray) -> float:
    return float(-10.0 * np.log10(np.mean((first - second) ** 2)))


def test_a_rollout_has_all_frames_and_starts_at_the_scene(folder: Path) -> None:
    made, truth = _frames(folder / "made"), _frames(folder / "truth")
    assert made.shape == truth.shape == (51, 160, 256, 3)
    assert _psnr_db(made[0], truth[0]) >= MINI_FIRST_FRAME_DB


@pytest.mark.parametrize("frame", [33, 50], ids=["walk", "turn"])
def test_the_world_moves_as_the_keys_say(frame: int, folder: Path) -> None:
    made, truth = _frames(folder / "made"), _frames(folder / "truth")
    frozen_db = _psnr_db(truth[0], truth[frame])
    assert _psnr_db(made[frame], truth[frame]) - frozen_db >= MINI_WALK_GAIN_DB


def test_replay_makes_the_same_latents(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert read_trace("made.trace.jsonl").header.weights == "shipped"
    assert main(["replay", "made.trace.jsonl"]) == 0
    assert "same as recorded: 3 of 3 chunks" in capsys.readouterr().out
