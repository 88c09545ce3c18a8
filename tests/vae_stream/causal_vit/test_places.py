"""Windows, slots and rotary tables of the causal ViT decoder."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tolerances import VIT_TABLE_ATOL
from tests.vae_stream.causal_vit.oracle import tables
from vae_stream.causal_vit.modes import FIRST, PAIR, SECOND
from vae_stream.causal_vit.places import (
    RING_SLOTS,
    CallKind,
    CausalConfig,
    frequencies,
    moment,
    plan_windows,
)
from vae_stream.vit import VitConfig

pytestmark = pytest.mark.cpu

NETWORK = VitConfig(layer_count=1, head_count=1)


@pytest.mark.parametrize(
    ("height_px", "width_px", "plain", "moved"),
    [(768, 1344, 18, 24), (720, 1280, 15, 24), (480, 832, 8, 12)],
)
def test_windows_of_the_usual_sizes(height_px: int, width_px: int, plain: int, moved: int) -> None:
    height, width = height_px // 16, width_px // 16
    for shift, count in ((0, plain), (8, moved)):
        plan = plan_windows(height, width, shift, network=NETWORK, causal=CausalConfig())
        assert len(plan.size_W) == count
        assert int(plan.size_W.sum()) == height * width
        assert int(plan.size_W.max()) == 256


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 7), (4, 4), (9, 6)])
def test_each_token_has_one_place_in_raster_order(height: int, width: int, shift: int) -> None:
    causal = CausalConfig(window=4)
    plan = plan_windows(height, width, shift, network=NETWORK, causal=causal)
    seen = []
    for tokens_J, size in zip(plan.token_WJ.tolist(), plan.size_W.tolist(), strict=True):
        own = tokens_J[:size]
        assert own == sorted(own)
        corners = {((at // width + shift) // 4, (at % width + shift) // 4) for at in own}
        assert len(corners) == 1
        assert tokens_J[size:] == [0] * (16 - size)
        seen += own
    assert sorted(seen) == list(range(height * width))
    assert plan.token_WJ.view(-1)[plan.place_R].tolist() == list(range(height * width))
    # In the ring, window follows window.
    assert [seen[row] for row in plan.ring_R.tolist()] == list(range(height * width))
    firsts = plan.token_WJ[:, 0].long()
    assert torch.equal(plan.ring_R[firsts], plan.begin_W.long())


@pytest.mark.parametrize("kind", [PAIR, FIRST, SECOND], ids=["pair", "first", "second"])
@pytest.mark.parametrize("first", [0, 5, 1003])
def test_slots_follow_from_the_clock(kind: CallKind, first: int) -> None:
    """Latent n lies in slot n mod 6; of those before the stream there are none."""
    plan = plan_windows(2, 2, 0, network=NETWORK, causal=CausalConfig())
    for now in range(first, first + 15):
        made = moment(
            torch.tensor([now, first]), kind, (plan,), frequencies(NETWORK), time_span=7.0,
            suffix_rows=5,
        )  # fmt: skip
        latents = range(max(first, now - kind.past), now + kind.latents)
        count = int(made.count_1)
        assert made.slots_S[:count].tolist() == [n % RING_SLOTS for n in latents]
        assert made.own_C.tolist() == [n % RING_SLOTS for n in range(now, now + kind.latents)]


@pytest.mark.parametrize("now", [0, 1, 25_412, 10**6, 10**9])
def test_angles_keep_their_precision_for_ever(now: int) -> None:
    causal = CausalConfig()
    plan = plan_windows(2, 3, 8, network=NETWORK, causal=causal)
    made = moment(
        torch.tensor([now, 0]), SECOND, (plan,), frequencies(NETWORK), time_span=7.0, suffix_rows=5
    )
    expected = tables(NETWORK, causal, 8, [now], 2, 3, max(0, now - 1))
    # Positions in float64 have 2^-53 of their size: 3e-7 of a turn at 10^9.
    atol = VIT_TABLE_ATOL + 2 * math.pi * now * 2**-52
    for ours, oracle in zip(made.tables[0], expected, strict=True):
        torch.testing.assert_close(ours, oracle, atol=atol, rtol=0)
