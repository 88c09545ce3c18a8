"""The fused form of the causal ViT decoder without a GPU: its kernels interpreted, its borders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vae_stream.h3_tiny import random_vit
from vae_stream.causal_vit import CausalVitDecoder, Form, window_attention

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
HEADS = 32


def test_interpreted_it_agrees_with_the_plain_form() -> None:
    """Kernels, calls and recordings in one process: the interpreter is chosen at import."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "tests.vae_stream.causal_vit.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) > 4
    assert found == {name: [] for name in found}


@pytest.mark.parametrize("form", [Form.COMPILED, Form.RECORDED])
def test_a_form_that_the_device_has_not_is_refused(form: Form) -> None:
    with pytest.raises(ValueError, match=f"form: {form} on cpu; allowed: plain, or cuda"):
        CausalVitDecoder(random_vit(), height_px=32, width_px=32, form=form)


def test_placing_compiles_for_an_h200() -> None:
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    kernels = pytest.importorskip("vae_stream.causal_vit.window_attention_triton")
    rows, channels = 17, 64 * HEADS
    qkv_RF = torch.zeros(rows, 3 * channels, dtype=torch.bfloat16)
    ring = (torch.zeros(6, rows - 5, channels, dtype=torch.bfloat16),) * 2
    table, numbers = torch.zeros(rows, 24), torch.zeros(rows - 5, dtype=torch.int64)

    (place,) = sm90.compiled_launches(
        lambda: kernels.place(
            qkv_RF, qkv_RF[0], table, table, numbers[:1], numbers, *ring, HEADS, 1.0, 1e-5
        )
    )  # fmt: skip

    assert ".v4.b32" in place.asm["ptx"]


@pytest.mark.parametrize(
    ("windows", "places", "latents", "suffix"),
    [(8, 256, 1, 5), (8, 256, 2, 5), (14, 1797, 1, 0)],
    ids=["one latent", "a pair", "whole tiles"],
)
def test_attention_compiles_for_an_h200(
    windows: int, places: int, latents: int, suffix: int
) -> None:
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    kernels = pytest.importorskip("vae_stream.causal_vit.window_attention_triton")
    tokens, channels = windows * places, 64 * HEADS
    q_RD = torch.zeros(latents * tokens + suffix, channels, dtype=torch.bfloat16)
    slots_S = torch.zeros(6, dtype=torch.int64)
    ring = (torch.zeros(6, tokens, channels, dtype=torch.bfloat16),) * 2
    token_WJ = torch.zeros(windows, places, dtype=torch.int32)

    attend, *merge = sm90.compiled_launches(
        lambda: kernels.attend(
            q_RD, *ring, q_RD[:suffix], q_RD[:suffix], slots_S, slots_S[:1], token_WJ,
            token_WJ[:, 0].contiguous(), token_WJ[:, 0].contiguous(), HEADS,
        )
    )  # fmt: skip

    assert len(merge) == (suffix > 0)
    # Products on tensor cores, from tiles that are copied while others are computed; two programs
    # fit an SM.
    assert "wgmma.mma_async" in attend.asm["ptx"]
    assert "cp.async.cg" in attend.asm["ptx"]
    assert attend.metadata.shared <= 110 * 1024


def test_a_cpu_decodes_plainly() -> None:
    assert CausalVitDecoder(random_vit(), height_px=32, width_px=32).form == Form.PLAIN


def test_kernels_refuse_a_cpu() -> None:
    rows, ring = torch.zeros(9, 192), torch.zeros(6, 4, 64)
    tables = torch.zeros(9, 24)
    with pytest.raises(ValueError, match="place: qkv is on cpu; allowed: cuda"):
        window_attention.place(
            rows,
            rows[0],
            tables,
            tables,
            torch.zeros(1, dtype=torch.int64),
            torch.arange(4),
            ring,
            ring.clone(),
            1,
            1.0,
            1e-5,
        )
