"""Losses of the autoencoder: what a reconstruction should keep, and a critic for crisp edges.

Owns: reconstruction terms, the patch critic and its losses.
Legend: B clips, T frames, G groups of consecutive frames, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vae_stream.geometry import BLOCK_FRAMES, RAW_FRAMES

GROUP_FRAMES = 3
_GRADIENT_SCALES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """Weight of each reconstruction term."""

    mse: float = 1.0
    gradient: float = 2.0
    """Of the mean over scales 1, 2 and 4."""
    motion: float = 0.5
    """Of frame differences; three times at the edge between two latent frames."""
    latent: float = 1e-4


def motion_weights(frames: int) -> Tensor:
    """Return the weight of each of `frames - 1` frame differences: 3 where a latent ends."""
    ends = [
        f for f in range(1, frames) if (f % BLOCK_FRAMES) % RAW_FRAMES == 1 or not f % BLOCK_FRAMES
    ]
    weights = torch.ones(frames - 1)
    weights[[f - 1 for f in ends]] = 3.0
    return weights


def reconstruction_terms(
    made_BTCHW: Tensor, true_BTCHW: Tensor, latents_BTCHW: Tensor, motion_T: Tensor
) -> Tensor:
    """Return [L1, MSE, gradient L1, motion L1, z^2] in fp32; all but z are of the residual."""
    residual = made_BTCHW.float() - true_BTCHW.float()
    flat = residual.flatten(0, 1)
    gradient = residual.new_zeros(())
    for scale in _GRADIENT_SCALES:
        pooled = F.avg_pool2d(flat, scale) if scale > 1 else flat
        across = (pooled[..., 1:] - pooled[..., :-1]).abs().mean()
        down = (pooled[..., 1:, :] - pooled[..., :-1, :]).abs().mean()
        gradient = gradient + (across + down) / len(_GRADIENT_SCALES)
    motion = (residual[:, 1:] - residual[:, :-1]).abs().mean((0, 2, 3, 4))
    return torch.stack(
        [
            residual.abs().mean(),
            residual.square().mean(),
            gradient,
            (motion * motion_T).mean(),
            latents_BTCHW.float().square().mean(),
        ]
    )


def total_loss(terms: Tensor, weights: LossWeights) -> Tensor:
    """Weigh the terms of `reconstruction_terms`."""
    return (
        terms[0]
        + weights.mse * terms[1]
        + weights.gradient * terms[2]
        + weights.motion * terms[3]
        + weights.latent * terms[4]
    )


def sharpness(frames_BTCHW: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels (0-d)."""
    across = (frames_BTCHW[..., 1:] - frames_BTCHW[..., :-1]).abs().mean()
    return across + (frames_BTCHW[..., 1:, :] - frames_BTCHW[..., :-1, :]).abs().mean()


class PatchCritic(nn.Module):
    """Judges patches of about 40 px over three consecutive frames, so that flicker counts too.

    Kernels are multiples of their strides: every pixel meets equally many taps, and the gradient
    has no grid of its own.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4 * 3 * GROUP_FRAMES, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(width * 2**level, width * 2 ** (level + 1), 4, stride=2, padding=1)
            for level in range(2)
        )
        self.logits = nn.Conv2d(4 * width, 1, 3, padding=1)

    def forward(self, groups_GCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits `[G, 1, H/8, W/8]` in fp32 and the features of each layer."""
        x_GCHW = F.pixel_unshuffle(2.0 * groups_GCHW - 1.0, 2)
        x_GCHW = F.leaky_relu(self.stem(x_GCHW), 0.2)
        features = [x_GCHW]
        for conv in self.down:
            x_GCHW = F.leaky_relu(conv(x_GCHW), 0.2)
            features.append(x_GCHW)
        return self.logits(x_GCHW).float(), features


def critic_loss(
    critic: PatchCritic, true_GCHW: Tensor, made_GCHW: Tensor, noise_GCHW: Tensor, gamma: float
) -> Tensor:
    """Relativistic loss of true against made, paired by place, with gradient penalties.

    The penalty gamma/2 |grad D|^2 on both sides is taken by finite differences along
    `noise_GCHW` (standard deviation s): E (D(x + n) - D(x))^2 / s^2. It needs no second backward.
    Sources: R3GAN, arXiv 2501.05441 (pairing, both penalties); APT, arXiv 2501.08316 (differences).
    """
    both = torch.cat([true_GCHW, made_GCHW])
    noise = torch.cat([noise_GCHW, noise_GCHW])
    logits, _ = critic(torch.cat([both, both + noise]))
    plain, moved = logits.chunk(2)
    true, made = plain.chunk(2)
    variance = (2.0 * noise_GCHW).square().mean()  # the critic sees -1..1
    penalty = (moved - plain).square().mean() / variance
    return F.softplus(made - true).mean() + gamma * penalty


def decoder_loss(critic: PatchCritic, true_GCHW: Tensor, made_GCHW: Tensor) -> Tensor:
    """Relativistic loss of made against true plus the distance of the critic's features."""
    with torch.no_grad():
        true, true_features = critic(true_GCHW)
    made, made_features = critic(made_GCHW)
    loss = F.softplus(true - made).mean()
    for ours, theirs in zip(made_features, true_features, strict=True):
        loss = loss + (ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean()
    return loss


def frame_groups(frames_BTCHW: Tensor, starts: list[int]) -> Tensor:
    """Return three consecutive frames from each start, on the channel axis: `[B * n, 9, H, W]`."""
    groups = [frames_BTCHW[:, s : s + GROUP_FRAMES].flatten(1, 2) for s in starts]
    return torch.cat(groups)
