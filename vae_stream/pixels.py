"""The only place for pixel ranges, uint8 rounding and picture layouts.

Invariants: float frames are RGB in 0..1, channel-first; uint8 frames are RGB, channel-last,
contiguous. Legend: T frames, C channels, H height, W width.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def to_uint8(frames_TCHW: Tensor) -> Tensor:
    """Return `frames_THWC` uint8: clamp to 0..1 in fp32, times 255, round half to even."""
    # One copy, then in place: fresh memory costs more than the arithmetic.
    frames_THWC = torch.empty(
        frames_TCHW.permute(0, 2, 3, 1).shape, dtype=torch.float32, device=frames_TCHW.device
    ).copy_(frames_TCHW.permute(0, 2, 3, 1))
    return frames_THWC.clamp_(0.0, 1.0).mul_(255.0).round_().to(torch.uint8)


def from_uint8(frames_THWC: Tensor) -> Tensor:
    """Return `frames_TCHW` fp32 in 0..1.

    Raises:
        ValueError: not uint8 `[T, H, W, 3]`.
    """
    if frames_THWC.dtype != torch.uint8 or frames_THWC.dim() != 4 or frames_THWC.shape[3] != 3:
        raise ValueError(
            f"frames_THWC: {frames_THWC.dtype} {tuple(frames_THWC.shape)}; "
            "allowed: uint8 [T, H, W, 3]"
        )
    return frames_THWC.permute(0, 3, 1, 2).float() / 255.0


def from_imagenet(frames_TCHW: Tensor) -> Tensor:
    """Return frames around 0..1, fp32, of frames normalised as H3 makes and takes them."""
    mean_C11, std_C11 = _imagenet(frames_TCHW.device)
    return frames_TCHW.float() * std_C11 + mean_C11


def to_imagenet(frames_TCHW: Tensor) -> Tensor:
    """Return frames in 0..1 normalised by the mean and deviation of the colours of ImageNet."""
    mean_C11, std_C11 = _imagenet(frames_TCHW.device)
    return (frames_TCHW - mean_C11) / std_C11


@cache
def _imagenet(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation, put on a device once, because a GPU waits for such a copy."""
    mean_C, std_C = (
        torch.tensor(values, device=device)
        for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    return mean_C[:, None, None], std_C[:, None, None]
