"""Every operator of the table against its oracle: interpreted on a CPU, and on a GPU at full size.

The interpreter reads its mode when Triton is imported, so it runs in a process of its own, once for
all cases.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import ConfigError, UnsupportedError
from engine.kernels import OPS, contract
from engine.kernels.cases import CASES
from tests.engine.kernels.judge import complaints

ROOT = Path(__file__).parents[3]
SMALL = [case for case in CASES if not case.is_full]
FULL = [case for case in CASES if case.is_full]
NAMES = pytest.mark.parametrize("name", OPS)
PRODUCTS = ("fp8_linear", "fp8_linear_block")

_SCRIPT = """
import json, torch
from engine.kernels import OPS
from tests.engine.kernels.interpreter import mend_interpreter
from tests.engine.kernels.judge import complaints
mend_interpreter()
cpu = torch.device("cpu")
print(json.dumps({
    op.name: {case.name: complaints(op, case, cpu) for case in op.cases if not case.is_full}
    for op in OPS.values()
}))
"""


def run_interpreted(script: str) -> str:
    """Return what a script prints in a process whose kernels are interpreted."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, list[str]]]:
    return json.loads(run_interpreted(_SCRIPT))


@pytest.mark.cpu
@NAMES
def test_interpreted_kernels_agree_with_their_oracles(interpreted, name):
    assert interpreted[name] == {case.name: [] for case in OPS[name].cases if not case.is_full}


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *FULL], ids=lambda case: case.name)
@NAMES
def test_kernels_agree_with_their_oracles(name, case):
    # Products on a GPU take bf16 alone, and sides that are multiples of 16.
    serves = case.dtype == torch.bfloat16 and case.hidden % 16 == 0 and case.inner % 16 == 0
    if case not in OPS[name].cases or (name == "fp8_linear" and not serves):
        pytest.skip("not a shape of a product on a GPU")
    assert complaints(OPS[name], case, torch.device("cuda")) == []


@pytest.mark.cpu
@pytest.mark.parametrize("name", [name for name in OPS if name not in PRODUCTS])
def test_the_kernels_compile_for_an_h200(name, monkeypatch):
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    monkeypatch.setattr(contract, "kernels_run_on", lambda x: True)
    op, case = OPS[name], dataclasses.replace(FULL[0], rows=5)
    given = op.inputs(case, torch.device("cpu"))
    (kernel,) = sm90.compiled_launches(lambda: op.fused(**given))
    # Rows are read and written in wide accesses: 8 bytes a thread or more.
    assert ".v2.b32" in kernel.asm["ptx"] or ".v4.b32" in kernel.asm["ptx"]
    # Two programs at least fit into a multiprocessor.
    assert kernel.metadata.shared <= 113 * 1024


SAME_SUMS = {
    "norm_modulate_fp8": "norm_modulate",
    "norm_modulate_fp8_block": "norm_modulate",
    "add_norm_modulate_fp8": "add_norm_modulate",
    "add_norm_modulate_fp8_block": "add_norm_modulate",
    "add_norm_modulate_sum": "add_norm_modulate",
    "add_norm_modulate_next": "add_norm_modulate",
    "add_norm_modulate_next_fp8": "add_norm_modulate",
    "place_sum": "place",
    "slide": "summarize",
}
"""Forms of one formula, of which the first has the bits of the second."""


@pytest.mark.cpu
@pytest.mark.parametrize("name", SAME_SUMS)
def test_forms_of_a_formula_sum_a_row_in_one_order(name, monkeypatch):
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    monkeypatch.setattr(contract, "kernels_run_on", lambda x: True)
    case = dataclasses.replace(FULL[0], rows=5)

    def sums(op):
        given = op.inputs(case, torch.device("cpu"))
        (kernel,) = sm90.compiled_launches(lambda: op.fused(**given))
        return sm90.summed(kernel)

    found = sums(OPS[name])
    assert found
    assert found == sums(OPS[SAME_SUMS[name]])


