"""Ranks that share a rollout, as real processes over gloo, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engine import parallel
from engine.block_ops import Fp8Rows
from engine.errors import ConfigError, UnsupportedError
from engine.kernels.exchange import merge_heads, pack_heads
from engine.parallel import Alone, Ulysses
from tests.engine.ranks import CASES, alone, run_ranks
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def single():
    torch.use_deterministic_algorithms(True)
    return alone()


@pytest.fixture(scope="module", params=[2, 3], ids=["ranks2", "ranks3"])
def shared(request, tmp_path_factory):
    return run_ranks(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_rollout_of_ranks_equals_that_of_one_process(single, shared, case):
    """Not bit for bit: products over fewer rows may be summed in another order."""
    for latents, _ in shared:
        torch.testing.assert_close(latents[case], single[case], rtol=0.0, atol=FP32_ROLLOUT_ATOL)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_makes_the_same_bits(shared, case):
    assert all(torch.equal(latents[case], shared[0][0][case]) for latents, _ in shared)


def test_exchanges_move_every_bit_to_its_place(shared):
    assert [{name for name, is_equal in moved.items() if not is_equal} for _, moved in shared] == [
        set()
    ] * len(shared)


class _Doubled:
    """An attention that needs no cache."""

    def __call__(self, layer, q_BRNK, k_BRNK, v_BRNK):
        return q_BRNK * k_BRNK + layer * v_BRNK

    def store(self, layer, q_BRNK, k_BRNK, v_BRNK):
        pass


def test_a_compiler_sees_through_the_exchange(group):
    exchange = Ulysses(6, group)
    inputs = torch.randn(1, 9, 3 * 6 * 4)

    def run(x_BRD):
        share = exchange.over(x_BRD.shape[1])
        q, k, v = share.own(x_BRD).unflatten(-1, (3, 6, 4)).unbind(2)
        return share.whole(share.attend(_Doubled())(2, q, k, v).flatten(2))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    q, k, v = inputs.unflatten(-1, (3, 6, 4)).unbind(2)
    expected = (q * k + 2 * v).flatten(2)
    assert torch.equal(run(inputs), expected)
    assert torch.equal(compiled(inputs), expected)


def test_an_output_in_eight_bits_cannot_be_exchanged(group):
    class Coded(_Doubled):
        def __call__(self, layer, q_BRNK, k_BRNK, v_BRNK):
            return Fp8Rows(q_BRNK, k_BRNK)

    attend = Ulysses(6, group).over(3).attend(Coded())
    with pytest.raises(UnsupportedError, match="attention output is FP8"):
        attend(0, *torch.zeros(3, 1, 3, 6, 4))


def test_alone_hands_back_what_it_is_given():
    x_BRD, share = torch.zeros(1, 3, 2), Alone().over(3)
    attend = object()
    assert share.own(x_BRD) is x_BRD
    assert share.whole(x_BRD) is x_BRD
    assert share.attend(attend) is attend
    assert Alone().own_heads(x_BRD) is x_BRD
    assert Alone().whole_heads(x_BRD) is x_BRD


class _Group:
    """Stands for a process group of five ranks; nothing is sent."""

    group_name = "five"

    def size(self) -> int:
        return 5

    def rank(self) -> int:
        return 3


def test_heads_have_to_divide_among_the_ranks():
    with pytest.raises(ConfigError, match="ranks are 5 for a model of 56 heads; allowed: 1, 2, 4"):
        Ulysses(56, _Group())


def test_a_group_that_ends_is_let_go():
    class Ending:
        group_name = "ending"

        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

    Ulysses(2, Ending())
    assert "ending" in parallel._GROUPS
    parallel.forget(Ending())
    assert "ending" not in parallel._GROUPS


def test_first_ranks_take_the_rows_that_are_left():
    share = Ulysses(10, _Group()).over(13)
    assert share.counts == (3, 3, 3, 2, 2)
    assert share.own(torch.arange(13)[None, :, None]).flatten().tolist() == [9, 10]
    two_runs = torch.tensor([7, 8])[None, :, None]
    assert Ulysses(10, _Group()).over(14).own(two_runs).flatten().tolist() == [8, 8, 8]
    one_for_all = torch.zeros(1, 1, 6, 4)
    assert share.own(one_for_all) is one_for_all


def test_every_rank_needs_a_row():
    with pytest.raises(ConfigError, match="rows are 4; allowed: at least one for 5 ranks"):
        Ulysses(10, _Group()).over(4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts are 0"),
        ([(1, 2, 6, 4)] * 4, "parts are 4"),
        ([(1, 2, 6, 4), (1, 2, 6, 8)], "a part is"),
        ([(1, 2, 5, 4)], "heads are 5"),
    ],
)
def test_parts_that_cannot_be_packed_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        pack_heads([torch.zeros(shape) for shape in parts], 3)


def test_operators_know_their_shapes_without_data():
    q_BRNK = torch.randn(2, 5, 6, 4)
    torch.library.opcheck(pack_heads, ([q_BRNK, q_BRNK], 3))
    torch.library.opcheck(merge_heads, (torch.randn(3, 5, 2, 2, 4),))
