"""An engine whose prompts go through a Qwen3-VL: from a folder of weights to chunks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.checkpoint.folder import save_model
from engine.config import EngineConfig, PromptOptions, Qwen3VlTextConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.text import WordEncoder
from tests.engine.prompts.tiny_qwen import READ, write_qwen
from tests.tiny import random_action, random_anchor, tiny_config, tiny_engine, tiny_model

pytestmark = pytest.mark.cpu
CONFIG = tiny_config(text=Qwen3VlTextConfig(layer=READ, caption_rows=64))
PICTURE = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8)
AROUND = 13 + 2 + 6
"""Rows of label and picture; a character is a token here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("h3")
    save_model(path / "transformer", tiny_model(CONFIG), CONFIG, int8=False)
    write_qwen(path)
    return path


def _engine(folder: Path, cache: Path, **options: object) -> Engine:
    prompts = PromptOptions(cache=str(cache), **options)  # type: ignore[arg-type]
    config = EngineConfig(device="cpu", dtype="float32", prompts=prompts)
    return Engine.from_pretrained(folder / "transformer", config)


def _chunks(engine: Engine) -> list[torch.Tensor]:
    rollout = engine.new_rollout("meadow", anchor_BCTHW=random_anchor(CONFIG), picture_HWC=PICTURE)
    assert rollout.core.layout.text_rows == AROUND + len("meadow")
    chunks = [engine.step(rollout, random_action(0)).latents_BCTHW]
    engine.set_prompt(rollout, "night over snow")
    assert rollout.core.layout.text_rows == AROUND + len("night over snow")
    return [*chunks, engine.step(rollout, random_action(1)).latents_BCTHW]


def test_the_encoder_beside_the_weights_makes_the_rows(folder: Path, tmp_path: Path) -> None:
    engine = _engine(folder, tmp_path)
    tags_R = engine.prompts.encode("meadow", PICTURE).tags_R
    assert tags_R.tolist() == [1] * 13 + [0] * 8 + [1] * 6
    made = _chunks(engine)
    assert engine.config.prompts.residency == "cpu"
    # The next engine reads what was kept; one without an encoder does no less.
    for options in ({"residency": "free"}, {"cache_mib": 0}):
        assert all(map(torch.equal, _chunks(_engine(folder, tmp_path, **options)), made))
    (folder / "text_encoder").rename(folder / "elsewhere")
    try:
        alone = _engine(folder, tmp_path)
        assert all(map(torch.equal, _chunks(alone), made))
        assert alone.model_hash == engine.model_hash
        with pytest.raises(CheckpointError, match="prompt encoder: none is beside the weights"):
            _engine(folder, tmp_path / "nothing")
    finally:
        (folder / "elsewhere").rename(folder / "text_encoder")


def test_a_picture_changes_the_world(folder: Path, tmp_path: Path) -> None:
    engine = _engine(folder, tmp_path)
    first, second = (
        engine.step(
            engine.new_rollout("", anchor_BCTHW=random_anchor(CONFIG), picture_HWC=picture),
            random_action(0),
        ).latents_BCTHW
        for picture in (PICTURE, 255 - PICTURE)
    )
    assert not torch.equal(first, second)


def test_a_prompt_that_is_refused_leaves_the_rollout_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    engine = _engine(folder, tmp_path)
    rollout = engine.new_rollout("meadow", anchor_BCTHW=random_anchor(CONFIG), picture_HWC=PICTURE)
    with pytest.raises(ConfigError, match="prompt: 65 tokens; allowed: at most 64"):
        engine.set_prompt(rollout, "x" * 65)
    assert rollout.prompt == "meadow"
    assert torch.equal(engine.step(rollout, random_action(0)).latents_BCTHW, _chunks(engine)[0])


def test_warm_up_goes_through_the_encoder(folder: Path, tmp_path: Path) -> None:
    engine = _engine(folder, tmp_path)
    engine.warm_up()
    black = torch.zeros(64, 96, 3, dtype=torch.uint8)
    assert engine.prompts.is_at_hand("", black)


def test_random_weights_have_words_instead_or_the_encoder_that_is_given(
    folder: Path, tmp_path: Path
) -> None:
    config = EngineConfig(device="cpu", dtype="float32")
    stand_in = Engine.from_random(CONFIG, config)
    assert isinstance(stand_in.prompts, WordEncoder)
    assert stand_in.prompts.encode("meadow").rows_BRE.shape == (1, CONFIG.text_rows, 64)
    given = dataclasses.replace(
        config, prompts=PromptOptions(encoder=str(folder), cache=str(tmp_path))
    )
    assert not isinstance(Engine.from_random(CONFIG, given).prompts, WordEncoder)
    with pytest.raises(ConfigError, match=r"prompt_encoder is .* words of its own"):
        Engine.from_random(tiny_engine().model_config, given)
    empty = dataclasses.replace(config, prompts=PromptOptions(encoder=str(tmp_path)))
    with pytest.raises(CheckpointError, match="holds no prompt encoder"):
        Engine.from_random(CONFIG, empty)
