"""The two forms of the camera encoding, and where each is used."""

from __future__ import annotations

import pytest
import torch

from engine.attention.placement import (
    PlacementOps,
    eager_ops,
    place,
    place_by_products,
    turn,
    turn_by_products,
)
from tests.tolerances import FP32_ATOL, FP32_RTOL

pytestmark = pytest.mark.cpu

SHAPES = pytest.mark.parametrize(
    ("batch_size", "matrix_batch", "groups", "rows", "heads", "width", "start"),
    [(1, 1, 5, 40, 6, 64, 48), (2, 1, 1, 9, 3, 20, 8), (3, 3, 7, 7, 1, 16, 12)],
    ids=["mini", "one-matrix", "one-row-a-matrix"],
)


def _inputs(batch_size, matrix_batch, groups, rows, heads, width, start):
    generator = torch.Generator().manual_seed(0)
    x_BRNK = torch.randn(batch_size, rows, heads, width, generator=generator)
    angles_RK = torch.randn(rows, start, generator=generator)
    matrix_BG44 = torch.randn(matrix_batch, groups, 4, 4, generator=generator)
    return x_BRNK, angles_RK.cos(), angles_RK.sin(), matrix_BG44


@SHAPES
def test_products_equal_multiply_adds_in_fp32(
    batch_size, matrix_batch, groups, rows, heads, width, start
):
    x, cos, sin, matrix = _inputs(batch_size, matrix_batch, groups, rows, heads, width, start)
    torch.testing.assert_close(
        place_by_products(x, cos, sin, matrix),
        place(x, cos, sin, matrix),
        atol=FP32_ATOL,
        rtol=FP32_RTOL,
    )


@SHAPES
def test_products_round_to_bf16_once(batch_size, matrix_batch, groups, rows, heads, width, start):
    x, _, _, matrix = _inputs(batch_size, matrix_batch, groups, rows, heads, width, start)
    low = x.bfloat16()
    exact = turn(low.double(), matrix, start)
    # Half a step of bf16, and what fp32 sums of four differ by where that decides the rounding.
    bound = exact.abs() * (2**-8 + 2**-20) + FP32_ATOL
    assert ((turn_by_products(low, matrix, start) - exact).abs() <= bound).all()


def test_a_transposed_output_keeps_its_values():
    x, _, _, matrix = _inputs(1, 1, 5, 40, 6, 64, 48)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(turn_by_products(heads_first, matrix, 48), turn_by_products(x, matrix, 48))


def test_products_are_for_cpus_alone():
    assert eager_ops(torch.device("cpu")).turn is turn_by_products
    assert eager_ops(torch.device("cuda", 0)) == PlacementOps()
