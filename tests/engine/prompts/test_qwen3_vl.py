"""The cut Qwen3-VL against the whole one of transformers; what is shown to it; bad files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError, StateError
from engine.prompts.files import find_encoder, holds_encoder
from engine.prompts.presentation import Presenter
from engine.prompts.qwen3_vl import Qwen3VlEncoder
from engine.types import LoadEvent
from tests.engine.prompts.tiny_qwen import LAYERS, READ, WIDTH, whole_model, write_qwen

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
PROMPT = "a meadow, at night"
LABEL_ROWS = 13
"""A byte is a token here; released, the label has 6."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    write_qwen(path)
    return path


@pytest.fixture(scope="module")
def picture() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=generator)


def _open(folder: Path, residency: Any = "cpu", caption_rows: int = 64) -> Qwen3VlEncoder:
    files = find_encoder(folder, layers=READ, text_dim=WIDTH)
    return Qwen3VlEncoder(
        files, layers=READ, caption_rows=caption_rows, device=CPU, residency=residency
    )


def _presenter(folder: Path) -> Presenter:
    return Presenter(folder / "tokenizer", folder / "processor", caption_rows=64)


@pytest.mark.parametrize("residency", ["cpu", "free"])
def test_rows_are_a_hidden_state_of_the_whole_model(
    folder: Path, picture: torch.Tensor, residency: str
) -> None:
    encoder = _open(folder, residency)
    found = encoder.encode(PROMPT, picture)
    shown = _presenter(folder).present(PROMPT, picture)
    ids_BR = shown.ids_R[None]
    with torch.no_grad():
        whole = whole_model(folder).model(
            input_ids=ids_BR,
            attention_mask=torch.ones_like(ids_BR),
            mm_token_type_ids=shown.is_picture_R[None],
            pixel_values=shown.patches_PC,
            image_grid_thw=shown.grid_13,
            use_cache=False,
            output_hidden_states=True,
        )
    assert len(whole.hidden_states) == LAYERS + 1
    assert torch.equal(found.rows_BRE, whole.hidden_states[READ])
    assert found.rows_BRE.dtype == torch.bfloat16
    assert torch.equal(found.tags_R, shown.tags_R)
    assert torch.equal(encoder.encode(PROMPT, picture).rows_BRE, found.rows_BRE)


def test_the_picture_is_laid_out_as_the_model_was_trained(
    folder: Path, picture: torch.Tensor
) -> None:
    from transformers import AutoTokenizer

    shown = _presenter(folder).present(PROMPT, picture)
    text = f"<Picture 1>: <|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>{PROMPT}"
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert shown.ids_R.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = picture.shape[0] // 32 * (picture.shape[1] // 32)
    caption = len(PROMPT)
    assert shown.tags_R.tolist() == [1] * LABEL_ROWS + [0] * (pieces + 2) + [1] * caption
    is_picture = [0] * (LABEL_ROWS + 1) + [1] * pieces + [0] * (1 + caption)
    assert shown.is_picture_R.tolist() == is_picture
    assert shown.grid_13.tolist() == [[1, 4, 6]]


def test_patches_are_the_pixels(folder: Path, picture: torch.Tensor) -> None:
    shown = _presenter(folder).present("", picture)
    # Patches merge two by two: the first four are the corner of 32x32 pixels, row by row.
    corner = (picture[:32, :32].double() - 127.5) / 127.5
    patches_PTHW = shown.patches_PC.view(-1, 3, 2, 16, 16)[:4]
    for index, patch_CTHW in enumerate(patches_PTHW):
        top, left = index // 2 * 16, index % 2 * 16
        expected_CHW = corner[top : top + 16, left : left + 16].permute(2, 0, 1)
        for frame_CHW in patch_CTHW.unbind(1):
            assert torch.equal(frame_CHW.bfloat16(), expected_CHW.float().bfloat16())


def test_later_layers_and_the_head_are_not_in_memory(folder: Path) -> None:
    told: list[LoadEvent] = []
    files = find_encoder(folder, layers=READ, text_dim=WIDTH)
    encoder = Qwen3VlEncoder(
        files, layers=READ, caption_rows=9, device=CPU, residency="cpu", on_progress=told.append
    )
    parameters = dict(encoder._model.named_parameters())
    assert not [name for name in parameters if f"layers.{READ}." in name or "lm_head" in name]
    held = sum(each.nbytes for each in parameters.values())
    assert held == files.size_bytes == told[-1].done_bytes
    parts = (encoder._model.language_model, encoder._model.visual)
    assert [part.config._attn_implementation for part in parts] == ["sdpa", "sdpa"]
    whole = sum(each.nbytes for each in whole_model(folder).parameters())
    assert held < 0.8 * whole


