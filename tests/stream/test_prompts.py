"""Worlds whose prompts go through a Qwen3-VL, by the commands and the settings that people use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from PIL import Image

from engine.checkpoint.folder import save_model, write_manifest
from engine.config import PromptOptions, Qwen3VlTextConfig
from engine.errors import ConfigError
from engine.types import Action
from stream.cli import main
from stream.live_rollout import LiveRollout
from stream.prompt_ahead import PromptAhead
from stream.settings import load_settings
from stream.worker_messages import Applied, Refused, Report, SetPrompt
from stream.workers import spec_of
from stream.world_spec import prompt_options, read_start, world_spec
from stream.worlds import ModelCache
from tests.engine.prompts.tiny_qwen import READ, write_qwen
from tests.tiny import tiny_config, tiny_model
from vae_stream.taehv import TinyVae, TinyVaeConfig

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of the size of the tiny preset, with an encoder beside them."""
    config = tiny_config(text=Qwen3VlTextConfig(layer=READ, caption_rows=40))
    path = tmp_path / "weights"
    save_model(path, tiny_model(config), config)
    TinyVae(TinyVaeConfig()).save_pretrained(path / "vae")
    write_manifest(path)
    write_qwen(path)
    return path


def test_a_video_is_made_and_replayed_from_kept_encodings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, out, cache = tmp_path / "a.png", tmp_path / "a.mp4", tmp_path / "cache"
    Image.new("RGB", (96, 64), (90, 120, 60)).save(image)
    options = ["--preset", "tiny", "--weights", str(folder), "--prompt-cache", str(cache)]
    script = tmp_path / "walk.jsonl"
    script.write_text('{"frame": 0, "keys": ["w"]}\n{"frame": 17, "prompt": "snow at night"}\n')
    walk = ["--image", str(image), "--actions", str(script), "--chunks", "2"]
    run = ["generate", *options, *walk, "--prompt", "a meadow", "--out", str(out)]
    assert main([*run, "--dtype", "float32"]) == 0, capsys.readouterr().err
    assert out.is_file()
    assert len(list(cache.rglob("*.safetensors"))) == 2
    again = ["replay", str(tmp_path / "a.trace.jsonl"), "--prompt-cache", str(cache)]
    elsewhere = tmp_path / "elsewhere"
    (folder / "text_encoder").rename(elsewhere)
    assert main(again) == 0, capsys.readouterr().err
    assert main([*again, "--refinement-prompt"]) == 2
    assert "model: the weights here have hash" in capsys.readouterr().err
    assert main([*again[:2], "--prompt-cache", str(tmp_path / "none")]) == 3
    assert "prompt encoder: none is beside the weights" in capsys.readouterr().err


def test_prompts_are_encoded_ahead_of_a_world(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["--prompt-cache", str(tmp_path / "cache")]
    start = ["--scene", "snow-ruins", *cache, "--preset", "tiny"]
    ahead = ["encode", *start, "--prompt", "a meadow", "--prompt", "snow"]
    assert main([*ahead, "--prompt-encoder", str(folder)]) == 2
    assert "preset: 'tiny' has words of its own" in capsys.readouterr().err
    assert main([*ahead, "--weights", str(folder)]) == 0
    assert capsys.readouterr().out == "29 rows: a meadow\n25 rows: snow\n"
    (folder / "text_encoder").rename(tmp_path / "elsewhere")
    walk = ["--actions", "w*17", "--out", str(tmp_path / "a.mp4"), "--weights", str(folder)]
    assert main(["generate", *start, *walk, "--prompt", "snow"]) == 0, capsys.readouterr().err


def test_a_prompt_is_switched_while_it_is_played(folder: Path, tmp_path: Path) -> None:
    prompts = PromptOptions(cache=str(tmp_path / "cache"))
    spec = world_spec(
        "tiny", size=None, weights=str(folder), renderer=False, device="cpu", dtype="float32",
        prompts=prompts,
    )  # fmt: skip
    models, start = ModelCache(), read_start(spec, image=None, scene="snow-ruins")
    rollout = LiveRollout(
        spec, models.world(spec, start), start, prompt="snow", seed=0,
        trace_path=tmp_path / "a.trace.jsonl",
    )  # fmt: skip
    is_ready, reports = threading.Event(), list[Report]()
    ahead = PromptAhead(is_ready.set)
    for number, prompt in enumerate(("a meadow", "x" * 41, "snow", "a lake")):
        ahead.add(rollout, SetPrompt(id=number, prompt=prompt))
    assert ahead.newest(rollout) == "a lake"
    while len(reports) < 4:
        assert is_ready.wait(60.0)
        is_ready.clear()
        ahead.apply(rollout, 0, reports.append)
    assert [type(each) for each in reports] == [Applied, Refused, Applied, Applied]
    rollout.prepare()
    assert sum(len(frames) for frames in rollout.step(Action.still())) == 17
    assert rollout.prompt == "a lake"
    # At hand: no thread is asked.
    is_ready.clear()
    ahead.add(rollout, SetPrompt(id=9, prompt="a meadow"))
    ahead.apply(rollout, 0, reports.append)
    assert reports[-1] == Applied(id=9, epoch=0, chunk=1)
    assert not is_ready.is_set()
    ahead.close()
    rollout.end()
    models.close()


def test_too_long_a_prompt_is_refused_with_the_limit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "a.png"
    Image.new("RGB", (96, 64)).save(image)
    walk = ["--image", str(image), "--actions", "w*17", "--out", str(tmp_path / "a.mp4")]
    options = ["--preset", "tiny", "--weights", str(folder), "--prompt-cache", str(tmp_path)]
    assert main(["generate", *options, *walk, "--prompt", "x" * 41]) == 2
    assert "prompt: 41 tokens; allowed: at most 40" in capsys.readouterr().err


def test_settings_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDSTREAM_PROMPT_ENCODER", str(tmp_path))
    monkeypatch.setenv("WORLDSTREAM_PROMPT_RESIDENCY", "free")
    settings = load_settings(prompt_cache="kept", prompt_cache_mib="9", refinement_prompt=True)
    assert spec_of(settings).engine.prompts == PromptOptions(
        encoder=str(tmp_path), residency="free", cache="kept", cache_mib=9, refinement=True
    )


def test_wrong_options_name_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt_encoder: '.*nowhere' is no folder; allowed"):
        prompt_options(encoder=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="prompt_residency is 'disk'; allowed: 'auto', 'gpu'"):
        prompt_options(encoder=None, residency="disk")
