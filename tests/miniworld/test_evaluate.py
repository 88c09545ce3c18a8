import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, preset
from engine.device import DtypeChoice
from engine.engine import Engine
from engine.loading import ModelParts
from engine.types import Action
from miniworld.evaluate import ITEMS, evaluate, main
from miniworld.evaluation import metrics, motion
from miniworld.evaluation.cases import (
    FORWARD,
    RIGHT,
    YAW,
    Cases,
    held_keys,
    mixed_cases,
    scripted_cases,
)
from miniworld.evaluation.figures import Figure, Report, Sheet
from miniworld.evaluation.models import FrameStream, Models, Sessions, Walk, load, roll_out
from miniworld.evaluation.presence import NOT_EMPTY_SHARE, busy_share
from miniworld.evaluation.quality import SHORT
from tests.tolerances import (
    EVALUATED_STEP_RATIO,
    EVALUATED_YAW_DEG,
    FP32_ROLLOUT_ATOL,
    GRID_LEVELS_ATOL,
    SHIPPED_GAIN_DB,
    SHIPPED_VAE_PSNR_DB,
)

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models() -> Models:
    return load("random", device=CPU, dtype=torch.float32)


def turning(models: Models, count: int) -> Cases:
    return scripted_cases(models, held_keys(count, 1, YAW, (1, -1)), 2)


def test_yaw_of_true_frames_is_found(models: Models) -> None:
    cases = turning(models, 4)
    truth = cases.truth(0, (6, 14))
    commanded = motion.heading_deg(cases.poses(0, 14)) - motion.heading_deg(cases.poses(0, 6))
    commanded = (commanded + 180.0) % 360.0 - 180.0

    seen = motion.yaw_deg(truth[:, 0], truth[:, 1])

    assert (seen - commanded).abs().max() < EVALUATED_YAW_DEG
    assert commanded.sign().tolist() == [1, -1, 1, -1]


def test_yaw_of_a_frame_with_itself_is_zero(models: Models) -> None:
    frame = turning(models, 2).truth(0, (6,))[:, 0]

    assert motion.yaw_deg(frame, frame).abs().max() < EVALUATED_YAW_DEG


@pytest.mark.parametrize(
    ("column", "estimate", "command"),
    [
        pytest.param(FORWARD, motion.forward_units, 0.56, id="ahead and back"),
        pytest.param(RIGHT, motion.strafe_units, 0.40, id="right and left"),
    ],
)
def test_steps_of_true_frames_are_found(
    models: Models, column: int, estimate: object, command: float
) -> None:
    cases = scripted_cases(models, held_keys(10, 1, column, (1, -1)), 3)
    truth = cases.truth(0, (6, 14))
    true = motion.step_between(cases.poses(0, 6), cases.poses(0, 14))[column]

    ratio = estimate(truth[:, 0], truth[:, 1], command) / true  # type: ignore[operator]

    assert (ratio > 0).all()
    assert (ratio - 1).abs().median() < EVALUATED_STEP_RATIO


def test_a_pose_step_is_seen_in_the_first_frame_of_reference() -> None:
    first, second = torch.eye(4).double(), torch.eye(4).double()
    first[0, 0] = first[2, 2] = 0.0
    first[0, 2], first[2, 0] = 1.0, -1.0  # looks along +x, its right is -z
    second[:3, 3] = torch.tensor([2.0, 0.0, -3.0])

    assert motion.step_between(first, second) == (2.0, 3.0)
    assert float(motion.heading_deg(first)) == 90.0


def test_things_in_view_tell_a_world_from_an_empty_plain(models: Models) -> None:
    cases = mixed_cases(models, 6, 2, 11)
    frames = (0, 16)
    empty = cases.empty(1, frames)

    busy = busy_share(cases.truth(1, frames), empty)
    # The empty views of the first chunk: the same worlds, other clouds and hills.
    plain = busy_share(cases.empty(0, frames), empty)

    assert (busy >= NOT_EMPTY_SHARE).all()
    assert (plain < NOT_EMPTY_SHARE).all()


@pytest.fixture(scope="module")
def frames(models: Models) -> Tensor:
    return mixed_cases(models, 3, 1, 12).truth(0, (0, 8))


def test_a_blurred_copy_is_less_sharp(frames: Tensor) -> None:
    flat = torch.nn.functional.avg_pool2d(frames.flatten(0, 1), 3, stride=1, padding=1)
    blurred = flat.unflatten(0, frames.shape[:2])

    assert metrics.sharpness_ratio(frames, frames) == metrics.edge_ratio(frames, frames) == 1.0
    assert metrics.sharpness_ratio(blurred, frames) < 0.95
    assert metrics.edge_ratio(blurred, frames) < 0.8


@pytest.mark.parametrize("period_px", [2, 4])
@pytest.mark.parametrize("axis", [-1, -2], ids=["columns", "rows"])
def test_a_grid_is_measured_in_steps_of_8_bits(frames: Tensor, period_px: int, axis: int) -> None:
    shape = [1, 1, 1, 1, 1]
    shape[axis] = frames.shape[axis]
    wave = torch.cos(torch.arange(frames.shape[axis]) * 2 * math.pi / period_px).view(shape)

    amplitude, ratio = metrics.grid(frames + wave / 255, frames)

    assert amplitude == pytest.approx(1.0, abs=GRID_LEVELS_ATOL)
    assert ratio > 1.5
    assert metrics.grid(frames, frames)[0] == 0.0


