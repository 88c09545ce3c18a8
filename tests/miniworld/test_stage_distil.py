"""Stage "distil": rollouts are the engine's own, the replay repeats them, the student moves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.core import RolloutCore
from miniworld.stages.distil import DistilConfig, Replay, Rollouts, roll_out, train_distil
from miniworld.stages.flow import FlowConfig, TrainedModel
from miniworld.stages.packed import PackedLayout, packed_block
from miniworld.stages.ranks import Ranks
from tests.miniworld.clips import CHUNKS, random_cache, random_clips, stage_config, stir
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu
ALONE = Ranks(rank=0, count=1, device=torch.device("cpu"))


class LastStep(random.Random):
    """Always leaves at the last step of the sampler."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return start - 1


@pytest.fixture(scope="module")
def student() -> TrainedModel:
    torch.manual_seed(0)
    made = TrainedModel(stage_config(), FlowConfig(), ALONE.device)
    stir(list(made.named_parameters()))
    return made


def made_rollouts(student: TrainedModel, dice: random.Random) -> Rollouts:
    clips = random_clips(stage_config(), switch_chunk=3)
    generator = torch.Generator().manual_seed(1)
    return roll_out(student, clips, stage_config(), generator, dice)


def replay(rollouts: Rollouts, leading_share: float) -> Replay:
    layout = PackedLayout(stage_config(), chunks=CHUNKS, prompts=2, device=ALONE.device)
    recipe = DistilConfig(leading_share=leading_share)
    generator = torch.Generator().manual_seed(2)
    return Replay(rollouts, stage_config(), recipe, layout, packed_block, generator)


def test_replay_of_the_last_step_gives_the_committed_chunks(student: TrainedModel) -> None:
    rollouts = made_rollouts(student, LastStep())
    with torch.no_grad():
        x0 = replay(rollouts, 1e-9).student(student)
    is_replayed = torch.ones(x0.shape[:2], dtype=torch.bool)
    is_replayed[-1, 0] = False  # the clip from a session's middle was given its first chunk
    torch.testing.assert_close(
        x0[is_replayed], rollouts.history_BNRC[is_replayed], atol=FP32_ROLLOUT_ATOL, rtol=0
    )


def test_mid_session_clip_begins_with_its_true_chunk(student: TrainedModel) -> None:
    rollouts = made_rollouts(student, random.Random(0))
    truth = rollouts.clips.latents_BNRC.float()
    assert torch.equal(rollouts.history_BNRC[-1, 0], truth[-1, 0])
    assert not torch.allclose(rollouts.history_BNRC[0, 0], truth[0, 0])


def test_a_later_part_asks_only_for_chunks_with_a_whole_window(student: TrainedModel) -> None:
    whole = made_rollouts(student, LastStep())
    part = whole.cut(1, CHUNKS - 1, stage_config().window_chunks)
    assert torch.equal(part.history_BNRC, whole.history_BNRC[:, 1:])
    assert torch.equal(part.clips.views_BT44, whole.clips.views_BT44[:, 5:])
    assert part.clips.switch_chunk == whole.clips.switch_chunk - 1
    layout = PackedLayout(stage_config(), chunks=CHUNKS - 1, prompts=2, device=ALONE.device)
    recipe, generator = DistilConfig(leading_share=1e-9), torch.Generator().manual_seed(2)
    judged = Replay(part, stage_config(), recipe, layout, packed_block, generator)
    asked = judged.weight_BNR1[..., 0, 0] > 0
    assert asked.tolist() == [[False] * 5 + [True]] * 2


def test_exit_times_are_the_samplers(student: TrainedModel) -> None:
    rollouts = made_rollouts(student, random.Random(0))
    times = torch.tensor(RolloutCore(student.model).times)
    assert torch.isin(rollouts.exit_t_BN, times).all()
    assert len(rollouts.exit_t_BN.unique()) > 1


def test_given_latents_stay_in_the_prediction(student: TrainedModel) -> None:
    rollouts = made_rollouts(student, random.Random(0))
    judged = replay(rollouts, 1.0)
    with torch.no_grad():
        x0 = judged.student(student)
    given = judged.weight_BNR1.expand_as(x0) == 0
    given[-1, 0] = False
    assert given.any()
    assert torch.equal(x0[given], rollouts.history_BNRC[given])


def test_student_moves_and_teacher_does_not(tmp_path: Path, student: TrainedModel) -> None:
    flow = {name: value.detach().clone() for name, value in student.named_parameters()}
    before = {name: value.clone() for name, value in flow.items()}
    trained = train_distil(
        tmp_path,
        random_cache(stage_config()),
        stage_config(),
        flow,
        recipe=DistilConfig(batch=2, rollouts=2, critic_updates=1, critic_warm_up=0),
        budget_s=600.0,
        seed=0,
        ranks=ALONE,
        resume=False,
        log=lambda _line: None,
        max_steps=1,
    )
    after = trained.averaged_state()
    assert not torch.equal(after["proj_in.weight"], before["proj_in.weight"])
    assert all(torch.equal(flow[name], value) for name, value in before.items())
    assert (tmp_path / "distil.ckpt").exists()
