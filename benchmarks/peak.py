"""Work of a pass and the rate that this machine reaches on plain matrix products.

Owns the count of multiply-adds, from shapes alone, and the yardsticks that shares of a peak divide
by: measured here and now, in the same dtype and with the same threads, not read from a data sheet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.memory import linear_parameter_count, prefix_row_count

_REPEATS = 7
_SIDES = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices: some 10 ms each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Floating-point operations; 2 for a multiply-add."""

    linear: float
    """Products with weights of the blocks."""
    attention: float
    """The two products of attention."""

    @property
    def total(self) -> float:
        """Both."""
        return self.linear + self.attention


def key_row_count(model: ModelConfig) -> int:
    """Keys that the rows of a chunk see over a full window."""
    return prefix_row_count(model) + model.window_chunks * model.rows_per_chunk


def pass_work(model: ModelConfig, *, with_prefix: bool = False) -> Work:
    """Work of one pass over a full window.

    Norms, positions, input and output projections are left out.

    Args:
        model: the model.
        with_prefix: the pass recomputes the prefix, too.
    """
    rows, keys, prefix_rows = model.rows_per_chunk, key_row_count(model), prefix_row_count(model)
    pairs = rows * keys
    if with_prefix:
        conditioning_rows = prefix_rows - model.audio_rows
        pairs += conditioning_rows**2 + model.audio_rows * prefix_rows
        rows += prefix_rows
    return Work(
        linear=2.0 * model.num_layers * rows * linear_parameter_count(model),
        attention=4.0 * model.num_layers * pairs * model.attention_dim,
    )


def denoise_flops(model: ModelConfig) -> float:
    """Floating-point operations of one denoise step over a full window, the prefix left out."""
    return pass_work(model).total


def chunk_work(model: ModelConfig, *, with_prefix: bool = False) -> Work:
    """Work of all denoise steps and the refresh, whose last block stops at its keys and values."""
    one = pass_work(model, with_prefix=with_prefix)
    full, layers = model.sampler.steps + 1, model.num_layers
    projections = 3 * model.hidden_size * model.attention_dim / linear_parameter_count(model)
    return Work(
        linear=one.linear * (full - (1.0 - projections) / layers),
        attention=one.attention * (full - 1.0 / layers),
    )


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of square matrix products, the best of a few."""
    side = _SIDES[device.type]
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    best_s = float("inf")
    for _ in range(1 + _REPEATS):
        _wait(device)
        start_s = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * side**3 / best_s


def fp8_product_rate(device: torch.device) -> float | None:
    """Operations a second of a large row-wise E4M3 product, or None where there is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    side = _SIDES[device.type]
    codes = torch.randn(side, side, device=device).to(torch.float8_e4m3fn)
    scale_rows, scale_columns = (
        torch.ones(shape, device=device) for shape in ((side, 1), (1, side))
    )
    best_s = float("inf")
    for _ in range(1 + _REPEATS):
        _wait(device)
        start_s = time.perf_counter()
        torch._scaled_mm(
            codes,
            codes.t(),
            scale_a=scale_rows,
            scale_b=scale_columns,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        _wait(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * side**3 / best_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
