"""Attention backends: the fused product against the exact one, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from engine.attention.base import AttentionNeed, select_backend
from engine.attention.sdpa import ProductsBackend
from engine.errors import ConfigError, UnsupportedError
from tests.tolerances import FP32_ATOL

pytestmark = pytest.mark.cpu

NEED = AttentionNeed(device_type="cpu", dtype=torch.float32, head_dim=16)


@pytest.mark.parametrize(("rows", "keys"), [(9, 41), (1, 7), (7, 1), (65, 129)])
def test_sdpa_equals_the_exact_product(rows, keys):
    q, k, v = torch.randn(2, rows, 3, 16), torch.randn(2, keys, 3, 16), torch.randn(2, keys, 3, 16)
    exact = select_backend(NEED, "math")(q, k, v)
    fused = select_backend(NEED)(q, k, v)
    assert fused.shape == (2, rows, 3, 16)
    assert (fused - exact).abs().max() <= FP32_ATOL


def _eager(q, k, v):
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("name", ["sdpa", "products"])
def test_bf16_is_as_near_to_fp32_as_rounding_allows(name):
    q, k, v = torch.randn(1, 9, 2, 16), torch.randn(1, 41, 2, 16), torch.randn(1, 41, 2, 16)
    need = AttentionNeed(device_type="cpu", dtype=torch.bfloat16, head_dim=16)
    low = [a.bfloat16() for a in (q, k, v)]
    reference = select_backend(NEED, "math")(*(a.float() for a in low))
    eager = _eager(*low).float()
    fused = select_backend(need, name)(*low).float()
    floor = torch.finfo(torch.bfloat16).eps * reference.abs().max()
    bound = 2 * (eager - reference).abs().max() + floor
    assert (fused - reference).abs().max() <= bound


def test_views_of_a_longer_buffer_give_the_same_bits():
    q, k, v = torch.randn(1, 9, 2, 16), torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
    backend = select_backend(NEED)
    whole = backend(q, k[:, :41].contiguous(), v[:, :41].contiguous())
    assert torch.equal(backend(q, k[:, :41], v[:, :41]), whole)


def test_products_in_blocks_equal_the_whole():
    q, k, v = torch.randn(2, 9, 3, 16), torch.randn(2, 41, 3, 16), torch.randn(2, 41, 3, 16)
    whole = ProductsBackend()(q, k, v)
    blocked = ProductsBackend(buffer_bytes=4 * 6 * 41 * 4)(q, k, v)
    assert (blocked - whole).abs().max() <= FP32_ATOL
    assert (whole - select_backend(NEED, "math")(q, k, v)).abs().max() <= FP32_ATOL


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", torch.bfloat16, "products"),
        ("cpu", torch.float32, "sdpa"),
        ("cuda", torch.bfloat16, "sdpa"),
    ],
)
def test_automatic_choice(device, dtype, name):
    assert select_backend(AttentionNeed(device_type=device, dtype=dtype, head_dim=64)).name == name


@pytest.mark.parametrize("name", ["sdpa", "products"])
def test_one_compiled_form_serves_every_number_of_keys(name):
    backend = select_backend(NEED, name)
    forms = CompileCounter()
    compiled = torch.compile(lambda q, k, v: backend(q, k, v), fullgraph=True, backend=forms)
    q = torch.randn(1, 9, 2, 16)
    for keys in (41, 50, 64):
        k, v = torch.randn(1, keys, 2, 16), torch.randn(1, keys, 2, 16)
        for tensor in (k, v):
            torch._dynamo.mark_dynamic(tensor, 1)
        assert torch.equal(compiled(q, k, v), backend(q, k, v))
    assert forms.frame_count == 1


def test_unknown_backend_is_refused():
    with pytest.raises(
        ConfigError,
        match="'fast'; allowed: auto, sdpa, cudnn, cudnn_split, flash, flex, fa3, fa4, gluon, prod",
    ):
        select_backend(NEED, "fast")


def test_refusal_carries_the_reason():
    need = AttentionNeed(device_type="cpu", dtype=torch.int64, head_dim=16)
    with pytest.raises(UnsupportedError, match=r"torch\.int64 is not floating point"):
        select_backend(need, "sdpa")
