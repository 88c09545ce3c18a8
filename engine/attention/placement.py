"""Where rows sit in space and time: RoPE on the leading head channels, PRoPE on the rest.

Owns the order of the two encodings: RoPE, then PRoPE, then attention, then the output matrix.
Shape suffixes: B batch, R rows, N heads, K head width, G camera groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.model.prope import Projective, apply_prope
from engine.model.rope import apply_rope


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Placement:
    """Positions and cameras of one run of rows."""

    cos_RK: Tensor
    sin_RK: Tensor
    camera: Projective
    """[B or 1, G, 4, 4]; each matrix serves R / G rows."""
    start: int
    """First head channel of PRoPE."""

    def query(self, q_BRNK: Tensor) -> Tensor:
        """Place queries."""
        rotated_BRNK = apply_rope(q_BRNK, self.cos_RK, self.sin_RK)
        return apply_prope(rotated_BRNK, self.camera.query, self.start)

    def key(self, k_BRNK: Tensor) -> Tensor:
        """Place keys."""
        rotated_BRNK = apply_rope(k_BRNK, self.cos_RK, self.sin_RK)
        return apply_prope(rotated_BRNK, self.camera.key_value, self.start)

    def value(self, v_BRNK: Tensor) -> Tensor:
        """Place values: cameras only."""
        return apply_prope(v_BRNK, self.camera.key_value, self.start)

    def output(self, o_BRNK: Tensor) -> Tensor:
        """Bring the attention output into the query row's own frame."""
        return apply_prope(o_BRNK, self.camera.output, self.start)
