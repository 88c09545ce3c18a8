"""Scenes and clips: worlds from a seed, walks through them, and their prompts and styles.

Owns: `Scenes`, `Clips`, their samplers, and the named scenes.
Invariants: everything is drawn on the CPU from explicit generators and moved later, so that all
devices see the same world; a scene holds geometry only, its look is a style vector.

Shapes: C clips, N primitives, P columns, Q ponds, F frames, S style numbers.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miniworld import layouts, prompts, styles, walks
from miniworld import primitives as P
from miniworld.layouts import KINDS
from miniworld.styles import PLACES, TIMES
from miniworld.walks import CHUNK_FRAMES

_KIND_WEIGHTS = {"forest": 3, "city": 3, "ruins": 3, "rocks": 2, "lake": 2, "mixed": 3}
_PHASE_COUNT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenes:
    """A batch of worlds: solids, ponds, phases of the ground and hills, sun azimuths."""

    primitives_CNP: Tensor
    ponds_CQ4: Tensor
    phases_CK: Tensor
    sun_azimuth_C: Tensor
    """Radians from +x towards +z."""
    kind_C: Tensor
    """Index into KINDS."""

    def __len__(self) -> int:
        """Count the worlds."""
        return self.kind_C.shape[0]

    def __getitem__(self, index: Tensor | slice | Sequence[int]) -> "Scenes":
        """Select worlds; a single int is not accepted, so that the batch axis stays."""
        return Scenes(**{field: getattr(self, field)[index] for field in _SCENE_FIELDS})

    def to(self, device: torch.device | str) -> "Scenes":
        """Move to a device."""
        return Scenes(**{field: getattr(self, field).to(device) for field in _SCENE_FIELDS})

    @staticmethod
    def cat(parts: Sequence["Scenes"]) -> "Scenes":
        """Concatenate batches."""
        return Scenes(**{
            field: torch.cat([getattr(part, field) for part in parts]) for field in _SCENE_FIELDS
        })  # fmt: skip


_SCENE_FIELDS = tuple(field.name for field in dataclasses.fields(Scenes))


def sample_scenes(count: int, seed: int, kinds: Sequence[str] | None = None) -> Scenes:
    """Draw worlds on the CPU; `kinds` limits the scene kinds (None: all, weighted).

    Raises: ValueError for an unknown kind.
    """
    unknown = set(kinds or ()) - set(KINDS)
    if unknown:
        raise ValueError(f"kinds: {sorted(unknown)} unknown; allowed: {KINDS}")
    return _sample_scenes(count, torch.Generator().manual_seed(seed), kinds)


def _sample_scenes(count: int, generator: torch.Generator, kinds: Sequence[str] | None) -> Scenes:
    uniform = torch.rand(count, layouts.UNIFORM_COUNT + _PHASE_COUNT + 1, generator=generator)
    allowed = tuple(kinds or KINDS)
    weights = torch.tensor([float(_KIND_WEIGHTS[kind]) for kind in allowed])
    chosen = torch.multinomial(weights, count, replacement=True, generator=generator)
    kind_index = torch.tensor([KINDS.index(kind) for kind in allowed])[chosen]
    rows = torch.zeros(count, P.PRIMITIVE_COUNT, P.COLUMN_COUNT)
    ponds = torch.zeros(count, P.POND_COUNT, 4)
    for index, kind in enumerate(KINDS):
        mine = (kind_index == index).nonzero()[:, 0]
        if len(mine):
            rows[mine], ponds[mine] = layouts.build(kind, uniform[mine, : layouts.UNIFORM_COUNT])
    angles = 2.0 * math.pi * uniform[:, layouts.UNIFORM_COUNT :]
    return Scenes(
        primitives_CNP=rows,
        ponds_CQ4=ponds,
        phases_CK=angles[:, :_PHASE_COUNT].contiguous(),
        sun_azimuth_C=angles[:, _PHASE_COUNT].contiguous(),
        kind_C=kind_index,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """A batch of walks with all that training needs to render and condition them."""

    scenes: Scenes
    c2w_CF44: Tensor
    """World poses, float64, CPU; one per frame."""
    origin_c2w_C44: Tensor
    """First pose of the session that the clip belongs to; the anchor image is seen from here."""
    is_mid_session_C: Tensor
    style_before_CS: Tensor
    style_after_CS: Tensor
    switch_chunk: int
    """First chunk drawn in `style_after_CS`; the chunk count when nothing switches."""
    prompt_before: list[str]
    prompt_after: list[str]

    def styles_CKS(self) -> Tensor:  # noqa: N802
        """Stack both styles [C, 2, S] (before, after), for `render`'s indexed form."""
        return torch.stack([self.style_before_CS, self.style_after_CS], 1)

    def style_index_CF(self) -> Tensor:  # noqa: N802
        """Tell which style each frame wears [C, F]: 0 before, 1 after."""
        count, frames = self.c2w_CF44.shape[:2]
        chunk = torch.arange(frames) // CHUNK_FRAMES
        return (chunk >= self.switch_chunk).long().expand(count, frames)


