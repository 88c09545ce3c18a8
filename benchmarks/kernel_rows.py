"""Operators that have a row in the benchmark of kernels, and what bounds each.

Owns the two rows beside the table of operators, which are tested by themselves: `route`, because
the ends of its lists mean nothing, and `dense`, because no interpreter runs it; the rates of this
machine and which of them is the bound of a call. Shape suffixes: see `engine.kernels`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.peak import fp8_product_rate, product_rate
from engine.attention.base import AttentionNeed
from engine.attention.dense import GluonBackend
from engine.attention.sdpa import SdpaBackend
from engine.config import SPARSE_BLOCKS
from engine.kernels import F_TOLERANCE, OPS, Op, cases, sparse, sparse_reference
from engine.kernels.cases import Case

Bound = Literal["memory", "products"]
_COPIED_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What this device reaches on plain work, a second."""

    copy: float
    """Bytes that a copy reads and writes."""
    products: float
    """Operations of a large product in bf16."""
    products_fp8: float | None

    @classmethod
    def of(cls, device: torch.device, timed_us: Callable[..., float]) -> Rates:
        """Measure them."""
        source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
        copy_us = timed_us(torch.empty_like(source).copy_, {"other": source})
        return cls(
            copy=2 * _COPIED_BYTES / (copy_us * 1e-6),
            products=product_rate(device, torch.bfloat16),
            products_fp8=fp8_product_rate(device),
        )

    def bound(self, op: Op, case: Case, given: Mapping[str, Any]) -> tuple[Bound, float]:
        """Return what a call cannot be faster than, and its microseconds."""
        memory_us = op.bytes_moved(case) / self.copy * 1e6
        if op.flops is None:
            return "memory", memory_us
        values = (each for each in given.values() if isinstance(each, Tensor))
        is_fp8 = any(each.dtype == torch.float8_e4m3fn for each in values)
        rate = self.products_fp8 if is_fp8 and self.products_fp8 else self.products
        products_us = op.flops(case, given) / rate * 1e6
        return ("products", products_us) if products_us > memory_us else ("memory", memory_us)


def _route(**given: Any) -> tuple[Tensor, Tensor]:
    exact_BNTJ, _, count_BNT = sparse.route(**given)
    return exact_BNTJ, count_BNT


def _route_plainly(*, keys: int, **given: Any) -> tuple[Tensor, Tensor]:
    own = sparse_reference.own_block(given["q_BRNK"].shape[1], keys, given["block"])
    exact_BNTJ, _, count_BNT = sparse_reference.route(own=own, **given)
    return exact_BNTJ, count_BNT


def _dense(**given: Any) -> Tensor:
    return GluonBackend()(**given)


def _dense_plainly(**given: Any) -> Tensor:
    return SdpaBackend()(**given)


def _head_bytes(case: Case, rows: float) -> float:
    return case.batch_size * case.heads * rows * case.width * case.dtype.itemsize


def _route_bytes(case: Case) -> float:
    """Queries and means in, a byte and a number a block and tile out."""
    block = SPARSE_BLOCKS[-1]
    blocks = sparse_reference.block_count(cases.window_keys(case), block)
    tiles = sparse_reference.block_count(case.rows, sparse_reference.tile_rows(block))
    routes = case.batch_size * case.heads * tiles * blocks
    return _head_bytes(case, case.rows + blocks) + (1 + 4) * routes


_BESIDE_THE_TABLE = (
    Op(
        name="route", klass="F", reference=_route_plainly, fused=_route,
        inputs=cases.route_inputs, bytes_moved=_route_bytes, is_oracle_timed=False,
        tolerance=F_TOLERANCE,
    ),
    Op(
        name="dense", klass="F", reference=_dense_plainly, fused=_dense,
        inputs=cases.dense_inputs,
        bytes_moved=lambda case: _head_bytes(case, 2 * (case.rows + cases.window_keys(case))),
        flops=lambda case, given: (
            4.0 * case.batch_size * case.heads * case.width * case.rows * cases.window_keys(case)
        ),
        tolerance=F_TOLERANCE,
    ),
)  # fmt: skip


def all_rows() -> dict[str, Op]:
    """Return the operators by name."""
    return OPS | {op.name: op for op in _BESIDE_THE_TABLE}


def refusal(op: Op, device: torch.device) -> str | None:
    """Return why an operator cannot run here though others can, or None."""
    if op.name != "dense":
        return None
    case = next(case for case in op.cases if case.is_full)
    return GluonBackend().refusal(AttentionNeed.on(device, case.dtype, case.width))


def cases_on(op: Op, device: torch.device) -> Iterator[Case]:
    """Cases of a device: the sizes of a pass on CUDA, one that an interpreter can do elsewhere.

    What never rounds in two ways has one case a size.
    """
    is_cuda = device.type == "cuda"
    fitting = [case for case in op.cases if case.is_full == is_cuda]
    rounds = "rounding" in inspect.signature(op.reference).parameters
    one_for_all = [case for case in fitting if case.has_blocks][:1]
    for case in fitting if is_cuda else one_for_all:
        if rounds:
            yield case
        elif case.rounding == "eager":
            yield dataclasses.replace(case, name=case.name.removesuffix("-eager"))