@pytest.mark.cpu
@NAMES
def test_a_compiler_sees_through(name):
    op, case = OPS[name], OPS[name].cases[0]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        given = {
            key: torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, value)
            for key, value in op.inputs(case, torch.device("cpu")).items()
        }
        made = op.fused(**given)
    real = op.reference(**op.inputs(case, torch.device("cpu")))
    for fake, value in zip(_listed(made), _listed(real), strict=True):
        assert fake.shape == value.shape
        assert fake.dtype == value.dtype
        # Factors of blocks lie column by column.
        assert fake.is_contiguous() or (name.endswith("_block") and fake.stride(-2) == 1)


def _listed(returned):
    if returned is None:
        return []
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def _given(name: str, **changes):
    return OPS[name].inputs(OPS[name].cases[0], torch.device("cpu")) | changes


ON_A_CPU = ("quantize_rows", "quantize_rows_block", *PRODUCTS, "summarize", "sparse_attend")
KERNELS = [name for name in OPS if name not in ON_A_CPU]


@pytest.mark.cpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_refuses_a_cpu(name):
    with pytest.raises(UnsupportedError, match=r"tensors are on cpu; allowed: cuda"):
        OPS[name].fused(**_given(name))


@pytest.fixture
def any_device(monkeypatch):
    """Let checks pass the device; whatever is refused is refused before a launch."""
    monkeypatch.setattr(contract, "kernels_run_on", lambda x: True)


def _column_major(shape):
    return torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=torch.bfloat16).mT


