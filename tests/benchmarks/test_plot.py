"""The ladder's picture: its caption stays on it."""

from __future__ import annotations

import pytest

from benchmarks.plot import wrapped

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("", ""),
        ("one two", "one two"),
        ("one two three", "one two\nthree"),
        ("extraordinarily one", "extraordinarily\none"),
    ],
)
def test_lines_break_between_words_as_late_as_they_fit(words: str, lines: str) -> None:
    assert wrapped(words, lambda line: len(line) <= 8) == lines
