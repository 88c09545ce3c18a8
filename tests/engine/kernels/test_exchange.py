"""Kernels that pack and merge heads equal the permutes bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.exchange import (
    merge_heads,
    merge_heads_reference,
    pack_heads,
    pack_heads_reference,
)

_INTERPRETED = """
import torch
from engine.kernels.exchange import merge_heads_reference, pack_heads_reference
from engine.kernels.exchange_triton import merge, pack

generator = torch.Generator().manual_seed(0)
for batch_size, rows, heads, width, ranks in ((2, 9, 6, 16, 3), (1, 7, 4, 24, 2), (1, 1, 5, 4, 5)):
    fused = torch.randn(batch_size, rows, 3, heads, width, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        parts = fused.to(dtype).unbind(2)
        for count in (1, 2, 3):
            packed = pack(parts[:count], ranks)
            assert torch.equal(packed, pack_heads_reference(parts[:count], ranks)), count
        received = pack(parts[:1], ranks)
        assert torch.equal(merge(received), merge_heads_reference(received))
        assert torch.equal(merge(received), parts[0])
"""


@pytest.mark.cpu
def test_kernels_equal_the_permutes_in_interpreter_mode():
    pytest.importorskip("triton")
    # A process of its own: the mode is read when Triton is imported.
    result = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["pack", "merge"])
def test_kernels_compile_for_an_h200(name):
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    from engine.kernels import exchange_triton

    parts = torch.zeros(1, 5, 3, 56, 128, dtype=torch.bfloat16).unbind(2)
    received = torch.zeros(2, 5, 1, 28, 128, dtype=torch.bfloat16)
    launch = {
        "pack": lambda: exchange_triton.pack(parts, 2),
        "merge": lambda: exchange_triton.merge(received),
    }[name]
    (kernel,) = sm90.compiled_launches(launch)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "heads", "ranks"), [(1950, 56, 2), (1950, 56, 8), (5040, 56, 7), (41, 6, 3)],
    ids=["r1950-w2", "r1950-w8", "r5040-w7", "r41-w3"],
)  # fmt: skip
def test_kernels_equal_the_permutes(rows, heads, ranks):
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(
        1, rows, 3, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16
    )
    parts = fused.unbind(2)
    packed = pack_heads(parts, ranks)
    assert torch.equal(packed, pack_heads_reference(parts, ranks))
    received = pack_heads(parts[:1], ranks)
    assert torch.equal(merge_heads(received), merge_heads_reference(received))


@pytest.mark.gpu
def test_parts_have_to_be_dense_in_the_last_axis():
    part = torch.zeros(1, 4, 16, 2, device="cuda").transpose(2, 3)
    with pytest.raises(ValueError, match="not dense in its last axis"):
        pack_heads([part], 2)
