"""The worked example of the model specification: weights and inputs by formula, outputs printed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model.dit import MiniMaxH3Transformer
from tests.parity.test_diffusers import CONFIG, full_forward
from tests.tolerances import PARITY_ATOL

pytestmark = pytest.mark.cpu

TEXT, KEYFRAME, LATENTS, AUDIO = 7, 6, 7, 9


def _fill(shape: tuple[int, ...], b: int) -> Tensor:
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    a = np.sin(12.9898 * index + 78.233 * b) * 43758.5453
    return torch.from_numpy(2 * (a - np.floor(a)) - 1).float().reshape(shape)


def _model() -> MiniMaxH3Transformer:
    model = MiniMaxH3Transformer(CONFIG).requires_grad_(False)
    for name, parameter in model.named_parameters():
        u = _fill(tuple(parameter.shape), sum(map(ord, name)) % 97)
        if parameter.ndim == 1:
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * u if is_norm else 0.3 * u)
        else:
            parameter.copy_(0.2 * u)
    return model


def _positions() -> Tensor:
    root, scale = np.sqrt(4 * 6), 32.0
    ys = [scale * ((1 - 4 / root) / 2 + r * (4 / root) / 2) for r in range(2)]
    xs = [scale * ((1 - 6 / root) / 2 + c * (6 / root) / 3) for c in range(3)]
    grid = [(y, x) for y in ys for x in xs]
    rows = [(float(j), 0.0, 0.0) for j in range(TEXT)]
    rows += [(float(TEXT), *cell) for cell in grid]
    rows += [(TEXT + m, 0.0, edge) for edge in (xs[0], xs[-1]) for m in range(AUDIO)]
    for j in range(LATENTS):
        frame = 17 * (j // 5) + (0, 1, 5, 9, 13)[j % 5]
        rows += [(TEXT + 5 / 3 * frame, *cell) for cell in grid]
    return torch.tensor(rows, dtype=torch.float64)


def test_printed_outputs():
    rows = TEXT + KEYFRAME + 2 * AUDIO + 6 * LATENTS
    order = torch.arange(rows)
    first = TEXT + KEYFRAME
    tags = torch.tensor([1] * TEXT + [0] * KEYFRAME + [2] * 2 * AUDIO + [0] * 6 * LATENTS)
    times = torch.tensor([0] * TEXT + [2] * KEYFRAME + [1] * 2 * AUDIO + [0] * 6 * LATENTS)
    video, audio = full_forward(
        _model(),
        video=_fill((1, 48, 96), 1),
        audio=_fill((1, 18, 32), 2),
        text=_fill((1, 7, 40), 3),
        times=torch.tensor([0.25, 0.6, 0.999]),
        time_index=times,
        tags=tags,
        positions=_positions(),
        where={
            "text": order[:TEXT],
            "video": torch.cat([order[TEXT:first], order[first + 2 * AUDIO :]]),
            "audio": order[first : first + 2 * AUDIO],
        },
    )
    printed = [
        (video[0, 0, :6], [0.80905, -2.27831, -0.13041, -0.26463, -0.20643, 1.60079]),
        (video[0, -1, :6], [-0.84451, -0.32195, -2.08561, -1.60422, -0.72787, 0.58289]),
        (audio[0, 0, :6], [0.66519, -0.86068, -0.33688, 0.06277, -0.98008, -1.72005]),
        (audio[0, -1, :4], [-0.27763, -0.79779, 1.79907, -0.21397]),
    ]
    for found, expected in printed:
        assert (found - torch.tensor(expected)).abs().max() <= PARITY_ATOL
