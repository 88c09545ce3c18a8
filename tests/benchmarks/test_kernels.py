"""The command that measures kernels, on a CPU, where they are interpreted."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import kernels
from engine.kernels import OPS
from tests.engine.kernels.test_ops import run_interpreted

pytestmark = pytest.mark.cpu

_SCRIPT = """
from benchmarks.kernels import main
from tests.engine.kernels.interpreter import mend_interpreter
mend_interpreter()
raise SystemExit(main(["--device", "cpu", "--names", "swiglu,swiglu_fp8,rotate"]))
"""


def test_every_named_operator_has_a_row():
    record = json.loads(run_interpreted(_SCRIPT).splitlines()[-1])
    rows = record["kernels"]
    assert [row["op"] for row in rows] == ["swiglu", "swiglu_fp8", "rotate"]
    assert all(row["is_agreeing"] and row["error"] == 0.0 for row in rows)
    assert all(row["fused_us"] > 0 for row in rows)
    assert record["machine"]["torch"] == torch.__version__


def test_what_does_not_agree_has_no_times(monkeypatch):
    op = OPS["quantize_rows"]
    wrong = dataclasses.replace(op, fused=lambda x: op.reference(2 * x))
    monkeypatch.setitem(OPS, "quantize_rows", wrong)
    (record,) = kernels.measure(["quantize_rows"], torch.device("cpu"))
    assert not record.is_agreeing
    assert record.error == pytest.approx(1.0)
    assert record.fused_us is None
    assert "does not agree with its oracle: no times" in record.line


def test_an_unknown_operator_is_refused(capsys):
    assert kernels.main(["--device", "cpu", "--names", "swig"]) == kernels.EXIT_USAGE
    assert "names: 'swig'; allowed: norm_modulate" in capsys.readouterr().err


def test_a_machine_without_kernels_is_told(capsys):
    assert kernels.main(["--device", "cpu", "--names", "swiglu"]) == kernels.EXIT_USAGE
    assert "tensors are on cpu; allowed: cuda" in capsys.readouterr().err
