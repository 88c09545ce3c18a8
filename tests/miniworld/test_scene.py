"""Scenes, walks and prompts: determinism, collision, styles, words."""

import math
import random

import pytest
import torch

from miniworld import primitives as P
from miniworld import prompts, scene, styles, walks

pytestmark = pytest.mark.cpu


def _inside_solid(rows_NP: torch.Tensor, position_F3: torch.Tensor) -> torch.Tensor:
    """Tell which points (x, up, z) lie in a solid [F, N], from the definition of the columns."""
    offset = walks.wrap(position_F3[:, None, [0, 2]] - rows_NP[:, [P.X, P.Z]].double())
    rise = position_F3[:, None, 1] - rows_NP[:, P.BASE]
    x, z = offset.unbind(-1)
    height, a, b = rows_NP[:, P.HEIGHT], rows_NP[:, P.A], rows_NP[:, P.B]
    cos, sin = rows_NP[:, P.ANGLE].cos(), rows_NP[:, P.ANGLE].sin()
    share = rise / height
    width = 1.0 - (1.0 - rows_NP[:, P.TAPER]) * share
    in_box = ((cos * x - sin * z).abs() < a * width) & ((sin * x + cos * z).abs() < b * width)
    in_cone = (x * x + z * z).sqrt() < a + (b - a) * share
    in_ball = (x / a) ** 2 + (z / b) ** 2 + (2.0 * share - 1.0) ** 2 < 1.0
    kind = torch.arange(P.PRIMITIVE_COUNT)
    in_shape = torch.where(
        kind < P.FRUSTUM_START, in_box, torch.where(kind < P.ELLIPSOID_START, in_cone, in_ball)
    )
    return in_shape & (rise > 0.0) & (share < 1.0) & (rows_NP[:, P.PRESENT] > 0.0)


@pytest.fixture(scope="module")
def clips() -> scene.Clips:
    return scene.sample_clips(24, 6, seed=5, switch_chunk=3)


def test_same_seed_gives_the_same_clips() -> None:
    first, second = (scene.sample_clips(3, 2, seed=9, switch_chunk=1) for _ in range(2))
    assert torch.equal(first.c2w_CF44, second.c2w_CF44)
    assert torch.equal(first.scenes.primitives_CNP, second.scenes.primitives_CNP)
    assert torch.equal(first.style_after_CS, second.style_after_CS)
    assert first.prompt_before == second.prompt_before


def test_other_seed_gives_other_worlds() -> None:
    first, second = scene.sample_scenes(2, 1), scene.sample_scenes(2, 2)
    assert not torch.equal(first.primitives_CNP, second.primitives_CNP)


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    scene.sample_clips(2, 1, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_open_walks_go_on_through_solids() -> None:
    clips = scene.sample_clips(24, 6, seed=5, through_share=1.0)
    obstacles = walks.Obstacles(clips.scenes.primitives_CNP, clips.scenes.ponds_CQ4)
    positions = clips.c2w_CF44[:, :, [0, 2], 3]
    pushes = [
        (obstacles.push_out(at, rounds=1) - at).norm(dim=-1) for at in positions[:, 1:].unbind(1)
    ]
    assert torch.stack(pushes).max() > walks.CLEARANCE
    steps = positions.diff(dim=1).norm(dim=-1)
    fastest = math.hypot(walks.FORWARD_PER_FRAME, walks.STRAFE_PER_FRAME)
    assert steps.max() < fastest * (1.0 + 1e-9)


def test_share_of_open_walks_changes_no_other_clip() -> None:
    stopped, mixed = (scene.sample_clips(24, 2, seed=5, through_share=x) for x in (0.0, 0.5))
    assert torch.equal(stopped.scenes.primitives_CNP, mixed.scenes.primitives_CNP)
    is_same = (stopped.c2w_CF44 == mixed.c2w_CF44).flatten(1).all(1)
    assert 8 <= int(is_same.sum()) <= 20


def test_no_pose_lies_in_a_solid(clips: scene.Clips) -> None:
    for clip in range(len(clips.scenes)):
        position = clips.c2w_CF44[clip, :, :3, 3].clone()
        position[:, 1] = walks.EYE_HEIGHT
        assert not _inside_solid(clips.scenes.primitives_CNP[clip], position).any(), clip


def test_origin_of_a_long_session_is_free_and_far(clips: scene.Clips) -> None:
    for clip in clips.is_mid_session_C.nonzero()[:, 0].tolist():
        origin = clips.origin_c2w_C44[clip, :3, 3].clone()
        gap = (origin - clips.c2w_CF44[clip, 0, :3, 3]).norm().item()
        # 5 to 100 units, plus what push-out may add: a few solids of at most 2.3 units each.
        assert 1.0 < gap < 110.0
        origin[1] = walks.EYE_HEIGHT
        rows = clips.scenes.primitives_CNP[clip]
        assert not _inside_solid(rows, origin[None]).any()


def test_clip_that_starts_its_session_has_its_first_pose_as_origin(clips: scene.Clips) -> None:
    starts = ~clips.is_mid_session_C
    assert starts.any()
    assert torch.equal(clips.origin_c2w_C44[starts], clips.c2w_CF44[starts, 0])


def test_poses_are_rigid_and_at_eye_height(clips: scene.Clips) -> None:
    rotation = clips.c2w_CF44[..., :3, :3]
    product = rotation @ rotation.transpose(-1, -2)
    torch.testing.assert_close(product, torch.eye(3).double().expand_as(product))
    assert (clips.c2w_CF44[..., 1, 3] == -walks.EYE_HEIGHT).all()


def test_style_index_follows_the_switch_chunk(clips: scene.Clips) -> None:
    index = clips.style_index_CF()
    assert (index[:, : 3 * walks.CHUNK_FRAMES] == 0).all()
    assert (index[:, 3 * walks.CHUNK_FRAMES :] == 1).all()


def test_switch_goes_to_another_named_style(clips: scene.Clips) -> None:
    named = torch.stack([
        styles.style_for(place, time) for place in styles.PLACES for time in styles.TIMES
    ])  # fmt: skip
    for before, after in zip(clips.style_before_CS, clips.style_after_CS, strict=True):
        assert (named == after).all(1).any()
        assert not torch.equal(before, after)


def test_clips_without_a_switch_keep_style_and_prompt() -> None:
    clips = scene.sample_clips(8, 1, seed=4)
    assert clips.switch_chunk == 1
    assert torch.equal(clips.style_before_CS, clips.style_after_CS)
    assert clips.prompt_before == clips.prompt_after


def test_free_walk_follows_the_smoothed_speeds() -> None:
    empty = walks.Obstacles(
        torch.zeros(1, P.PRIMITIVE_COUNT, P.COLUMN_COUNT), torch.zeros(1, P.POND_COUNT, 4)
    )
    keys = torch.tensor([[[1.0, 0.0, 1.0, 0.0]] * 3], dtype=torch.float64)
    start = torch.tensor([[2.0, 3.0, 0.0]], dtype=torch.float64)
    c2w = walks.integrate(walks.smoothed_speeds(keys), empty, start)[0]
    first, second = 0.35, 1.0 - 0.65**2
    assert torch.equal(c2w[0, :3, 3], torch.tensor([2.0, -1.0, 3.0]).double())
    # The heading turns before the step: frame 1 stands along the heading of frame 1.
    yaw = math.radians(1.2) * first
    assert c2w[1, 0, 3].item() == pytest.approx(2.0 + 0.07 * first * math.sin(yaw), abs=1e-12)
    assert c2w[1, 2, 3].item() == pytest.approx(3.0 + 0.07 * first * math.cos(yaw), abs=1e-12)
    heading = math.atan2(c2w[2, 0, 2].item(), c2w[2, 2, 2].item())
    assert heading == pytest.approx(math.radians(1.2) * (first + second), abs=1e-12)


@pytest.mark.parametrize("kind", scene.KINDS)
def test_layouts_fit_the_table_and_stand_on_the_torus(kind: str) -> None:
    rows = scene.sample_scenes(4, 1, (kind,)).primitives_CNP
    present = rows[..., P.PRESENT] > 0.0
    assert (present.sum(1) >= 12).all()
    assert (rows[..., [P.X, P.Z]] >= 0.0).all()
    assert (rows[..., [P.X, P.Z]] < P.PERIOD).all()
    assert (rows[..., P.HEIGHT][present] > 0.0).all()


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="volcano"):
        scene.sample_scenes(1, 0, ("volcano",))


