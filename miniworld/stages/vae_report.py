"""Held-out figures and contact sheet of the autoencoder.

Owns: PSNR by clip and frame position, sharpness, the grid score, the sheet.
Legend: B clips, T frames, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from miniworld.stages.vae_losses import sharpness
from vae_stream.pixels import to_uint8
from vae_stream.taehv import TinyVae

_CLIPS_PER_CALL = 8
_SHEET_CLIPS = 6
_SHEET_FRAMES = (0, 8, 17, 33)
_GRID_NEIGHBOURS = (3, 4, 5, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeReport:
    """Quality on clips that were not trained on."""

    psnr_mean_db: float
    psnr_min_db: float
    psnr_by_frame_db: tuple[float, ...]
    sharpness_ratio: float
    """Mean absolute neighbour difference, made over true; 1 is as sharp as the truth."""
    grid_score: float
    """Residual power at period 2 and 4 px over its neighbours, worst of both axes; 1 is no grid."""
    latent_std: float
    """Standard deviation of normalised latents."""

    def lines(self) -> list[str]:
        """Return the report for a log."""
        frames = " ".join(f"{value:.1f}" for value in self.psnr_by_frame_db)
        return [
            f"PSNR mean {self.psnr_mean_db:.2f} dB, worst clip {self.psnr_min_db:.2f} dB",
            f"PSNR by frame {frames}",
            f"sharpness {self.sharpness_ratio:.3f}, grid {self.grid_score:.2f}, "
            f"latent std {self.latent_std:.3f}",
        ]


@torch.no_grad()
def reconstruct(vae: TinyVae, frames_BTCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return frames through encoder and decoder, clamped, and the normalised latents."""
    made, latents = [], []
    for part in frames_BTCHW.split(_CLIPS_PER_CALL):
        latents.append(vae.encode(part))
        made.append(vae.decode(latents[-1])[0].float().clamp(0.0, 1.0))
    return torch.cat(made), torch.cat(latents)


def psnr_db(made: Tensor, true: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the peak signal-to-noise ratio over `dims` of values in 0..1."""
    return -10.0 * torch.log10((made - true).square().mean(dims).clamp(min=1e-10))


def grid_score(residual_BTCHW: Tensor) -> float:
    """Return power at period 2 and 4 px over the median of bins 3..6 away; the worst of 4."""
    worst = 0.0
    for axis in (-1, -2):
        size = residual_BTCHW.shape[axis]
        spectrum = torch.fft.rfft(residual_BTCHW.float(), dim=axis).abs().square()
        power = spectrum.transpose(axis, -1).flatten(0, -2).mean(0)
        for period in (2, 4):
            peak = size // period
            near = [b for d in _GRID_NEIGHBOURS for b in (peak - d, peak + d) if 0 < b < len(power)]
            worst = max(worst, float(power[peak] / power[near].median()))
    return worst


def evaluate(vae: TinyVae, frames_BTCHW: Tensor) -> VaeReport:
    """Measure a network on whole held-out clips."""
    made, latents = reconstruct(vae, frames_BTCHW)
    by_clip = psnr_db(made, frames_BTCHW, (1, 2, 3, 4))
    by_frame = psnr_db(made, frames_BTCHW, (0, 2, 3, 4))
    return VaeReport(
        psnr_mean_db=float(by_clip.mean()),
        psnr_min_db=float(by_clip.min()),
        psnr_by_frame_db=tuple(by_frame.tolist()),
        sharpness_ratio=float(sharpness(made) / sharpness(frames_BTCHW)),
        grid_score=grid_score(made - frames_BTCHW),
        latent_std=float(latents.std()),
    )


def write_sheet(vae: TinyVae, frames_BTCHW: Tensor, path: Path) -> None:
    """Write truth and reconstruction in turn, a row a clip pair, four frames across."""
    frames = frames_BTCHW[:_SHEET_CLIPS]
    made, _ = reconstruct(vae, frames)
    columns = [f for f in _SHEET_FRAMES if f < frames.shape[1]]
    rows = torch.stack([frames[:, columns], made[:, columns]], dim=1)
    cells = to_uint8(rearrange(rows, "b kind t c h w -> (b kind t) c h w")).cpu()
    sheet = rearrange(cells, "(row t) h w c -> (row h) (t w) c", t=len(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet.numpy()).save(path)
