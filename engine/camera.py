"""Camera: controls to poses, poses to the views that the model sees.

Owns the integration rule, the camera index of each latent frame, relative views. Invariants: pure
functions; poses are float64 on the CPU; a pose is camera-to-world, OpenCV axes (x right, y down,
z forward); the pose of the first frame of a rollout is the identity.
Shape suffixes: F frames, T latent frames, B batch, 44 a matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.config import FRAMES_PER_LATENT, CameraConfig
from engine.types import Action

FIRST_FRAMES = tuple(sum(FRAMES_PER_LATENT[:i]) for i in range(len(FRAMES_PER_LATENT)))
"""First frame that each latent of a chunk covers: 0, 1, 5, 9, 13. Its pose is the latent's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CameraState:
    """Where the camera is and how it moves at the first frame of a chunk."""

    x: float = 0.0
    z: float = 0.0
    heading_rad: float = 0.0
    pitch_rad: float = 0.0
    forward: float = 0.0
    """Velocities are per frame: units for walking, radians for turning."""
    right: float = 0.0
    yaw_rad: float = 0.0
    pitch_step_rad: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CameraPath:
    """Poses of one chunk and the state that the next chunk starts from."""

    poses_F44: npt.NDArray[np.float64]
    end: CameraState


def pose_matrix(state: CameraState) -> npt.NDArray[np.float64]:
    """Camera-to-world [4, 4] of a state: R = Ry(heading) Rx(pitch).

    The state keeps heading and pitch instead of a rotation matrix that each frame multiplies by
    Ry Rx: such a product turns about the camera's own tilted axes and gathers roll, so that the
    horizon leans after a few looks up while turning.
    """
    ch, sh = math.cos(state.heading_rad), math.sin(state.heading_rad)
    cp, sp = math.cos(state.pitch_rad), math.sin(state.pitch_rad)
    return np.array(
        [
            [ch, sh * sp, sh * cp, state.x],
            [0.0, cp, -sp, 0.0],
            [-sh, ch * sp, ch * cp, state.z],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )


def integrate(state: CameraState, action: Action, config: CameraConfig) -> CameraPath:
    """Move the camera through one chunk.

    Row f of the action moves frame f to frame f + 1, so the first pose is that of ``state`` and a
    control of any frame, however short, shows in the poses after it. Velocities approach the wanted
    ones exponentially; walking follows the ground plane along the new heading.
    """
    poses = []
    for forward, right, yaw, pitch, boost in action.axes_FA.tolist():
        poses.append(pose_matrix(state))
        factor = 1.0 + (config.boost_factor - 1.0) * boost
        state = _move(
            state,
            forward * config.forward_per_frame * factor,
            right * config.strafe_per_frame * factor,
            math.radians(yaw * config.yaw_deg_per_frame),
            math.radians(pitch * config.pitch_deg_per_frame),
            config,
        )
    return CameraPath(poses_F44=np.stack(poses), end=state)


def _move(
    state: CameraState,
    forward: float,
    right: float,
    yaw_rad: float,
    pitch_rad: float,
    config: CameraConfig,
) -> CameraState:
    share, limit = config.smoothing, config.pitch_limit_rad
    forward = state.forward + share * (forward - state.forward)
    right = state.right + share * (right - state.right)
    yaw_rad = state.yaw_rad + share * (yaw_rad - state.yaw_rad)
    pitch_step_rad = state.pitch_step_rad + share * (pitch_rad - state.pitch_step_rad)
    heading_rad = state.heading_rad + yaw_rad
    sine, cosine = math.sin(heading_rad), math.cos(heading_rad)
    return CameraState(
        x=state.x + sine * forward + cosine * right,
        z=state.z + cosine * forward - sine * right,
        heading_rad=heading_rad,
        pitch_rad=min(limit, max(-limit, state.pitch_rad + pitch_step_rad)),
        forward=forward,
        right=right,
        yaw_rad=yaw_rad,
        pitch_step_rad=pitch_step_rad,
    )


def camera_indices(latents: int, frames: int | None = None) -> list[int]:
    """Frame whose pose each latent takes: 17 floor(i / 5) + (0, 1, 5, 9, 13)[i mod 5].

    Args:
        latents: how many.
        frames: length of a finite clip. A latent whose first frame lies past the end takes the
            camera of the last latent inside, which need not be the last frame.
    """
    per_chunk = len(FIRST_FRAMES)
    indices = [
        sum(FRAMES_PER_LATENT) * (i // per_chunk) + FIRST_FRAMES[i % per_chunk]
        for i in range(latents)
    ]
    if frames is None:
        return indices
    last = max(index for index in indices if index < frames)
    return [min(index, last) for index in indices]


def invert_rigid(matrix_44: Tensor) -> Tensor:
    """Inverse of rigid transforms [..., 4, 4]: rotation transposed, translation -R^T t."""
    rotation = matrix_44[..., :3, :3]
    inverse_44 = torch.zeros_like(matrix_44)
    inverse_44[..., :3, :3] = rotation.mT
    inverse_44[..., :3, 3] = -(rotation.mT @ matrix_44[..., :3, 3:])[..., 0]
    inverse_44[..., 3, 3] = 1.0
    return inverse_44


def relative_views(c2w_BT44: Tensor, origin_B44: Tensor) -> Tensor:
    """World-to-camera views relative to the first frame of each rollout, fp32 [B, T, 4, 4].

    Args:
        c2w_BT44: absolute camera-to-world poses.
        origin_B44: the pose of frame 0 of each rollout.

    Poses are cast to fp32 before anything else, as the released model's inputs were, so a path far
    from the world's origin loses accuracy; a rollout of the engine starts at the origin. A pose
    equal to the origin gives the identity without rounding.
    Source: SolarWM-H3 camera preparation; agrees with it bit for bit.
    """
    c2w_BT44, origin_B144 = c2w_BT44.float(), origin_B44.float()[:, None]
    relative_BT44 = invert_rigid(origin_B144) @ c2w_BT44
    at_origin_BT = (c2w_BT44 == origin_B144).flatten(2).all(-1)
    identity = torch.eye(4, device=c2w_BT44.device)
    return invert_rigid(torch.where(at_origin_BT[..., None, None], identity, relative_BT44))