def test_error_is_in_decibels(frames: Tensor) -> None:
    assert torch.allclose(metrics.psnr_db(frames + 0.1, frames), torch.tensor(20.0), atol=1e-3)
    assert (metrics.psnr_db(frames, frames) == metrics.PSNR_CAP_DB).all()


def test_edges_ignore_colour_and_notice_shape(frames: Tensor) -> None:
    recoloured = 0.1 + 0.6 * frames
    moved = frames.roll(40, -1)

    assert metrics.edge_correlation(recoloured, frames).min() > 0.99
    assert metrics.edge_correlation(moved, frames).max() < 0.8


@pytest.mark.parametrize("shift_px", [-12, 0, 7])
def test_a_moved_horizon_is_found(frames: Tensor, shift_px: int) -> None:
    picture = frames[:, 0]
    moved = picture.roll(shift_px, -2)[:, None]

    assert metrics.horizon_shift_px(moved, picture).tolist() == [shift_px] * 3


def test_palette_reports_the_worse_half(frames: Tensor) -> None:
    picture = frames[:, 0]
    other = picture.clone()
    other[..., 80:, :] += 0.25

    assert torch.allclose(metrics.palette_distance(other[:, None], picture), torch.tensor(0.25))


@pytest.mark.parametrize(
    ("value", "met"), [(0.8, False), (0.9, True), (1.1, True), (1.2, False), (math.nan, False)]
)
def test_a_target_is_met_inside_its_bounds(value: float, met: bool) -> None:
    assert _figure(value, at_least=0.9, at_most=1.1).is_met is met


def test_a_figure_without_target_is_neither_met_nor_missed() -> None:
    assert _figure(5.0).is_met is None


def _figure(value: float, **bounds: float) -> Figure:
    return Figure(item="a", name="b", value=value, count=1, **bounds)


def test_json_survives_numbers_that_are_not_finite() -> None:
    report = Report(environment={})
    report.add("long", "motion", math.nan, count=1, at_least=0.7)

    row = json.loads(report.to_json())["figures"][0]

    assert row["value"] is None
    assert row["is_met"] is False


def test_a_sheet_alternates_its_sets_row_by_row(tmp_path: object) -> None:
    sheet = Sheet(scale=1.0)
    black, white = torch.zeros(2, 3, 4, 6), torch.ones(2, 3, 4, 6)
    sheet.column(black, white)
    sheet.column(white, black)
    path = tmp_path / "made" / "sheet.png"  # type: ignore[operator]

    sheet.save(path)

    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        grey = np.array(image)[2::4, 3::6, 0]
    assert grey.tolist() == [[0, 255], [255, 0], [0, 255], [255, 0]]


@pytest.mark.parametrize("chunks", [2])
def test_a_batch_of_sessions_is_what_the_engine_makes_one_by_one(
    models: Models, chunks: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    anchor = torch.randn(2, 24, 1, 10, 16, generator=generator)
    still = torch.eye(4).expand(2, 5 * chunks, 4, 4)
    walk = Walk(
        anchor_BCTHW=anchor,
        views_BT44=still,
        prompts=["a forest at night", "snow"],
        later_prompts=["a forest at night", "rocks on mars by day"],
        switch_chunk=1,
    )
    engine = Engine(
        ModelParts(
            model=models.core.model,
            text_encoder=models.text,
            config=EngineConfig(device="cpu", dtype="float32"),
            model_hash="",
            dtype_choice=DtypeChoice(dtype="float32"),
        )
    )

    batch = list(roll_out(models, walk, 3))

    rollout = engine.new_rollout("snow", anchor_BCTHW=anchor[1:], seed=3 * 4096 + 1)
    for chunk in range(chunks):
        if chunk == 1:
            engine.set_prompt(rollout, "rocks on mars by day")
        alone = engine.step(rollout, Action.still()).latents_BCTHW
        assert torch.allclose(batch[chunk][1:], alone, atol=FP32_ROLLOUT_ATOL)


def test_a_chunk_can_be_denoised_again_before_it_is_kept(models: Models) -> None:
    cases = mixed_cases(models, 2, 1, 13)
    sessions = Sessions(models, cases.walk(), 1)
    sessions.open()
    whole = sessions.denoise()

    again = sessions.denoise(whole[:, :, :2])

    assert torch.equal(again[:, :, :2], whole[:, :, :2])
    assert torch.equal(sessions.denoise(), whole)
    sessions.close()


def test_a_branched_stream_leaves_the_first_one_alone(models: Models) -> None:
    latents = torch.randn(2, 24, 5, 10, 16, generator=torch.Generator().manual_seed(1))
    stream, untouched = FrameStream(models), FrameStream(models)
    stream.decode(latents)
    untouched.decode(latents)

    stream.copy().decode(latents.flip(0))

    assert torch.equal(stream.decode(latents), untouched.decode(latents))


def test_an_evaluation_reports_everything_it_measured(models: Models, tmp_path: object) -> None:
    settings = dataclasses.replace(
        SHORT, cases=2, report_chunks=(1,), frames=(0, 16), sheet_dir=tmp_path
    )
    path = tmp_path / "figures.json"  # type: ignore[operator]

    report = evaluate(models, settings, ("vae", "rollout"), json_path=path)

    stored = json.loads(path.read_text())
    assert set(stored["seconds"]) == {"vae", "rollout"}
    assert [row["name"] for row in stored["figures"]] == [f.name for f in report.figures]
    needed = {"weights_hash", "dtype", "device", "torch", "commit", "settings", "time_utc"}
    assert needed <= set(stored["environment"])
    assert (tmp_path / "rollout.png").is_file()  # type: ignore[operator]
    assert report.table().count("\n") == len(report.figures) + 1


def test_a_commit_is_told_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ITEMS, "vae", lambda *_: None)
    path = tmp_path / "figures.json"
    arguments = ["--weights", "random", "--device", "cpu", "--items", "vae", "--json", str(path)]

    assert main([*arguments, "--commit", "abc1234"]) == 0

    assert json.loads(path.read_text())["environment"]["commit"] == "abc1234"


