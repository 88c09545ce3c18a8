"""Attention in eight bits: its plain form against exact attention, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from engine.attention.sdpa import MathBackend
from engine.errors import ConfigError
from engine.kernels import contract
from engine.kernels import fp8_attention_reference as reference
from engine.kernels.fp8_attention import fp8_attend, room_of, window_codes
from engine.kernels.reference import dequantize_rows
from engine.quant import sqnr_db
from tests.tolerances import FP8_LINEAR_SQNR_DB

pytestmark = pytest.mark.cpu


def _given(keys: int, rows: int = 9, width: int = 64, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(2, rows, 3, width, generator=generator)
    k, v = torch.randn(2, 2, 3, keys, width, generator=generator).transpose(2, 3).unbind(0)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("keys", [1, 41, 128, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_as_near_to_exact_attention_as_a_linear_in_eight_bits(keys, dtype):
    q, k, v = _given(keys, dtype=dtype)
    made = fp8_attend(q, *window_codes(k, v), keys)
    assert (made.dtype, made.shape, made.is_contiguous()) == (dtype, q.shape, True)
    assert sqnr_db(MathBackend()(q, k, v), made) >= FP8_LINEAR_SQNR_DB


def test_codes_stand_for_the_window_and_are_zero_behind_it():
    _, k, v = _given(129)
    k_codes, k_factors, v_codes, v_factors = window_codes(k, v)
    assert k_codes.shape == (2, 3, room_of(129), 64) == (2, 3, 256, 64)
    k_BNSK = dequantize_rows(k_codes, k_factors)
    v_BNKS = dequantize_rows(v_codes, v_factors)
    assert sqnr_db(k, k_BNSK[:, :, :129].transpose(1, 2)) >= FP8_LINEAR_SQNR_DB
    assert sqnr_db(v, v_BNKS[..., :129].permute(0, 3, 1, 2)) >= FP8_LINEAR_SQNR_DB
    assert not k_BNSK[:, :, 129:].any()
    assert not v_BNKS[..., 129:].any()


def test_a_value_far_out_costs_its_own_block_of_keys_alone():
    _, k, v = _given(256)
    v[:, 200] *= 1e3
    exact, coded = v[:, :128], dequantize_rows(*window_codes(k, v)[2:])[..., :128]
    assert sqnr_db(exact, coded.permute(0, 3, 1, 2)) >= FP8_LINEAR_SQNR_DB


def test_weights_are_rounded_against_the_largest_logit_so_far():
    # The first keys weigh nothing beside the last one, which a rounded sum must not feel.
    q, k, v = _given(130)
    k[:, -1] = 40.0 * q.mean(1)
    codes = window_codes(k, v)
    made, exact = fp8_attend(q, *codes, 130), reference.attend_codes(q, *codes, 130)
    assert sqnr_db(exact, made) >= FP8_LINEAR_SQNR_DB


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("keys", lambda each: 0, "keys is 0; allowed: 1 to 256"),
        ("keys", lambda each: 257, "keys is 257; allowed: 1 to 256"),
        ("k_codes", lambda each: each.float(), "k_codes is torch.float32"),
        ("k_factors", lambda each: each[..., 0], "k_factors has shape"),
        ("v_codes", lambda each: each.mT, "v_codes has shape"),
        ("v_factors", lambda each: each.double(), "v_factors is torch.float64"),
        ("q_BRNK", lambda each: each.double(), "q is torch.float64"),
    ],
)
def test_wrong_arguments_are_refused(name, change, message):
    q, k, v = _given(130)
    names = ("k_codes", "k_factors", "v_codes", "v_factors")
    given = {"q_BRNK": q, **dict(zip(names, window_codes(k, v), strict=True)), "keys": 130}
    given[name] = change(given[name])
    with pytest.raises(ConfigError, match=message):
        fp8_attend(**given)


def test_kernels_refuse_heads_of_other_widths(monkeypatch):
    q, k, v = _given(5, width=32)
    codes = window_codes(k, v)
    monkeypatch.setattr(contract, "kernels_run_on", lambda x: True)
    with pytest.raises(ConfigError, match="window_codes: heads are 32 wide; allowed: 64 or 128"):
        window_codes(k, v)
    with pytest.raises(ConfigError, match="fp8_attend: heads are 32 wide; allowed: 64 or 128"):
        fp8_attend(q, *codes, 5)
