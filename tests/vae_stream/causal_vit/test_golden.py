"""The causal ViT decoder against outputs of the public code: tables and states."""

from __future__ import annotations

import pytest
import torch

from tests.tolerances import (
    BF16_GOLDEN_RATIO,
    VIT_STATE_ATOL,
    VIT_TABLE_ATOL,
)
from tests.vae_stream.causal_vit.golden_vit import (
    assert_near,
    cases_with,
    decoded,
    golden,
    golden_vit,
    recorded_names,
    rms,
    window_of,
)
from vae_stream.causal_vit import CausalConfig, Mode
from vae_stream.causal_vit.modes import PAIR
from vae_stream.causal_vit.places import frequencies, moment, plan_windows

pytestmark = pytest.mark.cpu

STATES = ("embed", "hidden", "suffix", "ring_k", "ring_v")
PLACED = ("q", "k", "v", "attn", "suf_q", "suf_k", "suf_v", "suf_attn")


@pytest.mark.parametrize("case", cases_with("table.window_of_token"))
def test_windows_are_those_of_the_reference(case: str) -> None:
    tensors = golden(case)
    height, width = tensors["in.z"].shape[2:]
    causal, network = CausalConfig(window=window_of(case)), golden_vit(torch.float32).config
    for shift in (0, causal.window // 2):
        plan = plan_windows(height, width, shift, network=network, causal=causal)

        window_R = plan.place_R // causal.window**2
        expected = tensors[f"table.window_of_token.s{shift}"].long()
        assert torch.equal(window_R.view(height, width), expected)
        assert torch.equal(plan.size_W, tensors[f"table.tokens_per_window.s{shift}"])


@pytest.mark.parametrize("case", cases_with("table.suffix_cos"))
def test_rotary_tables_are_those_of_the_reference(case: str) -> None:
    tensors = golden(case)
    height, width = tensors["in.z"].shape[2:]
    causal, network = CausalConfig(window=window_of(case)), golden_vit(torch.float32).config
    shifts = (0, causal.window // 2)
    plans = tuple(
        plan_windows(height, width, shift, network=network, causal=causal) for shift in shifts
    )
    for call in (0, 5):
        now = moment(
            torch.tensor([2 * call, 0]), PAIR, plans, frequencies(network),
            time_span=causal.time_span, suffix_rows=5,
        )  # fmt: skip
        for kind in ("cos", "sin"):
            for shift, table in zip(shifts, now.tables, strict=True):
                rows_RA = table[kind == "sin"].repeat(1, 2)
                own_CRA = rows_RA[:-5].unflatten(0, (2, -1))
                assert_near(rows_RA[-1], tensors[f"table.suffix_{kind}.c{call}"], VIT_TABLE_ATOL)
                name = f"table.{kind}.c{call}.s{shift}"
                if name in tensors:
                    assert_near(own_CRA, tensors[name], VIT_TABLE_ATOL)


@pytest.mark.parametrize("case", cases_with("fp32.hidden"))
def test_states_are_those_of_the_reference(case: str, monkeypatch) -> None:
    tensors, run = golden(case), decoded(case, monkeypatch)
    for name in recorded_names(tensors, *STATES, *PLACED):
        assert_near(run.tensors[name].flatten(), tensors[f"fp32.{name}"].flatten(), VIT_STATE_ATOL)


@pytest.mark.parametrize("case", cases_with("bf16.hidden"))
def test_bf16_states_are_as_near_to_fp32_as_those_of_the_deployed_class(case, monkeypatch) -> None:
    tensors, run = golden(case), decoded(case, monkeypatch, dtype=torch.bfloat16)
    for name in recorded_names(tensors, "hidden", "suffix", kind="bf16"):
        exact = tensors[f"fp32.{name}"]
        ours, theirs = rms(run.tensors[name] - exact), rms(tensors[f"bf16.{name}"] - exact)
        assert ours <= BF16_GOLDEN_RATIO * theirs, name
    for name in recorded_names(tensors, "post_quant", kind="bf16"):
        theirs = tensors[f"bf16.{name}"]
        # Theirs is rounded to eight bits, and so are its terms; ours is fp32.
        assert rms(run.tensors[name] - theirs) <= 2**-8 * rms(theirs), name


def test_the_ring_of_single_latents_holds_five_of_the_past(monkeypatch) -> None:
    run = decoded("w4", monkeypatch, Mode.SINGLE_A1)
    expected = golden("design")["design.A1.ring_k.last.L1"]
    assert_near(run.tensors["ring_k.c14.L1"], expected, VIT_STATE_ATOL)
