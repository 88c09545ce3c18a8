"""The fused form of the causal ViT decoder without a GPU: its kernels interpreted, its borders."""

from __future__ import annotations

import pytest
import torch

from tests.vae_stream.h3_tiny import random_vit
from vae_stream.causal_vit import CausalVitDecoder, Form, window_attention
from vae_stream.causal_vit.fused import split_head, split_rows

pytestmark = pytest.mark.cpu


def test_parts_of_bf16_make_the_product_of_fp32() -> None:
    x_RD, weight_PD = torch.randn(40, 512), torch.randn(30, 512) * 512**-0.5
    exact = x_RD.double() @ weight_PD.double().T
    product = split_rows(x_RD).double() @ split_head(weight_PD).double().T
    # What is left out is 2^-9 of either side: 2^-18 of a term, of which 512 add up at random.
    assert (product - exact).abs().max() < 2**-15
    rounded = x_RD.bfloat16().double() @ weight_PD.bfloat16().double().T
    assert (rounded - exact).abs().max() > 2**-9


@pytest.mark.parametrize("form", [Form.COMPILED, Form.RECORDED])
def test_a_form_that_the_device_has_not_is_refused(form: Form) -> None:
    with pytest.raises(ValueError, match=f"form: {form} on cpu; allowed: plain, or cuda"):
        CausalVitDecoder(random_vit(), height_px=32, width_px=32, form=form)


def test_a_cpu_decodes_plainly() -> None:
    assert CausalVitDecoder(random_vit(), height_px=32, width_px=32).form == Form.PLAIN


def test_kernels_refuse_a_cpu() -> None:
    rows, ring = torch.zeros(9, 192), torch.zeros(6, 4, 64)
    tables = torch.zeros(9, 24)
    with pytest.raises(ValueError, match="place: qkv is on cpu; allowed: cuda"):
        window_attention.place(
            rows, tables, tables, torch.zeros(1, dtype=torch.int64), ring, ring.clone(), 1, 1e-5
        )
