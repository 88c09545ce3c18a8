import errno
import os
from pathlib import Path

import pytest
from PIL import Image

from engine.errors import ConfigError
from stream.jobs import (
    CHUNK_LIMIT,
    PROMPT_LIMIT,
    SEED_LIMIT,
    JobOptions,
    check_prompt,
    check_writable,
    options_from_json,
    parse_seed,
    plan,
    read_batch,
)

pytestmark = pytest.mark.cpu


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "seed.png"
    Image.new("RGB", (96, 64), (90, 120, 60)).save(path)
    return str(path)


def _options(tmp_path: Path, **changes: object) -> JobOptions:
    given = {"out": str(tmp_path / "a.mp4"), "actions": "w*34", "scene": "meadow-forest"}
    return JobOptions(**{**given, **changes})


@pytest.mark.parametrize(
    ("value", "seed"), [("0", 0), ("18446744073709551615", SEED_LIMIT), (7, 7)]
)
def test_seed_is_a_whole_number(value: object, seed: int) -> None:
    assert parse_seed(value) == seed


@pytest.mark.parametrize(
    "value", ["-1", "1.5", str(2**64), "abc", "", "1e3", " 1", "\u0661", 1.5, True]
)
def test_seed_outside_is_refused_with_the_limit(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^seed: .*0 to 2\^64-1"):
        parse_seed(value)


@pytest.mark.parametrize("prompt", ["", "a lake", "ünïcode 🌋", "x" * PROMPT_LIMIT])
def test_prompt_is_allowed(prompt: str) -> None:
    assert check_prompt(prompt) == prompt


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("x" * 100_000, "1000"),
        ("a\tb", "U+0009 at position 1"),
        ("\x1b[31m", "U+001B"),
        ("a\nb", "U+000A"),
        ("\x7f", "U+007F"),
        ("\udcff", "U+DCFF"),
    ],
)
def test_prompt_is_refused(prompt: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^prompt: ") as refused:
        check_prompt(prompt)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "chunk_count"),
    [
        ({}, 2),
        ({"actions": "w*35"}, 3),
        ({"chunks": "5"}, 5),
        ({"chunks": 1}, 1),
        ({"seconds": "0.01"}, 1),
        ({"seconds": 17 / 24}, 1),
        ({"seconds": "0.75"}, 2),
        ({"seconds": 60}, 85),
    ],
)
def test_length_in_chunks(tmp_path: Path, changes: dict[str, object], chunk_count: int) -> None:
    assert plan(_options(tmp_path, **changes)).chunk_count == chunk_count


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"chunks": "0"}, ["chunks", "0", str(CHUNK_LIMIT)]),
        ({"chunks": "-1"}, ["chunks", "-1"]),
        ({"chunks": CHUNK_LIMIT + 1}, ["chunks", str(CHUNK_LIMIT)]),
        ({"seconds": "0"}, ["seconds", "more than 0"]),
        ({"seconds": "inf"}, ["seconds"]),
        ({"seconds": "nan"}, ["seconds"]),
        ({"seconds": "soon"}, ["seconds", "'soon'"]),
        ({"seconds": 1, "chunks": 1}, ["seconds, chunks"]),
        ({"actions": None}, ["actions: not given"]),
        ({"out": None}, ["out: not given"]),
        ({"actions": "hop*3"}, ["'hop'", "shift"]),
        ({"preset": "maxi"}, ["'maxi'", "mini, h3_33b, tiny"]),
        ({"preset": "h3_33b"}, ["no weights ship", "random"]),
        ({"weights": "nowhere"}, ["'nowhere'", "random"]),
        ({"size": "10x10"}, ["'10x10'", "256x160"]),
        ({"dtype": "float16"}, ["'float16'", "bfloat16"]),
        ({"device": "gpu"}, ["'gpu'", "cuda:N"]),
        ({"attention": "spars"}, ["attention", "'spars'", "sparse"]),
        ({"sparse_tau": "much"}, ["sparse_tau", "'much'", "a number"]),
        ({"sparse_tau": 9}, ["sparse_tau", "9", "-8.0 to 8.0"]),
        ({"sparse_block": 12}, ["sparse_block", "'12'", "8, 16, 32, 64"]),
        ({"sparse_steps": 0}, ["sparse_steps", "0", "whole numbers from 1 to 64"]),
        ({"sparse_steps": "two"}, ["sparse_steps", "'two'", "whole numbers from 1 to 64"]),
        ({"sparse_steps": 3}, ["sparse_steps", "3", "attention 'auto'", "attention 'sparse'"]),
        ({"scene": None}, ["neither"]),
        ({"image": "a.png"}, ["both"]),
        ({"renderer": True, "preset": "tiny", "weights": "random"}, ["renderer", "mini"]),
        ({"renderer": True, "scene": None, "image": "a.png"}, ["renderer", "a scene"]),
        ({"seconds": 200, "gif": "a.gif"}, ["gif", "120"]),
    ],
)
def test_option_is_refused(tmp_path: Path, changes: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(_options(tmp_path, **changes))
    for name in names:
        assert name in str(refused.value)


def test_prompt_in_a_script_is_checked_too(tmp_path: Path) -> None:
    script = tmp_path / "a.jsonl"
    script.write_text('{"frame": 0, "prompt": "\\u0007"}\n')
    with pytest.raises(ConfigError, match="control character"):
        plan(_options(tmp_path, actions=str(script)))


def test_image_comes_at_the_size_of_the_preset(tmp_path: Path, image: str) -> None:
    job = plan(_options(tmp_path, scene=None, image=image, preset="h3_33b", weights="random",
                        size="832x480"))  # fmt: skip
    assert job.start.image is not None
    assert job.start.image.rgb_HWC.shape == (480, 832, 3)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"out": "gone/a.mp4"}, ["out", "does not exist"]),
        ({"out": "a.avi"}, ["out", ".mp4"]),
        ({"out": ".mp4"}, ["out", ".mp4"]),
        ({"out": "folder.mp4"}, ["out", "is a folder"]),
        ({"out": "old.mp4"}, ["out", "exists", "--force"]),
        ({"gif": "old.gif"}, ["gif", "exists", "--force"]),
        ({"gif": "a.png"}, ["gif", ".gif"]),
        ({"png": "old.mp4"}, ["png", "is a file"]),
        ({"png": "full"}, ["png", "not empty", "--force"]),
        ({"png": "gone/frames"}, ["png", "does not exist"]),
    ],
)
def test_place_to_write_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    names: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder.mp4", "full"):
        (tmp_path / folder).mkdir()
    for file in ("old.mp4", "old.gif", "full/a"):
        (tmp_path / file).touch()
    with pytest.raises(ConfigError) as refused:
        plan(_options(tmp_path, **changes))
    for name in names:
        assert name in str(refused.value)


