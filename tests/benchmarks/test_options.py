"""A dataclass as options of a command, read with and without the library of the main one."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import pytest

from benchmarks import session_speed
from benchmarks.options import add_options, command_parser, count, take_options
from benchmarks.session_speed import SessionScenario
from stream.cli import main, read_command

pytestmark = pytest.mark.cpu


@dataclass(frozen=True)
class Few:
    """What a walk is like."""

    pace: Literal["slow", "fast"] = "slow"
    """How fast, 100 % of the time,
    on level ground."""
    step_count: int = 3
    """Steps."""
    name: str = "auto"
    """Whose."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="walk", exit_on_error=False)
    add_options(parser, Few)
    return parser


def _read(*arguments: str) -> Few:
    return take_options(_parser().parse_args(arguments), Few)


def test_options_are_the_fields() -> None:
    assert _read() == Few()
    assert _read("--pace", "fast", "--step-count", "5", "--name", "a") == Few("fast", 5, "a")


@pytest.mark.parametrize("wrong", [("--pace", "lame"), ("--step-count", "many")])
def test_wrong_values_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=wrong[1]):
        _read(*wrong)


def test_help_has_the_words_below_each_field() -> None:
    text = " ".join(_parser().format_help().split())
    assert "How fast, 100 % of the time, on level ground." in text


def test_a_command_shows_its_docstring_as_it_stands() -> None:
    parser = command_parser("benchmarks.walk", "How far.\n\n    a line of code\n")
    assert "How far.\n\n    a line of code\n" in parser.format_help()
    assert parser.prog == "python -m benchmarks.walk"


def test_a_count_is_one_at_least() -> None:
    assert count("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="0; allowed: 1 or more"):
        count("0")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--preset", "tiny", "--geometry", "64x32", "--rows", "exact,A", "--chunks", "2"],
        ["--kernels", "eager", "--dtype", "float32", "--decoder", "pair", "--weights", "random"],
    ],
)
def test_both_commands_of_a_session_read_the_same(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, SessionScenario)
    expected = take_options(parser.parse_args(arguments), SessionScenario)
    command = read_command(["bench", "session", *arguments])
    assert command.target.scenario == expected  # type: ignore[union-attr]


def test_a_wrong_session_is_refused_by_both(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (session_speed.main, lambda arguments: main(["bench", "session", *arguments])):
        assert command(["--rows", "B"]) == 2
        told = capsys.readouterr().err
        assert "error: rows: 'B'; allowed: exact, A, mixed, block, sparse\n" in told
