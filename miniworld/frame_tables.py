"""Frame tables: a scene, a pose and a style turned into plain numbers for the ray-caster.

Owns: the column order that the torch renderer and the Triton kernel both read, and the screen
rectangles that let both skip solids.
Invariants: everything is relative to the camera, on the torus, float32; `up` is minus world y;
a rectangle contains every pixel that its solid, or the solid's shadow, can touch.

Shapes: G pictures (clips x frames), N primitives, Q ponds, K columns, V corners, E edges.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from miniworld import primitives as P
from miniworld import styles as S
from miniworld.scene import Scenes
from miniworld.walks import CLEARANCE, EYE_HEIGHT, HANGING, wrap

FOCAL_PER_WIDTH = 0.505050505
FADE_START, FADE_END = 11.0, 15.5
"""Distance in world units over which everything dissolves into the horizon."""
SHADOW_START, SHADOW_END = 5.0, 9.0
"""Length of a shadow ray over which the shadow vanishes."""
_CASTER_FADE = (8.0, 12.5)  # a shadow is gone before its caster changes sides on the torus
_POND_FADE = (9.5, 13.5)
_SINK_GAP = 0.7 * CLEARANCE
"""Gap between the eye and a solid below which the solid sinks into the ground. Walks that keep
`CLEARANCE` never see it; in a world that a model invents nothing stops the walker, and what one
walks into must give way to a view rather than fill it."""
_NEAR = 0.03

# Columns of FrameTables.solids_GNK.
(RX, RZ, BASE, HEIGHT, A, B, COS, SIN, TAPER, RED, GREEN, BLUE, PATTERN, ALPHA, SHADE,
 _SPARE) = range(16)  # fmt: skip
SOLID_COLUMNS = 16
# Columns of FrameTables.ponds_GQK.
POND_X, POND_Z, POND_A, POND_B, POND_ALPHA = range(5)
POND_COLUMNS = 5
# Columns of FrameTables.frame_GK: rotation 0..8 (row-major), then:
EYE, CAMERA_X, CAMERA_Z, SUN_X, SUN_UP, SUN_Z = range(9, 15)
PHASE = 15
PHASE_SIN = 23
STYLE = 31
FRAME_COLUMNS = STYLE + S.STYLE_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTables:
    """Everything that one picture needs, per picture."""

    frame_GK: Tensor
    solids_GNK: Tensor
    ponds_GQK: Tensor
    boxes_GN8: Tensor
    """Screen rectangles in pixels: solid x0 x1 y0 y1, then shadow x0 x1 y0 y1; empty: x0 > x1."""


def smoothstep(low: float, high: float, value: Tensor) -> Tensor:
    """Hermite step from 0 at `low` to 1 at `high`."""
    u = ((value - low) / (high - low)).clamp(0.0, 1.0)
    return u * u * (3.0 - 2.0 * u)


def build_tables(
    scenes: Scenes, clip_G: Tensor, c2w_G44: Tensor, style_GS: Tensor, *, height: int, width: int
) -> FrameTables:
    """Build the tables of G pictures; `clip_G` tells which world each picture shows."""
    device = style_GS.device
    position = c2w_G44[:, :3, 3].to(device)
    rotation = c2w_G44[:, :3, :3].float().to(device)
    rows = scenes.primitives_CNP[clip_G]
    sun = _sun_direction(scenes.sun_azimuth_C[clip_G], style_GS[:, S.SUN_ELEVATION])
    phases = scenes.phases_CK[clip_G]
    frame = torch.cat(
        [
            rotation.flatten(1),
            -position[:, 1:2].float(),
            (position[:, [0, 2]] % P.PERIOD).float(),
            sun,
            phases,
            phases.sin(),
            style_GS,
        ],
        1,
    )
    solids = _solids(rows, position, style_GS)
    ponds = _ponds(scenes.ponds_CQ4[clip_G], position)
    rectangles = _rectangles(solids, frame, height, width)
    return FrameTables(
        frame_GK=frame.contiguous(), solids_GNK=solids, ponds_GQK=ponds, boxes_GN8=rectangles
    )


def _sun_direction(azimuth_G: Tensor, elevation_G: Tensor) -> Tensor:
    """Unit vector towards the sun [G, 3]: x, up, z."""
    flat = elevation_G.cos()
    return torch.stack([azimuth_G.cos() * flat, elevation_G.sin(), azimuth_G.sin() * flat], 1)


def _solids(rows_GNP: Tensor, position_G3: Tensor, style_GS: Tensor) -> Tensor:
    rows = rows_GNP
    offset = wrap(rows[..., [P.X, P.Z]].double() - position_G3[:, None, [0, 2]]).float()
    distance = offset.norm(dim=-1)
    palette = style_GS[:, S.PALETTE].unflatten(1, (P.PALETTE_SIZE, 3))
    index = rows[..., P.COLOUR].long()[..., None].expand(-1, -1, 3)
    colour = palette.gather(1, index) * rows[..., P.BRIGHTNESS, None]
    rise = _rise(rows, offset)
    present = rows[..., P.PRESENT] * (rise > 0.0)
    alpha = present * (1.0 - smoothstep(FADE_START, FADE_END, distance))
    shade = present * (1.0 - smoothstep(*_CASTER_FADE, distance))
    angle = rows[..., P.ANGLE]
    base = rows[..., P.BASE] - (1.0 - rise) * (rows[..., P.BASE] + rows[..., P.HEIGHT])
    plain = [base, *(rows[..., column] for column in (P.HEIGHT, P.A, P.B))]
    return torch.stack(
        [
            *offset.unbind(-1), *plain, angle.cos(), angle.sin(), rows[..., P.TAPER],
            *colour.unbind(-1), rows[..., P.PATTERN], alpha, shade, torch.zeros_like(alpha),
        ],
        -1,
    ).contiguous()  # fmt: skip


def _rise(rows_GNP: Tensor, offset_GN2: Tensor) -> Tensor:
    """Share of each solid that stands [G, N]: 1, or less where the eye all but touches it.

    What hangs above the eye (crowns, roofs, beams) stays.
    """
    box, round_ = rows_GNP[:, : P.BOX_COUNT], rows_GNP[:, P.BOX_COUNT :]
    cos, sin = box[..., P.ANGLE].cos(), box[..., P.ANGLE].sin()
    x, z = offset_GN2[:, : P.BOX_COUNT].unbind(-1)
    gap_x = (cos * x - sin * z).abs() - box[..., P.A]
    gap_z = (sin * x + cos * z).abs() - box[..., P.B]
    radius = torch.maximum(round_[..., P.A], round_[..., P.B])
    gap = torch.cat(
        [torch.maximum(gap_x, gap_z), offset_GN2[:, P.BOX_COUNT :].norm(dim=-1) - radius], 1
    )
    hangs = rows_GNP[..., P.BASE] >= EYE_HEIGHT + HANGING
    return torch.where(hangs, 1.0, smoothstep(0.0, _SINK_GAP, gap))


def _ponds(ponds_GQ4: Tensor, position_G3: Tensor) -> Tensor:
    offset = wrap(ponds_GQ4[..., :2].double() - position_G3[:, None, [0, 2]]).float()
    halves = ponds_GQ4[..., 2:]
    alpha = (1.0 - smoothstep(*_POND_FADE, offset.norm(dim=-1))) * (halves[..., 0] > 0.0)
    return torch.cat([offset, halves.clamp(min=1e-3), alpha[..., None]], -1).contiguous()


_CUBE = [(x, y, z) for y in (0.0, 1.0) for z in (-1.0, 1.0) for x in (-1.0, 1.0)]
_CUBE_EDGES = [
    (i, j)
    for i in range(8)
    for j in range(i + 1, 8)
    if sum(a != b for a, b in zip(_CUBE[i], _CUBE[j], strict=True)) == 1
]


def _rectangles(solids_GNK: Tensor, frame_GK: Tensor, height: int, width: int) -> Tensor:
    """Screen rectangles [G, N, 8] of every solid and of every swept shadow."""
    device = solids_GNK.device
    cube = torch.tensor(_CUBE, device=device)
    columns = solids_GNK.unbind(-1)
    # Frustums may be wider on top; their B is a radius, not a second half width.
    kind = torch.arange(P.PRIMITIVE_COUNT, device=device)
    is_frustum = (kind >= P.FRUSTUM_START) & (kind < P.ELLIPSOID_START)
    widest = torch.maximum(columns[A], columns[B])
    half_x = torch.where(is_frustum, widest, columns[A])[..., None] * cube[:, 0]
    half_z = torch.where(is_frustum, widest, columns[B])[..., None] * cube[:, 2]
    cos, sin = columns[COS][..., None], columns[SIN][..., None]
    x = columns[RX][..., None] + cos * half_x + sin * half_z
    z = columns[RZ][..., None] - sin * half_x + cos * half_z
    up = (columns[BASE][..., None] + columns[HEIGHT][..., None] * cube[:, 1]).clamp(min=0.0)
    up = up - frame_GK[:, EYE, None, None]
    corners = torch.stack([x, -up, z], -1)
    sun = frame_GK[:, [SUN_X, SUN_UP, SUN_Z]]
    top = columns[BASE] + columns[HEIGHT]
    reach = (top / sun[:, None, 1]).clamp(max=SHADOW_END)
    sweep = reach[..., None] * (sun * sun.new_tensor([-1.0, 1.0, -1.0]))[:, None]
    swept = torch.cat([corners, corners + sweep[..., None, :]], 2)
    edges = torch.tensor(_CUBE_EDGES, device=device)
    links = torch.arange(8, device=device)[:, None] + torch.tensor([0, 8], device=device)
    solid = _bounds(corners, edges, frame_GK, height, width)
    shadow = _bounds(swept, torch.cat([edges, edges + 8, links]), frame_GK, height, width)
    nothing = solids_GNK.new_tensor([1e9, -1e9, 1e9, -1e9])
    solid = torch.where(columns[ALPHA][..., None] > 0.0, solid, nothing)
    shadow = torch.where(columns[SHADE][..., None] > 0.0, shadow, nothing)
    return torch.cat([solid, shadow], -1).contiguous()


def _bounds(
    points_GNV3: Tensor, edges_E2: Tensor, frame_GK: Tensor, height: int, width: int
) -> Tensor:
    """Bound the projection of convex hulls, cut at the near plane: [G, N, 4] x0 x1 y0 y1."""
    rotation = frame_GK[:, :9].view(-1, 3, 3)
    # Elementwise products: reduced-precision matrix units would move the rectangles.
    camera = (points_GNV3[..., :, None] * rotation[:, None, None]).sum(-2)
    start, end = camera[..., edges_E2[:, 0], :], camera[..., edges_E2[:, 1], :]
    z0, z1 = start[..., 2], end[..., 2]
    crosses = (z0 > _NEAR) != (z1 > _NEAR)
    share = ((_NEAR - z0) / torch.where(crosses, z1 - z0, 1.0))[..., None]
    cut = start + share * (end - start)
    points = torch.cat([camera, cut], 2)
    valid = torch.cat([camera[..., 2] > _NEAR, crosses], 2)
    focal = FOCAL_PER_WIDTH * width
    depth = points[..., 2].clamp(min=0.5 * _NEAR)
    x = points[..., 0] / depth * focal + 0.5 * width
    y = points[..., 1] / depth * focal + 0.5 * height
    inf = math.inf
    low = [torch.where(valid, axis, inf).amin(-1) for axis in (x, y)]
    high = [torch.where(valid, axis, -inf).amax(-1) for axis in (x, y)]
    # Finite numbers only: the kernel compares them as floats, and one pixel covers rounding.
    limit = 1e9
    return torch.stack(
        [
            (low[0] - 1.0).clamp(-limit, limit), (high[0] + 1.0).clamp(-limit, limit),
            (low[1] - 1.0).clamp(-limit, limit), (high[1] + 1.0).clamp(-limit, limit),
        ],
        -1,
    )  # fmt: skip
