"""What a chunk cannot take less than here: its products and its attention, back to back.

Owns the measurement of both at the shapes of a preset, one pass of each without anything between.
Invariants: a whole pass, so that the device is as warm as in a rollout; weights and windows of
several layers in turn, so that no cache holds them; the best of a few.
Shape suffixes: R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peak import chunk_work, key_row_count, pass_work
from engine.clock import new_clock
from engine.config import ModelConfig

_REPEATS = 3
_COPIES = 3
"""Sets of weights and windows in turn; one of the large model has 0.8 and 0.4 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Milliseconds of one pass on one of the ranks, exchanges left out."""

    linear_ms: float
    """In the dtype of the blocks."""
    linear_fp8_ms: float | None
    """With all products in row-wise FP8, quantisation left out; None where there are none."""
    attention_ms: float
    attention_flops: float
    """Operations a second that all ranks reach together."""

    def chunk_ms(
        self, model: ModelConfig, *, fp8_share: float = 0.0, read_share: float = 1.0
    ) -> float:
        """Floor of all denoise steps and the refresh.

        Args:
            model: the model.
            fp8_share: of the products that are in FP8.
            read_share: of the keys that attention reads.
        """
        linear_ms = self.linear_ms
        if self.linear_fp8_ms is not None:
            linear_ms += fp8_share * (self.linear_fp8_ms - self.linear_ms)
        one, chunk = pass_work(model), chunk_work(model)
        passes = chunk.linear / one.linear, chunk.attention / one.attention
        return passes[0] * linear_ms + passes[1] * read_share * self.attention_ms


def measure_floor(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, *, world_size: int = 1
) -> Floor:
    """Time one pass of products and one of attention, over what one rank has of them."""
    rows = -(-model.rows_per_chunk // world_size)
    attention_ms = _best_ms(device, _attentions(model, device, dtype, world_size))
    fp8_ms = None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        fp8_ms = _best_ms(device, _fp8_products(model, rows, device))
    return Floor(
        linear_ms=_best_ms(device, _products(model, rows, device, dtype)),
        linear_fp8_ms=fp8_ms,
        attention_ms=attention_ms,
        attention_flops=pass_work(model).attention / (attention_ms / 1e3),
    )


def _best_ms(device: torch.device, layers: Sequence[Callable[[], object]]) -> float:
    """Least time of all layers in turn."""
    best_ms = float("inf")
    for _ in range(1 + _REPEATS):
        clock = new_clock(device)
        clock.mark("begin")
        for layer in layers:
            layer()
        clock.mark("end")
        best_ms = min(best_ms, clock.between_ms("begin", "end"))
    return best_ms


def _shapes(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the products of a block; queries, keys and values are one product."""
    hidden, attention, ffn = model.hidden_size, model.attention_dim, model.ffn_dim
    return (hidden, 3 * attention), (attention, hidden), (hidden, 2 * ffn), (ffn, hidden)


def _products(
    model: ModelConfig, rows: int, device: torch.device, dtype: torch.dtype
) -> list[Callable[[], object]]:
    shapes = _shapes(model)
    inputs = [torch.randn(rows, width, device=device).to(dtype) for width, _ in shapes]
    copies = [
        [(torch.randn(out, width, device=device) * width**-0.5).to(dtype) for width, out in shapes]
        for _ in range(_COPIES)
    ]

    def layer(weights: list[Tensor]) -> Callable[[], object]:
        return lambda: [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]

    return [layer(copies[index % _COPIES]) for index in range(model.num_layers)]


def _fp8_products(
    model: ModelConfig, rows: int, device: torch.device
) -> list[Callable[[], object]]:
    shapes = _shapes(model)
    fp8 = torch.float8_e4m3fn
    inputs = [torch.randn(rows, width, device=device).to(fp8) for width, _ in shapes]
    row_scale = torch.ones(rows, 1, device=device)
    column_scales = [torch.ones(1, out, device=device) for _, out in shapes]
    copies = [
        [torch.randn(out, width, device=device).to(fp8) for width, out in shapes]
        for _ in range(_COPIES)
    ]

    def layer(weights: list[Tensor]) -> Callable[[], object]:
        return lambda: [
            torch._scaled_mm(
                x,
                weight.t(),
                scale_a=row_scale,
                scale_b=scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            for x, weight, scale in zip(inputs, weights, column_scales, strict=True)
        ]

    return [layer(copies[index % _COPIES]) for index in range(model.num_layers)]


def _attentions(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, world_size: int
) -> list[Callable[[], object]]:
    heads, width = model.num_attention_heads // world_size, model.attention_head_dim

    def head_rows(rows: int) -> Tensor:
        return torch.randn(1, heads, rows, width, device=device).to(dtype)

    q_1NRK = head_rows(model.rows_per_chunk)
    keys = key_row_count(model)
    windows = [(head_rows(keys), head_rows(keys)) for _ in range(_COPIES)]

    def layer(k_1NSK: Tensor, v_1NSK: Tensor) -> Callable[[], object]:
        def attend() -> Tensor:
            if device.type != "cuda":
                return F.scaled_dot_product_attention(q_1NRK, k_1NSK, v_1NSK)
            order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
            with sdpa_kernel([*order, SDPBackend.MATH], set_priority=True):
                return F.scaled_dot_product_attention(q_1NRK, k_1NSK, v_1NSK)

        return attend

    return [layer(*windows[index % len(windows)]) for index in range(model.num_layers)]
