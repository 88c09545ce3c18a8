"""The small world's renderer as a world of its own: true frames of a named scene.

Owns the walk through the scene: the engine's camera, kept out of solids. Invariant: frames come in
the portions of a decoder (1, 4, 4, 4, 4), so that nothing above can tell the two worlds apart; the
digest is taken over the frames, as there are no latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from engine.camera import CameraState, integrate
from engine.config import FRAMES_PER_LATENT, Geometry, preset
from engine.errors import ConfigError
from engine.types import Action
from graphs.runner import GraphRunner
from miniworld.prompts import parse_prompt
from miniworld.render import render
from miniworld.scene import NAMED_SCENES, named_scene
from miniworld.styles import style_for
from miniworld.walks import Obstacles
from stream.session import WorldSpeed, WorldState
from stream.trace import Digest
from vae_stream.decoder import FrameChunk


class RendererWorld:
    """A named scene, rendered.

    The prompt's words for place and time change the look; what it does not name stays the scene's.
    `seed` changes nothing: the scene is what it is.

    Raises:
        ConfigError: no scene of this name.
    """

    has_frames = True
    lookahead_latents = 0
    digest_of = "frames"
    model_hash = "renderer"
    device = "cpu"
    dtype = "float32"
    speed = WorldSpeed()
    note = ""
    is_finite = True
    state_bytes = 0
    """A few numbers."""

    def __init__(self, scene: str, geometry: Geometry) -> None:
        check_scene(scene)
        self.geometry = geometry
        self._named = NAMED_SCENES[scene]
        self._start = named_scene(scene)
        self._obstacles = Obstacles(self._start.scenes.primitives_CNP, self._start.scenes.ponds_CQ4)
        self._camera_config = preset("mini").model.camera
        self.begin("", 0, Digest())

    @property
    def attention_names(self) -> Mapping[str, str]:
        """Nothing attends."""
        return {}

    @property
    def runners(self) -> Mapping[str, GraphRunner]:
        """Nothing is recorded."""
        return {}

    def begin(self, prompt: str, seed: int, digest: Digest) -> None:
        """Go back to the scene's start."""
        self._digest = digest
        self._camera = CameraState()
        self._position_C2 = self._start.c2w_44[None, [0, 2], [3, 3]]
        self._chunk_index = 0
        self.set_prompt(prompt)

    def is_prompt_at_hand(self, prompt: str) -> bool:
        """Words are looked up."""
        return True

    def prepare_prompt(self, prompt: str) -> None:
        """Nothing is slow."""

    def set_prompt(self, prompt: str) -> None:
        """Change the look from the next chunk on."""
        place, _, time = parse_prompt(prompt)
        self._style_S = style_for(place or self._named.place, time or self._named.time)

    def step(self, action: Action) -> Iterator[FrameChunk]:
        """Render 17 frames."""
        frames_THWC = self._render(self._walk(action))
        self._digest.update(frames_THWC)
        first = self._chunk_index * len(frames_THWC)
        latent = self._chunk_index * len(FRAMES_PER_LATENT)
        self._chunk_index += 1
        begin = 0
        for index, count in enumerate(FRAMES_PER_LATENT):
            yield FrameChunk(
                frames_THWC=frames_THWC[begin : begin + count],
                first_frame=first + begin,
                latent_index=latent + index,
            )
            begin += count

    def finish(self) -> Iterator[FrameChunk]:
        """Nothing waits: a step yields all its frames."""
        yield from ()

    def state(self) -> WorldState:
        """Return where the camera is and how it moves."""
        values = {"chunk_index": float(self._chunk_index), **asdict(self._camera)}
        return WorldState(tensors={"position": self._position_C2}, values=values)

    def set_state(self, state: WorldState) -> None:
        """Move the camera."""
        values = dict(state.values)
        self._chunk_index = int(values.pop("chunk_index"))
        self._camera = CameraState(**values)
        self._position_C2 = state.tensors["position"]

    def first_picture(self) -> Tensor:
        """Return the picture at the start, uint8 [H, W, 3]."""
        return self._render(self._start.c2w_44[None])[0]

    def _walk(self, action: Action) -> Tensor:
        """Poses [F, 4, 4] of the next chunk: the free path, pushed out of solids step by step."""
        path = integrate(self._camera, action, self._camera_config)
        start_33 = self._start.c2w_44[:3, :3].numpy()
        end_3 = np.array([path.end.x, 0.0, path.end.z])
        free_F3 = np.concatenate([path.poses_F44[:, :3, 3], end_3[None]])
        steps_F3 = np.diff(free_F3, axis=0) @ start_33.T
        c2w_F44 = torch.eye(4, dtype=torch.float64).repeat(len(steps_F3), 1, 1)
        c2w_F44[:, :3, :3] = torch.from_numpy(start_33 @ path.poses_F44[:, :3, :3])
        c2w_F44[:, 1, 3] = self._start.c2w_44[1, 3]
        for frame, step_3 in enumerate(steps_F3):
            c2w_F44[frame, [0, 2], [3, 3]] = self._position_C2[0]
            moved_C2 = self._position_C2 + torch.from_numpy(step_3[[0, 2]])
            self._position_C2 = self._obstacles.push_out(moved_C2)
        self._camera = path.end
        return c2w_F44

    def _render(self, c2w_F44: Tensor) -> Tensor:
        pictures_CFCHW = render(
            self._start.scenes,
            c2w_F44[None],
            self._style_S[None],
            height=self.geometry.height_px,
            width=self.geometry.width_px,
        )
        frames_THWC = pictures_CFCHW[0].permute(0, 2, 3, 1)
        return (frames_THWC * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)


def check_scene(name: str) -> None:
    """Refuse an unknown name.

    Raises:
        ConfigError: lists the names.
    """
    if name not in NAMED_SCENES:
        raise ConfigError(f"scene: {name!r}; allowed: {', '.join(NAMED_SCENES)}")


def scene_prompt(name: str) -> str:
    """Return the prompt that belongs to a named scene."""
    check_scene(name)
    return NAMED_SCENES[name].prompt