def sample_clips(
    count: int,
    chunks: int,
    seed: int,
    *,
    switch_chunk: int | None = None,
    mid_session_share: float = 0.35,
    palette_share: float = 0.25,
    through_share: float = 0.0,
    kinds: Sequence[str] | None = None,
) -> Clips:
    """Draw clips of `chunks` x 17 frames.

    switch_chunk: first chunk in the new style; 0 means that only the anchor image wears the old
    one; None means no switch. mid_session_share: share of clips whose session began elsewhere,
    5 to 100 units away. palette_share: share of clips that begin in an unnamed style.
    through_share: share of clips whose walker nothing stops, as in a world that a model invents:
    what is walked into sinks into the ground. Half of these clips begin facing something near.

    Raises: ValueError for an unknown kind or a switch_chunk outside 0..chunks.
    """
    if switch_chunk is not None and not 0 <= switch_chunk <= chunks:
        raise ValueError(f"switch_chunk: {switch_chunk}; allowed: 0..{chunks} or None")
    generator = torch.Generator().manual_seed(seed)
    scenes = sample_scenes(count, seed + 0x5CE, kinds)
    obstacles = walks.Obstacles(scenes.primitives_CNP, scenes.ponds_CQ4)
    start = walks.choose_starts(obstacles, count, generator)
    keys = walks.key_scripts(count, chunks * CHUNK_FRAMES, generator)
    # A generator of its own, so that the share changes nothing else of a seed's clips.
    u_C = torch.rand(count, generator=torch.Generator().manual_seed(seed + 0x7B2))
    stops = obstacles.opened(u_C < through_share)
    faces = u_C < 0.5 * through_share
    start[:, 2] = torch.where(faces, obstacles.heading_to_nearest(start[:, :2]), start[:, 2])
    c2w = walks.integrate(walks.smoothed_speeds(keys), stops, start)
    is_mid = torch.rand(count, generator=generator) < mid_session_share
    far = _far_origins(obstacles, start, generator)
    origin = torch.where(is_mid[:, None, None], far, c2w[:, 0])
    switches = switch_chunk is not None and switch_chunk < chunks
    looks = _draw_looks(scenes, seed, generator, palette_share, switches)
    return Clips(
        scenes=scenes,
        c2w_CF44=c2w,
        origin_c2w_C44=origin,
        is_mid_session_C=is_mid,
        style_before_CS=looks[0][0],
        style_after_CS=looks[1][0],
        switch_chunk=chunks if switch_chunk is None else switch_chunk,
        prompt_before=looks[0][1],
        prompt_after=looks[1][1],
    )


def _far_origins(
    obstacles: walks.Obstacles, start_C3: Tensor, generator: torch.Generator
) -> Tensor:
    """Choose session starts 5..100 units (log-uniform) from the clip: [C, 4, 4]."""
    u = torch.rand(len(start_C3), 3, generator=generator, dtype=torch.float64)
    distance = 5.0 * 20.0 ** u[:, 0]
    direction = 2.0 * math.pi * u[:, 1]
    step = torch.stack([direction.cos(), direction.sin()], -1) * distance[:, None]
    position = obstacles.push_out(start_C3[:, :2] + step, rounds=12)
    heading = 2.0 * math.pi * u[:, 2]
    return walks.camera_matrix(position, heading, torch.zeros_like(heading))


