"""Solids inside the Triton kernel: ray meets box, frustum, ellipsoid; normals; small helpers.

Owns: the kernel's geometry, formula by formula the same as in `render`.
Invariants: float32; a function takes one row (`q_` points at a solid) and works for numbers and
blocks alike, so that primary rays (one origin) and shadow rays (one direction) share it.
"""

# Kernel functions have no Python types: their arguments are blocks known at compile time.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl

from miniworld import frame_tables as T
from miniworld import primitives as P

# Constants must be constexpr to be visible inside kernels.
_RX, _RZ, _BASE, _HEIGHT = (tl.constexpr(c) for c in (T.RX, T.RZ, T.BASE, T.HEIGHT))
_A, _B, _COS, _SINE, _TAPER = (tl.constexpr(c) for c in (T.A, T.B, T.COS, T.SIN, T.TAPER))
_SHADE = tl.constexpr(T.SHADE)
_FRUSTUM_START, _ELLIPSOID_START = (tl.constexpr(n) for n in (P.FRUSTUM_START, P.ELLIPSOID_START))
_LANES = tl.constexpr(16)  # one lane a solid while rectangles are tested; each kind fits
_SHADOW_START, _SHADOW_END = tl.constexpr(T.SHADOW_START), tl.constexpr(T.SHADOW_END)
_QUARTER, _HALF_TURN, _TURN = (tl.constexpr(n * torch.pi) for n in (0.5, 1.0, 2.0))
_PER_TURN = tl.constexpr(0.5 / torch.pi)
_FAR = tl.constexpr(1e6)
_STEP = tl.constexpr(1e-3)


@triton.jit
def smooth(low, high, value):
    """Hermite step from 0 at `low` to 1 at `high`."""
    u = tl.minimum(tl.maximum((value - low) / (high - low), 0.0), 1.0)
    return u * u * (3.0 - 2.0 * u)


@triton.jit
def sine(x):
    """Sine of an angle of some turns at most."""
    # Arguments stay within some turns: folding to a quarter turn and nine Taylor terms are exact
    # to 4e-6, without the slow path for huge arguments that tl.sin brings inline each time.
    r = x - _TURN * tl.floor(x * _PER_TURN + 0.5)
    r = tl.where(r > _QUARTER, _HALF_TURN - r, tl.where(r < -_QUARTER, -_HALF_TURN - r, r))
    s = r * r
    odd = 1.0 + s * (-1.0 / 6.0 + s * (1.0 / 120.0 + s * (-1.0 / 5040.0 + s / 362880.0)))
    return r * odd


@triton.jit
def nonzero(value):
    """Keep a divisor away from zero."""
    return tl.where(tl.abs(value) < 1e-6, 1e-6, value)


@triton.jit
def mix(a, b, share):
    """Go from a to b by a share."""
    return a + share * (b - a)


@triton.jit
def rgb(row, column):
    """Load three neighbours of a row."""
    return tl.load(row + column), tl.load(row + column + 1), tl.load(row + column + 2)


