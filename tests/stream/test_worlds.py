import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import save_model, write_manifest
from engine.config import EngineConfig, preset
from engine.errors import CheckpointError, ConfigError, DeviceError, UnsupportedError
from engine.memory import Present
from engine.ranks import Ranks
from engine.text import WordEncoder
from stream.cli import main
from stream.load_news import LoadNews
from stream.world_source import LoadedWorlds
from stream.world_spec import WorldSpec, read_start, world_spec
from stream.worlds import ModelCache, load_models
from tests.adapters import peft_keys, random_factors, write_adapter
from tests.tiny import tiny_model, unpacked_model
from tests.vae_stream.h3_tiny import random_vit, tensors_in, write_folder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig
from vae_stream.taehv import TinyVae, TinyVaeConfig
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of the tiny preset as they would ship."""
    config = preset("tiny").model
    path = tmp_path / "weights"
    save_model(path, tiny_model(config), config, text_encoder=WordEncoder.of(config))
    TinyVae(TinyVaeConfig()).save_pretrained(path / "vae")
    write_manifest(path)
    return path


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "seed.png"
    Image.new("RGB", (96, 64), (90, 120, 60)).save(path)
    return str(path)


def _spec(weights: Path | str, preset_name: str = "tiny", **adapter: str) -> WorldSpec:
    return world_spec(
        preset_name,
        size=None,
        weights=str(weights),
        renderer=False,
        device="cpu",
        dtype="float32",
        **adapter,
    )


def test_worlds_of_the_same_models_share_the_way_of_their_decoder(folder: Path, image: str) -> None:
    models, spec = ModelCache(), _spec(folder)
    start = read_start(spec, image=image, scene=None)
    one, other = (models.world(spec, start) for _ in range(2))
    assert one is not other
    assert one._lane is other._lane
    models.close()


def test_folder_of_weights_runs_and_replays(
    folder: Path, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    options = ["--image", image, "--actions", "w*34", "--out", str(out), "--dtype", "float32"]
    code = main(["generate", *options, "--preset", "tiny", "--weights", str(folder)])
    assert code == 0, capsys.readouterr().err
    assert main(["replay", str(tmp_path / "a.trace.jsonl")]) == 0


def test_an_adapter_is_taken_from_the_folder_or_as_named(folder: Path, tmp_path: Path) -> None:
    model = unpacked_model(preset("tiny").model)
    names = ["transformer_blocks.0.attn.to_q", "token_refiner.refiner_blocks.0.ff.net.2"]
    tensors = peft_keys(random_factors(model, names))
    beside = write_adapter(tmp_path / "other.safetensors", tensors)
    hashes = [load_models(_spec(folder)).engine.model_hash]
    named = load_models(_spec(folder, lora=str(beside), lora_mode="merged"))
    assert named.plan.part_gib("adapter") == 0.0
    write_adapter(folder / "adapter" / "adapter_model.safetensors", tensors)
    found = load_models(_spec(folder))
    assert found.engine.config.lora == str(folder / "adapter")
    assert found.plan.part_gib("adapter") > 0.0
    hashes += [models.engine.model_hash for models in (named, found)]
    assert hashes[0] != hashes[1] == hashes[2]


def test_an_adapter_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="lora: 'nowhere' is not there"):
        _spec(folder, lora="nowhere")


@pytest.mark.parametrize("name", ["vae/model.safetensors", "vae/config.json", "config.json"])
def test_changed_file_is_refused_by_name(
    folder: Path, image: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ")
    options = ["--image", image, "--actions", "w*17", "--out", str(tmp_path / "a.mp4")]
    code = main(["generate", *options, "--preset", "tiny", "--weights", str(folder)])
    err = capsys.readouterr().err
    assert code == 3
    assert err.count("\n") == 1
    assert name in err


def test_silence_in_the_folder_is_part_of_the_world(folder: Path) -> None:
    model = preset("tiny").model
    plain = load_models(_spec(folder))
    shape = model.audio_channel_count, model.audio_in_channels, model.audio_latent_count
    (folder / "sound").mkdir()
    save_file({"silence_GCT": torch.ones(shape).bfloat16()}, folder / "sound" / "a.safetensors")

    sounding = load_models(_spec(folder))

    assert sounding.engine.config.audio_vae == str(folder / "sound")
    assert sounding.engine.model_hash != plain.engine.model_hash
    for models in (plain, sounding):
        models.close()


def test_missing_codec_is_refused_by_name(folder: Path) -> None:
    (folder / "vae" / "model.safetensors").unlink()
    (folder / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no picture encoder; found: transformer"):
        load_models(_spec(folder))


@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_a_codec_that_is_not_whole_is_refused_before_anything_is_loaded(
    folder: Path, part: str
) -> None:
    (folder / "MANIFEST.json").unlink()
    file, news = folder / "vae" / "model.safetensors", _Listening()
    tensors = load_file(file)
    name = next(each for each in tensors if each.startswith(part) and tensors[each].dim() == 1)
    save_file(tensors | {name: torch.zeros(3)}, file)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: {name} has shape \(3,\); expected \(\d+,\)"
    ):
        load_models(_spec(folder), news)
    assert not news.stages


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (None, CheckpointError, "has no decoder; found: transformer, picture encoder"),
        (VitLayout.ORIGINAL, UnsupportedError, "official: pictures wait for 2 latents of the next"),
    ],
    ids=["none", "looks-ahead"],
)
def test_what_nobody_can_play_with_is_refused_before_anything_is_loaded(
    folder: Path, layout: VitLayout | None, error: type[Exception], message: str
) -> None:
    (folder / "MANIFEST.json").unlink()
    for file in (folder / "vae").iterdir():
        file.unlink()
    encoder = H3Encoder(H3EncoderConfig(widths=(8, 8, 8, 8, 8, 8), block_count=1, norm_groups=4))
    decoder = {} if layout is None else tensors_in(random_vit(), layout)
    write_folder(folder / "vae", decoder | encoder.state_dict(), {"norm_num_groups": 4})
    spec, news = _spec(folder), _Listening()
    source = LoadedWorlds(spec, news)
    with pytest.raises(error, match=message):
        source.open(read_start(spec, image=None, scene="meadow-lake"))
    assert news.stages == ["scene"]
    # Latents and videos can be made of it.
    load_models(spec).close()


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"made for 96x64; asked for: 256x160"):
        load_models(_spec(folder, "mini"))


def test_equal_specs_share_their_models(image: str) -> None:
    cache, spec = ModelCache(), _spec("random")
    start = read_start(spec, image=image, scene=None)
    first = cache.world(spec, start)
    second = cache.world(_spec("random"), start)
    assert first is not second
    assert first._engine is second._engine
    cache.close()


def test_random_weights_are_the_same_each_time() -> None:
    first, second = load_models(_spec("random")), load_models(_spec("random"))
    assert first.engine.model_hash == second.engine.model_hash
    picture_HWC = torch.arange(64 * 96 * 3).view(64, 96, 3).to(torch.uint8)
    latents = [models.encoder.encode_image(picture_HWC) for models in (first, second)]
    assert torch.equal(*latents)


def test_engine_config_of_a_spec() -> None:
    assert _spec("random").engine == EngineConfig(device="cpu", dtype="float32")


def test_more_worlds_than_memory_has_room_for_are_refused_before_any_loads() -> None:
    spec = dataclasses.replace(_spec("random"), world_count=100_000)
    news = _Listening()
    with pytest.raises(DeviceError, match=r"GiB are free for each of 100000 processes"):
        load_models(spec, news)
    assert not news.stages


@pytest.mark.parametrize(("seat", "on_its_gpu"), [(0, 2), (1, 1)])
def test_memory_of_a_gpu_is_for_the_worlds_on_it(
    monkeypatch: pytest.MonkeyPatch, seat: int, on_its_gpu: int
) -> None:
    asked = dict[str, int]()

    def present_memory(device: torch.device, **shares: int) -> Present:
        asked.update(shares)
        return Present(device_gib=80.0)

    monkeypatch.setattr("stream.worlds.gpu_count", lambda: 2)
    monkeypatch.setattr("stream.worlds.resolve_device", torch.device)
    monkeypatch.setattr("stream.worlds.present_memory", present_memory)
    engine = EngineConfig(device="cuda", dtype="bfloat16")
    spec = dataclasses.replace(_spec("random"), engine=engine, world_count=3, seat=seat)
    monkeypatch.setattr("stream.worlds.plan_world", _planned_enough)
    with pytest.raises(_PlannedError):
        load_models(spec, ranks=Ranks(own_device=f"cuda:{seat}"))
    assert asked == {"shared_by": on_its_gpu, "machine_shared_by": 3}


class _PlannedError(Exception):
    """Memory was asked for."""


def _planned_enough(*args: object, **more: object) -> None:
    raise _PlannedError


class _Listening(LoadNews):
    """Notes what is loaded."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str) -> AbstractContextManager[None]:
        self.stages.append(name)
        return nullcontext()