def test_switch_chunk_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="switch_chunk: 3"):
        scene.sample_clips(1, 2, seed=0, switch_chunk=3)


@pytest.mark.parametrize("name", scene.NAMED_SCENES)
def test_named_scene_starts_free_and_its_prompt_tells_its_style(name: str) -> None:
    start, entry = scene.named_scene(name), scene.NAMED_SCENES[name]
    position = start.c2w_44[None, :3, 3].clone()
    position[:, 1] = walks.EYE_HEIGHT
    assert not _inside_solid(start.scenes.primitives_CNP[0], position).any()
    place, kind, time = prompts.parse_prompt(start.prompt)
    assert (place, time) == (entry.place, entry.time)
    assert kind in (entry.kind, None)


def test_unknown_named_scene_lists_the_names() -> None:
    with pytest.raises(ValueError, match="meadow-forest"):
        scene.named_scene("nowhere")


def test_prompts_never_contradict_their_scene() -> None:
    rng = random.Random(0)
    for place in styles.PLACES:
        for time in styles.TIMES:
            for kind in scene.KINDS:
                for _ in range(20):
                    prompt = prompts.prompt_for(rng, place, kind, time)
                    found = prompts.parse_prompt(prompt)
                    assert found[0] == place, prompt
                    assert found[1] in (kind, None), prompt
                    assert found[2] in (time, None), prompt


def test_unnamed_prompts_name_no_style() -> None:
    rng = random.Random(1)
    for _ in range(200):
        place, _kind, time = prompts.parse_prompt(prompts.unnamed_prompt(rng))
        assert place is None
        assert time is None


def test_known_words_cover_the_templates() -> None:
    rng = random.Random(2)
    known = set(prompts.KNOWN_WORDS)
    assert list(prompts.KNOWN_WORDS) == sorted(known)
    words = [
        word
        for _ in range(400)
        for word in prompts.prompt_for(rng, rng.choice(styles.PLACES), "forest", "fog")
        .replace(",", "")
        .split()
    ]
    # At most one invented word a prompt, in about a tenth of the prompts.
    assert sum(word not in known for word in words) < 80


def test_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match="swamp"):
        styles.style_for("swamp", "day")


def test_random_styles_are_colours() -> None:
    drawn = styles.random_styles(50, torch.Generator().manual_seed(0))
    colours = [styles.SKY_TOP, styles.SKY_HORIZON, styles.LIGHT, styles.GROUND_A, styles.PALETTE]
    for part in colours:
        assert (drawn[:, part] >= 0.0).all()
        assert (drawn[:, part] <= 1.0).all()
    assert (drawn[:, styles.SUN_ELEVATION] >= 0.38).all()
