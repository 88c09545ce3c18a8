"""Stand-ins for outside photographs: pictures that no world of ours would show.

Owns: `synthetic_photos` and the pans and zooms over them.
Invariants: a picture depends on the seed and the index only through explicit CPU generators; the
heavy arithmetic runs on the requested device. Values are display colours in 0..1.

Shapes: C pictures, K shapes or octaves, H, W picture, T frames.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_SHAPES = 9
_CANVAS_SCALE = 1.5  # room to pan on the canvas around the view


def _palettes(count: int, colours: int, generator: torch.Generator) -> Tensor:
    """Draw palettes [C, colours, 3]: a common cast plus individual hues, muted as photographs."""
    cast = torch.rand(count, 1, 3, generator=generator)
    own = torch.rand(count, colours, 3, generator=generator)
    value = 0.15 + 0.85 * torch.rand(count, colours, 1, generator=generator)
    share = 0.25 + 0.5 * torch.rand(count, 1, 1, generator=generator)
    return value * (0.25 + 0.75 * torch.lerp(own, cast, share))


def _fractal(
    count: int, height: int, width: int, generator: torch.Generator, device: torch.device | str
) -> Tensor:
    """Draw three 1/f noise fields a picture [C, 3, H, W], zero mean, about unit deviation."""
    total = torch.zeros(count, 3, height, width, device=device)
    roughness = 0.35 + 0.3 * torch.rand(count, 1, 1, 1, generator=generator).to(device)
    for octave in range(6):
        size = (2 ** (octave + 1) + 1, 3 * 2**octave + 2)
        coarse = torch.randn(count, 3, *size, generator=generator).to(device)
        fine = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
        total = total + roughness**octave * fine
    return total / total.std(dim=(2, 3), keepdim=True).clamp(min=1e-3)


def _paint_shapes(
    picture: Tensor, palette_CK3: Tensor, horizon_C: Tensor, generator: torch.Generator
) -> Tensor:
    """Paint ellipses, boxes and half planes, far to near, each with its own shading."""
    count, _, height, width = picture.shape
    device = picture.device
    y = torch.linspace(0.0, 1.0, height, device=device)[None, :, None]
    x = torch.linspace(0.0, width / height, width, device=device)[None, None, :]
    u = torch.rand(_SHAPES, 9, count, 1, 1, generator=generator).to(device)
    for shape in range(_SHAPES):
        cx, depth, size, aspect, angle, kind, soft, shade, present = u[shape]
        nearness = (shape + depth) / _SHAPES
        cy = horizon_C[:, None, None] + (0.9 - horizon_C[:, None, None]) * nearness.square()
        radius = 0.04 + 0.28 * size * (0.3 + nearness)
        dx, dy = x - cx * width / height, y - cy
        turn = (angle - 0.5) * 0.8
        px = (turn.cos() * dx + turn.sin() * dy) / (radius * (0.4 + aspect))
        py = (turn.cos() * dy - turn.sin() * dx) / (radius * (1.4 - aspect))
        round_ = (px * px + py * py).sqrt()
        square = torch.maximum(px.abs(), py.abs())
        distance = torch.where(kind < 0.5, round_, square) - 1.0
        edge = 0.01 + 0.12 * soft.square()
        cover = (present < 0.75) * (0.5 - distance / edge).clamp(0.0, 1.0)
        light = 1.0 - 0.5 * shade * (px + py).clamp(-1.0, 1.0)
        colour = palette_CK3[:, 3 + shape, :, None, None] * light[:, None]
        picture = picture + cover[:, None] * (colour - picture)
    return picture


def synthetic_photos(
    count: int,
    seed: int,
    height: int = 160,
    width: int = 256,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw pictures [C, 3, H, W] in 0..1: a sky over a horizon, noise, shapes, any palette."""
    generator = torch.Generator().manual_seed(seed)
    palette = _palettes(count, 3 + _SHAPES, generator).to(device)
    u = torch.rand(8, count, generator=generator).to(device)
    horizon = 0.2 + 0.5 * u[0]
    noise = _fractal(count, height, width, generator, device)
    y = torch.linspace(0.0, 1.0, height, device=device)[None, :, None]
    ridge = horizon[:, None, None] + 0.12 * u[1, :, None, None].square() * noise[:, 0, :1]
    ground = ((y - ridge) / (0.004 + 0.05 * u[2, :, None, None].square()) + 0.5).clamp(0.0, 1.0)
    sky_share = (y / ridge.clamp(min=0.05)).clamp(0.0, 1.0)
    top, low, floor = (palette[:, k, :, None, None] for k in range(3))
    bright = 0.4 + 0.6 * u[3, :, None, None, None]
    sky = torch.lerp(top, 0.5 + 0.5 * low, (sky_share * bright[:, 0])[:, None])
    depth = ((y - ridge) / (1.0 - ridge).clamp(min=0.1)).clamp(0.0, 1.0)
    land = floor * (0.6 + 0.4 * depth)[:, None]
    picture = torch.lerp(sky, land, ground[:, None])
    picture = _paint_shapes(picture, palette, horizon, generator)
    texture = 0.02 + 0.20 * u[4].square()
    grey = noise.mean(1, keepdim=True)
    mixed = torch.lerp(grey, noise, 0.5 * u[5, :, None, None, None])
    picture = picture * (1.0 + texture[:, None, None, None] * mixed)
    # A share of pictures is pure coloured noise: no horizon, no shapes.
    is_abstract = (u[6] < 0.15)[:, None, None, None]
    abstract = palette[:, 0, :, None, None] + 0.18 * torch.lerp(grey, noise, 0.4)
    gain = 0.8 + 0.5 * u[7, :, None, None, None]
    return (torch.where(is_abstract, abstract, picture) * gain).clamp(0.0, 1.0)


def pan_clips(
    count: int,
    frames: int,
    *,
    seed: int,
    height: int = 160,
    width: int = 256,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Pan and zoom over synthetic photographs: clips [C, T, 3, H, W] in 0..1."""
    tall, wide = round(height * _CANVAS_SCALE), round(width * _CANVAS_SCALE)
    canvas = synthetic_photos(count, seed, tall, wide, device=device)
    generator = torch.Generator().manual_seed(seed + 1)
    u = torch.rand(6, count, generator=generator).to(device)
    time = torch.linspace(-0.5, 0.5, frames, device=device) * (frames / 34.0)
    # The view is 1 / scale of the canvas; keep every corner inside it.
    zoom = (0.06 * (u[0] - 0.5) * 2.0)[:, None] * time
    half = (1.0 / _CANVAS_SCALE) * torch.exp(zoom + 0.1 * (u[1, :, None] - 0.5))
    room = (1.0 - half).clamp(min=0.0)
    path = [
        0.5 * (u[2 + axis] - 0.5)[:, None] * room + 0.6 * (u[4 + axis] - 0.5)[:, None] * time
        for axis in (0, 1)
    ]
    centre_x, centre_y = (torch.maximum(torch.minimum(p, room), -room) for p in path)
    zero = torch.zeros_like(half)
    rows = torch.stack([half, zero, centre_x, zero, half, centre_y], -1).view(-1, 2, 3)
    grid = F.affine_grid(rows, [count * frames, 3, height, width], align_corners=False)
    flat = grid.view(count, frames * height, width, 2)
    clips = F.grid_sample(canvas, flat, mode="bilinear", padding_mode="border", align_corners=False)
    return clips.view(count, 3, frames, height, width).transpose(1, 2)
