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
        delta = F.linear(F.linear(x, self.a_RK), self.b_NR)
        return delta if self.scale == 1.0 else delta * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N]."""
        return self.base(x) + self.branch(x)


def some_rows(linear: nn.Linear | LoraLinear, rows: slice) -> nn.Linear | LoraLinear:
    """Return a linear of some of the output channels, with weights of its own."""
    base = linear.base if isinstance(linear, LoraLinear) else linear
    count = len(range(*rows.indices(base.out_features)))
    part = nn.Linear(
        base.in_features, count, bias=base.bias is not None, device=base.weight.device,
        dtype=base.weight.dtype,
    ).requires_grad_(False)  # fmt: skip
    part.weight.data = base.weight[rows].clone()
    if base.bias is not None:
        part.bias.data = base.bias[rows].clone()
    if isinstance(linear, LoraLinear):
        return LoraLinear(part, linear.a_RK, linear.b_NR[rows].clone(), linear.scale)
    return part
