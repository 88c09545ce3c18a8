"""README.md and the model card: commands and programs run, figures have records, links lead on."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import pictures, quality, report, sqnr
from miniworld import evaluate, train
from miniworld.prompts import KNOWN_WORDS
from miniworld.scene import NAMED_SCENES
from stream.cli import main as worldstream
from stream.cli import read_command
from stream.script import KEYS, parse_timed_keys

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL_CARD = (ROOT / "miniworld" / "README.md").read_text(encoding="utf-8")
LINE_LIMIT = 200


def _blocks(language: str) -> list[str]:
    text = README + MODEL_CARD
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _commands(block: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def _without(arguments: list[str], *options: str) -> list[str]:
    """Leave out options and their values."""
    kept = list(arguments)
    for option in options:
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return kept


def _make(arguments: list[str]) -> None:
    """Let make plan the target; the options of `play` are then read."""
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    planned = subprocess.run(
        ["make", "--dry-run", "--directory", str(ROOT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if arguments == ["play"]:
        serve = next(
            shlex.split(line) for line in planned.splitlines() if "worldstream serve" in line
        )
        _worldstream(serve[serve.index("serve") :])


def _worldstream(arguments: list[str]) -> None:
    """Run with one chunk; `bench engine` on the tiny preset; of others only read the options."""
    if arguments[0] == "generate":
        arguments = [*_without(arguments, "--seconds", "--chunks"), "--chunks", "1"]
    if arguments[:2] == ["bench", "live"]:
        read_command(arguments)
        return
    if "--ladder" in arguments:
        arguments = _without(arguments, "--preset", "--geometry", "--plot")
        arguments += ["--preset", "tiny", "--chunks", "1", "--rows", "eager"]
    elif arguments[0] == "bench":
        arguments = _without(arguments, "--preset", "--chunks", "--ablations")
        arguments += ["--preset", "tiny", "--chunks", "1", "--ablations", "prefix_cache"]
    if arguments[0] == "serve":
        arguments = [*arguments, "--print-config"]
    assert worldstream(arguments) == 0


def _python(arguments: list[str]) -> None:
    """Run the module, in its short form; stages of training are only parsed."""
    flag, module, *rest = arguments
    assert flag == "-m"
    if module == "miniworld.train":
        train._parser().parse_args(rest)
    elif module == "miniworld.evaluate":
        assert evaluate.main([*rest, "--short", "--cases", "2", "--items", "vae"]) == 0
    elif module == "benchmarks.quality":
        # Each is compared with itself: no approximation touches what the short form looks at.
        files, options = rest[: rest.index("--control")], rest[rest.index("--control") :]
        assert quality.main([files[0], files[0], *options]) == 0
        for path in files[1:]:
            assert quality.main([path, path, *_without(options, "--control")]) == 0
    elif module == "benchmarks.sqnr":
        assert sqnr.main(rest) == 0
    else:
        {"benchmarks.pictures": pictures, "benchmarks.report": report}[module].main()


def _activate(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert arguments == [re.findall(r"^VENV := (.*)$", makefile, re.MULTILINE)[0] + "/bin/activate"]


RUNNERS: dict[str, Callable[[list[str]], None]] = {
    "make": _make,
    "worldstream": _worldstream,
    "python": _python,
    ".": _activate,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that looks like the repository as far as README's commands see it."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).resize((640, 480)).save("photo.jpg")
    (tmp_path / "jobs.jsonl").write_text(next(each for each in _blocks("json") if '"out"' in each))
    for name in ("miniworld", "benchmarks"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "miniworld" / "walk.jsonl", "miniworld")
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    shutil.copy(ROOT / "miniworld" / "README.md", "miniworld")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    monkeypatch.setattr(report, "MODEL_CARD", tmp_path / "miniworld" / "README.md")
    monkeypatch.setattr(report, "LADDER_PICTURES", tmp_path)
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "pictures")
    monkeypatch.setattr(pictures, "CHUNK_COUNT", 1)
    return tmp_path


@pytest.mark.parametrize("block", range(len(_blocks("bash"))))
def test_commands_run(block: int, folder: Path) -> None:
    for program, *arguments in _commands(_blocks("bash")[block]):
        RUNNERS[program](arguments)


@pytest.mark.parametrize("block", range(len(_blocks("python"))))
def test_programs_run(block: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(_blocks("python")[block], "README.md", "exec"), {})
    assert "torch.Size([4, 160, 256, 3])" in capsys.readouterr().out


def test_key_file_is_one() -> None:
    script = parse_timed_keys(next(each for each in _blocks("json") if '"frame"' in each))
    assert script.prompts


def test_figures_equal_their_records() -> None:
    assert report.filled(README, report.section()) == README
    card = report.MODEL_CARD.read_text(encoding="utf-8")
    assert report.filled(card, report.card_section()) == card


def test_links_and_pictures_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_names_are_those_of_the_code() -> None:
    scenes = README.partition("**Scenes**")[2].partition("**")[0]
    assert set(re.findall(r"`([a-z-]+)`", scenes)) == {*NAMED_SCENES, "--renderer"}
    table = README.partition("| keys | do |")[2].partition("\n\n")[0]
    named = re.findall(r"`([a-z-]+)`", table)
    assert set(KEYS) - {"none"} <= set(named)
    words = re.findall(r"\(([a-z, ]+)\)", README.partition("**Prompts**")[2].partition("\n\n")[0])
    assert {word for group in words for word in group.split(", ")} <= set(KNOWN_WORDS)


def test_layout_names_every_package() -> None:
    block = README.partition("## Layout")[2].partition("##")[0]
    named = re.findall(r"^([a-z_]+)/ ", block, re.MULTILINE)
    assert set(named) == {path.parent.name for path in ROOT.glob("*/__init__.py")} | {
        "tests",
        "web_client",
    }


def test_it_is_short() -> None:
    assert len(README.splitlines()) < LINE_LIMIT
