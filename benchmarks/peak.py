"""Work of a denoise step and the rate that this machine reaches on plain matrix products.

Owns the count of multiply-adds, from shapes alone, and the yardstick that `share_of_peak` divides
by: measured here and now, in the same dtype and with the same threads, not read from a data sheet.
"""

from __future__ import annotations

import time

import torch

from engine.config import ModelConfig

_REPEATS = 7
_SIDES = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices: some 10 ms each."""


def denoise_flops(model: ModelConfig) -> float:
    """Floating-point operations of one denoise step over a full window.

    Linears of the blocks and the two products of attention; 2 operations for a multiply-add. Norms,
    positions, input and output projections are left out.
    """
    rows = model.rows_per_chunk
    prefix_rows = model.text.rows + model.rows_per_latent + model.audio_rows
    keys = prefix_rows + model.window_chunks * rows
    linears = 4 * model.hidden_size * model.attention_dim + 3 * model.hidden_size * model.ffn_dim
    return 2.0 * model.num_layers * rows * (linears + 2 * keys * model.attention_dim)


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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
