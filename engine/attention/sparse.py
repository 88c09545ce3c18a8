"""Attention of a chunk's rows that reads a part of the window and the rest in summary (class A).

Owns `SparseAttention`, what it has to prove before it is used, and the count of what it reads. The
formula and the blocks are those of `engine.kernels.sparse`; the sink is the prefix. Prefix rows,
the first layers (`SPARSE_DENSE_LAYERS`), later denoise steps and the refresh are not its affair.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import dataclasses
import logging
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed, AttentionPlan, AttentionShape, select_backend
from engine.config import SPARSE_DENSE_LAYERS, ModelConfig
from engine.errors import ConfigError, UnsupportedError
from engine.kernels import sparse
from engine.kernels.sparse import KeySummary

_ROUTE_ALL = -1000.0
"""Every score is above the mean less so many deviations."""
_LONG_KEYS = 32768
_GATE = {"max": 0.08, "mean": 0.002, "rel_l2": 0.005}
_LONG_MAX = 0.15
DENSITY_BOUNDS = (0.02, 0.98)
"""Shares of blocks read at which routing does nothing, or loses nearly everything."""

_log = logging.getLogger(__name__)


class SparseAttention:
    """Reads blocks whose score is ``tau`` deviations above the mean, and what is always read.

    Args:
        tau: larger reads less.
        block: keys that share a summary, one of `SPARSE_BLOCKS`.
        device: of the queries.
    """

    name = "sparse"

    def __init__(self, tau: float, block: int, device: torch.device) -> None:
        self.tau, self.block = tau, block
        self._tally_2 = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(
        self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, summary: KeySummary
    ) -> Tensor:
        """Return [B, R, N, K]; the summary of what the queries' own keys touch is renewed."""
        summary.renew(k_BSNK, v_BSNK, q_BRNK.shape[1])
        mean_BNJK, sum_BNJK, reach_BNJ, sink_1 = summary.tensors
        routes = sparse.route(
            q_BRNK, mean_BNJK, sink_1, self._tally_2, k_BSNK.shape[1], self.tau, summary.block
        )
        return sparse.attend(
            q_BRNK, k_BSNK, v_BSNK, mean_BNJK, sum_BNJK, reach_BNJ, *routes, summary.block
        )

    def take_density(self) -> float:
        """Return the share of blocks that was read since the last call; waits for the device."""
        read, all_ = self._tally_2.tolist()
        self._tally_2.zero_()
        return read / all_ if all_ else 0.0


def check_density(density: float) -> None:
    """Raises: UnsupportedError for a share of blocks that says routing was not at work."""
    least, most = DENSITY_BOUNDS
    if not least <= density <= most:
        raise UnsupportedError(
            f"sparse attention read {density:.3f} of the blocks; allowed: {least} to {most}"
        )


def sparse_refusal(need: AttentionNeed, layers: int) -> str | None:
    """Return why a model cannot be served, or None."""
    if need.dtype not in (torch.float32, torch.bfloat16):
        return f"made for float32 and bfloat16, not {need.dtype}"
    if need.device_type not in ("cpu", "cuda"):
        return f"made for cpu and cuda, not {need.device_type}"
    if need.device_type == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed"
    if layers <= SPARSE_DENSE_LAYERS:
        return f"the first {SPARSE_DENSE_LAYERS} layers read everything, and there are {layers}"
    return None


def require_sparse(need: AttentionNeed, model: ModelConfig, steps: int) -> None:
    """Refuse what cannot be served.

    Args:
        need: of the model.
        model: its layers and denoise steps.
        steps: first denoise steps of a chunk that are to read a part.

    Raises: ConfigError for more steps than there are, UnsupportedError for the model or the device.
    """
    if not 1 <= steps <= model.sampler.steps:
        raise ConfigError(
            f"sparse_steps is {steps}; allowed: 1 to {model.sampler.steps}, the denoise steps of "
            "this model"
        )
    reason = sparse_refusal(need, model.num_layers)
    if reason is not None:
        raise UnsupportedError(f"attention sparse refuses {need}: {reason}")


def with_sparse(
    plan: AttentionPlan,
    shape: AttentionShape,
    model: ModelConfig,
    *,
    tau: float,
    block: int,
    steps: int,
    device: torch.device,
) -> AttentionPlan:
    """Let a plan read the window in part, once that agrees with reading all of it.

    Every rank tries the same rows and comes to the same result.

    Args:
        plan: of everything else.
        shape: of the video rows over a full window.
        model: of these rows.
        tau: see `SparseAttention`.
        block: see there.
        steps: first denoise steps of a chunk that read a part.
        device: of the model.

    Raises: ConfigError for steps that there are not; UnsupportedError where it cannot serve or,
        reading every block, is further from torch's own product than rounding.
    """
    require_sparse(shape.need, model, steps)
    errors = route_all_errors(shape, block, device)
    gate = _GATE | ({"max": _LONG_MAX} if shape.keys >= _LONG_KEYS else {})
    told = ", ".join(f"{name} {errors[name]:.2e} (at most {most})" for name, most in gate.items())
    if not all(errors[name] <= most for name, most in gate.items()):
        raise UnsupportedError(
            f"attention sparse, reading every block of {shape}, differs from sdpa: {told}"
        )
    _log.info(
        "attention_sparse tau=%g block=%d steps=%d %s, reading all: %s",
        tau, block, steps, shape, told,
    )  # fmt: skip
    return dataclasses.replace(plan, sparse=SparseAttention(tau, block, device), sparse_steps=steps)


def route_all_errors(shape: AttentionShape, block: int, device: torch.device) -> dict[str, float]:
    """Distance from torch's own product where every block is read, over random rows."""
    generator = torch.Generator(device).manual_seed(0)

    def part(rows: int) -> Tensor:
        size = (1, shape.heads, rows, shape.need.head_dim)
        drawn = torch.randn(size, generator=generator, device=device)
        return drawn.to(shape.need.dtype).transpose(1, 2)

    q_BRNK, k_BSNK, v_BSNK = part(shape.rows), part(shape.keys), part(shape.keys)
    summary = KeySummary.of(k_BSNK, 0, block)
    summary.renew(k_BSNK, v_BSNK)
    read_all = SparseAttention(_ROUTE_ALL, block, device)
    made = read_all(q_BRNK, k_BSNK, v_BSNK, summary).float()
    expected = select_backend(shape.need, "sdpa")(q_BRNK, k_BSNK, v_BSNK).float()
    off = (made - expected).abs()
    return {
        "max": float(off.max()),
        "mean": float(off.mean()),
        "rel_l2": float((made - expected).norm() / expected.norm()),
    }