def test_weights_that_are_read_for_each_prompt_are_given_up(
    folder: Path, picture: torch.Tensor
) -> None:
    encoder = _open(folder, "free")
    for _ in range(2):
        encoder.encode(PROMPT, picture)
        assert {each.device.type for each in encoder._model.parameters()} == {"meta"}
    encoder.close()
    with pytest.raises(StateError, match="closed"):
        encoder.encode(PROMPT, picture)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("x" * 65, "prompt: 65 tokens; allowed: at most 64"),
        ("a <|image_pad|> of a meadow", r"prompt: it holds <\|image_pad\|>; allowed: text"),
        ("<|vision_start|>", r"prompt: it holds <\|vision_start\|>"),
    ],
)
def test_prompts_that_cannot_be_shown_are_refused(
    folder: Path, picture: torch.Tensor, prompt: str, message: str
) -> None:
    presenter = _presenter(folder)
    presenter.present("x" * 64, picture)
    with pytest.raises(ConfigError, match=message):
        presenter.present(prompt, picture)


def test_a_picture_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"picture is torch.float32 \[3, 8, 8\]; allowed: uint8"):
        _presenter(folder).present("", torch.zeros(3, 8, 8))


def test_an_encoder_is_found_beside_its_tokenizer_and_by_a_hash(
    folder: Path, tmp_path: Path
) -> None:
    flat, other = tmp_path / "flat", tmp_path / "other"
    for name in ("text_encoder", "tokenizer", "processor"):
        shutil.copytree(folder / name, flat, dirs_exist_ok=True)
    shutil.copy(folder / "text_encoder" / "config.json", flat)
    merged = {}
    for shard in sorted(flat.glob("*.safetensors")):
        merged |= load_file(shard)
        shard.unlink()
    (flat / "model.safetensors.index.json").unlink()
    save_file(merged, flat / "one.safetensors")
    found = [find_encoder(each, layers=READ, text_dim=WIDTH) for each in (folder, flat)]
    assert found[0].weights == folder / "text_encoder"
    assert found[1].processor == found[1].tokenizer == flat
    # Cut into other files it is the same model; one weight more or less is another.
    shutil.copytree(folder, other)
    shard = sorted((other / "text_encoder").glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(each for each in tensors if "mlp" in each)
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, shard)
    third = find_encoder(other, layers=READ, text_dim=WIDTH)
    assert found[0].model_hash == found[1].model_hash != third.model_hash
    assert holds_encoder(folder)
    assert not holds_encoder(folder / "tokenizer")


def _drop_tensor(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    tensors.pop(next(name for name in sorted(tensors) if "visual" in name or "layers.0" in name))
    save_file(tensors, shard)
    (folder / "model.safetensors.index.json").unlink()


def _reshape_tensor(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith("layers.1.mlp.gate_proj.weight"):
                tensors[name] = tensors[name][:-1].contiguous()
        save_file(tensors, shard)


def _change_config(folder: Path, **text: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= text
    path.write_text(json.dumps(config))


def _truncate(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_tensor, "tensors are missing, first"),
        (_reshape_tensor, r"gate_proj.weight has a wrong shape: expected \[96, 64\], got \[95, 64"),
        (lambda path: sorted(path.glob("*.safetensors"))[0].unlink(), "is missing; model.safeten"),
        (_truncate, "truncated"),
        (
            lambda path: _change_config(path, hidden_size=128),
            "text_config.hidden_size is 128; expected 64",
        ),
        (
            lambda path: _change_config(path, num_hidden_layers=1),
            "text_config.num_hidden_layers is 1; expected at least 2",
        ),
        (lambda path: (path / "config.json").write_text("{"), "config.json is not usable"),
        (lambda path: shutil.rmtree(path.parent / "tokenizer"), "the tokenizer is missing"),
        (lambda path: shutil.rmtree(path.parent / "processor"), "the processor is missing"),
        (
            lambda path: (path.parent / "tokenizer" / "tokenizer.json").write_text("{"),
            "no tokenizer can be read",
        ),
    ],
)
def test_bad_files_are_refused_by_name(
    folder: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy / "text_encoder")
    with pytest.raises(CheckpointError, match=message):
        _open(copy, "free")
