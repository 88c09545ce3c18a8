"""Two GPUs that share a rollout over NCCL, against one, and from graphs."""

from __future__ import annotations

import pytest
import torch

from tests.engine.ranks import run_cuda_rank, run_ranks
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), run_cuda_rank)


def test_rollout_of_two_equals_that_of_one(shared):
    """Not bit for bit: products over fewer rows may be summed in another order."""
    for latents, _ in shared:
        torch.testing.assert_close(
            latents["shared"], latents["single"], rtol=0.0, atol=FP32_ROLLOUT_ATOL
        )


def test_graphs_with_the_exchanges_in_them_make_the_same_bits(shared):
    assert all(torch.equal(latents["graphs"], latents["shared"]) for latents, _ in shared)


def test_exchanges_move_every_bit_to_its_place(shared):
    assert all(all(moved.values()) for _, moved in shared)
