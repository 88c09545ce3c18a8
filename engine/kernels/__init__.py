"""Fused operators.

Owns: kernels, each beside its plain form; the table of those that a block is made of.
Does not own: when they run; the rest of `engine` decides that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from engine.kernels import (
    absorb,
    adaln,
    cases,
    fp8_linear,
    qknorm_rope,
    reference,
    slide,
    sparse,
    sparse_reference,
    swiglu,
)
from engine.kernels.cases import CASES, Case

Klass = Literal["X", "F", "A"]
"""X: bit-exact. F: other rounding, same operators. A: approximate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operator, its oracle and what is known of its cost."""

    name: str
    klass: Klass
    reference: Callable[..., Any]
    fused: Callable[..., Any]
    inputs: Callable[[Case, torch.device], dict[str, Any]]
    bytes_moved: Callable[[Case], float]
    """Least traffic with memory, bytes."""
    flops: Callable[[Case, Mapping[str, Any]], float] | None = None
    """Of the matrix products that these arguments ask for; None where there are none. Elementwise
    work is not counted."""
    unquantized: str | None = None
    """The operator whose last output this one quantises."""
    exact: Callable[..., Any] | None = None
    """What it would return without any rounding to codes; None: the reference itself."""
    is_oracle_timed: bool = True
    """Whether anybody would run the oracle at full size; one that takes seconds is no yardstick."""
    written: tuple[str, ...] = ()
    """Arguments that are written instead of returned: tensors, or lists with one a layer."""
    tolerance: float
    """Largest RMS of the error over that of the result, in bf16."""
    serves: Callable[[Case], bool] = lambda case: True
    """Sizes that it is for."""

    def written_in(self, given: Mapping[str, Any]) -> list[Tensor]:
        """What a call with these arguments wrote; layers are joined on a new first axis."""
        written = (given[name] for name in self.written)
        return [each if isinstance(each, Tensor) else torch.stack(each) for each in written]

    @property
    def cases(self) -> tuple[Case, ...]:
        """Sizes to test and measure."""
        return tuple(case for case in CASES if self.serves(case))


F_TOLERANCE = 5e-3
"""bf16 has a relative RMS rounding error near 2e-3; two or three roundings meet."""
A_TOLERANCE = 4e-2
"""e4m3 has three bits: a uniform error of 1/16 of a value at most, 2.6 % RMS over a binade."""

PRODUCT_TOLERANCE = 1e-2
"""Fast accumulation on Hopper keeps some 14 bits of a partial sum: 2^-14 of it at each of K / 32
additions, which grow as their root; 1e-3 RMS at K = 5,376, and the rounding of the output."""


def _rows(case: Case) -> float:
    return case.batch_size * case.rows


def _hidden(tensors: float, codes: float = 0.0) -> Callable[[Case], float]:
    return lambda case: _rows(case) * case.hidden * (tensors * case.dtype.itemsize + codes)


def _heads(tensors: float, codes: float = 0.0) -> Callable[[Case], float]:
    return lambda case: (
        _rows(case) * case.heads * case.width * (tensors * case.dtype.itemsize + codes)
    )


def _window(tensors: float) -> Callable[[Case], float]:
    return lambda case: (
        case.batch_size * cases.window_keys(case) * case.heads * case.width
        * tensors * case.dtype.itemsize
    )  # fmt: skip


def _rotary(tensors: float) -> Callable[[Case], float]:
    return lambda case: _rows(case) * case.heads * case.rotary * tensors * case.dtype.itemsize


def _inner(tensors: float, codes: float = 0.0) -> Callable[[Case], float]:
    return lambda case: _rows(case) * case.inner * (tensors * case.dtype.itemsize + codes)


def _linear_bytes(case: Case) -> float:
    outputs = _rows(case) * case.inner * case.dtype.itemsize
    return _rows(case) * case.hidden + case.inner * case.hidden + outputs


def _keys(given: Mapping[str, Any]) -> int:
    return int(given["k_BSNK"].shape[1])


def _sparse_flops(case: Case, given: Mapping[str, Any]) -> float:
    """Of the blocks that are read, and of the summaries of all."""
    read_BNTJ, block, keys = given["exact_BNTJ"], given["block"], _keys(given)
    tiles, blocks = read_BNTJ.shape[2:]
    rows_T = sparse_reference.lengths(tiles, case.rows, 2 * block, given["reach_BNJ"])
    keys_J = sparse_reference.lengths(blocks, keys, block, given["reach_BNJ"])
    pairs = float((read_BNTJ * rows_T[:, None] * keys_J).sum(dtype=torch.float64))
    return 4.0 * case.width * (pairs + _rows(case) * case.heads * blocks)


def _slide_bytes(case: Case) -> float:
    # All raw channels are read and rotated; of the newest chunk the rest is copied. A layer with
    # summaries reads the rest of all keys, too.
    kept = 2 * _heads(2)(case) - _rotary(2)(case)
    rest = (cases.SLIDE_SLOTS - 1) * (_heads(1)(case) - _rotary(1)(case))
    return cases.SLIDE_LAYERS * (_rotary(2 * cases.SLIDE_SLOTS + 1)(case) + kept) + rest


_TABLE = (
    Op(
        name="norm_modulate", klass="F", reference=reference.norm_modulate,
        fused=adaln.norm_modulate, inputs=cases.adaln_inputs, bytes_moved=_hidden(2),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="norm_modulate_fp8", klass="A", reference=reference.norm_modulate_fp8,
        fused=adaln.norm_modulate_fp8, inputs=cases.adaln_inputs, bytes_moved=_hidden(1, 1),
        unquantized="norm_modulate", exact=reference.norm_modulate, tolerance=A_TOLERANCE,
    ),
    Op(
        name="add_norm_modulate", klass="F", reference=reference.add_norm_modulate,
        fused=adaln.add_norm_modulate, inputs=cases.add_norm_inputs, bytes_moved=_hidden(4),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="add_norm_modulate_fp8", klass="A", reference=reference.add_norm_modulate_fp8,
        fused=adaln.add_norm_modulate_fp8, inputs=cases.add_norm_inputs,
        bytes_moved=_hidden(3, 1), unquantized="add_norm_modulate",
        exact=reference.add_norm_modulate, tolerance=A_TOLERANCE,
    ),
    Op(
        name="add_gated", klass="F", reference=reference.add_gated, fused=adaln.add_gated,
        inputs=cases.add_gated_inputs, bytes_moved=_hidden(3), tolerance=F_TOLERANCE,
    ),
    Op(
        name="place", klass="F", reference=reference.place, fused=qknorm_rope.place,
        inputs=cases.place_inputs, bytes_moved=lambda case: _heads(6)(case) + _rotary(1)(case),
        written=("key_BRNK", "value_BRNK", "raw_BRNK"), tolerance=F_TOLERANCE,
    ),
    Op(
        name="rotate", klass="F", reference=reference.rotate, fused=qknorm_rope.rotate,
        inputs=cases.rotate_inputs, bytes_moved=_rotary(2), written=("key_BRNK",),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="slide", klass="F", reference=reference.slide, fused=slide.slide,
        inputs=cases.slide_inputs, bytes_moved=_slide_bytes,
        written=("keys_BSNK", "values_BSNK", "raw_BSNK", "mean_BNJK", "sum_BNJK"),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="turn_output", klass="F", reference=reference.turn_output,
        fused=qknorm_rope.turn_output, inputs=cases.turn_inputs, bytes_moved=_heads(2),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="turn_output_fp8", klass="A", reference=reference.turn_output_fp8,
        fused=qknorm_rope.turn_output_fp8, inputs=cases.turn_inputs, bytes_moved=_heads(1, 1),
        unquantized="turn_output", exact=reference.turn_output, tolerance=A_TOLERANCE,
    ),
    Op(
        name="absorb", klass="F", reference=reference.absorb, fused=absorb.absorb,
        inputs=cases.absorb_inputs, bytes_moved=_heads(3),
        flops=lambda case, given: 4.0 * _heads(1)(case) / case.dtype.itemsize * _keys(given),
        written=("o_BRNK",), tolerance=F_TOLERANCE,
    ),
    Op(
        name="summarize", klass="F", reference=sparse_reference.summarize, fused=sparse.summarize,
        inputs=cases.summarize_inputs, bytes_moved=_window(2), written=("mean_BNJK", "sum_BNJK"),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="sparse_attend", klass="F", reference=sparse_reference.attend, fused=sparse.attend,
        inputs=cases.sparse_inputs, bytes_moved=lambda case: _window(2)(case) + _heads(2)(case),
        flops=_sparse_flops, is_oracle_timed=False, tolerance=F_TOLERANCE,
    ),
    Op(
        name="swiglu", klass="F", reference=reference.swiglu, fused=swiglu.swiglu,
        inputs=cases.swiglu_inputs, bytes_moved=_inner(3), tolerance=F_TOLERANCE,
    ),
    Op(
        name="swiglu_fp8", klass="A", reference=reference.swiglu_fp8, fused=swiglu.swiglu_fp8,
        inputs=cases.swiglu_inputs, bytes_moved=_inner(2, 1), unquantized="swiglu",
        exact=reference.swiglu, tolerance=A_TOLERANCE,
    ),
    Op(
        name="quantize_rows", klass="A", reference=reference.quantize_rows,
        fused=fp8_linear.quantize_rows, inputs=cases.quantize_inputs, bytes_moved=_hidden(1, 1),
        exact=lambda x: x, tolerance=A_TOLERANCE,
    ),
    Op(
        name="fp8_linear", klass="A", reference=reference.fp8_linear,
        fused=fp8_linear.fp8_linear, inputs=cases.fp8_linear_inputs, bytes_moved=_linear_bytes,
        flops=lambda case, given: 2.0 * _rows(case) * case.hidden * case.inner,
        is_oracle_timed=False, tolerance=PRODUCT_TOLERANCE,
    ),
    Op(
        name="place_sum", klass="F", reference=reference.place, fused=qknorm_rope.place,
        inputs=cases.with_deltas(
            cases.place_inputs, q_delta_BRNK="q_BRNK", k_delta_BRNK="k_BRNK", v_delta_BRNK="v_BRNK"
        ),
        bytes_moved=lambda case: _heads(9)(case) + _rotary(1)(case),
        written=("key_BRNK", "value_BRNK", "raw_BRNK"), tolerance=F_TOLERANCE,
    ),
    Op(
        name="add_norm_modulate_sum", klass="F", reference=reference.add_norm_modulate,
        fused=adaln.add_norm_modulate,
        inputs=cases.with_deltas(cases.add_norm_inputs, delta_BRD="branch_BRD"),
        bytes_moved=_hidden(5), tolerance=F_TOLERANCE,
    ),
    Op(
        name="add_norm_modulate_next", klass="F", reference=reference.add_norm_modulate,
        fused=adaln.add_norm_modulate, inputs=cases.add_norm_next_inputs, bytes_moved=_hidden(4),
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="add_norm_modulate_next_fp8", klass="A", reference=reference.add_norm_modulate_fp8,
        fused=adaln.add_norm_modulate_fp8, inputs=cases.add_norm_next_inputs,
        bytes_moved=_hidden(3, 1), unquantized="add_norm_modulate_next",
        exact=reference.add_norm_modulate, tolerance=A_TOLERANCE,
    ),
    Op(
        name="add_gated_sum", klass="F", reference=reference.add_gated, fused=adaln.add_gated,
        inputs=cases.with_deltas(cases.add_gated_inputs, delta_BRD="branch_BRD"),
        bytes_moved=_hidden(4), tolerance=F_TOLERANCE,
    ),
    Op(
        name="swiglu_sum", klass="F", reference=reference.swiglu, fused=swiglu.swiglu,
        inputs=cases.with_deltas(cases.swiglu_inputs, delta_BRF="z_BRF"), bytes_moved=_inner(5),
        tolerance=F_TOLERANCE,
    ),
)  # fmt: skip


def _in_blocks(op: Op) -> Op:
    """Return the form of an operator with a factor for each block of channels."""
    inputs = partial(cases.fp8_linear_inputs, in_blocks=True)
    return dataclasses.replace(
        op,
        name=f"{op.name}_block",
        inputs=inputs if op.name == "fp8_linear" else cases.in_blocks(op.inputs),
        serves=lambda case: case.has_blocks,
    )


_BLOCK_FORMS = (
    "quantize_rows", "norm_modulate_fp8", "add_norm_modulate_fp8", "turn_output_fp8", "swiglu_fp8",
    "fp8_linear",
)  # fmt: skip
OPS: dict[str, Op] = {op.name: op for op in _TABLE}
OPS |= {f"{name}_block": _in_blocks(OPS[name]) for name in _BLOCK_FORMS}
"""Operators by name; tests and benchmarks go through all of them."""
