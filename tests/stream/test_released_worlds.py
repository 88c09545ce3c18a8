"""h3_33b from a folder of released formats, small: the commands and the service, end to end."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, Qwen3VlTextConfig, preset
from engine.memory import MemoryPlan, Present
from engine.text import WordEncoder
from engine.types import Action, Control, LoadEvent
from stream.cli import main
from stream.load_news import LoadNews
from stream.plan_table import plan_text
from stream.plan_world import plan_world
from stream.session import ModelWorld, Session
from stream.settings import load_settings
from stream.trace import read_trace
from stream.weight_folder import look_through
from stream.workers import spec_of
from stream.world_source import LoadedWorlds
from stream.world_spec import WorldSpec, read_start
from tests.adapters import peft_keys, write_adapter
from tests.engine.prompts.tiny_qwen import READ, WIDTH, write_qwen
from tests.released import original_state, pruned, write_sharded, write_single
from tests.tiny import narrow_config, tiny_model
from tests.vae_stream.h3_tiny import random_vit, randomise, tensors_in, write_folder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu

SIZE = preset("h3_33b").geometries[1]
PROMPT = "a meadow by day"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a person would fill it, of a model with one block of one head.

    Only `config.json` at its top is ours: it says that the model is small.
    """
    folder = tmp_path_factory.mktemp("weights")
    config = dataclasses.replace(
        narrow_config(),
        geometry=SIZE,
        text_dim=WIDTH,
        text=Qwen3VlTextConfig(layer=READ, caption_rows=40),
    )
    (folder / "config.json").write_text(config.to_json())
    model = tiny_model(config)
    write_sharded(folder / "transformer", original_state(model, config), "model", 3)
    write_folder(folder / "causal_decoder", tensors_in(random_vit(), VitLayout.CAUSAL))
    encoder = H3Encoder(H3EncoderConfig(widths=(8, 8, 8, 8, 8, 8), block_count=1, norm_groups=4))
    randomise(encoder)
    write_folder(folder / "vae", encoder.state_dict(), {"norm_num_groups": 4})
    write_qwen(folder)
    return folder


