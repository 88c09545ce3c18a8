"""The command that measures kernels, on a CPU, where they are interpreted."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernel_rows import Rates, all_rows, cases_on
from engine.kernels import OPS, Op
from engine.kernels.cases import Case
from tests.engine.kernels.test_ops import run_interpreted

pytestmark = pytest.mark.cpu

_SCRIPT = """
from benchmarks.kernels import main
from tests.engine.kernels.interpreter import mend_interpreter
mend_interpreter()
raise SystemExit(main(["--device", "cpu", "--names", "swiglu,swiglu_fp8,rotate,route,dense"]))
"""


def test_every_named_operator_has_a_row():
    record = json.loads(run_interpreted(_SCRIPT).splitlines()[-1])
    rows = record["kernels"]
    assert [row["op"] for row in rows] == ["swiglu", "swiglu_fp8", "rotate", "route"]
    assert all(row["is_agreeing"] and row["error"] == 0.0 for row in rows)
    assert all(row["fused_us"] > 0 for row in rows)
    assert record["left_out"] == {"dense": "made for cuda, not cpu"}
    assert record["machine"]["torch"] == torch.__version__


def _full(name: str) -> tuple[Op, list[Case]]:
    op = all_rows()[name]
    return op, list(cases_on(op, torch.device("cuda")))


def test_what_rounds_in_one_way_has_a_row_a_size():
    assert [case.name for case in _full("dense")[1]] == ["h3-832x480", "h3-1344x768"]
    assert [case.name for case in _full("swiglu")[1]] == [
        "h3-832x480-eager", "h3-832x480-fast", "h3-1344x768-eager", "h3-1344x768-fast",
    ]  # fmt: skip


RATES = Rates(copy=4e12, products=8e14, products_fp8=16e14)


@pytest.mark.parametrize(
    ("name", "given", "kind", "least_us"),
    [
        # 1950 rows of 3 x 14336 in bf16.
        ("swiglu", {}, "memory", 1950 * 3 * 14336 * 2 / 4e6),
        # 4 x 1950 x 13650 x 56 heads of 128.
        ("dense", {}, "products", 4 * 1950 * 13650 * 56 * 128 / 8e8),
        ("fp8_linear", {"codes": torch.zeros(1).to(torch.float8_e4m3fn)}, "products",
         2 * 1950 * 5376 * 14336 / 16e8),
    ],
)  # fmt: skip
def test_a_call_is_held_against_what_bounds_it(name, given, kind, least_us):
    op, (case, *_) = _full(name)
    assert RATES.bound(op, case, given) == (kind, pytest.approx(least_us))


def test_traffic_of_what_is_beside_the_table():
    op, (case, *_) = _full("dense")
    assert op.bytes_moved(case) == 56 * 128 * 2 * 2 * (1950 + 13650)
    # 214 blocks of 64 keys by 16 tiles of 128 queries: a byte and a number of four for each.
    assert all_rows()["route"].bytes_moved(case) == 56 * (128 * 2 * (1950 + 214) + 5 * 214 * 16)


def test_products_of_sparse_attention_are_those_of_the_blocks_that_are_read():
    op = OPS["sparse_attend"]
    case = next(case for case in op.cases if not case.is_full)
    given = op.inputs(case, torch.device("cpu"))
    block, (_, keys, _, _) = given["block"], given["k_BSNK"].shape
    pairs = case.batch_size * case.heads * case.rows * -(-keys // block)
    for at in given["exact_BNTJ"].nonzero().tolist():
        rows = min(2 * block, case.rows - at[2] * 2 * block)
        pairs += rows * min(block, keys - at[3] * block)
    assert op.flops(case, given) == 4 * case.width * pairs


def test_a_row_of_products_tells_their_rate_and_what_bounds_it():
    record = kernels.KernelRecord(
        op="dense", case="h3-832x480", klass="F", error=3e-3, is_agreeing=True, fused_us=1200.0,
        plain_us=2000.0, tflops=636.0, bound="products", share=0.81,
    )  # fmt: skip
    assert record.line.split()[4:] == ["1200.0", "2000.0", "-", "636.0", "81%", "of", "products"]


def test_what_does_not_agree_has_no_times():
    op = OPS["quantize_rows"]
    wrong = dataclasses.replace(op, fused=lambda x: op.reference(2 * x))
    (record,) = kernels.measure([wrong], torch.device("cpu"))
    assert not record.is_agreeing
    assert record.error == pytest.approx(1.0)
    assert record.fused_us is None
    assert "does not agree with its oracle: no times" in record.line


def test_an_unknown_operator_is_refused(capsys):
    assert kernels.main(["--device", "cpu", "--names", "swig"]) == kernels.EXIT_USAGE
    assert "names: 'swig'; allowed: norm_modulate" in capsys.readouterr().err


def test_a_machine_without_kernels_is_told(capsys):
    assert kernels.main(["--device", "cpu", "--names", "swiglu"]) == kernels.EXIT_ENVIRONMENT
    assert "tensors are on cpu; allowed: cuda" in capsys.readouterr().err


def test_nothing_that_can_be_measured_is_an_error(capsys):
    assert kernels.main(["--device", "cpu", "--names", "dense"]) == kernels.EXIT_ENVIRONMENT
    printed = capsys.readouterr()
    assert "nothing of them can be measured on cpu: dense: made for cuda, not cpu" in printed.err
    assert printed.out == ""
