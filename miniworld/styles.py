"""Style vectors: the light, weather and colours of a world as one row of numbers.

Owns: the layout of a style vector, the 16 named styles and the sampler of unnamed ones.
Invariants: colours are display values in 0..1; a style holds no geometry except the sun's height.
"""

import torch
from torch import Tensor

from miniworld.primitives import PALETTE_SIZE

PLACES = ("meadow", "desert", "snow", "mars")
TIMES = ("day", "sunset", "night", "fog")

SKY_TOP = slice(0, 3)
SKY_HORIZON = slice(3, 6)
LIGHT = slice(6, 9)
AMBIENT = slice(9, 12)
FOG = 12
"""Extinction per world unit."""
SUN_ELEVATION = 13
"""Radians; at least 0.38, so that no shadow is longer than about 2.5 heights."""
GROUND_A = slice(14, 17)
GROUND_B = slice(17, 20)
PALETTE = slice(20, 20 + 3 * PALETTE_SIZE)
GLOW = 38
DISC = 39
LAMP_POWER = 40
CLOUD = 41
HILL = slice(42, 45)
WATER = slice(45, 48)
STYLE_SIZE = 48

# top, horizon, light, ambient, fog, elevation, glow, disc, lamps, clouds
_TIME_ROWS = {
    "day": (
        (0.24, 0.50, 0.86), (0.76, 0.87, 0.95), (0.68, 0.64, 0.54), (0.47, 0.49, 0.53),
        0.012, 0.85, 0.35, 0.9, 0.0, 0.55,
    ),
    "sunset": (
        (0.30, 0.25, 0.50), (0.99, 0.62, 0.36), (0.86, 0.50, 0.24), (0.38, 0.34, 0.44),
        0.020, 0.40, 1.0, 1.0, 0.45, 0.45,
    ),
    "night": (
        (0.06, 0.09, 0.24), (0.22, 0.28, 0.48), (0.36, 0.44, 0.60), (0.25, 0.29, 0.44),
        0.018, 0.52, 0.35, 0.90, 1.0, 0.22,
    ),
    "fog": (
        (0.70, 0.73, 0.76), (0.76, 0.78, 0.80), (0.18, 0.18, 0.17), (0.66, 0.67, 0.68),
        0.125, 1.00, 0.0, 0.0, 0.25, 0.0,
    ),
}  # fmt: skip

# ground a and b, sky tint, its share, hill, water, palette: stone plaster accent wood leaf leaf
_PLACE_ROWS = {
    "meadow": (
        (0.48, 0.67, 0.29), (0.31, 0.51, 0.20), (0.50, 0.70, 0.95), 0.0, (0.36, 0.52, 0.40),
        (0.25, 0.50, 0.62),
        ((0.66, 0.64, 0.60), (0.90, 0.84, 0.70), (0.80, 0.30, 0.22),
         (0.46, 0.32, 0.20), (0.24, 0.50, 0.20), (0.48, 0.62, 0.20)),
    ),
    "desert": (
        (0.94, 0.80, 0.53), (0.78, 0.60, 0.35), (0.92, 0.80, 0.58), 0.30, (0.78, 0.56, 0.38),
        (0.20, 0.56, 0.60),
        ((0.76, 0.56, 0.38), (0.96, 0.86, 0.66), (0.18, 0.52, 0.58),
         (0.50, 0.34, 0.22), (0.46, 0.54, 0.24), (0.70, 0.60, 0.26)),
    ),
    "snow": (
        (0.96, 0.97, 1.00), (0.76, 0.83, 0.93), (0.86, 0.92, 1.00), 0.30, (0.62, 0.72, 0.84),
        (0.42, 0.62, 0.78),
        ((0.50, 0.55, 0.62), (0.72, 0.58, 0.46), (0.72, 0.24, 0.26),
         (0.34, 0.26, 0.24), (0.20, 0.40, 0.38), (0.78, 0.88, 0.94)),
    ),
    "mars": (
        (0.78, 0.42, 0.26), (0.56, 0.27, 0.17), (0.88, 0.58, 0.42), 0.60, (0.50, 0.24, 0.20),
        (0.42, 0.20, 0.34),
        ((0.52, 0.32, 0.28), (0.86, 0.78, 0.72), (0.24, 0.56, 0.62),
         (0.36, 0.20, 0.22), (0.56, 0.26, 0.46), (0.84, 0.52, 0.24)),
    ),
}  # fmt: skip


