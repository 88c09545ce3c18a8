"""The ray-caster as one Triton kernel: the same formulas as `render`, for CUDA tensors.

Owns: shading inside the kernel, the kernel and its launch. One program casts one 16 x 16 tile of
one picture, all of its sub-samples, and writes the mean colours and the share of solid pixels.
Invariants: reads only `FrameTables`; a solid whose screen rectangle misses the tile is skipped;
float32 throughout; offsets into pictures are int64.

Arguments that start or end with `_` point at one row: `f_` a picture, `q_` a solid.
Vectors are (x, up, z), relative to the camera, up from the ground.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from miniworld import frame_tables as T
from miniworld import primitives as P
from miniworld import styles as S
from miniworld.frame_tables import FrameTables
from miniworld.triton_solids import (
    meet_box,
    meet_ellipsoid,
    meet_frustum,
    mix,
    normal,
    rgb,
    shade_weight,
    sine,
    smooth,
    touching,
)

_TILE_PX = 16

# Constants must be constexpr to be visible inside kernels.
_RX, _RZ, _BASE, _HEIGHT = (tl.constexpr(c) for c in (T.RX, T.RZ, T.BASE, T.HEIGHT))
_RED, _PATTERN, _ALPHA = (tl.constexpr(c) for c in (T.RED, T.PATTERN, T.ALPHA))
_SOLID_COLUMNS, _POND_COLUMNS = tl.constexpr(T.SOLID_COLUMNS), tl.constexpr(T.POND_COLUMNS)
_EYE, _CAMERA_X, _CAMERA_Z = (tl.constexpr(c) for c in (T.EYE, T.CAMERA_X, T.CAMERA_Z))
_SUN, _PHASE, _PHASE_SIN = (tl.constexpr(c) for c in (T.SUN_X, T.PHASE, T.PHASE_SIN))
_FRAME_COLUMNS = tl.constexpr(T.FRAME_COLUMNS)
_SKY_TOP, _HORIZON, _LIGHT, _AMBIENT, _GROUND_A, _GROUND_B, _HILL, _WATER = (
    tl.constexpr(T.STYLE + part.start)
    for part in (S.SKY_TOP, S.SKY_HORIZON, S.LIGHT, S.AMBIENT, S.GROUND_A, S.GROUND_B, S.HILL,
                 S.WATER)
)  # fmt: skip
_FOG, _GLOW, _DISC, _LAMP_POWER, _CLOUD = (
    tl.constexpr(T.STYLE + column) for column in (S.FOG, S.GLOW, S.DISC, S.LAMP_POWER, S.CLOUD)
)
_BANDS, _WINDOWS, _FOLIAGE, _LAMP = (
    tl.constexpr(float(p)) for p in (P.BANDS, P.WINDOWS, P.FOLIAGE, P.LAMP)
)
_BOXES, _FRUSTUMS, _ELLIPSOIDS, _PONDS = (
    tl.constexpr(n) for n in (P.BOX_COUNT, P.FRUSTUM_COUNT, P.ELLIPSOID_COUNT, P.POND_COUNT)
)
_FRUSTUM_START, _ELLIPSOID_START = (tl.constexpr(n) for n in (P.FRUSTUM_START, P.ELLIPSOID_START))
_SOLIDS = tl.constexpr(P.PRIMITIVE_COUNT)
_FADE_START, _FADE_END = tl.constexpr(T.FADE_START), tl.constexpr(T.FADE_END)
_PERIOD = tl.constexpr(P.PERIOD)
_WAVE = tl.constexpr(2.0 * torch.pi / P.PERIOD)
_PANE_ACROSS, _PANE_UP = tl.constexpr(torch.pi / 0.8), tl.constexpr(2.0 * torch.pi / 0.95)
_QUARTER = tl.constexpr(0.5 * torch.pi)
_FAR = tl.constexpr(1e6)


@triton.jit
def _haze(f_, dx, du, dz):
    sx, su, sz = rgb(f_, _SUN)
    hr, hg, hb = rgb(f_, _HORIZON)
    lr, lg, lb = rgb(f_, _LIGHT)
    glow = 0.34 * tl.load(f_ + _GLOW) * tl.exp((dx * sx + du * su + dz * sz - 1.0) * 7.0)
    return hr + glow * lr, hg + glow * lg, hb + glow * lb


@triton.jit
def _sky(f_, dx, du, dz):
    tr, tg, tb = rgb(f_, _SKY_TOP)
    hr, hg, hb = rgb(f_, _HORIZON)
    lr, lg, lb = rgb(f_, _LIGHT)
    ar, ag, ab = rgb(f_, _AMBIENT)
    haze_r, haze_g, haze_b = _haze(f_, dx, du, dz)
    up = tl.maximum(du, 0.0)
    rest = 1.0 - tl.sqrt(up + 1e-6)
    rise = 1.0 - rest * rest
    r, g, b = haze_r + rise * (tr - hr), haze_g + rise * (tg - hg), haze_b + rise * (tb - hb)
    stretch = 1.6 / (up + 0.15)
    cx = dx * stretch + tl.load(f_ + _PHASE + 6)
    cz = dz * stretch + tl.load(f_ + _PHASE + 7)
    bumps = sine(cx) * sine(cz + 0.6 * sine(0.7 * cx)) + 0.5 * sine(1.7 * cx + 1.3 * cz)
    cloud = tl.load(f_ + _CLOUD) * smooth(0.1, 1.1, bumps) * smooth(0.03, 0.3, up)
    r = mix(r, tl.minimum(lr + ar, 1.0), cloud)
    g = mix(g, tl.minimum(lg + ag, 1.0), cloud)
    b = mix(b, tl.minimum(lb + ab, 1.0), cloud)
    sx, su, sz = rgb(f_, _SUN)
    disc = tl.load(f_ + _DISC) * smooth(0.99863, 0.99900, dx * sx + du * su + dz * sz)
    r = mix(r, tl.minimum(1.25 * lr + 0.15, 1.0), disc)
    g = mix(g, tl.minimum(1.25 * lg + 0.15, 1.0), disc)
    b = mix(b, tl.minimum(1.25 * lb + 0.15, 1.0), disc)
    # A hazy ridge at infinity: harmonics of the azimuth from (c1, s1) without an arctangent.
    flat = 1.0 / tl.sqrt(dx * dx + dz * dz + 1e-9)
    c1, s1 = dx * flat, dz * flat
    c2, s2 = c1 * c1 - s1 * s1, 2.0 * c1 * s1
    c3, s3 = c1 * c2 - s1 * s2, s1 * c2 + c1 * s2
    c5, s5 = c2 * c3 - s2 * s3, s2 * c3 + c2 * s3
    w_ = f_ + _PHASE_SIN
    ridge = 0.062 + 0.030 * (tl.load(w_) * c2 + tl.load(w_ + 1) * s2)
    ridge = ridge + 0.026 * (tl.load(w_ + 2) * c3 + tl.load(w_ + 3) * s3)
    ridge = ridge + 0.014 * (tl.load(w_ + 4) * c5 + tl.load(w_ + 5) * s5)
    ridge = tl.maximum(ridge, 0.006)
    slope = du * flat
    share = tl.minimum(tl.maximum(slope / ridge, 0.0), 1.0)
    thick = (0.50 + 0.38 * share) * tl.exp(-16.0 * tl.load(f_ + _FOG))
    hill_r, hill_g, hill_b = rgb(f_, _HILL)
    is_hill = slope < ridge
    r = tl.where(is_hill, mix(haze_r, hill_r, thick), r)
    g = tl.where(is_hill, mix(haze_g, hill_g, thick), g)
    b = tl.where(is_hill, mix(haze_b, hill_b, thick), b)
    return r, g, b


@triton.jit
def _ground(f_, ponds_, dx, du, dz, t, shadow):
    x, z = dx * t, dz * t
    wx, wz = (x + tl.load(f_ + _CAMERA_X)) * _WAVE, (z + tl.load(f_ + _CAMERA_Z)) * _WAVE
    p_ = f_ + _PHASE
    check = sine(8.0 * wx + tl.load(p_)) * sine(8.0 * wz + tl.load(p_ + 1))
    check = tl.minimum(tl.maximum(3.0 * check, -1.0), 1.0)
    check = 0.5 + 0.5 * check * tl.exp(-0.09 * t)
    blotch = 0.5 * sine(2.0 * wx + tl.load(p_ + 2)) * sine(2.0 * wz + tl.load(p_ + 3))
    blotch = blotch + 0.3 * sine(5.0 * wx - 3.0 * wz + tl.load(p_ + 4))
    tone = 1.0 + 0.12 * blotch * tl.exp(-0.04 * t)
    sun = tl.load(f_ + _SUN + 1)
    lambert = sun * (1.0 - shadow)
    lr, lg, lb = rgb(f_, _LIGHT)
    ar, ag, ab = rgb(f_, _AMBIENT)
    r0, g0, b0 = rgb(f_, _GROUND_B)
    r1, g1, b1 = rgb(f_, _GROUND_A)
    r = mix(r0, r1, check) * tone * (ar + lr * lambert)
    g = mix(g0, g1, check) * tone * (ag + lg * lambert)
    b = mix(b0, b1, check) * tone * (ab + lb * lambert)
    tr, tg, tb = rgb(f_, _SKY_TOP)
    hr, hg, hb = rgb(f_, _HORIZON)
    wr, wg, wb = rgb(f_, _WATER)
    mirror = tl.sqrt(tl.minimum(tl.maximum(-du, 0.0), 1.0))
    dark = 1.0 - 0.25 * shadow
    water_r = (0.45 * mix(hr, tr, mirror) + 0.55 * wr * (ar + 0.6 * lr)) * dark
    water_g = (0.45 * mix(hg, tg, mirror) + 0.55 * wg * (ag + 0.6 * lg)) * dark
    water_b = (0.45 * mix(hb, tb, mirror) + 0.55 * wb * (ab + 0.6 * lb)) * dark
    for k in range(_PONDS):
        pond_ = ponds_ + k * _POND_COLUMNS
        ex = (x - tl.load(pond_)) / tl.load(pond_ + 2)
        ez = (z - tl.load(pond_ + 1)) / tl.load(pond_ + 3)
        alpha = tl.load(pond_ + 4)
        ring = tl.sqrt(ex * ex + ez * ez)
        rim = 1.0 - 0.35 * 0.45 * alpha * (1.0 - smooth(1.0, 1.12, ring))
        inside = alpha * (1.0 - smooth(0.93, 1.0, ring))
        r = mix(r * rim, water_r, inside)
        g = mix(g * rim, water_g, inside)
        b = mix(b * rim, water_b, inside)
    clear = 1.0 - smooth(_FADE_START, _FADE_END, tl.sqrt(x * x + z * z))
    clear = clear * tl.exp(-tl.load(f_ + _FOG) * t)
    haze_r, haze_g, haze_b = _haze(f_, dx, du, dz)
    return mix(haze_r, r, clear), mix(haze_g, g, clear), mix(haze_b, b, clear)


@triton.jit
def _solid(f_, solids_, dx, du, dz, t, hit, shadow):
    """Colour and opacity where a solid was hit; other lanes hold finite nonsense."""
    is_hit = hit >= 0
    q_ = solids_ + tl.maximum(hit, 0) * _SOLID_COLUMNS
    up = tl.load(f_ + _EYE) + du * t
    x = dx * t - tl.load(q_ + _RX, mask=is_hit, other=0.0)
    z = dz * t - tl.load(q_ + _RZ, mask=is_hit, other=0.0)
    rise = up - tl.load(q_ + _BASE, mask=is_hit, other=0.0)
    nx, nu, nz, across = normal(q_, hit, is_hit, x, rise, z)
    sx, su, sz = rgb(f_, _SUN)
    lambert = tl.maximum(nx * sx + nu * su + nz * sz, 0.0) * (1.0 - shadow)
    pattern = tl.load(q_ + _PATTERN, mask=is_hit, other=0.0)
    share = rise / tl.load(q_ + _HEIGHT, mask=is_hit, other=1.0)
    tone = tl.where(pattern == _BANDS, 0.80 + 0.20 * smooth(-0.35, 0.35, sine(6.0 * up)), 1.0)
    tone = tl.where(pattern == _FOLIAGE, 0.72 + 0.42 * share, tone)
    tone = tone * (0.7 + 0.3 * tl.minimum(tl.maximum(2.0 * up, 0.0), 1.0))
    pane = smooth(0.30, 0.45, sine(across * _PANE_ACROSS + _QUARTER))
    pane = pane * smooth(0.10, 0.30, -sine(rise * _PANE_UP + _QUARTER))
    pane = tl.where((pattern == _WINDOWS) & (tl.abs(nu) < 0.5), pane, 0.0)
    tone = tone * (1.0 - 0.55 * pane)
    lr, lg, lb = rgb(f_, _LIGHT)
    ar, ag, ab = rgb(f_, _AMBIENT)
    around = 0.82 + 0.18 * nu
    r = tl.load(q_ + _RED, mask=is_hit, other=0.0) * tone * (ar * around + lr * lambert)
    g = tl.load(q_ + _RED + 1, mask=is_hit, other=0.0) * tone * (ag * around + lg * lambert)
    b = tl.load(q_ + _RED + 2, mask=is_hit, other=0.0) * tone * (ab * around + lb * lambert)
    shine = tl.load(f_ + _LAMP_POWER) * tl.where(pattern == _LAMP, 0.9, 0.85 * pane)
    r, g, b = mix(r, 1.0, shine), mix(g, 0.84, shine), mix(b, 0.50, shine)
    haze_r, haze_g, haze_b = _haze(f_, dx, du, dz)
    clear = tl.exp(-tl.load(f_ + _FOG) * t)
    fade = 1.0 - smooth(_FADE_START, _FADE_END, tl.sqrt((dx * dx + dz * dz) * t * t))
    alpha = tl.minimum(fade, tl.load(q_ + _ALPHA, mask=is_hit, other=0.0))
    return mix(haze_r, r, clear), mix(haze_g, g, clear), mix(haze_b, b, clear), alpha


@triton.jit
def _cast_kernel(
    frames_ptr,
    solids_ptr,
    ponds_ptr,
    boxes_ptr,
    pictures_ptr,
    coverage_ptr,
    height,
    width,
    tiles_x,
    tiles,
    focal,
    SIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    picture = (program // tiles).to(tl.int64)
    tile = program % tiles
    tile_y, tile_x = tile // tiles_x, tile % tiles_x
    f_ = frames_ptr + picture * _FRAME_COLUMNS
    solids_ = solids_ptr + picture * (_SOLIDS * _SOLID_COLUMNS)
    ponds_ = ponds_ptr + picture * (_PONDS * _POND_COLUMNS)
    boxes_ = boxes_ptr + picture * (_SOLIDS * 8)
    lane = tl.arange(0, TILE * TILE)
    column, row = tile_x * TILE + lane % TILE, tile_y * TILE + lane // TILE
    is_inside = (column < width) & (row < height)
    x0, y0 = (tile_x * TILE).to(tl.float32), (tile_y * TILE).to(tl.float32)
    x1, y1 = x0 + TILE, y0 + TILE
    see_box = touching(boxes_, 0, _BOXES, x0, x1, y0, y1)
    see_frustum = touching(boxes_, _FRUSTUM_START, _FRUSTUMS, x0, x1, y0, y1)
    see_ellipsoid = touching(boxes_, _ELLIPSOID_START, _ELLIPSOIDS, x0, x1, y0, y1)
    dim_box = touching(boxes_ + 4, 0, _BOXES, x0, x1, y0, y1)
    dim_frustum = touching(boxes_ + 4, _FRUSTUM_START, _FRUSTUMS, x0, x1, y0, y1)
    dim_ellipsoid = touching(boxes_ + 4, _ELLIPSOID_START, _ELLIPSOIDS, x0, x1, y0, y1)
    eye = tl.load(f_ + _EYE)
    sx, su, sz = rgb(f_, _SUN)
    total_r = tl.zeros([TILE * TILE], dtype=tl.float32)
    total_g = tl.zeros([TILE * TILE], dtype=tl.float32)
    total_b = tl.zeros([TILE * TILE], dtype=tl.float32)
    total_alpha = tl.zeros([TILE * TILE], dtype=tl.float32)
    for sample in range(SIDE * SIDE):
        sub_x = (sample % SIDE + 0.5) / SIDE
        sub_y = (sample // SIDE + 0.5) / SIDE
        u = (column.to(tl.float32) + sub_x - 0.5 * width) / focal
        v = (row.to(tl.float32) + sub_y - 0.5 * height) / focal
        norm = 1.0 / tl.sqrt(u * u + v * v + 1.0)
        dx = (tl.load(f_) * u + tl.load(f_ + 1) * v + tl.load(f_ + 2)) * norm
        du = -(tl.load(f_ + 3) * u + tl.load(f_ + 4) * v + tl.load(f_ + 5)) * norm
        dz = (tl.load(f_ + 6) * u + tl.load(f_ + 7) * v + tl.load(f_ + 8)) * norm
        is_down = du < -1e-5
        ground_t = tl.where(is_down, eye / tl.maximum(-du, 1e-5), _FAR)
        t = ground_t
        hit = tl.full([TILE * TILE], -1, dtype=tl.int32)
        for k in range(_BOXES):
            if ((see_box >> k) & 1) != 0:
                t_box = meet_box(solids_ + k * _SOLID_COLUMNS, 0.0, eye, 0.0, dx, du, dz)
                hit = tl.where(t_box < t, k, hit)
                t = tl.minimum(t, t_box)
        for k in range(_FRUSTUMS):
            if ((see_frustum >> k) & 1) != 0:
                q_cone = solids_ + (_FRUSTUM_START + k) * _SOLID_COLUMNS
                t_cone = meet_frustum(q_cone, 0.0, eye, 0.0, dx, du, dz)
                hit = tl.where(t_cone < t, _FRUSTUM_START + k, hit)
                t = tl.minimum(t, t_cone)
        for k in range(_ELLIPSOIDS):
            if ((see_ellipsoid >> k) & 1) != 0:
                q_ball = solids_ + (_ELLIPSOID_START + k) * _SOLID_COLUMNS
                t_ball = meet_ellipsoid(q_ball, 0.0, eye, 0.0, dx, du, dz)
                hit = tl.where(t_ball < t, _ELLIPSOID_START + k, hit)
                t = tl.minimum(t, t_ball)
        reach = tl.minimum(t, 2.0 * _PERIOD)
        ox, ou, oz = dx * reach, eye + du * reach, dz * reach
        shadow = tl.zeros([TILE * TILE], dtype=tl.float32)
        for k in range(_BOXES):
            if ((dim_box >> k) & 1) != 0:
                q_dim_box = solids_ + k * _SOLID_COLUMNS
                s_box = meet_box(q_dim_box, ox, ou, oz, sx, su, sz)
                shadow = tl.maximum(shadow, shade_weight(q_dim_box, s_box, hit, k))
        for k in range(_FRUSTUMS):
            if ((dim_frustum >> k) & 1) != 0:
                q_dim_cone = solids_ + (_FRUSTUM_START + k) * _SOLID_COLUMNS
                s_cone = meet_frustum(q_dim_cone, ox, ou, oz, sx, su, sz)
                w_cone = shade_weight(q_dim_cone, s_cone, hit, _FRUSTUM_START + k)
                shadow = tl.maximum(shadow, w_cone)
        for k in range(_ELLIPSOIDS):
            if ((dim_ellipsoid >> k) & 1) != 0:
                q_dim_ball = solids_ + (_ELLIPSOID_START + k) * _SOLID_COLUMNS
                s_ball = meet_ellipsoid(q_dim_ball, ox, ou, oz, sx, su, sz)
                w_ball = shade_weight(q_dim_ball, s_ball, hit, _ELLIPSOID_START + k)
                shadow = tl.maximum(shadow, w_ball)
        r = tl.zeros([TILE * TILE], dtype=tl.float32)
        g = tl.zeros([TILE * TILE], dtype=tl.float32)
        b = tl.zeros([TILE * TILE], dtype=tl.float32)
        alpha = tl.zeros([TILE * TILE], dtype=tl.float32)
        if tl.min(du, axis=0) < -1e-5:
            # Lanes above the horizon shade a far point; the sky replaces it below.
            near_t = tl.minimum(ground_t, 1e3)
            r, g, b = _ground(f_, ponds_, dx, du, dz, near_t, shadow)
        if tl.max(du, axis=0) >= -1e-5:
            sky_r, sky_g, sky_b = _sky(f_, dx, du, dz)
            r = tl.where(is_down, r, sky_r)
            g = tl.where(is_down, g, sky_g)
            b = tl.where(is_down, b, sky_b)
        if tl.max(hit, axis=0) >= 0:
            is_hit = hit >= 0
            solid_t = tl.minimum(t, 1e3)
            lit_r, lit_g, lit_b, solid_alpha = _solid(f_, solids_, dx, du, dz, solid_t, hit, shadow)
            alpha = tl.where(is_hit, solid_alpha, 0.0)
            r, g, b = mix(r, lit_r, alpha), mix(g, lit_g, alpha), mix(b, lit_b, alpha)
        total_r += tl.minimum(tl.maximum(r, 0.0), 1.0)
        total_g += tl.minimum(tl.maximum(g, 0.0), 1.0)
        total_b += tl.minimum(tl.maximum(b, 0.0), 1.0)
        total_alpha += alpha
    share = 1.0 / (SIDE * SIDE)
    plane = height.to(tl.int64) * width
    at = pictures_ptr + picture * 3 * plane + row.to(tl.int64) * width + column
    kind = pictures_ptr.dtype.element_ty
    tl.store(at, (total_r * share).to(kind), mask=is_inside)
    tl.store(at + plane, (total_g * share).to(kind), mask=is_inside)
    tl.store(at + 2 * plane, (total_b * share).to(kind), mask=is_inside)
    solid_sum = tl.sum(tl.where(is_inside, total_alpha, 0.0), axis=0) * share
    pixel_count = tl.sum(tl.where(is_inside, 1.0, 0.0), axis=0)
    tl.store(coverage_ptr + program, solid_sum / pixel_count)


def render_tables(
    tables: FrameTables, *, height: int, width: int, supersample: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Render every picture of the tables: [G, 3, H, W] and coverage [G, H/16, W/16].

    Raises: ValueError for a dtype that is neither float32, float16 nor bfloat16.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype: {dtype}; allowed: float32, float16, bfloat16")
    device, count = tables.frame_GK.device, tables.frame_GK.shape[0]
    tiles_x, tiles_y = triton.cdiv(width, _TILE_PX), triton.cdiv(height, _TILE_PX)
    pictures = torch.empty(count, 3, height, width, dtype=dtype, device=device)
    coverage = torch.empty(count, tiles_y, tiles_x, device=device)
    _cast_kernel[(count * tiles_x * tiles_y,)](
        tables.frame_GK,
        tables.solids_GNK,
        tables.ponds_GQK,
        tables.boxes_GN8,
        pictures,
        coverage,
        height,
        width,
        tiles_x,
        tiles_x * tiles_y,
        T.FOCAL_PER_WIDTH * width,
        SIDE=supersample,
        TILE=_TILE_PX,
        num_warps=4,
    )
    return pictures, coverage