BAD = {
    "rounding": ("add_gated", {"rounding": "up"}, "rounding is 'up'; allowed: eager, fast"),
    "dtype": ("norm_modulate", {"x_BRD": torch.zeros(2, 5, 96)}, "modulation is torch.bfloat16"),
    "half": ("swiglu", {"z_BRF": torch.zeros(2, 5, 96).half()}, "z is torch.float16; allowed"),
    "odd": ("swiglu", {"z_BRF": torch.zeros(2, 5, 97)}, r"\(2, 5, 97\); allowed: .*even"),
    "dense": ("norm_modulate", {"x_BRD": _column_major((2, 5, 96))}, "x has stride 5 on its last"),
    "weight": ("norm_modulate", {"weight_D": torch.ones(95)}, r"\(95,\); allowed: \(96,\)"),
    "branch": ("add_gated", {"branch_BRD": torch.zeros(2, 4, 96).bfloat16()}, r"branch has shape"),
    "runs": ("norm_modulate", {"modulation_BMPD": torch.zeros(1, 2, 6, 96).bfloat16()}, "2 runs"),
    "following": ("add_norm_modulate_next", {"following_BMPD": torch.zeros(1, 1, 6, 96).bfloat16()},
                  r"following modulation has shape \(1, 1, 6, 96\); allowed: \(1, 5, 6, 96\)"),
    "parts": ("add_gated", {"modulation_BM6D": torch.zeros(1, 1, 2, 96).bfloat16()},
              r"allowed: \(1, 1, 6, 96\)"),
    "rotary": ("turn_output", {"start": 128}, "128 channels, 128 of them rotary; allowed"),
    "matrix": ("turn_output", {"matrix_BG44": torch.zeros(1, 1, 4, 4).mT}, "dense"),
    "raw": ("place", {"raw_BRNK": torch.zeros(2, 5, 2, 95).bfloat16()}, "raw has shape"),
    "slot": ("place", {"key_BRNK": torch.zeros(2, 6, 2, 128).bfloat16()}, "key has shape"),
    "layers": ("slide", {"raw_BSNK": []}, "'raw': 0, .*allowed: one at least, as many in all"),
    "layer": ("slide", {"values_BSNK": [torch.zeros(2, 32, 2, n).bfloat16() for n in (128, 64)]},
              r"values has dtype, .*\(2, 32, 2, 64\).* in a layer; allowed: .*\(2, 32, 2, 128\)"),
    "newest": ("slide", {"slot": 5}, "slot is 5 in a ring of 25 rows, 5 a chunk; .* 0 to 4"),
    "room": ("slide", {"keys_BSNK": [torch.zeros(2, 29, 2, 128).bfloat16()] * 2,
                       "values_BSNK": [torch.zeros(2, 29, 2, 128).bfloat16()] * 2},
             "keys have 29 rows; allowed: 30 at least"),
    "lists": ("slide", {"sum_BNJK": []}, r"summaries are \[1, 0, 1\]; allowed: as many in all"),
    "too short": ("slide", {"block": 8, "mean_BNJK": [torch.zeros(2, 2, 4, 128).bfloat16()],
                            "sum_BNJK": [torch.zeros(2, 2, 4, 128).bfloat16()],
                            "reach_BNJ": [torch.zeros(2, 2, 4)]},
                  "block is 8; allowed: 16 at least"),
    "reach": ("slide", {"reach_BNJ": [torch.zeros(2, 2, 2).bfloat16()]},
              "reach is torch.bfloat16; allowed: torch.float32"),
    "ring": ("slide", {"cos_SK": torch.zeros(24, 96)}, r"cos has shape \(24, 96\); allowed: \(25"),
    "summary": ("summarize", {"mean_BNJK": torch.zeros(2, 2, 5, 128).bfloat16()},
                r"mean has shape \(2, 2, 5, 128\); allowed: \(2, 2, 6, 128\)"),
    "newest rows": ("summarize", {"rows": 330}, "rows are 330; allowed: 1 to 329"),
    "routes": ("sparse_attend", {"count_BNT": torch.zeros(2, 2, 2)}, "count has shape"),
    "table": ("rotate", {"sin_RK": torch.zeros(4, 96)}, "sin has shape"),
    "blocks of rows": ("quantize_rows_block", {"x": torch.zeros(5, 96)},
                       "quantize_rows: 96 channels in blocks; allowed: multiples of 128"),
    "blocks of halves": ("swiglu_fp8_block", {"z_BRF": torch.zeros(2, 5, 384).bfloat16()},
                         "swiglu_fp8: 192 channels in blocks"),
    "blocks of the norm": (
        "norm_modulate_fp8_block",
        {"x_BRD": torch.zeros(2, 5, 96).bfloat16(), "weight_D": torch.ones(96),
         "modulation_BMPD": torch.zeros(1, 1, 6, 96).bfloat16()},
        "norm_modulate_fp8: 96 channels in blocks",
    ),
    "blocks of the sum": (
        "add_norm_modulate_fp8_block",
        {"x_BRD": torch.zeros(2, 5, 96).bfloat16(), "branch_BRD": torch.zeros(2, 5, 96).bfloat16(),
         "weight_D": torch.ones(96), "modulation_BM6D": torch.zeros(1, 1, 6, 96).bfloat16()},
        "add_norm_modulate_fp8: 96 channels in blocks",
    ),
    "blocks of heads": (
        "turn_output_fp8_block", {"o_BRNK": torch.zeros(2, 5, 4, 96).bfloat16(), "start": 64},
        "turn_output_fp8: heads of 96 channels in blocks; allowed: divisors of 128",
    ),
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("bad", BAD)
def test_wrong_arguments_are_refused(bad):
    name, changes, message = BAD[bad]
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        OPS[name].fused(**_given(name, **changes))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_NK": torch.zeros(2208, 96)}, "weight is torch.float32; allowed: dense float8"),
        ({"scale": torch.ones(2, 5)}, r"scale has shape \(2, 5\); allowed: \(2, 5, 1\)"),
        ({"weight_scale": torch.ones(96)}, r"weight scale has shape \(96,\); allowed: \(2208,\)"),
    ],
)
def test_wrong_products_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        OPS["fp8_linear"].fused(**_given("fp8_linear", **changes))


@pytest.mark.cpu
def test_a_product_of_blocks_needs_whole_ones():
    given = _given("fp8_linear_block")
    given |= {"weight_NK": given["weight_NK"][:192], "weight_scale": given["weight_scale"][:1]}
    with pytest.raises(ConfigError, match="fp8_linear: 192 channels in blocks; allowed: mult"):
        OPS["fp8_linear_block"].fused(**given)