def style_for(place: str, time: str) -> Tensor:
    """Build the named style [S].

    Raises: ValueError when the place or the time has no style.
    """
    if place not in _PLACE_ROWS or time not in _TIME_ROWS:
        raise ValueError(f"style ({place!r}, {time!r}): place is one of {PLACES}, time of {TIMES}")
    top, horizon, light, ambient, fog, elevation, glow, disc, lamp, cloud = _TIME_ROWS[time]
    ground_a, ground_b, tint, share, hill, water, palette = _PLACE_ROWS[place]
    horizon_t, tint_t = torch.tensor(horizon), torch.tensor(tint)
    luminance = float(horizon_t.mean())
    share *= 0.4 + 0.6 * luminance
    style = torch.zeros(STYLE_SIZE)
    # The place tints the sky at the sky's own brightness: a Martian night stays a night.
    for part, colour in ((SKY_TOP, torch.tensor(top)), (SKY_HORIZON, horizon_t)):
        style[part] = torch.lerp(colour, tint_t * (colour.mean() / tint_t.mean()), share)
    style[LIGHT], style[AMBIENT] = torch.tensor(light), torch.tensor(ambient)
    style[FOG], style[SUN_ELEVATION] = fog, elevation
    style[GROUND_A], style[GROUND_B] = torch.tensor(ground_a), torch.tensor(ground_b)
    style[PALETTE] = torch.tensor(palette).flatten()
    style[GLOW], style[DISC], style[LAMP_POWER], style[CLOUD] = glow, disc, lamp, cloud
    hill_t = torch.tensor(hill) * (0.25 + 0.75 * luminance)
    style[HILL] = torch.lerp(hill_t, style[SKY_HORIZON], 0.3)
    style[WATER] = torch.tensor(water)
    return style


def _hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Convert hue, saturation and value (each [...]) to RGB [..., 3]."""
    offset = torch.tensor([5.0, 3.0, 1.0])
    k = (offset + hue[..., None] * 6.0) % 6.0
    ramp = torch.minimum(k, 4.0 - k).clamp(0.0, 1.0)
    return value[..., None] * (1.0 - saturation[..., None] * ramp)


def random_styles(count: int, generator: torch.Generator) -> Tensor:
    """Draw unnamed styles [count, S]: plausible light, any colours; CPU generator."""
    u = torch.rand(count, 64, generator=generator)
    style = torch.zeros(count, STYLE_SIZE)
    bright = 0.30 + 0.70 * u[:, 0]
    sky_hue = u[:, 1]
    style[:, SKY_TOP] = _hsv(sky_hue, 0.15 + 0.65 * u[:, 2], bright * (0.35 + 0.55 * u[:, 3]))
    style[:, SKY_HORIZON] = _hsv(
        (sky_hue + 0.45 * (u[:, 4] - 0.5)) % 1.0, 0.05 + 0.55 * u[:, 5], bright
    )
    light_hue, warm = u[:, 6], 0.35 * u[:, 7]
    style[:, LIGHT] = _hsv(light_hue, warm, (0.20 + 0.65 * u[:, 8]) * (0.35 + 0.65 * bright))
    style[:, AMBIENT] = _hsv(sky_hue, 0.25 * u[:, 9], 0.20 + 0.35 * bright)
    style[:, FOG] = 0.012 * (10.0 ** u[:, 10].square())
    style[:, SUN_ELEVATION] = 0.38 + 0.7 * u[:, 11]
    ground_hue, ground_value = u[:, 12], 0.35 + 0.6 * u[:, 13]
    saturation = 0.08 + 0.6 * u[:, 14]
    style[:, GROUND_A] = _hsv(ground_hue, saturation, ground_value)
    style[:, GROUND_B] = _hsv(
        (ground_hue + 0.08 * (u[:, 15] - 0.5)) % 1.0, saturation, ground_value * 0.76
    )
    hue, chroma, value = u[:, 16:34].view(count, 3, PALETTE_SIZE).unbind(1)
    style[:, PALETTE] = _hsv(hue, 0.1 + 0.6 * chroma, 0.25 + 0.65 * value).flatten(1)
    style[:, GLOW], style[:, DISC] = u[:, 34], u[:, 35]
    style[:, LAMP_POWER] = (1.3 - 2.0 * bright).clamp(0.0, 1.0)
    style[:, CLOUD] = 0.6 * u[:, 36]
    style[:, HILL] = torch.lerp(
        style[:, GROUND_B] * bright[:, None], style[:, SKY_HORIZON], 0.3 + 0.3 * u[:, 37, None]
    )
    style[:, WATER] = _hsv(u[:, 38], 0.2 + 0.5 * u[:, 39], 0.3 + 0.5 * u[:, 40])
    return style
