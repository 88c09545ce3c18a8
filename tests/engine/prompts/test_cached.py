"""Kept encodings: the same bits, whole files only, within a bound, and without an encoder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import PromptOptions, Qwen3VlTextConfig
from engine.errors import CheckpointError, ConfigError
from engine.prompts.cached import (
    KEPT_IN_MEMORY,
    REFINEMENT_PROMPT,
    CachedPrompts,
    open_prompts,
    prompt_parts,
    residencies,
)
from engine.prompts.files import PromptFiles
from engine.prompts.store import EncodingStore, encoding_key, kept_model
from engine.text import PromptEncoding

pytestmark = pytest.mark.cpu
MODEL = "ab" * 32
PICTURE = torch.arange(4 * 6 * 3).view(4, 6, 3).to(torch.uint8)
CPU = torch.device("cpu")


class _Encoder:
    """Rows that depend on prompt and picture; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, prompt: str, picture_HWC: Tensor) -> PromptEncoding:
        self.asked.append(prompt)
        generator = torch.Generator().manual_seed(len(prompt) + int(picture_HWC.sum()))
        rows_BRE = torch.randn(1, 5, 8, generator=generator).bfloat16()
        return PromptEncoding(rows_BRE=rows_BRE, tags_R=torch.tensor([1, 0, 0, 1, 1]))

    def close(self) -> None:
        pass


def _prompts(
    folder: Path, encoder: _Encoder | None, *, refines: bool = False, limit_mib: int = 100
) -> CachedPrompts:
    store = EncodingStore(folder, MODEL, limit_mib=limit_mib)
    return CachedPrompts(model_hash=MODEL, encoder=encoder, store=store, refines=refines)  # type: ignore[arg-type]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _same(first: PromptEncoding, second: PromptEncoding) -> bool:
    is_same = torch.equal(first.rows_BRE, second.rows_BRE)
    return (
        is_same
        and torch.equal(first.tags_R, second.tags_R)
        and first.rows_BRE.dtype == second.rows_BRE.dtype
    )


def test_an_encoding_that_was_kept_has_the_same_bits_and_needs_no_encoder(tmp_path: Path) -> None:
    encoder = _Encoder()
    made = _prompts(tmp_path, encoder).encode("meadow", PICTURE)
    assert kept_model(tmp_path) == MODEL
    again = _prompts(tmp_path, None)
    assert not again.is_at_hand("meadow", PICTURE)
    assert _same(again.encode("meadow", PICTURE), made)
    assert again.is_at_hand("meadow", PICTURE)
    assert encoder.asked == ["meadow"]
    with pytest.raises(CheckpointError, match=r"not among the kept encodings.*--prompt-encoder"):
        again.encode("night", PICTURE)


