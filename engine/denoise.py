"""The sampler: noise to a clean chunk in a few denoise steps.

Owns the sigma schedule and the loop. Plain functions; no clock, no input or output, no wait for the
device. Velocity points to the data: x_t = t x0 + (1 - t) noise, so x0 = x_t + (1 - t) v.
Shape suffixes: B batch, C channels, T latent frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.config import SamplerConfig

Velocity = Callable[[Tensor, int], Tensor]
"""(x_BCTHW, denoise step) -> velocity_BCTHW."""


def model_times(sampler: SamplerConfig) -> Tensor:
    """Model time t = 1 - sigma of each denoise step, fp32 [steps] on the CPU.

    sigma = shift s / (1 + (shift - 1) s) on s = 1, 1 - 1/steps, ...; sigma is built in fp32 first.
    """
    grid = torch.linspace(1.0, 0.0, sampler.steps + 1, dtype=torch.float32)[:-1]
    return 1.0 - sampler.shift * grid / (1.0 + (sampler.shift - 1.0) * grid)


def denoise_chunk(
    velocity: Velocity,
    noise_BCTHW: Tensor,
    step_noise: Sequence[Tensor],
    times: Sequence[float],
    clean_BCTHW: Tensor | None = None,
) -> Tensor:
    """Denoise one chunk: predict x0, noise it again to the next level with fresh noise.

    The x0 of the last step is the chunk; there is no step to t = 1.

    Args:
        velocity: the model, with its conditions.
        noise_BCTHW: fp32, where the chunk starts.
        step_noise: fresh fp32 noise after every step but the last.
        times: model time of each step.
        clean_BCTHW: leading latent frames that are given. They stay as they are in every step; the
            model must be told that their rows are clean (t = 1).

    Source: SolarWM-H3 stage 2 rollout.
    """
    count = 0 if clean_BCTHW is None else clean_BCTHW.shape[2]

    def with_clean(x_BCTHW: Tensor) -> Tensor:
        if clean_BCTHW is None:
            return x_BCTHW
        return torch.cat([clean_BCTHW, x_BCTHW[:, :, count:]], dim=2)

    x_BCTHW = with_clean(noise_BCTHW)
    for step, t in enumerate(times):
        x0_BCTHW = with_clean(x_BCTHW + (1.0 - t) * velocity(x_BCTHW, step))
        if step + 1 < len(times):
            next_t = times[step + 1]
            x_BCTHW = with_clean(next_t * x0_BCTHW + (1.0 - next_t) * step_noise[step])
    return x0_BCTHW
