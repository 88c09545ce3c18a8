"""Measures of frames: error, sharpness, grid, brightness, contrast, motion, palette, horizon.

Owns pure functions of float frames in 0..1. Invariant: the batch axis survives wherever the name
does not say "ratio", so that a caller can report medians and worst clips.

Shape suffixes: B clips, F frames, C colours, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PSNR_CAP_DB = 60.0
"""Identical frames count as this; 8-bit rounding alone gives 59 dB."""
BORDER_PX = 8
"""Left out of sharpness and grid: padding of the convolutions bends the picture's edge."""
_GRID_NEIGHBOURS = (3, 4, 5, 6, 7)


def psnr_db(made_BFCHW: Tensor, true_BFCHW: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each clip [B], over all its frames."""
    error_B = (made_BFCHW - true_BFCHW).square().flatten(1).mean(1)
    return (-10.0 * torch.log10(error_B.clamp(min=1e-12))).clamp(max=PSNR_CAP_DB)


def _inner(frames: Tensor) -> Tensor:
    return frames[..., BORDER_PX:-BORDER_PX, BORDER_PX:-BORDER_PX]


def sharpness(frames_BFCHW: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, both axes, off the border [B]."""
    inner = _inner(frames_BFCHW)
    across = (inner[..., 1:] - inner[..., :-1]).abs().flatten(1).mean(1)
    down = (inner[..., 1:, :] - inner[..., :-1, :]).abs().flatten(1).mean(1)
    return across + down


def sharpness_ratio(made_BFCHW: Tensor, true_BFCHW: Tensor) -> float:
    """Sharpness of all frames over that of the truth; below 1 is blurred."""
    return float(sharpness(made_BFCHW).mean() / sharpness(true_BFCHW).mean())


def edge_ratio(made_BFCHW: Tensor, true_BFCHW: Tensor) -> float:
    """Root mean square of neighbour differences over that of the truth.

    Stricter than `sharpness_ratio`: a blurred edge keeps its height, and with it the sum of its
    differences, but not the sum of their squares.
    """

    def energy(frames_BFCHW: Tensor) -> Tensor:
        inner = _inner(frames_BFCHW)
        across = (inner[..., 1:] - inner[..., :-1]).square().mean()
        return across + (inner[..., 1:, :] - inner[..., :-1, :]).square().mean()

    return float((energy(made_BFCHW) / energy(true_BFCHW)).sqrt())


def _peak_and_neighbours(frames_BFCHW: Tensor, period_px: int, axis: int) -> tuple[Tensor, Tensor]:
    """Mean squared amplitude at one spatial period and at the bins beside it, along one axis."""
    size = frames_BFCHW.shape[axis]
    shape = [1] * frames_BFCHW.dim()
    shape[axis] = size
    # A Hann window keeps edges at the border from leaking into every bin; its gain is one half.
    window = torch.hann_window(size, device=frames_BFCHW.device).view(shape)
    spectrum = torch.fft.rfft(frames_BFCHW.float() * window, dim=axis).abs()
    # A wave has half of its amplitude at its own frequency, but all of it at the highest one.
    scale = 2.0 / size if period_px == 2 else 4.0 / size
    power = (scale * spectrum).square().transpose(axis, -1).flatten(0, -2).mean(0)
    peak = size // period_px
    near = [peak + s * d for d in _GRID_NEIGHBOURS for s in (-1, 1) if peak + s * d < len(power)]
    return power[peak], power[near].mean()


def grid(made_BFCHW: Tensor, true_BFCHW: Tensor) -> tuple[float, float]:
    """Strength of a regular grid with periods of 2 and 4 px along both axes, the worst of the four.

    Returns: its amplitude in steps of 8 bits (half a step drowns in rounding), and the height of
    its peak over the bins beside it, divided by the same of the truth (1 is no more than there).
    """
    made, true = _inner(made_BFCHW), _inner(true_BFCHW)
    # Sizes that 4 divides put both periods on a bin.
    height, width = (size - size % 4 for size in made.shape[-2:])
    made, true = made[..., :height, :width], true[..., :height, :width]
    amplitude, ratio = 0.0, 0.0
    for period_px in (2, 4):
        for axis in (-1, -2):
            peak, near = _peak_and_neighbours(made, period_px, axis)
            true_peak, true_near = _peak_and_neighbours(true, period_px, axis)
            excess = (peak - near - (true_peak - true_near)).clamp(min=0.0)
            amplitude = max(amplitude, 255.0 * float(excess.sqrt()))
            ratio = max(ratio, float(peak / near.clamp(min=1e-20) * true_near / true_peak))
    return amplitude, ratio


def brightness(frames_BFCHW: Tensor) -> Tensor:
    """Mean of all values [B]."""
    return frames_BFCHW.flatten(1).mean(1)


def contrast(frames_BFCHW: Tensor) -> Tensor:
    """Standard deviation of the grey value inside a frame, mean over frames [B]."""
    return frames_BFCHW.mean(2).flatten(2).std(2).mean(1)


def motion(frames_BFCHW: Tensor) -> Tensor:
    """Mean absolute change between the given frames, one to the next [B]."""
    return (frames_BFCHW[:, 1:] - frames_BFCHW[:, :-1]).abs().flatten(1).mean(1)


def edge_correlation(made_BFCHW: Tensor, true_BFCHW: Tensor) -> Tensor:
    """Correlation of edge maps in 4-px cells [B]: the same shapes in other colours score high."""
    return _correlation(_edges(made_BFCHW), _edges(true_BFCHW))


def _edges(frames_BFCHW: Tensor) -> Tensor:
    grey = frames_BFCHW.mean(2)
    across = (grey[..., 1:] - grey[..., :-1]).abs()[..., :-1, :]
    down = (grey[..., 1:, :] - grey[..., :-1, :]).abs()[..., :-1]
    # The root keeps one bright edge from outweighing all the others.
    return F.avg_pool2d((across + down).sqrt(), 4).flatten(1)


def _correlation(a_BN: Tensor, b_BN: Tensor) -> Tensor:
    a, b = a_BN - a_BN.mean(1, keepdim=True), b_BN - b_BN.mean(1, keepdim=True)
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-12)


