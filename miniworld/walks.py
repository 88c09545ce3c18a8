"""Walks: scripted keys, smoothed speeds and camera poses that keep out of solids.

Owns: the key scripts, the integration rule with push-out, and the choice of where to start.
Invariants: float64 on the CPU; OpenCV axes (x right, y down, z forward); eye height 1; the pose
of frame 0 is the start and the controls at frame f move frame f to f + 1.

Shapes: C clips, F frames, N primitives, M candidates.
"""

import math

import torch
from torch import Tensor

from miniworld import primitives as P

CHUNK_FRAMES = 17
EYE_HEIGHT = 1.0
FORWARD_PER_FRAME = 0.07
STRAFE_PER_FRAME = 0.05
YAW_PER_FRAME_DEG = 1.2
PITCH_PER_FRAME_DEG = 0.4
SMOOTHING = 0.35
PITCH_LIMIT_RAD = 0.25
CLEARANCE = 0.35
"""Least distance between the eye and a solid, world units."""
HANGING = 0.2
"""A solid whose base is this far above the eye hangs: one walks beneath it."""

_START_CANDIDATES = 24


def key_scripts(count: int, frames: int, generator: torch.Generator) -> Tensor:
    """Draw held keys per frame: [C, F, 4] of (forward, right, yaw, pitch), each -1, 0 or 1.

    70 % of the clips change keys on chunk edges only, 30 % at any frame.
    """
    segments = frames // 5 + 2
    u = torch.rand(6, count, segments, generator=generator, dtype=torch.float64)
    is_aligned = torch.rand(count, 1, generator=generator) < 0.7
    hold = torch.where(is_aligned, CHUNK_FRAMES * (1 + (u[0] * 2.2).long()), 5 + (u[1] * 36).long())
    edge = hold.cumsum(1)
    segment = (torch.arange(frames)[None, :, None] >= edge[:, None, :]).sum(-1)

    def signed(numbers: Tensor, positive: float, negative: float) -> Tensor:
        return (numbers < positive).double() - (
            (numbers >= positive) & (numbers < positive + negative)
        ).double()

    keys = torch.stack(
        [
            signed(u[2], 0.60, 0.08),
            signed(u[3], 0.12, 0.12),
            signed(u[4], 0.27, 0.27),
            signed(u[5], 0.06, 0.06),
        ],
        -1,
    )
    return keys.gather(1, segment[..., None].expand(-1, -1, 4))


def smoothed_speeds(keys_CF4: Tensor) -> Tensor:
    """Turn held keys into speeds per frame [C, F, 4]: units, units, radians, radians."""
    full = torch.tensor(
        [
            FORWARD_PER_FRAME,
            STRAFE_PER_FRAME,
            math.radians(YAW_PER_FRAME_DEG),
            math.radians(PITCH_PER_FRAME_DEG),
        ],
        dtype=torch.float64,
    )
    target = keys_CF4.double() * full
    speed = torch.zeros_like(target[:, 0])
    speeds = []
    for frame in range(target.shape[1]):
        speed = speed + SMOOTHING * (target[:, frame] - speed)
        speeds.append(speed)
    return torch.stack(speeds, 1)


def wrap(offset: Tensor) -> Tensor:
    """Map an offset on the torus to its nearest image, -PERIOD/2 .. PERIOD/2."""
    return offset - P.PERIOD * (offset / P.PERIOD).round()