@triton.jit
def meet_box(q_, ox, ou, oz, dx, du, dz):
    """Distance to a box: six half-spaces, sides leaning by the taper."""
    cos, sin = tl.load(q_ + _COS), tl.load(q_ + _SINE)
    a, b, height = tl.load(q_ + _A), tl.load(q_ + _B), tl.load(q_ + _HEIGHT)
    ax, rise, az = ox - tl.load(q_ + _RX), ou - tl.load(q_ + _BASE), oz - tl.load(q_ + _RZ)
    lx, lz = cos * ax - sin * az, sin * ax + cos * az
    mx, mz = cos * dx - sin * dz, sin * dx + cos * dz
    lean = (1.0 - tl.load(q_ + _TAPER)) / height
    lean_x, lean_z = a * lean, b * lean
    out_0, out_1 = lx + lean_x * rise - a, -lx + lean_x * rise - a
    out_2, out_3 = lz + lean_z * rise - b, -lz + lean_z * rise - b
    out_4, out_5 = rise - height, -rise
    slope_0, slope_1 = nonzero(mx + lean_x * du), nonzero(-mx + lean_x * du)
    slope_2, slope_3 = nonzero(mz + lean_z * du), nonzero(-mz + lean_z * du)
    slope_4, slope_5 = nonzero(du), nonzero(-du)
    t_0, t_1, t_2 = -out_0 / slope_0, -out_1 / slope_1, -out_2 / slope_2
    t_3, t_4, t_5 = -out_3 / slope_3, -out_4 / slope_4, -out_5 / slope_5
    enter_01 = tl.maximum(tl.where(slope_0 < 0, t_0, _STEP), tl.where(slope_1 < 0, t_1, _STEP))
    enter_23 = tl.maximum(tl.where(slope_2 < 0, t_2, _STEP), tl.where(slope_3 < 0, t_3, _STEP))
    enter_45 = tl.maximum(tl.where(slope_4 < 0, t_4, _STEP), tl.where(slope_5 < 0, t_5, _STEP))
    leave_01 = tl.minimum(tl.where(slope_0 > 0, t_0, _FAR), tl.where(slope_1 > 0, t_1, _FAR))
    leave_23 = tl.minimum(tl.where(slope_2 > 0, t_2, _FAR), tl.where(slope_3 > 0, t_3, _FAR))
    leave_45 = tl.minimum(tl.where(slope_4 > 0, t_4, _FAR), tl.where(slope_5 > 0, t_5, _FAR))
    enter = tl.maximum(tl.maximum(enter_01, enter_23), tl.maximum(enter_45, _STEP))
    leave = tl.minimum(tl.minimum(leave_01, leave_23), leave_45)
    outside = tl.maximum(tl.maximum(out_0, out_1), tl.maximum(out_2, out_3))
    outside = tl.maximum(outside, tl.maximum(out_4, out_5))
    # Nested, not `&`: for primary rays `outside` is one number, `enter` a block.
    return tl.where(enter < leave, tl.where(outside > 0, enter, _FAR), _FAR)


@triton.jit
def meet_frustum(q_, ox, ou, oz, dx, du, dz):
    """Distance to a cone between two discs."""
    bottom, top, height = tl.load(q_ + _A), tl.load(q_ + _B), tl.load(q_ + _HEIGHT)
    ax, rise, az = ox - tl.load(q_ + _RX), ou - tl.load(q_ + _BASE), oz - tl.load(q_ + _RZ)
    slope = (top - bottom) / height
    radius = bottom + slope * rise
    a = nonzero(dx * dx + dz * dz - slope * slope * du * du)
    b = ax * dx + az * dz - slope * du * radius
    c = ax * ax + az * az - radius * radius
    square = b * b - a * c
    root = tl.sqrt(tl.maximum(square, 0.0))
    t_0, t_1 = (-b - root) / a, (-b + root) / a
    at_0, at_1 = rise + t_0 * du, rise + t_1 * du
    ok_0 = (square > 0) & (t_0 > _STEP) & (at_0 > 0) & (at_0 < height)
    ok_1 = (square > 0) & (t_1 > _STEP) & (at_1 > 0) & (at_1 < height)
    side = tl.minimum(tl.where(ok_0, t_0, _FAR), tl.where(ok_1, t_1, _FAR))
    down = nonzero(du)
    t_2, t_3 = (height - rise) / down, (0.0 - rise) / down
    x_2, z_2, x_3, z_3 = ax + t_2 * dx, az + t_2 * dz, ax + t_3 * dx, az + t_3 * dz
    ok_2 = (x_2 * x_2 + z_2 * z_2 < top * top) & (t_2 > _STEP)
    ok_3 = (x_3 * x_3 + z_3 * z_3 < bottom * bottom) & (t_3 > _STEP)
    disc = tl.minimum(tl.where(ok_2, t_2, _FAR), tl.where(ok_3, t_3, _FAR))
    return tl.minimum(side, disc)


@triton.jit
def meet_ellipsoid(q_, ox, ou, oz, dx, du, dz):
    """Distance to an upright ellipsoid."""
    half = 0.5 * tl.load(q_ + _HEIGHT)
    a, b = tl.load(q_ + _A), tl.load(q_ + _B)
    ax, az = (ox - tl.load(q_ + _RX)) / a, (oz - tl.load(q_ + _RZ)) / b
    au = (ou - tl.load(q_ + _BASE) - half) / half
    ex, eu, ez = dx / a, du / half, dz / b
    k_a = ex * ex + eu * eu + ez * ez
    k_b = ax * ex + au * eu + az * ez
    square = k_b * k_b - k_a * (ax * ax + au * au + az * az - 1.0)
    t = (-k_b - tl.sqrt(tl.maximum(square, 0.0))) / k_a
    return tl.where((square > 0) & (t > _STEP), t, _FAR)


