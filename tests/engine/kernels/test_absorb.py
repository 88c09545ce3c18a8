"""The kernel that lets more keys in, for each way in which their number is tiled."""

from __future__ import annotations

import json

import pytest
import torch

from tests.engine.kernels.test_ops import run_interpreted

KEYS = (1, 22, 86, 127)
"""Less than a tile, one tile, two tiles, one tile that two would not make smaller."""

_SCRIPT = f"""
import dataclasses, json, torch
from engine.kernels import OPS
from engine.kernels.cases import CASES, absorb_inputs
from tests.engine.kernels.interpreter import mend_interpreter
from tests.engine.kernels.judge import complaints
mend_interpreter()

def last(keys):
    def inputs(case, device):
        given = absorb_inputs(case, device)
        return given | {{name: given[name][:, -keys:] for name in ("k_BSNK", "v_BSNK")}}
    return inputs

# Two tiles of rows, and the most keys to choose from.
case = dataclasses.replace(CASES[0], rows=70, rounding="fast", is_full=True)
cpu = torch.device("cpu")
print(json.dumps({{
    keys: complaints(dataclasses.replace(OPS["absorb"], inputs=last(keys)), case, cpu)
    for keys in {KEYS}
}}))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    return json.loads(run_interpreted(_SCRIPT))


@pytest.mark.cpu
@pytest.mark.parametrize("keys", KEYS)
def test_any_number_of_keys_agrees_with_the_oracle(interpreted, keys):
    assert interpreted[str(keys)] == []


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("keys", "sides"), [(1, (16, 0)), (22, (32, 0)), (48, (32, 16)), (86, (64, 32)), (97, (128, 0))]
)
def test_keys_take_the_fewest_places_of_one_or_two_tiles(keys, sides):
    absorb_triton = pytest.importorskip("engine.kernels.absorb_triton")
    assert absorb_triton._sides(keys) == sides


@pytest.mark.cpu
@pytest.mark.parametrize(("keys", "programs"), [(22, 3), (86, 3), (127, 2)])
def test_programs_share_a_multiprocessor_of_an_h200(keys, programs):
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    from engine.kernels.absorb_triton import absorb

    o, q = (torch.zeros(1, 5, 56, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(1, keys, 56, 128, dtype=torch.bfloat16) for _ in range(2))
    (kernel,) = sm90.compiled_launches(lambda: absorb(o, torch.zeros(1, 56, 5), q, k, v))
    threads = 32 * kernel.metadata.num_warps
    # A multiprocessor has 227 KiB to share, of which each program takes one more; 64 Ki registers.
    assert programs * (kernel.metadata.shared + 1024) <= 227 * 1024
    assert programs * threads * kernel.metadata.maxnreg <= 64 * 1024
