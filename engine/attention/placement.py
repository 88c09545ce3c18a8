"""Where rows sit in space and time: RoPE on the leading head channels, PRoPE on the rest.

Owns the order of the two encodings: RoPE, then PRoPE, then attention, then the output matrix.
Shape suffixes: B batch, R rows, N heads, K head width, G camera groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.prope import Projective, apply_prope, apply_prope_by_products
from engine.model.rope import apply_rope


def place(x_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, matrix_BG44: Tensor) -> Tensor:
    """Rotate the leading channels, then multiply the rest by each row's matrix."""
    return turn(apply_rope(x_BRNK, cos_RK, sin_RK), matrix_BG44, cos_RK.shape[-1])


def turn(x_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Multiply the channels from ``start`` on by each row's matrix."""
    return apply_prope(x_BRNK, matrix_BG44, start)


def place_by_products(
    x_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, matrix_BG44: Tensor
) -> Tensor:
    """Return `place` of the same arguments; see `apply_prope_by_products`."""
    return turn_by_products(apply_rope(x_BRNK, cos_RK, sin_RK), matrix_BG44, cos_RK.shape[-1])


def turn_by_products(x_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Return `turn` of the same arguments; see `apply_prope_by_products`."""
    return apply_prope_by_products(x_BRNK, matrix_BG44, start)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOps:
    """A pair of the functions above, or compiled forms of them."""

    place: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = place
    turn: Callable[[Tensor, Tensor, int], Tensor] = turn


def eager_ops(device: torch.device) -> PlacementOps:
    """Faster form where nothing is compiled: products on a CPU, multiply-adds elsewhere.

    On a GPU a product may run in TF32; a compiler fuses the multiply-adds.
    """
    if device.type == "cpu":
        return PlacementOps(place=place_by_products, turn=turn_by_products)
    return PlacementOps()


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Placement:
    """Positions and cameras of one run of rows."""

    cos_RK: Tensor
    """As wide as the channels that RoPE rotates."""
    sin_RK: Tensor
    camera: Projective
    """[B or 1, G, 4, 4]; each matrix serves R / G rows."""
    ops: PlacementOps

    def query(self, q_BRNK: Tensor) -> Tensor:
        """Place queries."""
        return self.ops.place(q_BRNK, self.cos_RK, self.sin_RK, self.camera.query)

    def key(self, k_BRNK: Tensor) -> Tensor:
        """Place keys."""
        return self.ops.place(k_BRNK, self.cos_RK, self.sin_RK, self.camera.key_value)

    def value(self, v_BRNK: Tensor) -> Tensor:
        """Place values: cameras only."""
        return self.ops.turn(v_BRNK, self.camera.key_value, self.cos_RK.shape[-1])

    def output(self, o_BRNK: Tensor) -> Tensor:
        """Bring the attention output into the query row's own frame."""
        return self.ops.turn(o_BRNK, self.camera.output, self.cos_RK.shape[-1])
