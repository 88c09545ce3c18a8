"""Whether a frame still shows things, or only an empty plain under the sky.

Owns the share of busy cells: cells of 16 x 16 pixels with more change along their rows than the
same view of the same world, in the same style, has without any solid or pond. Change along rows
ignores the horizon and the haze, which a plain has too.

The two constants are calibrated on 144 held-out views of the truth, of all kinds and styles: 98 %
of them count as not empty, and fewer than 1 % of empty views do when compared with another empty
view of the same world, whose clouds and hills lie elsewhere.

Shape suffixes: B clips, F frames, C colours, H height, W width.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from miniworld import primitives as P
from miniworld.scene import Scenes

CELL_PX = 16
BUSY_MARGIN = 0.008
"""Change per pixel, of full scale, by which a busy cell exceeds the empty view."""
NOT_EMPTY_SHARE = 0.025
"""Share of busy cells from which a view counts as not empty: four cells of 160."""


def without_things(scenes: Scenes) -> Scenes:
    """Return the same worlds without solids and ponds: ground, hills and sky only."""
    rows_CNP = scenes.primitives_CNP.clone()
    rows_CNP[..., P.PRESENT] = 0.0
    return dataclasses.replace(
        scenes, primitives_CNP=rows_CNP, ponds_CQ4=torch.zeros_like(scenes.ponds_CQ4)
    )


def _row_change(frames_BFCHW: Tensor) -> Tensor:
    across = (frames_BFCHW[..., 1:] - frames_BFCHW[..., :-1]).abs().amax(2)
    return F.avg_pool2d(F.pad(across, (0, 1)), CELL_PX)


def busy_share(frames_BFCHW: Tensor, empty_BFCHW: Tensor) -> Tensor:
    """Share of busy cells, mean over the frames of a clip [B]."""
    is_busy = _row_change(frames_BFCHW) > _row_change(empty_BFCHW) + BUSY_MARGIN
    return is_busy.float().flatten(1).mean(1)
