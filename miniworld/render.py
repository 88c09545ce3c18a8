"""The ray-caster: worlds, poses and styles to pictures; plain torch, the oracle of the kernel.

Owns: the public `render`, primary and shadow rays, and the shading of sky, ground and solids.
Invariants: rays are elementwise float32 (no matrix units); all colours are display values; the
same tables and the same formulas drive `render_triton`.

Shapes: C clips, F frames, G pictures, H, W picture, S style numbers, L lit pixels of one picture.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from miniworld import frame_tables as T
from miniworld import primitives as P
from miniworld import styles as S
from miniworld.frame_tables import FrameTables, smoothstep
from miniworld.scene import Scenes

CELL_PX = 16
"""Edge of a coverage cell: one latent position."""
_FAR = 1e6
_STEP = 1e-3


Style = Tensor | tuple[Tensor, Tensor]
Vector = tuple[Tensor, Tensor, Tensor]


@overload
def render(
    scenes: Scenes,
    c2w_CF44: Tensor,
    style: Style,
    *,
    height: int = ...,
    width: int = ...,
    supersample: int = ...,
    dtype: torch.dtype = ...,
    coverage: Literal[False] = ...,
) -> Tensor: ...


@overload
def render(
    scenes: Scenes,
    c2w_CF44: Tensor,
    style: Style,
    *,
    height: int = ...,
    width: int = ...,
    supersample: int = ...,
    dtype: torch.dtype = ...,
    coverage: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def render(
    scenes: Scenes,
    c2w_CF44: Tensor,
    style: Style,
    *,
    height: int = 160,
    width: int = 256,
    supersample: int = 2,
    dtype: torch.dtype = torch.float32,
    coverage: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Render pictures [C, F, 3, H, W] in 0..1 on the scenes' device.

    style: [C, S], [C, F, S], or (styles [C, K, S], index [C, F]).
    coverage: also return the share of solid pixels in each 16 x 16 cell [C, F, H/16, W/16];
    solids that dissolve in the distance count by their opacity.

    Raises: ValueError when shapes disagree.
    """
    clips, frames = c2w_CF44.shape[:2]
    if clips != len(scenes):
        raise ValueError(f"c2w: {clips} clips; scenes: {len(scenes)}; they must be equal")
    device = scenes.primitives_CNP.device
    clip = torch.arange(clips, device=device).repeat_interleave(frames)
    tables = T.build_tables(
        scenes,
        clip,
        c2w_CF44.flatten(0, 1),
        _styles_per_frame(style, clips, frames, device),
        height=height,
        width=width,
    )
    if device.type == "cuda":
        from miniworld.render_triton import render_tables as cast
    else:
        cast = render_tables
    pictures, covered = cast(
        tables, height=height, width=width, supersample=supersample, dtype=dtype
    )
    frames_CFCHW = pictures.unflatten(0, (clips, frames))
    return (frames_CFCHW, covered.unflatten(0, (clips, frames))) if coverage else frames_CFCHW


def _styles_per_frame(style: Style, clips: int, frames: int, device: torch.device) -> Tensor:
    """Expand any accepted form of style to [G, S]."""
    if isinstance(style, tuple):
        styles_CKS, index_CF = (part.to(device) for part in style)
        rows = torch.arange(clips, device=device)[:, None]
        style_CFS = styles_CKS[rows, index_CF]
    else:
        moved = style.to(device)
        style_CFS = moved[:, None].expand(-1, frames, -1) if moved.ndim == 2 else moved
    if style_CFS.shape != (clips, frames, S.STYLE_SIZE):
        raise ValueError(
            f"style: {tuple(style_CFS.shape)} per frame; needs {(clips, frames, S.STYLE_SIZE)}"
        )
    return style_CFS.flatten(0, 1).float()