@pytest.mark.parametrize(
    ("model_hash", "prompt", "picture"),
    [
        ("cd" * 32, "meadow", PICTURE),
        (MODEL, "meadow ", PICTURE),
        (MODEL, "meadow", PICTURE + 1),
        (MODEL, "meadow", PICTURE.view(6, 4, 3)),
    ],
    ids=["model", "prompt", "pixels", "shape"],
)
def test_another_model_prompt_or_picture_has_another_key(
    model_hash: str, prompt: str, picture: Tensor
) -> None:
    assert encoding_key(model_hash, prompt, picture) != encoding_key(MODEL, "meadow", PICTURE)
    assert encoding_key(MODEL, "meadow", PICTURE.clone()) == encoding_key(MODEL, "meadow", PICTURE)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x80\x04 a pickle"),
    ],
    ids=["bit", "truncated", "empty", "pickle"],
)
def test_a_damaged_file_is_made_again(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = _Encoder()
    made = _prompts(tmp_path, encoder).encode("meadow", PICTURE)
    (path,) = _files(tmp_path)
    damage(path)  # type: ignore[operator]
    assert _same(_prompts(tmp_path, encoder).encode("meadow", PICTURE), made)
    assert encoder.asked == ["meadow", "meadow"]
    assert f"prompt_cache_damaged path={path}" in caplog.text
    assert _same(_prompts(tmp_path, None).encode("meadow", PICTURE), made)


def test_an_encoding_under_the_name_of_another_counts_as_none(tmp_path: Path) -> None:
    encoder = _Encoder()
    prompts = _prompts(tmp_path, encoder)
    prompts.encode("meadow", PICTURE)
    (path,) = _files(tmp_path)
    path.rename(path.with_name(encoding_key(MODEL, "night", PICTURE) + ".safetensors"))
    _prompts(tmp_path, encoder).encode("night", PICTURE)
    assert encoder.asked == ["meadow", "night"]


def test_interrupted_writing_leaves_nothing_under_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    _prompts(tmp_path, _Encoder()).encode("meadow", PICTURE)
    assert _files(tmp_path) == []
    assert "prompt_not_kept" in caplog.text


def test_what_was_used_least_of_late_makes_room(tmp_path: Path) -> None:
    store = EncodingStore(tmp_path, MODEL, limit_mib=1)
    rows_BRE = torch.zeros(1, 100, 2048)  # 0.8 MB, two are too many
    encoding = PromptEncoding(rows_BRE=rows_BRE, tags_R=torch.ones(100, dtype=torch.int64))
    small = PromptEncoding(rows_BRE=rows_BRE[:, :1], tags_R=torch.ones(1, dtype=torch.int64))
    for age, key in enumerate(("old", "used")):
        store.write(key, small)
        os.utime(tmp_path / MODEL[:16] / f"{key}.safetensors", (age, age))
    store.write("large", encoding)
    for age, key in enumerate(("large", "old"), start=10):
        os.utime(tmp_path / MODEL[:16] / f"{key}.safetensors", (age, age))
    assert store.read("used") is not None  # from now on the newest
    left = tmp_path / MODEL[:16] / ".left.1.part"
    left.touch()
    os.utime(left, (0, 0))
    store.write("larger", encoding)
    assert {path.stem for path in _files(tmp_path)} == {"old", "used", "larger"}


def test_memory_holds_the_newest(tmp_path: Path) -> None:
    encoder = _Encoder()
    prompts = CachedPrompts(model_hash=MODEL, encoder=encoder, store=None)  # type: ignore[arg-type]
    names = [f"prompt {number}" for number in range(KEPT_IN_MEMORY + 1)]
    for name in names:
        prompts.encode(name, PICTURE)
    assert [prompts.is_at_hand(name, PICTURE) for name in names] == [False] + [
        True
    ] * KEPT_IN_MEMORY


def test_one_canonical_prompt_may_stand_for_all(tmp_path: Path) -> None:
    encoder = _Encoder()
    prompts = _prompts(tmp_path, encoder, refines=True)
    first, second = (prompts.encode(prompt, PICTURE) for prompt in ("meadow", "night"))
    assert first is second
    assert encoder.asked == [REFINEMENT_PROMPT]
    assert prompts.is_at_hand("anything", PICTURE)
    # Its worlds are others, its encodings are not.
    assert prompts.model_hash != _prompts(tmp_path, None).model_hash
    assert _same(_prompts(tmp_path, None).encode(REFINEMENT_PROMPT, PICTURE), first)


def test_a_picture_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="picture is None"):
        _prompts(tmp_path, _Encoder()).encode("meadow")


def test_without_encoder_the_kept_encodings_have_to_be_of_one(tmp_path: Path) -> None:
    options = PromptOptions(cache=str(tmp_path), residency="free")

    def opened() -> CachedPrompts:
        return open_prompts(None, Qwen3VlTextConfig(), options, device=CPU)

    with pytest.raises(CheckpointError, match=r"prompt encoder: none.*--prompt-encoder"):
        opened()
    _prompts(tmp_path, _Encoder()).encode("meadow", PICTURE)
    assert opened().model_hash == MODEL
    other = EncodingStore(tmp_path, "cd" * 32, limit_mib=9)
    other.write("key", _Encoder().encode("", PICTURE))
    with pytest.raises(CheckpointError, match="not of exactly one"):
        opened()


def test_residency_follows_the_engine() -> None:
    cuda, options = torch.device("cuda:0"), PromptOptions()
    assert [each.residency for each in residencies(options, cuda)] == ["gpu", "free"]
    assert [each.residency for each in residencies(options, CPU)] == ["cpu", "free"]
    assert len(residencies(PromptOptions(residency="cpu"), cuda)) == 1
    with pytest.raises(ConfigError, match="prompt_residency is 'gpu' on cpu; allowed there"):
        residencies(PromptOptions(residency="gpu"), CPU)


def test_memory_of_the_encoder_lies_where_its_weights_do(tmp_path: Path) -> None:
    gib = 2**30

    class Sized(PromptFiles):
        size_bytes, largest_part_bytes = 50 * gib, 2 * gib  # type: ignore[assignment]

    files = Sized(
        weights=tmp_path, tokenizer=tmp_path, processor=tmp_path, records={}, model_hash=MODEL,
        config={"text_config": {"hidden_size": 5120, "intermediate_size": 25600}},
    )  # fmt: skip
    cuda = torch.device("cuda:0")

    def part(residency: str, device: torch.device = cuda) -> tuple[float, float, float]:
        options = PromptOptions(residency=residency)  # type: ignore[arg-type]
        (found,) = prompt_parts(files, options, device, rows=1528)
        return found.loading // gib, found.playing // gib, found.host // gib

    assert part("gpu") == (50, 50, 0)
    assert part("cpu") == (0, 0, 50)
    assert part("free") == (0, 2, 0)
    assert part("cpu", CPU) == (50, 50, 0)
    assert prompt_parts(None, PromptOptions(residency="cpu"), cuda, rows=9) == ()
