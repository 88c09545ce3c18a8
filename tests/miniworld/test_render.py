"""The renderer: camera convention, torus, shadows, coverage, and the kernel against the oracle."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miniworld import frame_tables, photos, scene, styles, walks
from miniworld import primitives as P
from miniworld.render import render
from tests.tolerances import RAYCAST_EDGE_SHARE, RAYCAST_SHADE_ATOL, RAYCAST_STEP_ATOL

pytestmark = pytest.mark.cpu

_SMALL = {"height": 40, "width": 64}


def _world(rows: dict[int, dict[int, float]], ponds: torch.Tensor | None = None) -> scene.Scenes:
    """Build one world from rows {index: {column: value}}; everything else is absent."""
    table = torch.zeros(1, P.PRIMITIVE_COUNT, P.COLUMN_COUNT)
    table[..., P.HEIGHT] = table[..., P.A] = table[..., P.B] = table[..., P.TAPER] = 1.0
    for index, columns in rows.items():
        for column, value in ({P.PRESENT: 1.0, P.BRIGHTNESS: 1.0} | columns).items():
            table[0, index, column] = value
    return scene.Scenes(
        primitives_CNP=table,
        ponds_CQ4=torch.zeros(1, P.POND_COUNT, 4) if ponds is None else ponds,
        phases_CK=torch.linspace(0.1, 5.0, 8)[None],
        sun_azimuth_C=torch.tensor([1.0]),
        kind_C=torch.tensor([0]),
    )


def _pose(x: float = 0.0, z: float = 0.0, heading: float = 0.0, pitch: float = 0.0):
    position = torch.tensor([[x, z]], dtype=torch.float64)
    angles = (torch.tensor([angle], dtype=torch.float64) for angle in (heading, pitch))
    return walks.camera_matrix(position, *angles)[:, None]


_BALL = P.ELLIPSOID_START
_DAY = styles.style_for("meadow", "day")[None]


def _ball_mask(x: float, base: float, z: float, c2w: torch.Tensor, radius: float = 0.12):
    """Where a dark ball shows against the sky [H, W], 0 or 1; its shadow lies below the horizon."""
    ball = {P.X: x, P.Z: z, P.BASE: base, P.HEIGHT: 2 * radius, P.A: radius, P.B: radius}
    ball |= {P.BRIGHTNESS: 0.0}
    with_ball, without = (render(_world(rows), c2w, _DAY)[0, 0] for rows in ({_BALL: ball}, {}))
    mask = ((with_ball - without).abs().amax(0) > 0.1).float()
    mask[78:] = 0.0
    return mask


def _centroid(mask: torch.Tensor) -> tuple[float, float]:
    weight = mask / mask.sum()
    columns = torch.arange(mask.shape[1]) + 0.5
    rows = torch.arange(mask.shape[0]) + 0.5
    return (weight.sum(0) * columns).sum().item(), (weight.sum(1) * rows).sum().item()


def test_a_point_projects_where_the_pinhole_says() -> None:
    mask = _ball_mask(1.0, 1.48, 4.0, _pose())
    focal = 0.505050505 * 256
    u, v = _centroid(mask)
    # Half a pixel: the ball is 8 px wide and perspective shifts its centre by 0.2 px.
    assert abs(u - (128 + focal * 1.0 / 4.0)) < 0.5
    assert abs(v - (80 - focal * 0.6 / 4.0)) < 0.5


def test_yaw_to_the_right_moves_things_left() -> None:
    straight = _centroid(_ball_mask(0.0, 1.5, 4.0, _pose()))[0]
    turned = _centroid(_ball_mask(0.0, 1.5, 4.0, _pose(heading=math.radians(5.0))))[0]
    focal = 0.505050505 * 256
    assert abs((straight - turned) - focal * math.tan(math.radians(5.0))) < 0.5


def test_looking_up_moves_things_down() -> None:
    level = _centroid(_ball_mask(0.0, 1.9, 4.0, _pose()))[1]
    raised = _centroid(_ball_mask(0.0, 1.9, 4.0, _pose(pitch=math.radians(3.0))))[1]
    assert raised > level + 5.0


def test_walking_forward_makes_things_grow() -> None:
    far = _ball_mask(0.0, 1.5, 5.0, _pose(), radius=0.25).sum()
    near = _ball_mask(0.0, 1.5, 5.0, _pose(z=2.0), radius=0.25).sum()
    # 5 to 3 units: the area grows by 25 / 9; a fifth is allowed for the rim of a small disc.
    assert 0.8 * 25 / 9 < near / far < 1.2 * 25 / 9


def test_moving_by_the_period_gives_the_same_picture() -> None:
    clips = scene.sample_clips(2, 1, seed=8)
    # Halves of small integers: adding the period is exact in float64.
    pose = torch.cat([_pose(2.5, 7.0, heading=0.5), _pose(11.0, 3.5, heading=2.0)])
    moved = pose.clone()
    moved[..., 0, 3] += P.PERIOD
    moved[..., 2, 3] -= 2 * P.PERIOD
    first, second = (
        render(clips.scenes, c2w, clips.style_before_CS, **_SMALL) for c2w in (pose, moved)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("index", [2, P.FRUSTUM_START + 2, P.ELLIPSOID_START])
def test_nothing_pops_when_a_solid_changes_sides(index: int) -> None:
    clips = scene.sample_clips(1, 1, seed=2, kinds=("ruins",))
    x, z = clips.scenes.primitives_CNP[0, index, [P.X, P.Z]].tolist()
    assert clips.scenes.primitives_CNP[0, index, P.PRESENT] == 1.0
    pictures = [
        render(clips.scenes, _pose(x - 0.5 * P.PERIOD + step, z, heading=heading), _DAY, **_SMALL)
        for step in (-5e-7, 5e-7)
        for heading in (0.5 * math.pi, -0.5 * math.pi)
    ]
    for before, after in zip(pictures[:2], pictures[2:], strict=True):
        assert (before - after).abs().max().item() < RAYCAST_STEP_ATOL


def test_solids_dissolve_before_the_far_side() -> None:
    tower = {P.X: 0.0, P.Z: 15.6, P.HEIGHT: 4.0, P.A: 1.0, P.B: 1.0}
    with_tower = render(_world({P.FRUSTUM_START: tower}), _pose(), _DAY, **_SMALL)
    assert torch.equal(with_tower, render(_world({}), _pose(), _DAY, **_SMALL))


_INSIDE = {
    "box": (2, {P.A: 1.0, P.B: 0.5, P.ANGLE: 0.7}),
    "frustum": (P.FRUSTUM_START, {P.A: 1.0, P.B: 0.8}),
    "ellipsoid": (P.ELLIPSOID_START, {P.A: 1.0, P.B: 0.9, P.BASE: -0.2}),
}


@pytest.mark.parametrize("kind", _INSIDE)
def test_what_the_eye_has_entered_is_gone(kind: str) -> None:
    index, columns = _INSIDE[kind]
    world = _world({index: {P.X: 0.2, P.Z: 0.1, P.HEIGHT: 3.0, **columns}})
    picture = render(world, _pose(), _DAY, **_SMALL)
    assert torch.equal(picture, render(_world({}), _pose(), _DAY, **_SMALL))


@pytest.mark.parametrize("kind", _INSIDE)
def test_nothing_sinks_before_a_walker_who_keeps_clear(kind: str) -> None:
    index, columns = _INSIDE[kind]
    angle = columns.get(P.ANGLE, 0.0)
    away = columns[P.A] + walks.CLEARANCE
    # The box's own x axis is (cos, -sin) in the ground plane.
    position = {P.X: away * math.cos(angle), P.Z: -away * math.sin(angle)}
    world = _world({index: {**position, P.HEIGHT: 3.0, **columns}})
    tables = frame_tables.build_tables(
        world, torch.zeros(1, dtype=torch.long), _pose()[:, 0], _DAY, height=16, width=16
    )
    assert tables.solids_GNK[0, index, frame_tables.BASE] == columns.get(P.BASE, 0.0)
    assert tables.solids_GNK[0, index, frame_tables.ALPHA] == 1.0


def test_what_hangs_above_the_eye_stays() -> None:
    roof = {P.BASE: 1.5, P.HEIGHT: 1.0, P.A: 1.0, P.B: 1.0}
    picture = render(_world({2: roof}), _pose(), _DAY, **_SMALL)
    assert not torch.equal(picture, render(_world({}), _pose(), _DAY, **_SMALL))


def test_a_solid_throws_its_shadow_away_from_the_sun() -> None:
    pole = {P.X: 0.0, P.Z: 5.0, P.HEIGHT: 2.0, P.A: 0.3, P.B: 0.3}
    world = _world({P.FRUSTUM_START: pole})
    sun_on_the_right = scene.Scenes(
        primitives_CNP=world.primitives_CNP,
        ponds_CQ4=world.ponds_CQ4,
        phases_CK=world.phases_CK,
        sun_azimuth_C=torch.zeros(1),
        kind_C=world.kind_C,
    )
    bare = scene.Scenes(
        primitives_CNP=_world({}).primitives_CNP,
        ponds_CQ4=world.ponds_CQ4,
        phases_CK=world.phases_CK,
        sun_azimuth_C=torch.zeros(1),
        kind_C=world.kind_C,
    )
    shaded, lit = (render(w, _pose(), _DAY)[0, 0] for w in (sun_on_the_right, bare))
    darker = (lit - shaded).mean(0)[100:]
    left, right = darker[:, :115], darker[:, 145:]
    assert (left > 0.05).any()
    assert (right.abs() < 1e-6).all()


def test_coverage_is_the_share_of_solid_pixels() -> None:
    wall = {P.X: 0.0, P.Z: 2.0, P.HEIGHT: 9.0, P.A: 9.0, P.B: 0.1}
    _, full = render(_world({0: wall}), _pose(), _DAY, coverage=True)
    _, none = render(_world({}), _pose(), _DAY, coverage=True)
    assert full.shape == (1, 1, 10, 16)
    # The wall hides everything down to its foot: f / 1.9 = 68 px under the centre, row 9 or later.
    assert (full[0, 0, :9, 4:12] == 1.0).all()
    assert (none == 0.0).all()


def test_batch_and_style_forms_agree() -> None:
    clips = scene.sample_clips(2, 2, seed=6, switch_chunk=1)
    c2w = clips.c2w_CF44[:, ::16]
    index = clips.style_index_CF()[:, ::16]
    stacked = clips.styles_CKS()
    indexed = render(clips.scenes, c2w, (stacked, index), **_SMALL)
    per_frame = torch.stack([stacked[clip][index[clip]] for clip in range(2)])
    assert torch.equal(indexed, render(clips.scenes, c2w, per_frame, **_SMALL))
    alone = render(clips.scenes[1:], c2w[1:], per_frame[1:], **_SMALL)
    assert torch.equal(indexed[1:], alone)


def test_screen_rectangles_lose_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = scene.sample_clips(3, 1, seed=12)
    c2w = clips.c2w_CF44[:, ::8]
    culled = render(clips.scenes, c2w, clips.style_before_CS, **_SMALL)
    whole = torch.tensor([-1.0, 1e4, -1.0, 1e4] * 2)

    def everything(solids, frame, height, width):
        present = (solids[..., frame_tables.ALPHA] > 0.0)[..., None]
        return torch.where(present, whole, torch.tensor([1e9, -1e9] * 4))

    monkeypatch.setattr(frame_tables, "_rectangles", everything)
    assert torch.equal(culled, render(clips.scenes, c2w, clips.style_before_CS, **_SMALL))


def test_wrong_shapes_are_refused() -> None:
    worlds = scene.sample_scenes(2, 0)
    with pytest.raises(ValueError, match="c2w: 1 clips"):
        render(worlds, _pose(), _DAY)
    with pytest.raises(ValueError, match="style:"):
        render(worlds[:1], _pose(), _DAY[:, :5])


_KERNEL_SCRIPT = """
import json, torch
from miniworld import frame_tables, render, render_triton, scene
clips = scene.sample_clips(2, 1, seed=3, kinds=("city", "lake"))
size = {"height": 16, "width": 20}
tables = frame_tables.build_tables(
    clips.scenes, torch.arange(2), clips.c2w_CF44[:, 9], clips.style_before_CS, **size
)
options = size | {"supersample": 2, "dtype": torch.float32}
oracle, oracle_cover = render.render_tables(tables, **options)
kernel, kernel_cover = render_triton.render_tables(tables, **options)
gap = (oracle - kernel).abs().amax(1)
print(json.dumps({
    "gaps": gap.flatten().tolist(), "cover": (oracle_cover - kernel_cover).abs().max().item(),
    "deviation": oracle.std().item(), "covered": oracle_cover.mean().item(),
}))
"""


def test_kernel_agrees_with_the_oracle_in_interpreter_mode() -> None:
    pytest.importorskip("triton")
    # A process of its own: the mode is read when Triton is imported.
    result = subprocess.run(
        [sys.executable, "-c", _KERNEL_SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    gaps = torch.tensor(report["gaps"])
    assert report["deviation"] > 0.05
    assert report["covered"] > 0.01
    assert (gaps > RAYCAST_SHADE_ATOL).float().mean().item() <= RAYCAST_EDGE_SHARE
    assert report["cover"] <= RAYCAST_EDGE_SHARE


@pytest.mark.parametrize("shape", [(160, 256), (33, 47)], ids=["full", "odd"])
def test_synthetic_photographs_repeat_and_fill_the_range(shape: tuple[int, int]) -> None:
    first, second = (photos.synthetic_photos(6, 3, *shape) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (6, 3, *shape)
    assert first.min() >= 0.0
    assert first.max() <= 1.0
    assert (first.std(dim=(1, 2, 3)) > 0.02).all()


def test_pans_move_without_jumps() -> None:
    clips = photos.pan_clips(2, 9, seed=4, height=48, width=64)
    assert clips.shape == (2, 9, 3, 48, 64)
    change = (clips[:, 1:] - clips[:, :-1]).abs().mean((2, 3, 4))
    assert (change > 0.0).all()
    # A pan has one speed: no step may change the picture three times as much as the mean step.
    assert (change < 3.0 * change.mean(1, keepdim=True)).all()
