"""Judges an operator on one case: against its oracle, and against arithmetic without rounding.

Owns `complaints`, which runs on any device that has the kernels.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from engine.kernels import OPS, Op, reference
from engine.kernels.cases import Case
from tests.tolerances import EAGER_EQUAL_SHARE, FP32_ATOL, FP32_RTOL

_ULP = torch.finfo(torch.bfloat16).eps


def complaints(op: Op, case: Case, device: torch.device) -> list[str]:
    """Return what is wrong, in words with figures; nothing when all is well."""
    given, oracle_given = op.inputs(case, device), op.inputs(case, device)
    raw = _listed(op.fused(**given))
    made = _values([*raw, *op.written_in(given)])
    oracle_raw = _listed(op.reference(**oracle_given))
    oracle = _values([*oracle_raw, *op.written_in(oracle_given)])
    found = [f"output {i}: dtype" for i, (a, b) in enumerate(zip(raw, oracle_raw, strict=True))
             if a.dtype != b.dtype or a.shape != b.shape]  # fmt: skip
    exact = _exact(op, case, device)
    for index, (ours, theirs, true) in enumerate(zip(made, oracle, exact, strict=True)):
        found += [f"output {index}: {text}" for text in _compare(op, case, ours, theirs, true)]
    if op.unquantized is not None:
        found += _codes_differ(op, case, device, raw)
    return found


def _compare(op: Op, case: Case, ours: Tensor, theirs: Tensor, true: Tensor) -> list[str]:
    found = []
    if not ours.isfinite().all():
        return ["not finite"]
    if case.dtype == torch.float32 and op.klass == "F":
        if not torch.allclose(ours, theirs, atol=FP32_ATOL, rtol=FP32_RTOL):
            found.append(f"fp32 differs by {(ours - theirs).abs().max():.2e}")
        return found
    error = (ours - true).norm() / true.norm()
    if error > op.tolerance * (2 if case.rounding == "eager" else 1):
        found.append(f"RMS error {error:.2e}")
    floor = op.tolerance if op.flops else _ULP / 2
    bound = 2 * (theirs - true).abs().max() + floor * true.abs().max()
    if (ours - true).abs().max() > bound:
        found.append(f"error {(ours - true).abs().max():.2e} above {bound:.2e}")
    share = (ours == theirs).double().mean().item()
    # What products sum in another order is rounded to the other side more often.
    rounds_alike = case.rounding == "eager" and not op.flops
    if op.klass == "F" and rounds_alike and share < EAGER_EQUAL_SHARE:
        found.append(f"{share:.4f} of the values equal the oracle's")
    return found


def _exact(op: Op, case: Case, device: torch.device) -> list[Tensor]:
    given: dict[str, Any] = {}
    for name, value in op.inputs(case, device).items():
        is_rows = isinstance(value, Tensor) and value.dtype != torch.float8_e4m3fn
        given[name] = value.double() if is_rows else value
        if isinstance(value, list):
            given[name] = [each.double() for each in value]
    if "rounding" in given:
        given["rounding"] = "fast"
    if "dtype" in given:
        given["dtype"] = torch.float64
    form = op.exact or op.reference
    names = inspect.signature(form).parameters
    returned = form(**{name: value for name, value in given.items() if name in names})
    return _values([*_listed(returned), *op.written_in(given)])


def _codes_differ(op: Op, case: Case, device: torch.device, raw: list[Tensor]) -> list[str]:
    """Quantised rows have to be the quantised output of the plain kernel, bit for bit."""
    plain = OPS[op.unquantized or ""]
    names = inspect.signature(plain.reference).parameters
    given = {name: value for name, value in op.inputs(case, device).items() if name in names}
    in_blocks = op.inputs(case, device).get("in_blocks", False)
    codes, scale = reference.quantize_rows(_listed(plain.fused(**given))[-1], in_blocks)
    wrong = (codes.view(torch.uint8) != raw[-2].view(torch.uint8)).sum().item()
    found = [f"{wrong} codes differ from the quantised plain output"] if wrong else []
    return found + ([] if torch.equal(scale, raw[-1]) else ["factors differ"])


def _listed(returned: Any) -> list[Tensor]:
    if returned is None:
        return []
    return [returned] if isinstance(returned, Tensor) else list(returned)


def _values(tensors: list[Tensor]) -> list[Tensor]:
    """Numbers behind the outputs; codes are joined with the factors that follow them."""
    values: list[Tensor] = []
    pending: Tensor | None = None
    for tensor in tensors:
        if tensor.dtype == torch.float8_e4m3fn:
            pending = tensor.double()
        elif pending is not None:
            values.append(reference.dequantize_rows(pending, tensor.double()))
            pending = None
        else:
            values.append(tensor.double())
    return values