def render_tables(
    tables: FrameTables, *, height: int, width: int, supersample: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Render every picture of the tables: [G, 3, H, W] and coverage [G, H/16, W/16]."""
    count = tables.frame_GK.shape[0]
    pictures = torch.empty(count, 3, height, width, dtype=dtype)
    coverage = torch.empty(count, -(-height // CELL_PX), -(-width // CELL_PX))
    for index in range(count):
        colour, opacity = _Picture(tables, index, height, width, supersample).cast()
        pictures[index] = torch.nn.functional.avg_pool2d(colour, supersample)
        coverage[index] = torch.nn.functional.avg_pool2d(
            opacity[None], CELL_PX * supersample, ceil_mode=True
        )[0]
    return pictures, coverage


class _Picture:
    """One picture being cast: rays, nearest hits, shadows, colours."""

    def __init__(
        self, tables: FrameTables, index: int, height: int, width: int, supersample: int
    ) -> None:
        self.frame = tables.frame_GK[index]
        self.solids = tables.solids_GNK[index]
        self.ponds = tables.ponds_GQK[index].tolist()
        self.rectangles = tables.boxes_GN8[index].tolist()
        self.size = (height * supersample, width * supersample)
        self.scale = supersample
        focal = T.FOCAL_PER_WIDTH * width
        v = ((torch.arange(self.size[0]) + 0.5) / supersample - 0.5 * height) / focal
        u = ((torch.arange(self.size[1]) + 0.5) / supersample - 0.5 * width) / focal
        norm = (u.square() + v[:, None].square() + 1.0).rsqrt()
        r = self.frame[:9].tolist()
        self.dx = (r[0] * u + (r[1] * v + r[2])[:, None]) * norm
        self.du = -(r[3] * u + (r[4] * v + r[5])[:, None]) * norm
        self.dz = (r[6] * u + (r[7] * v + r[8])[:, None]) * norm
        zero = torch.zeros(())
        self.eye: Vector = (zero, self.frame[T.EYE], zero)
        self.sun: Vector = (self.frame[T.SUN_X], self.frame[T.SUN_UP], self.frame[T.SUN_Z])
        self.style = self.frame[T.STYLE :]

    def _window(self, rectangle: list[float]) -> tuple[slice, slice] | None:
        x0, x1, y0, y1 = rectangle
        rows = slice(max(0, int(y0 * self.scale)), min(self.size[0], int(y1 * self.scale) + 1))
        columns = slice(max(0, int(x0 * self.scale)), min(self.size[1], int(x1 * self.scale) + 1))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return None
        return rows, columns

    def cast(self) -> tuple[Tensor, Tensor]:
        """Cast all rays: colours [3, h, w] and opacity of solids [h, w], supersampled."""
        ground_t = torch.where(self.du < -1e-5, self.eye[1] / (-self.du).clamp(min=1e-5), _FAR)
        t, hit = ground_t.clone(), torch.full(self.size, -1, dtype=torch.int32)
        for k, rectangle in enumerate(self.rectangles):
            window = self._window(rectangle[:4])
            if window is None:
                continue
            direction = (self.dx[window], self.du[window], self.dz[window])
            t_new = _intersect(k, self.solids[k], self.eye, direction)
            nearer = t_new < t[window]
            t[window] = torch.where(nearer, t_new, t[window])
            hit[window].masked_fill_(nearer, k)
        shadow = self._shadows(t, hit)
        colour = torch.empty(3, self.dx.numel())
        rays: Vector = (self.dx.flatten(), self.du.flatten(), self.dz.flatten())
        t_flat, hit_flat, shadow_flat = t.flatten(), hit.flatten(), shadow.flatten()
        is_down = rays[1] < -1e-5
        sky = (~is_down).nonzero()[:, 0]
        colour[:, sky] = self._sky(_at(rays, sky))
        ground = is_down.nonzero()[:, 0]
        # Behind a fading solid the ground shows; it keeps the solid's own shadow value.
        colour[:, ground] = self._ground(
            _at(rays, ground), ground_t.flatten()[ground], shadow_flat[ground]
        )
        solid = (hit_flat >= 0).nonzero()[:, 0]
        opacity = torch.zeros_like(t_flat)
        lit, alpha = self._solid(
            _at(rays, solid), t_flat[solid], hit_flat[solid], shadow_flat[solid]
        )
        colour[:, solid] += alpha * (lit - colour[:, solid])
        opacity[solid] = alpha
        return colour.clamp_(0.0, 1.0).view(3, *self.size), opacity.view(self.size)

    def _shadows(self, t: Tensor, hit: Tensor) -> Tensor:
        """How much sun is lost at each hit [h, w]; one ray towards the sun."""
        shadow = torch.zeros(self.size)
        for k, rectangle in enumerate(self.rectangles):
            window = self._window(rectangle[4:])
            if window is None:
                continue
            reach = t[window].clamp(max=2.0 * P.PERIOD)
            origin = (
                self.dx[window] * reach,
                self.eye[1] + self.du[window] * reach,
                self.dz[window] * reach,
            )
            t_sun = _intersect(k, self.solids[k], origin, self.sun)
            weight = self.solids[k, T.SHADE] * (
                1.0 - smoothstep(T.SHADOW_START, T.SHADOW_END, t_sun)
            )
            # Solids are convex: a solid never shades itself, its lambert term does that.
            weight = torch.where(hit[window] == k, 0.0, weight)
            shadow[window] = torch.maximum(shadow[window], weight)
        return shadow

    def _rgb(self, part: slice) -> Tensor:
        return self.style[part][:, None]

    def _haze(self, ray: Vector) -> Tensor:
        """The colour at the horizon in a ray's direction [3, L], warmer towards the sun."""
        toward = _dot(ray, self.sun)
        glow = 0.34 * self.style[S.GLOW] * ((toward - 1.0) * 7.0).exp()
        return self._rgb(S.SKY_HORIZON) + glow * self._rgb(S.LIGHT)

    def _sky(self, ray: Vector) -> Tensor:
        dx, du, dz = ray
        style, phase = self.style, self.frame[T.PHASE : T.PHASE + 8]
        up = du.clamp(min=0.0)
        haze = self._haze(ray)
        rise = (up + 1e-6).sqrt()
        climb = self._rgb(S.SKY_TOP) - self._rgb(S.SKY_HORIZON)
        colour = haze + (1.0 - (1.0 - rise).square()) * climb
        stretch = 1.6 / (up + 0.15)
        cx, cz = dx * stretch + phase[6], dz * stretch + phase[7]
        bumps = cx.sin() * (cz + 0.6 * (0.7 * cx).sin()).sin() + 0.5 * (1.7 * cx + 1.3 * cz).sin()
        cloud = style[S.CLOUD] * smoothstep(0.1, 1.1, bumps) * smoothstep(0.03, 0.3, up)
        white = (self._rgb(S.LIGHT) + self._rgb(S.AMBIENT)).clamp(max=1.0)
        colour = colour + cloud * (white - colour)
        toward = _dot(ray, self.sun)
        disc = style[S.DISC] * smoothstep(0.99863, 0.99900, toward)
        colour = colour + disc * ((1.25 * self._rgb(S.LIGHT) + 0.15).clamp(max=1.0) - colour)
        return self._hills(colour, haze, ray)

    def _hills(self, sky: Tensor, haze: Tensor, ray: Vector) -> Tensor:
        """Lay a hazy ridge at infinity over the sky: a sum of harmonics of the azimuth."""
        dx, du, dz = ray
        w = self.frame[T.PHASE_SIN : T.PHASE_SIN + 6]
        flat = (dx * dx + dz * dz + 1e-9).rsqrt()
        c1, s1 = dx * flat, dz * flat
        c2, s2 = c1 * c1 - s1 * s1, 2.0 * c1 * s1
        c3, s3 = c1 * c2 - s1 * s2, s1 * c2 + c1 * s2
        c5, s5 = c2 * c3 - s2 * s3, s2 * c3 + c2 * s3
        ridge = 0.062 + 0.030 * (w[0] * c2 + w[1] * s2)
        ridge = ridge + 0.026 * (w[2] * c3 + w[3] * s3) + 0.014 * (w[4] * c5 + w[5] * s5)
        ridge = ridge.clamp(min=0.006)
        slope = du * flat
        share = (slope / ridge).clamp(0.0, 1.0)
        thick = (0.50 + 0.38 * share) * (-16.0 * self.style[S.FOG]).exp()
        hill = haze + thick * (self._rgb(S.HILL) - haze)
        return torch.where(slope < ridge, hill, sky)

    def _ground(self, ray: Vector, t: Tensor, shadow: Tensor) -> Tensor:
        dx, du, dz = ray
        frame, style = self.frame, self.style
        x, z = dx * t, dz * t
        phase = frame[T.PHASE : T.PHASE + 8]
        # Every frequency is a multiple of 2 pi / PERIOD: the pattern has no seam.
        unit = 2.0 * torch.pi / P.PERIOD
        wx, wz = (x + frame[T.CAMERA_X]) * unit, (z + frame[T.CAMERA_Z]) * unit
        check = (3.0 * (8.0 * wx + phase[0]).sin() * (8.0 * wz + phase[1]).sin()).clamp(-1.0, 1.0)
        check = 0.5 + 0.5 * check * (-0.09 * t).exp()
        blotch = 0.5 * (2.0 * wx + phase[2]).sin() * (2.0 * wz + phase[3]).sin()
        blotch = blotch + 0.3 * (5.0 * wx - 3.0 * wz + phase[4]).sin()
        tone = 1.0 + 0.12 * blotch * (-0.04 * t).exp()
        base = self._rgb(S.GROUND_B) + check * (self._rgb(S.GROUND_A) - self._rgb(S.GROUND_B))
        lambert = self.sun[1] * (1.0 - shadow)
        colour = base * tone * (self._rgb(S.AMBIENT) + self._rgb(S.LIGHT) * lambert)
        for px, pz, a, b, alpha in self.ponds:
            if alpha <= 0.0:
                continue
            ring = (((x - px) / a).square() + ((z - pz) / b).square()).sqrt()
            rim = alpha * (1.0 - smoothstep(1.0, 1.12, ring))
            colour = colour + rim * 0.35 * (0.55 * colour - colour)
            mirror = self._rgb(S.SKY_HORIZON) + (-du).clamp(max=1.0).sqrt() * (
                self._rgb(S.SKY_TOP) - self._rgb(S.SKY_HORIZON)
            )
            tint = self._rgb(S.WATER) * (self._rgb(S.AMBIENT) + 0.6 * self._rgb(S.LIGHT))
            water = (0.45 * mirror + 0.55 * tint) * (1.0 - 0.25 * shadow)
            inside = alpha * (1.0 - smoothstep(0.93, 1.0, ring))
            colour = colour + inside * (water - colour)
        reach = (x * x + z * z).sqrt()
        clear = (1.0 - smoothstep(T.FADE_START, T.FADE_END, reach)) * (-style[S.FOG] * t).exp()
        haze = self._haze(ray)
        return haze + clear * (colour - haze)

    def _solid(self, ray: Vector, t: Tensor, hit: Tensor, shadow: Tensor) -> tuple[Tensor, Tensor]:
        """Colours [3, L] and opacities [L] of pixels that see a solid."""
        style = self.style
        dx, du, dz = ray
        q = self.solids[hit.long()].T
        x, up, z = dx * t - q[T.RX], self.eye[1] + du * t, dz * t - q[T.RZ]
        rise = up - q[T.BASE]
        nx, nu, nz, across = _normals(hit, q, x, rise, z)
        lambert = _dot((nx, nu, nz), self.sun).clamp(min=0.0) * (1.0 - shadow)
        pattern = q[T.PATTERN]
        height_share = rise / q[T.HEIGHT]
        bands = smoothstep(-0.35, 0.35, (6.0 * up).sin())
        tone = torch.where(pattern == P.BANDS, 0.80 + 0.20 * bands, 1.0)
        tone = torch.where(pattern == P.FOLIAGE, 0.72 + 0.42 * height_share, tone)
        tone = tone * (0.7 + 0.3 * (2.0 * up).clamp(0.0, 1.0))
        # Windows: a lattice of soft-edged panes on upright faces, 0.8 apart.
        pane = smoothstep(0.30, 0.45, (across * (torch.pi / 0.8)).cos()) * smoothstep(
            0.10, 0.30, -(rise * (2.0 * torch.pi / 0.95)).cos()
        )
        pane = torch.where((pattern == P.WINDOWS) & (nu.abs() < 0.5), pane, 0.0)
        base = torch.stack([q[T.RED], q[T.GREEN], q[T.BLUE]]) * tone
        base = base * (1.0 - 0.55 * pane)
        ambient = 0.82 + 0.18 * nu
        colour = base * (self._rgb(S.AMBIENT) * ambient + self._rgb(S.LIGHT) * lambert)
        shine = style[S.LAMP_POWER] * torch.where(pattern == P.LAMP, 0.9, 0.85 * pane)
        warm = colour.new_tensor([1.0, 0.84, 0.50])[:, None]
        colour = colour + shine * (warm - colour)
        haze = self._haze(ray)
        colour = haze + (-style[S.FOG] * t).exp() * (colour - haze)
        reach = ((dx * dx + dz * dz) * t * t).sqrt()
        fade = 1.0 - smoothstep(T.FADE_START, T.FADE_END, reach)
        return colour, torch.minimum(fade, q[T.ALPHA])


def _at(vector: Vector, index: Tensor) -> Vector:
    return vector[0][index], vector[1][index], vector[2][index]


def _dot(a: Vector, b: Vector) -> Tensor:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _safe(value: Tensor) -> Tensor:
    """Keep a divisor away from zero; a ray along a face counts as leaving it."""
    return torch.where(value.abs() < 1e-6, 1e-6, value)


def _intersect(k: int, solid_K: Tensor, origin: Vector, direction: Vector) -> Tensor:
    """Nearest distance along rays (x, up, z) to solid k, at least `_STEP`; `_FAR` if none."""
    q = solid_K.unbind()
    ox, oz = origin[0] - q[T.RX], origin[2] - q[T.RZ]
    rise = origin[1] - q[T.BASE]
    if k < P.FRUSTUM_START:
        return _meet_box(q, (ox, rise, oz), direction)
    if k < P.ELLIPSOID_START:
        return _meet_frustum(q, (ox, rise, oz), direction)
    return _meet_ellipsoid(q, (ox, rise, oz), direction)


def _meet_box(q: tuple[Tensor, ...], origin: Vector, direction: Vector) -> Tensor:
    """Cut the ray by six half-spaces; the side faces lean by the taper."""
    cos, sin = q[T.COS], q[T.SIN]
    lx, lz = cos * origin[0] - sin * origin[2], sin * origin[0] + cos * origin[2]
    mx, mz = cos * direction[0] - sin * direction[2], sin * direction[0] + cos * direction[2]
    rise, du = origin[1], direction[1]
    lean = (1.0 - q[T.TAPER]) / q[T.HEIGHT]
    lean_x, lean_z = q[T.A] * lean, q[T.B] * lean
    faces = (
        (lx + lean_x * rise - q[T.A], mx + lean_x * du),
        (-lx + lean_x * rise - q[T.A], -mx + lean_x * du),
        (lz + lean_z * rise - q[T.B], mz + lean_z * du),
        (-lz + lean_z * rise - q[T.B], -mz + lean_z * du),
        (rise - q[T.HEIGHT], du),
        (-rise, -du),
    )
    enter, leave = torch.tensor(_STEP), torch.tensor(_FAR)
    is_out = torch.tensor(False)
    for outside, slope in faces:
        safe = _safe(slope)
        t = -outside / safe
        enter = torch.where(safe < 0.0, torch.maximum(enter, t), enter)
        leave = torch.where(safe > 0.0, torch.minimum(leave, t), leave)
        is_out = is_out | (outside > 0.0)
    return torch.where((enter < leave) & is_out, enter, _FAR)


def _meet_frustum(q: tuple[Tensor, ...], origin: Vector, direction: Vector) -> Tensor:
    """Meet a cone between two discs; radius(rise) = A + slope * rise."""
    ox, rise, oz = origin
    dx, du, dz = direction
    slope = (q[T.B] - q[T.A]) / q[T.HEIGHT]
    radius = q[T.A] + slope * rise
    a = _safe(dx * dx + dz * dz - slope * slope * du * du)
    b = ox * dx + oz * dz - slope * du * radius
    c = ox * ox + oz * oz - radius * radius
    root = b * b - a * c
    is_real = root > 0.0
    root = root.clamp(min=0.0).sqrt()
    best = torch.tensor(_FAR)
    for t in ((-b - root) / a, (-b + root) / a):
        at = rise + t * du
        ok = is_real & (t > _STEP) & (at > 0.0) & (at < q[T.HEIGHT]) & (t < best)
        best = torch.where(ok, t, best)
    safe = _safe(du)
    for level, disc in ((q[T.HEIGHT], q[T.B]), (0.0, q[T.A])):
        t = (level - rise) / safe
        px, pz = ox + t * dx, oz + t * dz
        ok = (px * px + pz * pz < disc * disc) & (t > _STEP) & (t < best)
        best = torch.where(ok, t, best)
    return best


def _meet_ellipsoid(q: tuple[Tensor, ...], origin: Vector, direction: Vector) -> Tensor:
    half = 0.5 * q[T.HEIGHT]
    ox, oz = origin[0] / q[T.A], origin[2] / q[T.B]
    ou = (origin[1] - half) / half
    dx, du, dz = direction[0] / q[T.A], direction[1] / half, direction[2] / q[T.B]
    a = dx * dx + du * du + dz * dz
    b = ox * dx + ou * du + oz * dz
    root = b * b - a * (ox * ox + ou * ou + oz * oz - 1.0)
    t = (-b - root.clamp(min=0.0).sqrt()) / a
    return torch.where((root > 0.0) & (t > _STEP), t, _FAR)


def _normals(
    hit: Tensor, q: Tensor, x: Tensor, rise: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit normals (x, up, z) and the coordinate across a box face, at points on solids."""
    is_box, is_round = hit < P.FRUSTUM_START, hit >= P.ELLIPSOID_START
    height = q[T.HEIGHT]
    # Box: the face whose plane is nearest.
    cos, sin = q[T.COS], q[T.SIN]
    lx, lz = cos * x - sin * z, sin * x + cos * z
    lean = (1.0 - q[T.TAPER]) / height
    lean_x, lean_z = q[T.A] * lean, q[T.B] * lean
    norm_x, norm_z = (1.0 + lean_x * lean_x).rsqrt(), (1.0 + lean_z * lean_z).rsqrt()
    out_x = (lx.abs() + lean_x * rise - q[T.A]) * norm_x
    out_z = (lz.abs() + lean_z * rise - q[T.B]) * norm_z
    flat = torch.maximum(rise - height, -rise)
    side_x = (out_x >= out_z) & (out_x >= flat)
    side_z = ~side_x & (out_z >= flat)
    sign_x, sign_z = torch.where(lx < 0.0, -1.0, 1.0), torch.where(lz < 0.0, -1.0, 1.0)
    bx = torch.where(side_x, sign_x * norm_x, 0.0)
    bz = torch.where(side_z, sign_z * norm_z, 0.0)
    face_up = torch.where(rise > 0.5 * height, 1.0, -1.0)
    box_u = torch.where(side_x, lean_x * norm_x, torch.where(side_z, lean_z * norm_z, face_up))
    box_x, box_z = cos * bx + sin * bz, cos * bz - sin * bx
    across = torch.where(side_x, lz, lx)
    # Frustum: side or caps; ellipsoid: gradient.
    slope = (q[T.B] - q[T.A]) / height
    norm = (1.0 + slope * slope).rsqrt()
    inv = norm * (x * x + z * z + 1e-9).rsqrt()
    on_top, on_bottom = rise > height - 1e-3, rise < 1e-3
    is_side = ~(on_top | on_bottom)
    cone_u = torch.where(on_top, 1.0, torch.where(on_bottom, -1.0, -slope * norm))
    cone_x, cone_z = torch.where(is_side, x * inv, 0.0), torch.where(is_side, z * inv, 0.0)
    half = 0.5 * height
    safe_b = q[T.B].clamp(min=1e-3)
    gx, gu, gz = x / q[T.A].square(), (rise - half) / half.square(), z / safe_b.square()
    inv = (gx * gx + gu * gu + gz * gz + 1e-9).rsqrt()
    nx = torch.where(is_round, gx * inv, torch.where(is_box, box_x, cone_x))
    nu = torch.where(is_round, gu * inv, torch.where(is_box, box_u, cone_u))
    nz = torch.where(is_round, gz * inv, torch.where(is_box, box_z, cone_z))
    return nx, nu, nz, across
