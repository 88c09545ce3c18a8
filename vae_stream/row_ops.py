"""Fused operators between two attentions of the H3 ViT, in bf16 on CUDA; `vit_rows` decides.

    add_norm      n = norm(x + (y + a) s) w
    add_two_norm  x' = x + (y + a) s + (z + b) t,  n = norm(x') w
    gated         silu(g) v  of  [g | v] = n W^T + c

norm(x) = x rsqrt(mean x^2 + eps) over a row. Rows x and all sums are fp32; y, z, n and products are
bf16, and each is rounded once: the product of `gated` is not, before its bias is added. Rounding
differs from that of the plain form (class F), which is their oracle.
`add_norm` and `add_two_norm` read a row once. On an H200, where the compiler's code takes two
passes: 6.5 us for 11.1 and 13 for 15.7 at 1565 rows, 32 us for 53 and 58 for 74 at 8069. `gated`
makes the activation where the product ends, see `GATED_LEAST_ROWS`.
Owns the operators and the choice of them for a device; `row_ops_triton` and `gated_gluon` have the
kernels.

Legend: R rows, D width, G twice the width of the feed-forward part, U half of that.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from vae_stream.kernel_contract import kernels_run_on, require

GATED_LEAST_ROWS = 4000
"""From here on the gated product is the faster one. On an H200, product and activation apart
against it: 168, 175 us at 1565 rows; 447, 421 at 4037; 901, 833 at 8069; 2788, 2535 at 25158. A
program has tiles of 128 rows and 128 columns; few rows leave its last round of tiles half empty."""
_GATED_DEPTH, _GATED_COLUMNS = 64, 128
_FP32, _BF16 = torch.float32, torch.bfloat16

_log = logging.getLogger(__name__)


class RowForms(NamedTuple):
    """Which operators serve."""

    has_kernels: bool
    """`add_norm` and `add_two_norm`."""
    has_gated: bool


PLAIN_ROWS = RowForms(has_kernels=False, has_gated=False)
"""Plain torch, for a compiler or eager."""


def row_forms(weight_GD: Tensor, bias_G: Tensor) -> RowForms:
    """Return what serves a network with such weights of the gate, on their device."""
    device = weight_GD.device
    if weight_GD.dtype != _BF16 or not kernels_run_on(device):
        return PLAIN_ROWS
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    has_gated = is_hopper and _is_tiled(weight_GD) and _gluon_takes(weight_GD, bias_G)
    return RowForms(has_kernels=True, has_gated=has_gated)


def _is_tiled(weight_GD: Tensor) -> bool:
    gate, width = weight_GD.shape
    return gate % (2 * _GATED_COLUMNS) == 0 and width % _GATED_DEPTH == 0


def _gluon_takes(weight_GD: Tensor, bias_G: Tensor) -> bool:
    """Whether this Triton has what the kernel needs, and compiles it; later calls find it so."""
    try:
        from triton.errors import TritonError

        from vae_stream import gated_gluon
    except ImportError as error:
        _log.info("vit_gated_left_out: %s", error)
        return False
    try:
        gated_gluon.gated(weight_GD.new_zeros(1, weight_GD.shape[1]), weight_GD, bias_G, programs=1)
    except TritonError as error:
        _log.info("vit_gated_left_out: %s", str(error).partition("\n")[0])
        return False
    return True


@torch.library.custom_op("worldstream::vit_add_norm", mutates_args=())
def add_norm(
    x_RD: Tensor, y_RD: Tensor, bias_D: Tensor, scale_D: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Return n [R, D] of rows to which a product is added.

    Args:
        x_RD: fp32 rows.
        y_RD: product, bf16, without its bias.
        bias_D: of the product, bf16.
        scale_D: of the product, fp32.
        weight_D: of the norm, fp32.
        eps: of the norm.

    Raises: ValueError.
    """
    from vae_stream import row_ops_triton

    _require_rows("add_norm", x_RD, weight_D)
    _require_product("add_norm", x_RD, y_RD, bias_D, scale_D)
    return row_ops_triton.add_norm(x_RD, y_RD, bias_D, scale_D, weight_D, eps)


@add_norm.register_fake
def _(
    x_RD: Tensor, y_RD: Tensor, bias_D: Tensor, scale_D: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    return torch.empty_like(y_RD)


@torch.library.custom_op("worldstream::vit_add_two_norm", mutates_args=())
def add_two_norm(
    x_RD: Tensor,
    y_RD: Tensor,
    y_bias_D: Tensor,
    y_scale_D: Tensor,
    z_RD: Tensor,
    z_bias_D: Tensor,
    z_scale_D: Tensor,
    weight_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return rows [R, D] with two products added, fp32, and n of them; see `add_norm`.

    Raises: ValueError.
    """
    from vae_stream import row_ops_triton

    _require_rows("add_two_norm", x_RD, weight_D)
    _require_product("add_two_norm", x_RD, y_RD, y_bias_D, y_scale_D)
    _require_product("add_two_norm", x_RD, z_RD, z_bias_D, z_scale_D)
    return row_ops_triton.add_two_norm(
        x_RD, y_RD, y_bias_D, y_scale_D, z_RD, z_bias_D, z_scale_D, weight_D, eps
    )


@add_two_norm.register_fake
def _(
    x_RD: Tensor,
    y_RD: Tensor,
    y_bias_D: Tensor,
    y_scale_D: Tensor,
    z_RD: Tensor,
    z_bias_D: Tensor,
    z_scale_D: Tensor,
    weight_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_RD), torch.empty_like(y_RD)


@torch.library.custom_op("worldstream::vit_gated", mutates_args=())
def gated(n_RD: Tensor, weight_GD: Tensor, bias_G: Tensor) -> Tensor:
    """Return silu(g) v [R, U], on Hopper alone.

    Args:
        n_RD: bf16 rows.
        weight_GD: bf16; the rows of g, then those of v.
        bias_G: bf16.

    Raises: ValueError.
    """
    rows, (gate, width) = n_RD.shape[0], weight_GD.shape
    require("gated", n_RD, _BF16, (rows, width), "n")
    require("gated", weight_GD, _BF16, (gate, width), "weight")
    require("gated", bias_G, _BF16, (gate,), "bias")
    if not rows or not _is_tiled(weight_GD):
        raise ValueError(
            f"gated: {rows} rows of {width}, {gate} columns; allowed: 1 or more of a multiple of "
            f"{_GATED_DEPTH}, a multiple of {2 * _GATED_COLUMNS}"
        )
    from vae_stream import gated_gluon

    programs = torch.cuda.get_device_properties(n_RD.device).multi_processor_count
    return gated_gluon.gated(n_RD, weight_GD, bias_G, programs=programs)


@gated.register_fake
def _(n_RD: Tensor, weight_GD: Tensor, bias_G: Tensor) -> Tensor:
    return n_RD.new_empty(n_RD.shape[0], weight_GD.shape[0] // 2)


def _require_rows(op: str, x_RD: Tensor, weight_D: Tensor) -> None:
    require(op, x_RD, _FP32, (x_RD.shape[0], weight_D.shape[0]), "x")
    require(op, weight_D, _FP32, tuple(weight_D.shape), "weight")


def _require_product(
    op: str, x_RD: Tensor, product_RD: Tensor, bias_D: Tensor, scale_D: Tensor
) -> None:
    require(op, product_RD, _BF16, tuple(x_RD.shape), "product")
    require(op, bias_D, _BF16, tuple(x_RD.shape[1:]), "bias")
    require(op, scale_D, _FP32, tuple(x_RD.shape[1:]), "scale")