def _draw_looks(
    scenes: Scenes,
    seed: int,
    generator: torch.Generator,
    palette_share: float,
    switches: bool,
) -> tuple[tuple[Tensor, list[str]], tuple[Tensor, list[str]]]:
    """Draw styles [C, S] and prompts before and after the switch."""
    count = len(scenes)
    rng = random.Random(seed)
    palette = styles.random_styles(count, generator)
    before, after = [], []
    text_before, text_after = [], []
    for clip, kind_index in enumerate(scenes.kind_C.tolist()):
        kind = KINDS[kind_index]
        place, time = rng.choice(PLACES), rng.choice(TIMES)
        if rng.random() < palette_share:
            before.append(palette[clip])
            text_before.append(prompts.unnamed_prompt(rng))
            current = None
        else:
            before.append(styles.style_for(place, time))
            text_before.append(prompts.prompt_for(rng, place, kind, time))
            current = (place, time)
        if switches:
            others = [(p, t) for p in PLACES for t in TIMES if (p, t) != current]
            place, time = rng.choice(others)
            after.append(styles.style_for(place, time))
            text_after.append(prompts.prompt_for(rng, place, kind, time))
        else:
            after.append(before[-1])
            text_after.append(text_before[-1])
    return (torch.stack(before), text_before), (torch.stack(after), text_after)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedScene:
    """A world worth starting in."""

    seed: int
    kind: str
    place: str
    time: str
    prompt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedStart:
    """What a session needs to begin in a named scene."""

    scenes: Scenes
    """One world."""
    style_S: Tensor
    c2w_44: Tensor
    """Start pose, float64, world."""
    prompt: str


NAMED_SCENES: dict[str, NamedScene] = {
    name: NamedScene(seed=seed, kind=kind, place=place, time=time, prompt=prompt)
    for name, seed, kind, place, time, prompt in (
        ("meadow-forest", 5, "forest", "meadow", "day", "a forest in a meadow by day"),
        ("meadow-lake", 3, "lake", "meadow", "sunset", "a lake in a meadow at sunset"),
        ("meadow-town", 10, "city", "meadow", "day", "houses in a green meadow by day"),
        ("desert-gates", 8, "ruins", "desert", "sunset", "gates in a desert at sunset"),
        ("desert-oasis", 11, "lake", "desert", "day", "water and trees in a desert at noon"),
        ("desert-night", 5, "city", "desert", "night", "a city in a desert at night"),
        ("snow-forest", 7, "forest", "snow", "sunset", "a forest in snow at sunset"),
        ("snow-night-towers", 10, "city", "snow", "night", "towers in snow at night"),
        ("snow-ruins", 11, "ruins", "snow", "day", "ruins in snow by day"),
        ("mars-rocks", 3, "rocks", "mars", "day", "rocks on mars by day"),
        ("mars-ruins", 8, "ruins", "mars", "night", "ruins on mars at night"),
        ("foggy-walk", 5, "mixed", "meadow", "fog", "a walk in a meadow in fog"),
    )
}


def named_scene(name: str) -> NamedStart:
    """Build a named scene.

    Raises: ValueError that lists the names when `name` is unknown.
    """
    if name not in NAMED_SCENES:
        raise ValueError(f"scene: {name!r} unknown; allowed: {', '.join(NAMED_SCENES)}")
    entry = NAMED_SCENES[name]
    scenes = sample_scenes(1, entry.seed, (entry.kind,))
    obstacles = walks.Obstacles(scenes.primitives_CNP, scenes.ponds_CQ4)
    generator = torch.Generator().manual_seed(entry.seed)
    start = walks.choose_starts(obstacles, 1, generator)
    c2w = walks.camera_matrix(start[:, :2], start[:, 2], torch.zeros_like(start[:, 2]))
    return NamedStart(
        scenes=scenes,
        style_S=styles.style_for(entry.place, entry.time),
        c2w_44=c2w[0],
        prompt=entry.prompt,
    )
