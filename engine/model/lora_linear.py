"""A linear with a low-rank branch beside it: y = W x + scale B (A x).

Owns the layer. Every product and the sum are rounded to the dtype of the rows, as PEFT does; that
is the reference of every other form. Shape suffixes: N output channels, K input channels, R rank.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """Has no gradient.

    Args:
        base: the linear, which stays as it is.
        a_RK: in the dtype of the base, like ``b_NR``.
        b_NR: as above.
        scale: alpha / rank.
        sums_inside: let a fused kernel behind the linear form the sum, with the same rounding.
    """

    a_RK: Tensor
    b_NR: Tensor

    def __init__(
        self,
        base: nn.Linear,
        a_RK: Tensor,
        b_NR: Tensor,
        scale: float,
        *,
        sums_inside: bool = False,
    ) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("a_RK", a_RK)
        self.register_buffer("b_NR", b_NR)
        self.scale = scale
        self.sums_inside = sums_inside

    @property
    def weight(self) -> Tensor:
        """Of the base."""
        return self.base.weight

    @property
    def out_features(self) -> int:
        """Of the base."""
        return self.base.out_features

    def branch(self, x: Tensor) -> Tensor:
        """Return what is added to the base."""
        return low_rank(x, self.a_RK, self.b_NR, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N]."""
        return self.base(x) + self.branch(x)


def low_rank(x: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float) -> Tensor:
    """Return scale B (A x), [..., N]."""
    delta = F.linear(F.linear(x, a_RK), b_NR)
    return delta if scale == 1.0 else delta * scale
