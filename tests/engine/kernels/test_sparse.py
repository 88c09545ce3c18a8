"""Attention that reads a part of its keys: formula, routes, kernels on any data."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import slide, sparse, sparse_reference
from engine.kernels.sparse import KeySummary
from tests.engine.kernels.test_ops import run_interpreted
from tests.tolerances import FP32_ATOL, FP32_RTOL, SPARSE_BF16_REL

CPU = torch.device("cpu")
SPREADS = ("normal", "outlier", "zeros")


def rows(keys: int, queries: int, heads: int, width: int, *, spread: str = "normal",
         dtype: torch.dtype = torch.float32, device: torch.device = CPU,
         batch_size: int = 1) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Random queries, keys and values; heads of the keys outermost, as in the cache."""
    generator = torch.Generator(device).manual_seed(0)

    def part(count: int) -> Tensor:
        size = (batch_size, heads, count, width)
        return torch.randn(size, generator=generator, device=device).to(dtype).transpose(1, 2)

    q, k, v = part(queries).contiguous(), part(keys + 1)[:, :keys], part(keys + 1)[:, :keys]
    if spread == "outlier":
        # One key turned from most queries and 30 times as long as the others: what bounds all
        # scores is far above the largest score that a row has.
        k[:, 200] *= 30.0
        k[:, keys // 2] = -30.0 * q.mean(dim=1)
    if spread == "zeros":
        q[:, 3], k[:, 70:140], v[:, 5] = 0.0, 0.0, 0.0
    return q, k, v


def attended(q: Tensor, k: Tensor, v: Tensor, tau: float, prefix: int = 70, form=sparse.attend,
             block: int = 64):  # fmt: skip
    """Output, which blocks were read, and the tally."""
    summary, tally_2 = KeySummary.of(k, prefix, block), torch.zeros(2, device=k.device).long()
    summary.renew(k, v)
    mean, sum_, reach, sink_1 = summary.tensors
    routes = sparse.route(q, mean, sink_1, tally_2, k.shape[1], tau, block)
    return form(q, k, v, mean, sum_, reach, *routes, block), routes[0], tally_2


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All keys."""
    parts = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*parts).transpose(1, 2)


def distance(made: Tensor, expected: Tensor) -> float:
    """rel-L2; infinite where it is not finite."""
    error = float((made.double() - expected.double()).norm() / expected.double().norm())
    return error if math.isfinite(error) else math.inf


@pytest.mark.cpu
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("keys", "queries"), [(523, 80), (704, 130), (64, 64), (1, 1)])
def test_reading_every_block_is_attention(keys, queries, spread):
    q, k, v = rows(max(keys, 1), queries, 2, 32, spread=spread if keys > 300 else "normal")
    made, read, _ = attended(q, k, v, -1000.0)
    assert read.all()
    torch.testing.assert_close(made, dense(q, k, v), atol=FP32_ATOL, rtol=FP32_RTOL)


@pytest.mark.cpu
def test_a_block_of_equal_keys_need_not_be_read():
    q, k, v = rows(640, 64, 2, 32)
    k = k[:, ::64].repeat_interleave(64, dim=1)
    made, read, _ = attended(q, k, v, 8.0)
    assert not read.all()
    torch.testing.assert_close(made, dense(q, k, v), atol=FP32_ATOL, rtol=FP32_RTOL)


@pytest.mark.cpu
@pytest.mark.parametrize("block", [8, 16])
def test_short_blocks_are_softmax_over_keys_and_means(block):
    """Each key of a block that is not read has the weight and the value of the block's mean."""
    q, k, v = rows(203, 37, 2, 32)
    made, read, _ = attended(q, k, v, 0.5, prefix=11, block=block)
    assert read.shape == (1, 2, -(-37 // (2 * block)), -(-203 // block))
    for row in range(37):
        for head in range(2):
            keys, values = k[0, :, head].clone(), v[0, :, head].clone()
            for at, is_read in enumerate(read[0, head, row // (2 * block)].tolist()):
                if not is_read:
                    part = slice(at * block, (at + 1) * block)
                    keys[part], values[part] = keys[part].mean(0), values[part].mean(0)
            weights = torch.softmax(keys @ q[0, row, head] / math.sqrt(32), dim=0)
            torch.testing.assert_close(
                made[0, row, head], weights @ values, atol=FP32_ATOL, rtol=FP32_RTOL
            )


@pytest.mark.cpu
def test_reading_every_short_block_is_attention():
    q, k, v = rows(203, 37, 2, 32)
    made, read, _ = attended(q, k, v, -1000.0, block=8)
    assert read.all()
    torch.testing.assert_close(made, dense(q, k, v), atol=FP32_ATOL, rtol=FP32_RTOL)


@pytest.mark.cpu
def test_what_is_always_read_follows_the_block():
    q, k, v = rows(203, 37, 2, 32)
    _, read, _ = attended(q, k, v, 8.0, prefix=11, block=8)
    # 11 rows reach into block 1; queries begin at key 166, 8 before them is in block 19 of 26.
    assert read[0, 0, 0].tolist() == [1, 1, *[0] * 17, *[1] * 7]


@pytest.mark.cpu
def test_prefix_and_surroundings_of_the_queries_are_always_read():
    q, k, v = rows(1000, 100, 3, 32)
    _, read, _ = attended(q, k, v, 8.0, prefix=70)
    # 70 rows reach into block 1; queries begin at key 900, 64 before them is in block 13.
    assert read[0, 0, 0].tolist() == [1, 1, *[0] * 11, 1, 1, 1]


@pytest.mark.cpu
def test_a_larger_tau_reads_less():
    q, k, v = rows(1500, 100, 3, 32)
    densities = [attended(q, k, v, tau)[1].float().mean().item() for tau in (0.0, 1.0, 1.5)]
    assert densities == sorted(densities, reverse=True)
    assert len(set(densities)) == 3


@pytest.mark.cpu
def test_what_is_read_is_counted():
    q, k, v = rows(1500, 200, 3, 32)
    _, read, tally_2 = attended(q, k, v, 1.0)
    assert tally_2.tolist() == [read.sum().item(), read.numel()]


@pytest.mark.cpu
def test_renewing_the_last_rows_renews_all_that_they_touch():
    _, k, v = rows(1000, 100, 2, 32)
    whole, part = KeySummary.of(k, 70, 64), KeySummary.of(k, 70, 64)
    part.renew(k, v)
    k[:, 900:], v[:, 900:] = k[:, 900:] + 1.0, v[:, 900:] + 1.0
    part.renew(k, v, rows=100)
    whole.renew(k, v)
    for name in ("mean_BNJK", "sum_BNJK", "reach_BNJ"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name))


@pytest.mark.cpu
def test_a_shorter_window_is_summarized_in_the_same_memory():
    _, k, v = rows(1000, 100, 2, 32)
    room = KeySummary.of(k, 70, 64)
    short, expected = room.first(500), KeySummary.of(k[:, :500], 70, 64)
    short.renew(k[:, :500], v[:, :500])
    expected.renew(k[:, :500], v[:, :500])
    assert all(torch.equal(*pair) for pair in zip(short.tensors, expected.tensors, strict=True))
    assert short.mean_BNJK.data_ptr() == room.mean_BNJK.data_ptr()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": 999}, None),
        ({"keys": 2000}, r"mean has shape \(1, 2, 16, 32\); allowed: \(1, 2, 32, 32\)"),
        ({"sink_1": torch.ones(1)}, "sink is torch.float32; allowed: torch.int32"),
        ({"tally_2": torch.zeros(1).long()}, r"tally has shape \(1,\); allowed: \(2,\)"),
        ({"block": 12}, "block is 12; allowed: 8, 16, 32, 64"),
    ],
    ids=["fits", "keys", "sink", "tally", "block"],
)
def test_routes_need_their_own_summary(changes, message):
    q, k, _ = rows(1000, 100, 2, 32)
    summary = KeySummary.of(k, 70, 64)
    given = {
        "q_BRNK": q, "mean_BNJK": summary.mean_BNJK, "sink_1": summary.sink_1,
        "tally_2": torch.zeros(2, dtype=torch.int64), "keys": 1000, "tau": 1.0, "block": 64,
    }  # fmt: skip
    if message is None:
        sparse.route(**given | changes)
        return
    with pytest.raises(ConfigError, match=message):
        sparse.route(**given | changes)


_SCRIPT = """
import json, torch
from engine.kernels import sparse, sparse_reference, sparse_triton
from engine.kernels.sparse import KeySummary
from tests.engine.kernels.interpreter import mend_interpreter
from tests.engine.kernels.test_sparse import SPREADS, distance, rows
mend_interpreter()
found = {}
for spread, block in [(spread, 64) for spread in SPREADS] + [("normal", 16)]:
    q, k, v = rows(523, 150, 2, 32, spread=spread, batch_size=2)
    forms = []
    for form in (sparse_reference, sparse_triton):
        summary, tally = KeySummary.of(k, 70, block), torch.zeros(2, dtype=torch.int64)
        mean, sum_, reach, sink = summary.tensors
        form.summarize(k, v, mean, sum_, reach, 523, block)
        exact, listed, count = form.route(
            q, mean, sink, tally, sparse_reference.own_block(150, 523, block), 0.5, block
        )
        lists = [row[:n].tolist() for row, n in zip(listed.flatten(0, 2), count.flatten())]
        o = form.attend(q, k, v, mean, sum_, reach, exact, listed, count, block)
        forms.append((o, exact, lists, tally.tolist(), reach))
    ours, theirs = forms[1], forms[0]
    found[f"{spread}, {block}"] = {
        "routes": torch.equal(ours[1], theirs[1]) and 0 < ours[1].float().mean().item() < 1,
        "lists": ours[2] == theirs[2],
        "tally": ours[3] == theirs[3],
        "output": distance(ours[0], theirs[0]) < 1e-5,
        "reach": distance(ours[4], theirs[4]) < 1e-6,
    }
print(json.dumps(found))
"""


@pytest.mark.cpu
def test_interpreted_kernels_choose_and_read_the_same_blocks():
    found = json.loads(run_interpreted(_SCRIPT))
    wrong = {spread: [name for name, is_right in each.items() if not is_right]
             for spread, each in found.items()}  # fmt: skip
    forms = [*(f"{spread}, 64" for spread in SPREADS), "normal, 16"]
    assert wrong == {form: [] for form in forms}


def slid(chunk_rows: int, prefix: int, block: int, slot: int, *, heads: int = 2, width: int = 32,
         dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> list[str]:  # fmt: skip
    """Slide windows of two layers, one of them summarized, and tell what is not as made anew."""
    generator = torch.Generator(device).manual_seed(0)
    ring_rows, rotary = 5 * chunk_rows, width * 3 // 4

    def layers(count: int, width: int) -> list[Tensor]:
        size = (1, heads, count + 1, width)
        drawn = [torch.randn(size, generator=generator, device=device) for _ in range(2)]
        return [each.to(dtype).transpose(1, 2)[:, :count] for each in drawn]

    keys, values = (layers(prefix + ring_rows + chunk_rows, width) for _ in range(2))
    raw, newest = layers(ring_rows, rotary), layers(chunk_rows, rotary)
    cos, sin = (torch.randn(ring_rows, rotary, device=device).to(dtype) for _ in range(2))
    kept, made = KeySummary.of(keys[1], prefix, block), KeySummary.of(keys[1], prefix, block)
    kept.renew(keys[1], values[1])
    slide.slide(
        keys, values, raw, newest, cos, sin, [kept.mean_BNJK], [kept.sum_BNJK], [kept.reach_BNJ],
        slot, block, "fast",
    )  # fmt: skip
    made.renew(keys[1], values[1])
    own = sparse_reference.own_block(chunk_rows, keys[1].shape[1], block)
    names = ("mean", "sum", "reach")
    return [name for name, ours, anew in zip(names, kept.tensors, made.tensors, strict=False)
            if not torch.equal(ours[:, :, :own], anew[:, :, :own])]  # fmt: skip


_SLIDE_SCRIPT = """
import json
from tests.engine.kernels.interpreter import mend_interpreter
from tests.engine.kernels.test_sparse import slid
mend_interpreter()
print(json.dumps([slid(37, 11, 16, slot) for slot in range(5)] + [slid(32, 16, 32, 2)]))
"""


@pytest.mark.cpu
def test_a_slide_leaves_the_summary_of_the_window_up_to_the_open_chunk():
    assert json.loads(run_interpreted(_SLIDE_SCRIPT)) == [[]] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("slot", [0, 2, 4])
def test_a_slide_on_a_gpu_has_the_bits_of_a_summary_made_anew(slot):
    more = {"width": 128, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    assert slid(1950, 1826, 64, slot, heads=8, **more) == []
    assert slid(75, 40, 32, slot, heads=3, **more) == []


@pytest.mark.cpu
def test_the_form_for_hopper_compiles():
    pytest.importorskip("triton.experimental.gluon")
    from engine.kernels import sparse_gluon, sparse_triton
    from tests.engine.kernels import sm90

    rows, blocks = torch.zeros(1, 150, 2, 128).bfloat16(), -(-523 // sparse_triton.HOPPER_BLOCK)
    keys = torch.zeros(1, 2, 530, 128).bfloat16().transpose(1, 2)[:, :523]
    means, reach = torch.zeros(1, 2, blocks, 128).bfloat16(), torch.zeros(1, 2, blocks)
    listed = torch.zeros(1, 2, 2, blocks, dtype=torch.int32)
    (kernel,) = sm90.compiled_launches(
        lambda: sparse_gluon.attend(
            rows,
            keys,
            keys,
            means,
            means,
            reach,
            listed.to(torch.int8),
            listed,
            listed[..., 0],
            sparse_triton.HOPPER_BLOCK,
        )
    )
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    # All of a multiprocessor's memory at most.
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("tau", [-1000.0, 1.0])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("keys", "queries", "prefix", "heads"),
    [(523, 150, 70, 3), (704, 128, 0, 2), (13526, 1950, 1826, 8)],
    ids=["short", "whole-blocks", "h3-832x480"],
)
def test_the_kernels_equal_the_oracle(keys, queries, prefix, heads, spread, tau):
    q, k, v = rows(
        keys, queries, heads, 128, spread=spread, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    made, read, _ = attended(q, k, v, tau, prefix)
    expected, _, _ = attended(q, k, v, tau, prefix, form=sparse_reference.attend)
    assert distance(made, expected) <= SPARSE_BF16_REL
    if tau < 0:
        assert read.all()
        assert distance(made, dense(q.float(), k.float(), v.float())) <= SPARSE_BF16_REL


@pytest.mark.gpu
def test_other_widths_and_dtypes_go_by_triton():
    for width, dtype, bound in ((64, torch.bfloat16, SPARSE_BF16_REL), (128, torch.float32, 1e-5)):
        q, k, v = rows(523, 150, 2, width, dtype=dtype, device=torch.device("cuda"), batch_size=2)
        made, _, _ = attended(q, k, v, 1.0)
        expected, _, _ = attended(q, k, v, 1.0, form=sparse_reference.attend)
        assert distance(made, expected) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("block", [8, 16, 32])
def test_shorter_blocks_go_by_triton_or_plainly(block):
    q, k, v = rows(523, 150, 2, 128, dtype=torch.bfloat16, device=torch.device("cuda"))
    made, _, _ = attended(q, k, v, 1.0, block=block)
    expected, _, _ = attended(q, k, v, 1.0, form=sparse_reference.attend, block=block)
    assert distance(made, expected) <= SPARSE_BF16_REL


@pytest.mark.gpu
def test_a_recorded_call_follows_its_data():
    q, k, v = rows(704, 128, 2, 128, dtype=torch.bfloat16, device=torch.device("cuda"))
    attended(q, k, v, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made, _, _ = attended(q, k, v, 1.0)
    for factor in (1.0, -2.0):
        k *= factor
        graph.replay()
        assert torch.equal(made, attended(q, k, v, 1.0)[0])