class Obstacles:
    """What the eye cannot walk through: solids that are present and start below eye height."""

    def __init__(self, rows_CNP: Tensor, ponds_CQ4: Tensor) -> None:
        rows = self._rows = rows_CNP.double()
        self._centre = rows[..., [P.X, P.Z]]
        low = rows[..., P.BASE] < EYE_HEIGHT + HANGING
        self._is_solid = (rows[..., P.PRESENT] > 0.0) & low
        is_box = torch.arange(rows.shape[1]) < P.BOX_COUNT
        self._boxes = slice(0, P.BOX_COUNT)
        self._half = rows[:, self._boxes][..., [P.A, P.B]] + CLEARANCE
        angle = rows[:, self._boxes, P.ANGLE]
        self._cos, self._sin = angle.cos(), angle.sin()
        radius = torch.maximum(rows[..., P.A], rows[..., P.B])
        self.radius = torch.where(is_box, rows[..., [P.A, P.B]].norm(dim=-1), radius)
        self._ponds = ponds_CQ4.double()

    def push_out(self, position_C2: Tensor, rounds: int = 2) -> Tensor:
        """Move positions (x, z) out of every obstacle, keeping CLEARANCE."""
        for _ in range(rounds):
            position_C2 = position_C2 + self._push(position_C2)
        return position_C2

    def _push(self, position_C2: Tensor) -> Tensor:
        offset = wrap(position_C2[:, None] - self._centre)
        box, round_ = offset[:, self._boxes], offset[:, P.BOX_COUNT :]
        x = self._cos * box[..., 0] - self._sin * box[..., 1]
        z = self._sin * box[..., 0] + self._cos * box[..., 1]
        depth_x, depth_z = self._half[..., 0] - x.abs(), self._half[..., 1] - z.abs()
        is_in = (depth_x > 0.0) & (depth_z > 0.0) & self._is_solid[:, self._boxes]
        along_x = depth_x < depth_z
        step_x = torch.where(is_in & along_x, depth_x.copysign(x), 0.0)
        step_z = torch.where(is_in & ~along_x, depth_z.copysign(z), 0.0)
        push_x = (self._cos * step_x + self._sin * step_z).sum(1)
        push_z = (self._cos * step_z - self._sin * step_x).sum(1)
        distance = round_.norm(dim=-1).clamp(min=1e-4)
        depth = (self.radius[:, P.BOX_COUNT :] + CLEARANCE - distance).clamp(min=0.0)
        depth = torch.where(self._is_solid[:, P.BOX_COUNT :], depth / distance, 0.0)
        push = (round_ * depth[..., None]).sum(1)
        return push + torch.stack([push_x, push_z], -1)

    def opened(self, is_open_C: Tensor) -> "Obstacles":
        """Return the same obstacles, none of which stops the walkers of clips [C] that are open."""
        rows = self._rows.clone()
        rows[is_open_C, :, P.PRESENT] = 0.0
        return Obstacles(rows, self._ponds)

    def repeat(self, times: int) -> "Obstacles":
        """Return the same obstacles for `times` candidates a clip, candidate index fastest."""
        return Obstacles(
            self._rows.repeat_interleave(times, 0), self._ponds.repeat_interleave(times, 0)
        )

    def heading_to_nearest(self, position_C2: Tensor) -> Tensor:
        """Heading [C] in radians from each position to the solid whose side is nearest."""
        offset = wrap(self._centre - position_C2[:, None])
        gap = torch.where(self._is_solid, offset.norm(dim=-1) - self.radius, torch.inf)
        nearest = offset[torch.arange(len(offset)), gap.argmin(1)]
        return torch.atan2(nearest[:, 0], nearest[:, 1])

    def view_score(self, position_C2: Tensor, heading_C: Tensor) -> Tensor:
        """Rate a standpoint [C]: things at a middle distance ahead, nothing in one's face."""
        offset = wrap(self._centre - position_C2[:, None])
        distance = offset.norm(dim=-1).clamp(min=1e-4)
        ahead = torch.stack([heading_C.sin(), heading_C.cos()], -1)
        cosine = (offset * ahead[:, None]).sum(-1) / distance
        gap = torch.where(self._is_solid, distance - self.radius, torch.inf)
        is_blocked = ((gap < 1.8) & (cosine > 0.6)).any(1)
        to_pond = wrap(self._ponds[..., :2] - position_C2[:, None])
        is_pond = self._ponds[..., 2] > 0.0
        shore = to_pond.norm(dim=-1) - self._ponds[..., 2]
        facing = (to_pond * ahead[:, None]).sum(-1) > 0.75 * to_pond.norm(dim=-1)
        is_wet = (is_pond & (shore < 0.2)).any(1)
        sees_water = (is_pond & facing & (shore < 5.0)).any(1)
        visible = ((gap > 2.2) & (gap < 8.0) & (cosine > 0.75)).sum(1)
        score = visible.clamp(max=7).double() + 2.0 * sees_water.double()
        return score - 10.0 * (is_blocked | is_wet).double()


def choose_starts(obstacles: Obstacles, count: int, generator: torch.Generator) -> Tensor:
    """Pick a free standpoint with something to see: [C, 3] of (x, z, heading in radians)."""
    candidates = obstacles.repeat(_START_CANDIDATES)
    total = count * _START_CANDIDATES
    u = torch.rand(total, 4, generator=generator, dtype=torch.float64)
    position = candidates.push_out(P.PERIOD * u[:, :2], rounds=12)
    heading = 2.0 * math.pi * u[:, 2]
    score = candidates.view_score(position, heading) + 1.5 * u[:, 3]
    best = score.view(count, -1).argmax(1)
    table = torch.cat([position, heading[:, None]], 1).view(count, -1, 3)
    return table[torch.arange(count), best]


def camera_matrix(position_C2: Tensor, heading_C: Tensor, pitch_C: Tensor) -> Tensor:
    """Build camera-to-world matrices [..., 4, 4]: R = Ry(heading) Rx(pitch), eye at y = -1."""
    cy, sy, cx, sx = heading_C.cos(), heading_C.sin(), pitch_C.cos(), pitch_C.sin()
    zero = torch.zeros_like(cy)
    rotation = torch.stack([cy, sy * sx, sy * cx, zero, cx, -sx, -sy, cy * sx, cy * cx], -1)
    matrix = torch.eye(4, dtype=cy.dtype).repeat(*cy.shape, 1, 1)
    matrix[..., :3, :3] = rotation.unflatten(-1, (3, 3))
    matrix[..., 0, 3] = position_C2[..., 0]
    matrix[..., 1, 3] = -EYE_HEIGHT
    matrix[..., 2, 3] = position_C2[..., 1]
    return matrix


def integrate(speeds_CF4: Tensor, obstacles: Obstacles, start_C3: Tensor) -> Tensor:
    """Integrate speeds from the start (x, z, heading) to poses [C, F, 4, 4], float64, world."""
    position, heading = start_C3[:, :2].clone(), start_C3[:, 2].clone()
    pitch = torch.zeros_like(heading)
    positions, headings, pitches = [], [], []
    for forward, right, yaw, tilt in (speed.unbind(-1) for speed in speeds_CF4.unbind(1)):
        positions.append(position)
        headings.append(heading)
        pitches.append(pitch)
        heading = heading + yaw
        pitch = (pitch + tilt).clamp(-PITCH_LIMIT_RAD, PITCH_LIMIT_RAD)
        sin, cos = heading.sin(), heading.cos()
        step = torch.stack([sin * forward + cos * right, cos * forward - sin * right], -1)
        position = obstacles.push_out(position + step)
    return camera_matrix(*(torch.stack(part, 1) for part in (positions, headings, pitches)))