@triton.jit
def shade_weight(q_, t_sun, hit, k):
    """How much sun solid k takes from hits; none from its own."""
    weight = tl.load(q_ + _SHADE) * (1.0 - smooth(_SHADOW_START, _SHADOW_END, t_sun))
    return tl.where(hit == k, 0.0, weight)


@triton.jit
def touching(boxes_, first, count, x0, x1, y0, y1):
    """Bits of the solids first .. first + count whose rectangle meets the tile."""
    lane = tl.arange(0, _LANES)
    is_one = lane < count
    at = boxes_ + (first + lane) * 8
    left = tl.load(at, mask=is_one, other=1e9)
    right = tl.load(at + 1, mask=is_one, other=-1e9)
    low = tl.load(at + 2, mask=is_one, other=1e9)
    high = tl.load(at + 3, mask=is_one, other=-1e9)
    meets = (left <= x1) & (right >= x0) & (low <= y1) & (high >= y0)
    return tl.sum(tl.where(meets, 1 << lane, 0), axis=0)


@triton.jit
def normal(q_, hit, is_hit, x, rise, z):
    """Unit normal, and the coordinate across a box face."""
    height = tl.load(q_ + _HEIGHT, mask=is_hit, other=1.0)
    a = tl.load(q_ + _A, mask=is_hit, other=1.0)
    b = tl.load(q_ + _B, mask=is_hit, other=1.0)
    cos = tl.load(q_ + _COS, mask=is_hit, other=1.0)
    sin = tl.load(q_ + _SINE, mask=is_hit, other=0.0)
    lx, lz = cos * x - sin * z, sin * x + cos * z
    lean = (1.0 - tl.load(q_ + _TAPER, mask=is_hit, other=1.0)) / height
    lean_x, lean_z = a * lean, b * lean
    norm_x, norm_z = 1.0 / tl.sqrt(1.0 + lean_x * lean_x), 1.0 / tl.sqrt(1.0 + lean_z * lean_z)
    out_x = (tl.abs(lx) + lean_x * rise - a) * norm_x
    out_z = (tl.abs(lz) + lean_z * rise - b) * norm_z
    flat = tl.maximum(rise - height, -rise)
    side_x = (out_x >= out_z) & (out_x >= flat)
    side_z = (out_x < out_z) | (out_x < flat)
    side_z = side_z & (out_z >= flat)
    bx = tl.where(side_x, tl.where(lx < 0, -norm_x, norm_x), 0.0)
    bz = tl.where(side_z, tl.where(lz < 0, -norm_z, norm_z), 0.0)
    face_up = tl.where(rise > 0.5 * height, 1.0, -1.0)
    box_u = tl.where(side_x, lean_x * norm_x, tl.where(side_z, lean_z * norm_z, face_up))
    box_x, box_z = cos * bx + sin * bz, cos * bz - sin * bx
    slope = (b - a) / height
    norm = 1.0 / tl.sqrt(1.0 + slope * slope)
    inv = norm / tl.sqrt(x * x + z * z + 1e-9)
    on_top, on_bottom = rise > height - 1e-3, rise < 1e-3
    is_cap = on_top | on_bottom
    cone_u = tl.where(on_top, 1.0, tl.where(on_bottom, -1.0, -slope * norm))
    cone_x, cone_z = tl.where(is_cap, 0.0, x * inv), tl.where(is_cap, 0.0, z * inv)
    half = 0.5 * height
    safe_b = tl.maximum(b, 1e-3)
    gx, gu, gz = x / (a * a), (rise - half) / (half * half), z / (safe_b * safe_b)
    inv_g = 1.0 / tl.sqrt(gx * gx + gu * gu + gz * gz + 1e-9)
    is_box, is_round = hit < _FRUSTUM_START, hit >= _ELLIPSOID_START
    nx = tl.where(is_round, gx * inv_g, tl.where(is_box, box_x, cone_x))
    nu = tl.where(is_round, gu * inv_g, tl.where(is_box, box_u, cone_u))
    nz = tl.where(is_round, gz * inv_g, tl.where(is_box, box_z, cone_z))
    return nx, nu, nz, tl.where(side_x, lz, lx)
