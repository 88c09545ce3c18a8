"""The causal ViT decoder against outputs of the public code: frames, in every mode.

    WORLDSTREAM_GOLDEN_VAE=FOLDER python -m pytest -m "cpu or manual" tests/vae_stream/causal_vit

needs the complete set, which is too large to ship.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.tolerances import BF16_GOLDEN_RATIO, VIT_OFFSET_ATOL, VIT_RAW_ATOL, VIT_RGB8_SHARE
from tests.vae_stream.causal_vit.golden_vit import (
    CASES,
    assert_near,
    decoded,
    golden,
    golden_vit,
    new_run,
    recorded_names,
    rms,
    subsampled,
)
from vae_stream.causal_vit import Mode
from vae_stream.causal_vit.modes import PAIR, SECOND

pytestmark = [
    pytest.mark.manual,
    pytest.mark.skipif(
        "WORLDSTREAM_GOLDEN_VAE" not in os.environ, reason="WORLDSTREAM_GOLDEN_VAE names no folder"
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_raw_frames_are_those_of_the_reference(case: str, monkeypatch) -> None:
    tensors, run = golden(case), decoded(case, monkeypatch)
    name, step = subsampled(tensors, "fp32.raw")
    expected = tensors[name]
    raw = run.raw[:, : expected.shape[1]]
    assert_near(raw[..., ::step, ::step], expected, VIT_RAW_ATOL)
    assert_near(raw.mean((2, 3)).T, tensors["fp32.frame_mean"], VIT_RAW_ATOL)
    assert_near(raw.square().mean((2, 3)).sqrt().T, tensors["fp32.frame_rms"], VIT_RAW_ATOL)
    for index, part in enumerate((golden(f"{case}_full0"), golden(f"{case}_full1"))):
        if part:
            assert_near(raw[:, 29 + 2 * index], part["fp32.raw"][:, 0], VIT_RAW_ATOL)


@pytest.mark.parametrize("case", CASES)
def test_pictures_are_those_of_the_reference(case: str, monkeypatch) -> None:
    tensors, run = golden(case), decoded(case, monkeypatch)
    name, step = subsampled(tensors, "fp32.final_rgb8")
    frames = torch.cat([chunk.frames_THWC for chunk in run.chunks]).permute(3, 0, 1, 2)
    apart = (frames[..., ::step, ::step].int() - tensors[name].int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() <= VIT_RGB8_SHARE
    kept: dict[int, list[int]] = {}
    for chunk, call in zip(run.chunks, run.chunk_calls, strict=True):
        ends = 4 * (chunk.latent_index + 1)
        kept.setdefault(call, []).extend(range(ends - len(chunk.frames_THWC), ends))
    assert [index for own in kept.values() for index in own] == tensors["fp32.final_index"].tolist()
    for name in recorded_names(tensors, "kept_index"):  # the flush has none
        call = int(name.removeprefix("kept_index.c"))
        assert kept[call] == (tensors[f"fp32.{name}"] + 8 * call).tolist()


@pytest.mark.parametrize("case", CASES)
def test_bf16_frames_are_as_near_to_fp32_as_those_of_the_deployed_class(case, monkeypatch) -> None:
    tensors = golden(case)
    exact = decoded(case, monkeypatch).raw
    run = decoded(case, monkeypatch, dtype=torch.bfloat16)
    name, step = subsampled(tensors, "bf16.raw")
    theirs = tensors[name]
    exact = exact[:, : theirs.shape[1]]
    ours = run.raw[:, : theirs.shape[1]]
    reference = exact[..., ::step, ::step]
    far = rms(theirs - reference)
    assert rms(ours[..., ::step, ::step] - reference) <= BF16_GOLDEN_RATIO * far
    means = exact.mean((2, 3)).T
    far = rms(tensors["bf16.frame_mean"] - means)
    assert rms(ours.mean((2, 3)).T - means) <= BF16_GOLDEN_RATIO * far


@pytest.mark.parametrize("case", ["w4", "w16"])
def test_an_odd_last_latent_alone_is_that_of_the_reference(case: str, monkeypatch) -> None:
    tensors = golden(case)
    run = decoded(case, monkeypatch, Mode.PREVIEW_COMMIT_A2)
    name, step = subsampled(tensors, "fp32.tail_single_raw")
    assert_near(run.raws[-1][..., ::step, ::step], tensors[name], VIT_RAW_ATOL)


@pytest.mark.parametrize("offset", [1000, 1003])
def test_a_stream_may_begin_anywhere(offset: int, monkeypatch) -> None:
    tensors = golden("offsets")
    run = new_run("w4", Mode.PAIR, monkeypatch, first_latent=offset)
    run.push(golden("w4")["in.z"][:8])
    expected = tensors[f"fp32.offset{offset}.raw_s3"]
    assert_near(run.raw[..., ::3, ::3], expected, VIT_OFFSET_ATOL)
    counts = [0] * 4
    for chunk, call in zip(run.chunks, run.chunk_calls, strict=True):
        counts[call] += len(chunk.frames_THWC)
    assert counts == tensors[f"fp32.offset{offset}.frames_per_call"].tolist()


def test_the_same_weights_decode_a_window_as_the_original_does() -> None:
    tensors = golden("offsets")
    z_BCTHW = tensors["in.window7.z"].transpose(0, 1)[None]
    raw_BCTHW = golden_vit(torch.float32)(z_BCTHW)
    assert_near(raw_BCTHW[0], tensors["fp32.window7.raw"], VIT_RAW_ATOL)


@pytest.mark.parametrize(
    ("mode", "name"),
    [(Mode.SINGLE_A1, "A1"), (Mode.SINGLE_A4, "A4"), (Mode.SINGLE_A5, "A5")],
)
def test_single_latents_are_those_of_the_design(mode: Mode, name: str, monkeypatch) -> None:
    run = decoded("w4", monkeypatch, mode)
    assert_near(run.raw[..., ::3, ::3], golden("design")[f"design.{name}.raw_s3"], VIT_RAW_ATOL)


def test_previews_are_those_of_the_design(monkeypatch) -> None:
    run = decoded("w4", monkeypatch, Mode.PREVIEW_COMMIT_A2)
    previews = torch.cat(run.raws[::2], dim=1)  # every other call commits the pair
    assert_near(previews[..., ::3, ::3], golden("design")["design.A2.preview_raw_s3"], VIT_RAW_ATOL)


@pytest.mark.parametrize(("kind", "name"), [(PAIR, "A2d"), (SECOND, "A2b")])
def test_other_previews_are_those_of_the_design(kind, name: str, monkeypatch) -> None:
    """Calls of a state that goes on as if they had not been: a copy as partner, or five before."""
    run = new_run("w4", Mode.SINGLE_A1, monkeypatch)
    pairs = new_run("w4", Mode.PAIR, monkeypatch)
    previews = []
    for index, z in enumerate(golden("w4")["in.z"]):
        if index % 2 == 0:
            state, buffers = run.state, run.state.buffers
            state.latent_index = index
            for slot in pairs.state.slots(6, 0):
                buffers.keys_LSRD[:, slot] = pairs.state.buffers.keys_LSRD[:, slot]
                buffers.values_LSRD[:, slot] = pairs.state.buffers.values_LSRD[:, slot]
            buffers.latents_CFHW[:] = z
            buffers.clock_2[0] = index
            run.decoder._calls.run(state, kind)
            previews.append(run.raws[-1][:, :4])
        pairs.push(z[None])
    raw = torch.cat(previews, dim=1)
    assert_near(raw[..., ::3, ::3], golden("design")[f"design.{name}.preview_raw_s3"], VIT_RAW_ATOL)


def test_chunks_of_five_are_those_of_the_design(monkeypatch) -> None:
    run = decoded("w4", monkeypatch, Mode.HYBRID_A3)
    calls, shown = [], []
    for index, raw in enumerate(run.raws):
        latents = raw.shape[1] // 4
        own = [c.latent_index for c, at in zip(run.chunks, run.chunk_calls, strict=True)
               if at == index]  # fmt: skip
        begin = own[-1] + 1 - latents
        calls.append([begin, latents, own[0], len(own)])
        shown.append(raw[:, 4 * (own[0] - begin) :])
    assert calls == golden("design")["design.A3.calls"].tolist()
    raw = torch.cat(shown, dim=1)
    assert_near(raw[..., ::3, ::3], golden("design")["design.A3.raw_s3"], VIT_RAW_ATOL)
