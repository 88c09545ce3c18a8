"""Motion seen in a pair of frames: degrees turned, units walked.

Owns the search for the homography that turns one frame into the other. A turn on the spot moves
every pixel by a known homography; a step without a turn moves the pixels of the ground plane by
another. Neither needs the truth, so both work where the world is the model's own invention.

Invariants: the pinhole of the mini world (square pixels, centre in the middle, eye one unit above
the ground, level); frames are float in 0..1. Shape suffixes: B pairs, C colours, H height, W width,
K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from miniworld.frame_tables import FOCAL_PER_WIDTH

_YAW_REACH_DEG = 20.0
_YAW_STEP_DEG = 0.5
_STEP_REACH = 1.5
"""Candidates for walking reach this many times the command, both ways."""
_STEP_COUNT = 61
_GROUND_TOP_SHARE = 0.62
"""Ground rows begin here; nearer the horizon a step moves a pixel by less than it can show."""

Warp = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x, y, amount) of the second frame's pixels on the plane z = 1 -> (x, y) in the first frame."""


def _plane(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Coordinates of the pixel centres on the plane z = 1, each [H, W]."""
    focal_px = FOCAL_PER_WIDTH * width
    y = (torch.arange(height, device=device) + 0.5 - height / 2) / focal_px
    x = (torch.arange(width, device=device) + 0.5 - width / 2) / focal_px
    return x.expand(height, width), y[:, None].expand(height, width)


def _warped(first_BCHW: Tensor, warp: Warp, amount_B: Tensor) -> tuple[Tensor, Tensor]:
    """First frames as seen after the motion, and which pixels of it they cover [B, H, W]."""
    height, width = first_BCHW.shape[-2:]
    x_HW, y_HW = _plane(height, width, first_BCHW.device)
    focal_px = FOCAL_PER_WIDTH * width
    x, y = warp(x_HW[None], y_HW[None], amount_B[:, None, None])
    grid = torch.stack([x * focal_px / (width / 2), y * focal_px / (height / 2)], -1)
    covered = (grid.abs() < 0.97).all(-1)
    return F.grid_sample(first_BCHW, grid, align_corners=False), covered


def _yaw(x: Tensor, y: Tensor, yaw_rad: Tensor) -> tuple[Tensor, Tensor]:
    sine, cosine = yaw_rad.sin(), yaw_rad.cos()
    depth = (cosine - sine * x).clamp(min=1e-3)
    return (cosine * x + sine) / depth, y / depth


def _forward(x: Tensor, y: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    # Ground at depth 1 / y; before the step it was `step` further away.
    scale = 1.0 / (1.0 + step * y.clamp(min=1e-3)).clamp(min=1e-3)
    return x * scale, y * scale


def _right(x: Tensor, y: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    return x + step * y, y.expand_as(x + step * y)


def _refined(cost_KB: Tensor, candidates_K: Tensor) -> Tensor:
    """Candidate of least cost, moved to the vertex of the parabola through its neighbours [B]."""
    best = cost_KB.argmin(0)
    middle = best.clamp(1, cost_KB.shape[0] - 2)
    left, centre, right = (cost_KB.gather(0, (middle + d)[None])[0] for d in (-1, 0, 1))
    bend = left - 2 * centre + right
    offset = torch.where(bend > 0, 0.5 * (left - right) / bend.clamp(min=1e-12), 0.0)
    step = candidates_K[1] - candidates_K[0]
    inside = candidates_K[middle] + offset.clamp(-1.0, 1.0) * step
    return torch.where(best == middle, inside, candidates_K[best])


def yaw_deg(first_BCHW: Tensor, second_BCHW: Tensor) -> Tensor:
    """Degrees turned to the right between frames of a turn on the spot [B], within 20 each way."""

    def search(first: Tensor, second: Tensor, candidates_KB: Tensor) -> Tensor:
        costs = []
        for amount_B in candidates_KB:
            made, covered = _warped(first, _yaw, amount_B.deg2rad())
            error = (made - second).abs().mean(1) * covered
            costs.append(error.sum((1, 2)) / covered.sum((1, 2)).clamp(min=1))
        return torch.stack(costs)

    first, second = first_BCHW.float(), second_BCHW.float()
    coarse = torch.arange(
        -_YAW_REACH_DEG, _YAW_REACH_DEG + _YAW_STEP_DEG / 2, _YAW_STEP_DEG, device=first.device
    )
    batch = first.shape[0]
    small = (F.avg_pool2d(first, 2), F.avg_pool2d(second, 2))
    rough_B = _refined(search(*small, coarse[:, None].expand(-1, batch)), coarse)
    fine = torch.linspace(-0.6, 0.6, 7, device=first.device)
    return rough_B + _refined(search(first, second, rough_B + fine[:, None]), fine)


def _walked(first_BCHW: Tensor, second_BCHW: Tensor, warp: Warp, commanded: float) -> Tensor:
    height = first_BCHW.shape[-2]
    ground = slice(int(_GROUND_TOP_SHARE * height), height)
    first, second = first_BCHW.float(), second_BCHW.float()[..., ground, :]
    candidates = torch.linspace(
        -_STEP_REACH * commanded, _STEP_REACH * commanded, _STEP_COUNT, device=first.device
    )
    errors, covers = [], []
    for candidate in candidates:
        made, covered = _warped(first, warp, candidate.expand(first.shape[0]))
        errors.append((made[..., ground, :] - second).abs().mean(1))
        covers.append(covered[:, ground])
    error_KBHW, seen_BHW = torch.stack(errors), torch.stack(covers).all(0)
    # Things that stand on the ground do not fit any candidate; they must not outvote it.
    limit = error_KBHW.amin(0).flatten(1).quantile(0.8, dim=1)[:, None, None] * 4 + 0.02
    kept = torch.minimum(error_KBHW, limit) * seen_BHW
    return _refined(kept.sum((2, 3)) / seen_BHW.sum((1, 2)).clamp(min=1), candidates)


def forward_units(first_BCHW: Tensor, second_BCHW: Tensor, commanded: float) -> Tensor:
    """Units walked ahead between level frames without a turn [B], within 1.5 x the command."""
    return _walked(first_BCHW, second_BCHW, _forward, commanded)


def strafe_units(first_BCHW: Tensor, second_BCHW: Tensor, commanded: float) -> Tensor:
    """Units walked to the right between level frames without a turn [B]."""
    return _walked(first_BCHW, second_BCHW, _right, commanded)


def heading_deg(c2w_44: Tensor) -> Tensor:
    """Heading of poses [..., 4, 4] in degrees, to the right of +z."""
    return torch.atan2(c2w_44[..., 0, 2], c2w_44[..., 2, 2]) * (180.0 / math.pi)


def step_between(first_44: Tensor, second_44: Tensor) -> tuple[Tensor, Tensor]:
    """Return units (forward, right) from one level pose to another, in the first one's frame."""
    offset = second_44[..., :3, 3] - first_44[..., :3, 3]
    return (offset * first_44[..., :3, 2]).sum(-1), (offset * first_44[..., :3, 0]).sum(-1)