def palette_distance(made_BFCHW: Tensor, picture_BCHW: Tensor) -> Tensor:
    """Distance of mean colours, the worse of upper and lower half [B]; 1 is black to white."""
    half = picture_BCHW.shape[-2] // 2
    distances = []
    for rows in (slice(0, half), slice(half, None)):
        made = made_BFCHW[..., rows, :].mean((1, 3, 4))
        distances.append((made - picture_BCHW[..., rows, :].mean((2, 3))).abs().mean(1))
    return torch.stack(distances).amax(0)


def horizon_shift_px(made_BFCHW: Tensor, picture_BCHW: Tensor, *, reach_px: int = 24) -> Tensor:
    """Rows by which the vertical colour profile moved against the picture [B]; down is positive.

    The profile is the mean colour of each row, and its change from row to row, smoothed, marks the
    horizon; the shift is where the changes agree best.
    """

    def changes(frames: Tensor) -> Tensor:
        profile_BCH = F.avg_pool1d(frames.mean(-1), 5, stride=1)
        return (profile_BCH[..., 6:] - profile_BCH[..., :-6]).flatten(1)

    colours = picture_BCHW.shape[1]
    reference = changes(picture_BCHW).unflatten(1, (colours, -1))
    made = changes(made_BFCHW.mean(1)).unflatten(1, (colours, -1))
    inner = slice(reach_px, reference.shape[-1] - reach_px)
    shifts = range(-reach_px, reach_px + 1)
    scores = torch.stack(
        [
            _correlation(
                reference[..., inner].flatten(1),
                made[..., inner.start + s : inner.stop + s].flatten(1),
            )
            for s in shifts
        ]
    )
    return torch.tensor(list(shifts), device=scores.device)[scores.argmax(0)].float()