class Heard(LoadNews):
    """Remembers what was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.table = ""

    def planned(self, plan: MemoryPlan, present: Present) -> None:
        self.told.append("planned")
        self.table = plan_text(plan, present)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.told.append(name)
        yield

    def read(self, event: LoadEvent) -> None:
        self.told.append("read")


def _spec(weights: Path, cache: Path) -> WorldSpec:
    """As the service has it."""
    return spec_of(
        load_settings(
            preset="h3_33b",
            weights=str(weights),
            size=f"{SIZE.width_px}x{SIZE.height_px}",
            device="cpu",
            dtype="float32",
            prompt_cache=str(cache),
        )
    )


def test_generate_makes_a_video_of_a_released_folder(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, out, cache = tmp_path / "a.png", tmp_path / "a.mp4", tmp_path / "cache"
    Image.new("RGB", (SIZE.width_px, SIZE.height_px), (90, 120, 60)).save(image)
    options = ["--preset", "h3_33b", "--weights", str(weights), "--size", "832x480"]
    options += ["--device", "cpu", "--dtype", "float32", "--prompt-cache", str(cache)]
    walk = ["--image", str(image), "--prompt", PROMPT, "--actions", "w*17", "--out", str(out)]
    assert main(["generate", *options, *walk]) == 0, capsys.readouterr().err
    assert "1 chunks, 17 frames" in capsys.readouterr().out
    assert out.stat().st_size > 0
    trace = read_trace(tmp_path / "a.trace.jsonl")
    assert trace.header.preset == "h3_33b"


def test_the_service_opens_the_same_world_and_tells_how(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard, spec = Heard(), _spec(weights, tmp_path)
    source = LoadedWorlds(spec, heard)
    world = source.open(read_start(spec, image=None, scene="meadow-lake"))
    assert isinstance(world, ModelWorld)
    assert heard.told[:3] == ["scene", "planned", "transformer"]
    assert f"adapter_missing weights={weights}: the transformer was never trained" in caplog.text
    stages = [each for each in heard.told if each not in ("planned", "read")]
    assert stages == ["scene", "transformer", "decoder", "picture encoder", "first picture"]
    assert heard.told.index("read") > heard.told.index("transformer")
    for part in ("blocks", "window", "decoder, state", "picture encoder", "prompt encoder"):
        assert part in heard.table
    assert world.decoder_name.startswith("causal ViT")
    session = Session(world, prompt=PROMPT, seed=1)
    walk = Action.from_keys([[Control.FORWARD, Control.LOOK_LEFT]] * 17)
    counts = []
    for _ in range(2):
        frames = [each.frames_THWC for each in session.step(walk)]
        counts.append(sum(len(each) for each in frames))
        assert torch.cat(frames).float().std() > 1.0
    # Whole chunks: what is shown never waits for an action that is not known yet.
    assert counts == [17, 17]
    session.switch_prompt("snow at night")
    source.close()


def test_an_adapter_of_a_pruned_model_is_planned_and_loaded(tmp_path: Path) -> None:
    config = dataclasses.replace(narrow_config(), geometry=SIZE)
    (tmp_path / "config.json").write_text(config.to_json())
    model = tiny_model(config)
    tensors = pruned(model, original_state(model, config, "stacked"), points=9, rank=8)
    words = {f"text_encoder.{n}": t for n, t in WordEncoder.of(config).state_dict().items()}
    write_single(tmp_path / "transformer" / "pruned.safetensors", tensors | words)
    (tmp_path / "transformer" / "config.json").write_text(config.to_json())
    outputs = len(tensors["final_layer.adaln_proj.linear.weight"])
    factors = {"norm_out.linear": (torch.ones(2, 8), torch.ones(outputs, 2))}
    lora = str(write_adapter(tmp_path / "adapter" / "a.safetensors", peft_keys(factors)))
    engine = EngineConfig(device="cpu", dtype="float32", lora=lora)
    spec = WorldSpec(
        source="model", preset="h3_33b", geometry=SIZE, weights=str(tmp_path), engine=engine
    )
    planned = plan_world(spec, look_through(tmp_path), Present(device_gib=500.0))
    assert planned.plan.part_gib("adapter") > 0


def test_the_doctor_looks_into_the_prompt_encoder(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that lies elsewhere, first whole, then with a tensor of another shape."""
    for name in ("text_encoder", "tokenizer", "processor"):
        shutil.copytree(weights / name, tmp_path / name)
    options = ["doctor", "--weights", str(weights), "--size", "832x480", "--device", "cpu"]
    options += ["--prompt-encoder", str(tmp_path), "--decoder", "pair", "--json"]

    def found() -> dict[str, str]:
        main(options)
        findings = json.loads(capsys.readouterr().out)["findings"]
        return {each["name"]: each["detail"] for each in findings if each["section"] == "files"}

    assert found()["prompt encoder"].startswith(f"{tmp_path}: Qwen3-VL, ")
    assert "pair, which waits for later latents" in found()["decoder"]
    for file in (tmp_path / "text_encoder").glob("*.safetensors"):
        tensors = load_file(file)
        for name in [each for each in tensors if "layers.1.mlp.gate" in each]:
            tensors[name] = tensors[name][:-1].contiguous()
        save_file(tensors, file)
    assert "gate_proj.weight has a wrong shape: expected [" in found()["prompt encoder"]


def test_the_doctor_finds_every_network(
    weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stream.doctor.present_memory", lambda device, **shares: Present(device_gib=139.0)
    )
    main(["doctor", "--weights", str(weights), "--size", "832x480", "--json", "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    files = {each["name"]: each for each in found["findings"] if each["section"] == "files"}
    for name, detail in (
        ("transformer", "transformer: original layout, interleaved qkv, 3 files, "),
        ("decoder", "causal_decoder: causal H3 ViT, hybrid_a3"),
        ("picture encoder", "vae: H3 video autoencoder"),
        ("prompt encoder", "text_encoder: Qwen3-VL, "),
    ):
        assert files[name]["health"] == "ok", files[name]
        assert files[name]["detail"].startswith(detail), files[name]
    assert "taken for FL2VA" in files["transformer"]["detail"]
    assert not [each for each in found["missing"] if each.startswith(("files", "memory"))]
    assert found["memory"][0]["fits"]
