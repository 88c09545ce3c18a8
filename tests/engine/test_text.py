"""The word encoder: any string works, known words come first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import WordEncoder

pytestmark = pytest.mark.cpu

ENCODER = WordEncoder(("meadow", "night", "snow"), unknown_buckets=4, rows=5, text_dim=8)


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_any_string_gives_finite_rows_of_a_fixed_count(prompt):
    encoding = ENCODER.encode(prompt)
    assert encoding.rows_BRE.shape == (1, 5, 8)
    assert torch.isfinite(encoding.rows_BRE).all()
    assert encoding.tags_R.tolist() == [1] * 5


def test_known_words_survive_a_long_prompt():
    long = ENCODER.tokenize("filler " + " ".join(f"word{i}" for i in range(100)) + " snow")
    assert long[0] == ENCODER.tokenize("snow")[0]


def test_case_and_repeats_do_not_matter():
    assert ENCODER.tokenize("Snow SNOW, night!") == ENCODER.tokenize("snow night")


def test_unknown_words_share_the_buckets():
    ids = {ENCODER.tokenize(f"word{i}")[0] for i in range(50)}
    assert ids <= {4, 5, 6, 7}
