"""Options of commands on machines without the library of the main command line.

Owns how a command shows its docstring, what a count is, and the reading of a dataclass: names,
defaults, choices and words are those of the dataclass, whose fields are texts, counts or literals,
each with a docstring below it. `worldstream` reads the same dataclass, so that both commands have
the same options.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


def command_parser(module: str, words: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m module``, which shows the docstring as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def count(text: str) -> int:
    """Read a number of things to measure.

    Raises: ArgumentTypeError for less than one, ValueError for what is no whole number.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; allowed: 1 or more")
    return number


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an option for each field of a dataclass."""
    hints, words = get_type_hints(options), _docstrings(options)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=field.default,
            type=int if hint is int else str,
            choices=get_args(hint) if get_origin(hint) is Literal else None,
            help=words[field.name].replace("%", "%%"),
        )


def take_options(found: argparse.Namespace, options: type[Options]) -> Options:
    """Make the dataclass of what the command line said.

    Raises: whatever the dataclass does for values that are not allowed.
    """
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    return options(**{field.name: getattr(found, field.name) for field in fields})


def _docstrings(options: type[Any]) -> dict[str, str]:
    """Texts that stand below the fields, on one line each."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    assert isinstance(tree, ast.ClassDef)
    words = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no docstring"
            words[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return words
