"""Released weights and adapters on a GPU: the same bits as on disk, and in every form of a mode."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine import loading
from engine.checkpoint import reading
from engine.checkpoint.reading import load_model
from engine.checkpoint.source import open_source
from engine.config import EngineConfig
from engine.engine import Engine
from tests.adapters import adapted_names, peft_keys, random_factors, write_adapter
from tests.released import original_state, released_state, write_sharded
from tests.tiny import random_action, random_anchor, tiny_config, unpacked_model

pytestmark = [
    pytest.mark.gpu,
    # The compiler gives advice about settings that would change the numbers.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CONFIG = tiny_config()
CUDA = torch.device("cuda")
# Seven chunks: the window slides, so history keys are rotated from their raw form.
CHUNKS = 7


@pytest.mark.parametrize("buffer_bytes", [4096, 64 * 2**20], ids=["small", "large"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, monkeypatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(reading, "BUFFER_BYTES", buffer_bytes)
    model = unpacked_model(CONFIG)
    folder = write_sharded(tmp_path, original_state(model, CONFIG), "model", 3)
    source = open_source(folder, CONFIG)
    state = load_model(source, dtype=torch.bfloat16, device=CUDA).state_dict()
    for name, tensor in released_state(model).items():
        assert torch.equal(state[name].cpu(), tensor), name


def test_what_was_quantised_is_kept_bit_for_bit(tmp_path: Path, monkeypatch) -> None:
    from engine.checkpoint.folder import save_model
    from engine.text import WordEncoder

    monkeypatch.setattr(loading, "CACHE_FOLDER", tmp_path / "cache")
    scheme = tmp_path / "all.json"
    scheme.write_text('[{"format": "fp8_rowwise", "blocks": [0, 2]}]')
    words = WordEncoder.of(CONFIG)
    save_model(tmp_path / "w", unpacked_model(CONFIG), CONFIG, text_encoder=words, int8=False)
    config = EngineConfig(device="cuda", linear=str(scheme), compile="off", graphs=False)
    made = [_roll(Engine.from_pretrained(tmp_path / "w", config)) for _ in range(2)]
    assert len(list((tmp_path / "cache" / "linears").iterdir())) == 1
    assert torch.equal(*made)


FORMS = {
    "eager": {"compile": "off", "graphs": False},
    "compiled": {"compile": "full", "graphs": False},
    "graphs": {"compile": "full", "graphs": True},
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    factors = random_factors(unpacked_model(CONFIG), adapted_names(CONFIG), rank=16, size=0.5)
    path = tmp_path_factory.mktemp("adapter") / "a.safetensors"
    return str(write_adapter(path, peft_keys(factors)))


def _roll(engine: Engine) -> torch.Tensor:
    rollout = engine.new_rollout("snow", anchor_BCTHW=random_anchor(CONFIG))
    made = [engine.step(rollout, random_action(i)).latents_BCTHW.cpu() for i in range(CHUNKS)]
    engine.close()
    return torch.cat(made, dim=2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", ["eager", "fast"])
def test_fused_is_separate_bit_for_bit(adapter: str, kernels: str, form: str) -> None:
    config = EngineConfig(
        device="cuda", dtype="bfloat16", attention="sdpa", kernels=kernels, lora=adapter,
        lora_mode="separate", **FORMS[form],
    )  # fmt: skip
    fused, separate, without = (
        _roll(Engine.from_random(CONFIG, dataclasses.replace(config, **changes)))
        for changes in ({"lora_mode": "fused"}, {}, {"lora": None, "lora_mode": "auto"})
    )
    assert torch.equal(fused, separate)
    assert not torch.equal(fused, without)
