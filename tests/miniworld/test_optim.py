"""Muon, its pairing, fp32 masters, averages, schedule."""

import math

import pytest
import torch
from torch import nn

from miniworld.stages.optim import (
    Ema,
    MasterWeights,
    Muon,
    cosine_scale,
    optimizer_pair,
    orthogonalise,
    scale_learning_rate,
)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("shape", [(2, 8, 24), (1, 24, 8), (3, 9, 9)], ids=str)
def test_singular_values_end_near_one(shape: tuple[int, int, int]) -> None:
    made = orthogonalise(torch.randn(shape))

    # The quintic's band for five steps is 0.68..1.13; bf16 rounding adds a little; a singular
    # value that starts near 0 (square matrices) may stay below the band.
    values = torch.linalg.svdvals(made.float())
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_an_update_has_the_rms_of_adamw() -> None:
    weight = nn.Parameter(torch.zeros(64, 192))
    weight.grad = torch.randn(64, 192)

    Muon([weight], lr=1.0, weight_decay=0.0).step()

    # 64 singular values of about 1 over 64 * 192 entries, times 0.2 sqrt(192): 0.2.
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_split_rows_update_like_matrices_of_their_own() -> None:
    grad = torch.randn(12, 5)
    whole = nn.Parameter(torch.randn(12, 5))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(3)]
    whole.grad = grad
    for part, part_grad in zip(parts, grad.chunk(3), strict=True):
        part.grad = part_grad

    Muon([whole], [3], lr=0.1).step()
    Muon(parts, lr=0.1).step()

    assert torch.equal(whole, torch.cat(parts))


def test_momentum_survives_a_checkpoint() -> None:
    def run(steps: int, weight: nn.Parameter, optimizer: Muon) -> None:
        for step in range(steps):
            weight.grad = torch.full_like(weight, 1.0 + step).tril()
            optimizer.step()

    torch.manual_seed(1)
    first = nn.Parameter(torch.randn(4, 6))
    second = nn.Parameter(first.detach().clone())
    one, two = Muon([first], lr=0.1), Muon([second], lr=0.1)
    run(2, first, one)
    run(2, second, two)
    resumed = Muon([second], lr=0.1)
    resumed.load_state_dict(two.state_dict())

    run(2, first, one)
    run(2, second, resumed)

    assert torch.equal(first, second)


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(7,\) in 1 matrices"):
        Muon([torch.zeros(7)], lr=0.1)


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(7, 2\) in 3 matrices"):
        Muon([torch.zeros(7, 2)], [3], lr=0.1)


def test_a_pair_shares_out_every_parameter_once() -> None:
    layer = nn.Linear(4, 3)

    adamw, muon = optimizer_pair(
        layer.named_parameters(), {"weight": 1}, muon_lr=0.02, adamw_lr=0.01
    )
    scale_learning_rate([adamw, muon], 0.5)

    assert adamw.param_groups[0]["params"] == [layer.bias]
    assert muon.param_groups[0]["params"] == [layer.weight]
    assert (adamw.param_groups[0]["lr"], muon.param_groups[0]["lr"]) == (0.005, 0.01)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'weights' is no parameter"):
        optimizer_pair(
            nn.Linear(2, 2).named_parameters(), {"weights": 1}, muon_lr=0.1, adamw_lr=0.1
        )


def test_masters_keep_steps_that_bf16_would_lose() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    masters = MasterWeights([weight])
    optimizer = torch.optim.SGD(masters.masters, lr=1e-3)

    for _ in range(4):  # bf16 near 1 moves in steps of 2^-8: one step of 1e-3 alone rounds back
        weight.grad = torch.ones_like(weight)
        masters.step([optimizer])

    torch.testing.assert_close(masters.masters[0], torch.full((4,), 1 - 4e-3))
    assert torch.equal(weight, torch.full((4,), 1 - 4e-3).bfloat16())


def test_masters_of_fp32_weights_are_the_weights() -> None:
    weight = nn.Parameter(torch.ones(3))

    masters = MasterWeights([weight])

    assert masters.is_identity
    assert masters.masters[0] is weight


def test_masters_skip_weights_without_gradient() -> None:
    used, unused = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    masters = MasterWeights([used, unused])
    optimizer = torch.optim.AdamW(masters.masters, lr=0.1, weight_decay=0.5)
    used.grad = torch.ones_like(used)

    masters.step([optimizer])

    assert torch.equal(unused, torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_before_clipping(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    masters = MasterWeights([weight])
    weight.grad = torch.tensor([3.0, 4.0], dtype=dtype)

    norm = masters.step([torch.optim.SGD(masters.masters, lr=1.0)], max_norm=1.0)

    assert norm.item() == 5.0
    # The clip divides by norm + 1e-6.
    torch.testing.assert_close(masters.masters[0], torch.tensor([-0.6, -0.8]), rtol=1e-6, atol=0)


def test_a_step_without_gradient_is_refused() -> None:
    masters = MasterWeights([nn.Parameter(torch.zeros(2))])

    with pytest.raises(RuntimeError, match="no weight has a gradient"):
        masters.step([])


def test_an_average_warms_up_and_then_keeps_its_decay() -> None:
    weight = nn.Parameter(torch.zeros(1))
    average = Ema([weight], decay=0.2)
    weight.data.fill_(1.0)

    average.update()  # decay 1/10
    assert average.shadow[0].item() == pytest.approx(0.9)
    average.update()  # decay 2/11, below 0.2
    average.update()  # decay 0.2, not 3/12

    expected = 1 - 0.1 * (2 / 11) * 0.2
    assert average.shadow[0].item() == pytest.approx(expected)


def test_cosine_runs_from_warm_up_to_the_floor() -> None:
    assert cosine_scale(0.0, 0, warm_up_steps=10) == pytest.approx(0.1)
    assert cosine_scale(0.5, 1_000, floor=0.1) == pytest.approx(0.55)
    assert cosine_scale(1.0, 1_000, floor=0.1) == pytest.approx(0.1)
    assert math.isclose(cosine_scale(7.0, 1_000), 0.0, abs_tol=1e-12)