def test_an_evaluation_says_which_attention_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ITEMS, "vae", lambda *_: None)
    path = tmp_path / "figures.json"
    asked = {"attention": "sparse", "sparse_tau": 0.5, "sparse_block": 8, "sparse_steps": 3}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    arguments = ["--weights", "random", "--device", "cpu", "--items", "vae", "--json", str(path)]

    assert main([*arguments, *options]) == 0

    environment = json.loads(path.read_text())["environment"]
    assert {name: environment[name] for name in asked} == asked


@pytest.mark.parametrize(
    "arguments",
    [["--items", "vae,colour"], ["--items", ""], ["--cases", "1"]],
    ids=["unknown item", "no item", "too few cases"],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--weights", "no such folder"])

    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "fastest"], "invalid choice: 'fastest'"),
        (["--attention", "fa3"], "attention backend fa3 refuses"),
        (["--attention", "sparse", "--sparse-tau", "nan"], "sparse_tau is nan; allowed: -8.0"),
        (["--attention", "sparse", "--sparse-block", "12"], "sparse_block is 12; allowed: 8, 16,"),
        (["--attention", "sparse", "--sparse-steps", "5"], "sparse_steps is 5; allowed: 1 to 4"),
        (["--linear", "fp4"], "fp4: .*expected a json list of rules"),
    ],
)
def test_a_form_that_cannot_be_run_is_refused_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--device", "cpu", "--weights", "no such folder"])

    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_every_item_of_the_table_has_a_measure() -> None:
    assert set(ITEMS) == {
        "vae", "rollout", "yaw", "walking", "return", "prompt", "leading", "long", "outside",
        "endless",
    }  # fmt: skip


@pytest.fixture(scope="module")
def shipped() -> Report:
    """Figures of the shipped weights in the 8-case form, two chunks long."""
    models = load(str(preset("mini").weights), device=CPU, dtype=torch.float32)
    report = evaluate(models, dataclasses.replace(SHORT, report_chunks=(1,)), ("vae",))
    moving = dataclasses.replace(SHORT, report_chunks=(2,))
    report.figures += evaluate(models, moving, ("rollout", "yaw")).figures
    return report


def test_items_are_measured_with_exact_convolutions(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen: list[bool] = []
    monkeypatch.setitem(ITEMS, "vae", lambda *_: seen.append(torch.backends.cudnn.allow_tf32))

    evaluate(models, SHORT, ("vae",))

    assert seen == [False]
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("item", "name", "floor", "ceiling"),
    [
        ("vae", "PSNR, chunk 1", SHIPPED_VAE_PSNR_DB, math.inf),
        ("vae", "sharpness / truth, chunk 1", 0.9, 1.05),
        ("rollout", "gain over the frozen frame, chunk 2", SHIPPED_GAIN_DB, math.inf),
        ("rollout", "sharpness / VAE round trip, chunk 2", 0.9, 1.15),
        ("yaw", "median error, chunk 2", 0.0, 0.6),
        ("yaw", "right sign, chunk 2", 1.0, 1.0),
    ],
)
def test_the_shipped_world_keeps_its_quality(
    shipped: Report, item: str, name: str, floor: float, ceiling: float
) -> None:
    assert floor <= shipped.value(item, name) <= ceiling


def test_linears_in_eight_bits_keep_its_quality() -> None:
    models = load(
        str(preset("mini").weights),
        device=CPU,
        dtype=torch.float32,
        linear="fp8_rowwise",
        attention="math",
    )
    settings = dataclasses.replace(SHORT, cases=4, report_chunks=(2,))
    report = evaluate(models, settings, ("rollout",))
    assert report.environment["linear"] == "fp8_rowwise"
    assert report.environment["attention"] == "math"
    assert report.value("rollout", "gain over the frozen frame, chunk 2") >= SHIPPED_GAIN_DB
