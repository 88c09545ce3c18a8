"""A leader and a follower, each with an engine of its own, in one process; nothing is exchanged."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable

import pytest
import torch

from engine.calls import Call, Close, Denoise, Drop, NewRollout
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, StateError, UnsupportedError
from engine.following import LeadingEngine, follow
from engine.loading import EngineSource
from engine.parallel import Alone
from engine.rollout import SeededDraws
from tests.tiny import random_action, random_anchor, tiny_config

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
SOURCE = EngineSource(
    weights=None, model=CONFIG, config=EngineConfig(device="cpu", dtype="float32")
)


class AbandonedError(Exception):
    """In place of the end of the process."""


class Post:
    """Keeps what is told as it is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.agreed_count = 0

    @property
    def calls(self) -> list[Call]:
        return [pickle.loads(each) for each in self.sent]

    def tell(self, call: Call) -> None:
        self.sent.append(pickle.dumps(call))

    def agree(self) -> None:
        self.agreed_count += 1

    def abandon(self, error: BaseException) -> None:
        raise AbandonedError from error


class Watched(Engine):
    """Keeps the latents that it makes."""

    def __init__(self) -> None:
        super().__init__(SOURCE.parts())
        self.made: list[torch.Tensor] = []

    def denoise(self, *args, **more):
        chunk = super().denoise(*args, **more)
        self.made.append(chunk.latents_BCTHW)
        return chunk


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def leader(post) -> LeadingEngine:
    return LeadingEngine(SOURCE.parts(), exchange=Alone(), followers=post)


def _begin(leader: LeadingEngine, prompt: str = "meadow", **more):
    return leader.new_rollout(prompt, anchor_BCTHW=random_anchor(CONFIG), **more)


def _follow(post: Post) -> tuple[Watched, list[Exception]]:
    engine, refused = Watched(), []
    calls = iter(post.calls)
    follow(engine, lambda: next(calls), refused.append)
    return engine, refused


def _walk(leader: LeadingEngine) -> list[torch.Tensor]:
    """Everything that a session does, and something else in between."""
    rollout, made = _begin(leader, seed=3), []

    def step(index: int, **more) -> None:
        made.append(leader.denoise(rollout, random_action(index), **more).latents_BCTHW)

    for index in range(3):
        step(index)
        leader.commit(rollout, beside=True)
        leader.settle(rollout)
    leader.set_prompt(rollout, "snow at night")
    step(3)
    leader.commit(rollout)
    leader.undo(rollout)
    step(3, leading_BCTHW=made[-1][:, :, :2])
    leader.commit(rollout)
    snapshot = leader.snapshot(rollout)
    step(4)  # and is abandoned
    rollout = _begin(leader, "snow at night", seed=3)
    leader.restore(rollout, snapshot)
    step(4)
    leader.commit(rollout)
    return made


def test_a_follower_makes_what_the_leader_makes(leader, post):
    made = _walk(leader)
    leader.close()
    engine, refused = _follow(post)
    assert len(made) == 7
    assert all(torch.equal(*pair) for pair in zip(engine.made, made, strict=True))
    assert refused == []
    with pytest.raises(StateError, match="the engine is closed"):
        _ = engine.core


def test_a_leader_makes_what_any_engine_makes(leader):
    rollout = _begin(leader, seed=3)
    engine = Engine(SOURCE.parts())
    other = engine.new_rollout("meadow", anchor_BCTHW=random_anchor(CONFIG), seed=3)
    for index in range(2):
        expected = engine.step(other, random_action(index)).latents_BCTHW
        assert torch.equal(leader.step(rollout, random_action(index)).latents_BCTHW, expected)


def test_what_the_leader_lets_go_is_dropped_before_the_next_call(leader, post):
    first, second = _begin(leader), _begin(leader)
    del first
    gc.collect()
    leader.denoise(second, random_action(0))
    told = post.calls
    assert [type(call) for call in told] == [NewRollout, NewRollout, Drop, Denoise]
    assert (told[2].rollouts, told[3].rollout) == ((1,), 2)


def _without_chunk(leader: LeadingEngine) -> None:
    leader.commit(_begin(leader))


def _with_wrong_leading(leader: LeadingEngine) -> None:
    leader.denoise(_begin(leader), random_action(0), leading_BCTHW=torch.zeros(1, 24, 5, 4, 6))


def _without_picture(leader: LeadingEngine) -> None:
    leader.new_rollout("meadow")


def _within_a_chunk(leader: LeadingEngine) -> None:
    rollout = _begin(leader)
    leader.denoise(rollout, random_action(0))
    leader.snapshot(rollout)


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (_without_chunk, StateError),
        (_with_wrong_leading, ConfigError),
        (_without_picture, ConfigError),
        (_within_a_chunk, StateError),
    ],
)
def test_what_the_leader_refuses_every_follower_refuses(
    leader, post, refused: Callable[[LeadingEngine], None], kind
):
    with pytest.raises(kind):
        refused(leader)
    assert post.agreed_count == 1
    made = leader.step(_begin(leader), random_action(0)).latents_BCTHW
    leader.close()
    engine, errors = _follow(post)
    assert [type(error) for error in errors] == [kind]
    assert torch.equal(engine.made[-1], made)


class Refusing:
    """An encoder that takes no prompt."""

    def encode(self, prompt, picture_HWC=None):
        raise ConfigError("prompt: 900 tokens; allowed: at most 512")


def test_a_prompt_that_is_refused_is_told_to_nobody(leader, post, monkeypatch):
    rollout = _begin(leader)
    monkeypatch.setattr(leader, "_text_encoder", Refusing())
    with pytest.raises(ConfigError, match="900 tokens"):
        leader.set_prompt(rollout, "long")
    with pytest.raises(ConfigError, match="900 tokens"):
        _begin(leader, "long")
    assert len(post.calls) == 1


def test_any_other_error_ends_all(leader, monkeypatch):
    rollout = _begin(leader)

    def burn(*args, **more):
        raise RuntimeError("this device caught fire")

    monkeypatch.setattr(leader.core, "denoise", burn)
    with pytest.raises(AbandonedError):
        leader.denoise(rollout, random_action(0))


def test_a_follower_passes_any_other_error_on(leader, post, monkeypatch):
    monkeypatch.setattr(post, "sent", [pickle.dumps(Drop(rollouts=(7,)))])
    leader.settle(_begin(leader))
    del post.sent[1]  # a follower that lost its rollout
    with pytest.raises(KeyError):
        _follow(post)


def test_draws_from_elsewhere_cannot_be_told(leader, post):
    with pytest.raises(UnsupportedError, match="draws: from elsewhere"):
        _begin(leader, draws=SeededDraws(CONFIG, 1))
    assert post.sent == []


def test_an_engine_is_closed_once(leader, post):
    leader.close()
    leader.close()
    assert [type(call) for call in post.calls] == [Close]
    with pytest.raises(StateError, match="the engine is closed"):
        _begin(leader)
    assert len(post.sent) == 1