def test_force_replaces(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    assert plan(_options(tmp_path, force=True)).outputs.video == tmp_path / "a.mp4"


def test_planning_leaves_no_file(tmp_path: Path) -> None:
    plan(_options(tmp_path, png=str(tmp_path / "frames"), gif=str(tmp_path / "a.gif")))
    assert list(tmp_path.iterdir()) == []


def test_folder_that_takes_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A real read-only folder needs a mount: permission bits do not stop root, who runs CI.
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ConfigError, match=r"out: cannot write in .*Read-only"):
        check_writable(tmp_path, "out")


def test_batch_line_is_laid_over_the_command_line() -> None:
    defaults = JobOptions(preset="tiny", weights="random", seed="3")
    options = options_from_json('{"out": "b.mp4", "actions": "w*17", "seed": 4}', defaults)
    assert (options.out, options.preset, options.seed) == ("b.mp4", "tiny", 4)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("{", "not JSON"),
        ("[1]", "list"),
        ('{"outt": "a.mp4"}', "'outt'"),
        ('{"out": 3}', "out is 3"),
        ('{"force": 1}', "force is 1"),
        ('{"seed": true}', "seed is true"),
        ('{"seed": [1]}', "seed is [1]"),
    ],
)
def test_batch_line_is_refused(line: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^job: ") as refused:
        options_from_json(line, JobOptions())
    assert name in str(refused.value)


def test_batch_keeps_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n{}\n\n{}\n")
    assert [number for number, _ in read_batch(str(path))] == [2, 4]


def test_empty_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no job"):
        read_batch(str(path))
