"""What "auto" becomes on a device, and what cannot be had there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine import loading, speed
from engine.checkpoint.folder import save_model
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ConfigError, UnsupportedError
from engine.speed import kernels_refusal, resolve_speed, speed_parts
from engine.text import WordEncoder
from graphs.key import GraphKey, Phase
from tests.graphs.tape import TapeCapture
from tests.tiny import block_config, narrow_config, unpacked_model

pytestmark = pytest.mark.cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


MODEL = narrow_config()
NO_CAMERA = dataclasses.replace(MODEL, attention_head_dim=6 * MODEL.rope_freq_dim)
"""Heads that are rotary throughout."""
WIDE_HEADS = block_config(
    num_layers=6, num_attention_heads=4, attention_head_dim=96, rope_freq_dim=8
)


def _resolved(
    config: EngineConfig,
    device: torch.device,
    model: ModelConfig | None = None,
    linear: str = "bf16",
) -> tuple[str, object, str]:
    found = resolve_speed(dataclasses.replace(config, linear=linear), device, model or MODEL)
    return found.compile, found.graphs, found.kernels


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        (CPU, {}, ("off", False, "off")),
        (CUDA, {}, ("off", True, "fast")),
        (CUDA, {"prefix_cache": False}, ("off", False, "off")),
        (CUDA, {"compile": "blocks"}, ("blocks", True, "off")),
        (CUDA, {"graphs": False}, ("off", False, "fast")),
        (CUDA, {"graphs": "strict"}, ("off", "strict", "fast")),
        (CUDA, {"kernels": "off"}, ("full", True, "off")),
        (CUDA, {"kernels": "eager"}, ("off", True, "eager")),
        (CPU, {"compile": "full"}, ("full", False, "off")),
        (CPU, {"is_long_lived": True}, ("blocks", False, "off")),
        (CPU, {"is_long_lived": True, "compile": "off"}, ("off", False, "off")),
        (CUDA, {"is_long_lived": True}, ("off", True, "fast")),
    ],
    ids=[
        "cpu",
        "cuda",
        "no-shortcut",
        "blocks",
        "no-graphs",
        "strict-graphs",
        "plain",
        "eager",
        "cpu-full",
        "service",
        "service-off",
        "cuda-service",
    ],
)
def test_auto_is_resolved_by_the_device(monkeypatch, device, changes, expected):
    monkeypatch.setattr(speed, "_no_compiler", lambda device: None)
    assert _resolved(EngineConfig(**changes), device) == expected


def test_a_missing_compiler_is_left_out_and_said(monkeypatch, caplog):
    monkeypatch.setattr(speed, "_no_compiler", lambda device: "triton is missing")
    assert _resolved(EngineConfig(), CUDA) == ("off", True, "off")
    assert "compile_and_kernels_left_out device=cuda:0: triton is missing" in caplog.text


@pytest.mark.parametrize(
    ("model", "linear", "reason"),
    [
        (NO_CAMERA, "bf16", "heads have 96 channels, 96 of them rotary; allowed"),
        (WIDE_HEADS, "fp8_block", "heads of 96 channels in blocks; allowed: divisors of 128"),
    ],
    ids=["rotary", "blocks"],
)
def test_kernels_that_do_not_serve_a_model_are_left_out_and_said(
    monkeypatch, caplog, model, linear, reason
):
    monkeypatch.setattr(speed, "_no_compiler", lambda device: None)
    assert _resolved(EngineConfig(), CUDA, model, linear) == ("full", True, "off")
    assert f"kernels_left_out linear={linear}: attention_head_dim is 96: {reason}" in caplog.text
    for kernels in ("eager", "fast"):
        message = f"kernels is '{kernels}'; .* linear '{linear}': 'off', because .* {reason}"
        with pytest.raises(UnsupportedError, match=message):
            _resolved(EngineConfig(kernels=kernels), CUDA, model, linear)


def test_kernels_serve_heads_that_divide_no_block_where_their_output_has_none():
    assert kernels_refusal("fp8_mixed", WIDE_HEADS) is None


def test_a_compiler_that_fails_gives_its_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def fail(*args: object, **options: object) -> object:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(torch, "compile", lambda fn, **options: fail)
    assert speed._no_compiler(CPU) == "Failed to find C compiler"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graphs": True}, "graphs is True on cpu; allowed there: False"),
        ({"graphs": "strict"}, "graphs is 'strict' on cpu; allowed there: False"),
        ({"kernels": "fast"}, "kernels is 'fast' on cpu; allowed there: 'off'"),
    ],
)
def test_what_needs_cuda_is_refused_before_anything_is_built(changes, message):
    config = EngineConfig(device="cpu", dtype="float32", **changes)
    with pytest.raises(ConfigError, match=message):
        Engine.from_random(narrow_config(), config)


@pytest.mark.parametrize(
    ("attention", "layers", "message"),
    [
        ("cudnn", 3, r"float32 on cpu, heads of .*, not cpu; allowed here: auto, sdpa"),
        ("gluon", 3, r"gluon refuses .*made for cuda, not cpu"),
        ("sparse", 2, r"sparse refuses .*first 2 layers read everything, and there are 2"),
    ],
)
def test_attention_that_cannot_serve_is_refused_before_anything_is_built(
    monkeypatch, attention, layers, message
):
    monkeypatch.setattr(loading, "empty_model", lambda *given, **named: pytest.fail("built"))
    model = dataclasses.replace(narrow_config(), num_layers=layers)
    config = EngineConfig(device="cpu", dtype="float32", attention=attention)
    with pytest.raises(UnsupportedError, match=message):
        Engine.from_random(model, config)


def test_attention_that_cannot_serve_is_refused_before_weights_are_read(monkeypatch, tmp_path):
    model = narrow_config()
    words = WordEncoder.of(model)
    save_model(tmp_path / "w", unpacked_model(model), model, text_encoder=words, int8=False)
    monkeypatch.setattr(loading, "load_model", lambda *given, **named: pytest.fail("read"))
    config = EngineConfig(device="cpu", dtype="float32", attention="gluon")
    with pytest.raises(UnsupportedError, match=r"gluon refuses .*made for cuda, not cpu"):
        Engine.from_pretrained(tmp_path / "w", config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"linear": "fp8_mixed"}, "linear is 'fp8_mixed'"), ({"attention": "gluon"}, "gluon refuses")],
)
def test_what_is_refused_is_so_before_the_compiler_is_tried(monkeypatch, changes, message):
    monkeypatch.setattr(speed, "_no_compiler", lambda device: pytest.fail("tried"))
    config = EngineConfig(device="cpu", dtype="float32", is_long_lived=True, **changes)
    with pytest.raises(UnsupportedError, match=message):
        Engine.from_random(narrow_config(), config)


@pytest.mark.parametrize(
    ("attention", "phases"),
    [("auto", (Phase.DENOISE, Phase.REFRESH)),
     ("sparse", (Phase.SPARSE_DENOISE, Phase.DENOISE, Phase.REFRESH))],
)  # fmt: skip
def test_all_kinds_of_passes_of_a_chunk_are_recorded_in_one_go(monkeypatch, attention, phases):
    monkeypatch.setattr(speed, "CudaCapture", lambda device: TapeCapture())
    model = unpacked_model(dataclasses.replace(narrow_config(), num_layers=3))
    config = EngineConfig(graphs=True, compile="off", kernels="off", attention=attention)
    runner = speed_parts(model, config).runner
    assert runner is not None
    keys = [
        GraphKey(phase=phase, rows=1, history_rows=0, prefix_rows=0, dtype=torch.float32, batch=1)
        for phase in phases
    ]
    runner.allow(keys)
    fixed = [torch.zeros(1)]
    for _ in range(2):
        runner.begin_turn()
        for key in keys:
            runner.run(key, lambda: fixed[0] + 1, fixed)
    assert (runner.counts.plain, runner.counts.captures) == (len(phases), len(phases))


@pytest.mark.parametrize(("graphs", "is_strict"), [(True, False), ("strict", True)])
@pytest.mark.parametrize("attention", ["auto", "sparse"])
def test_strict_graphs_are_the_runners(monkeypatch, graphs, is_strict, attention):
    monkeypatch.setattr(speed, "CudaCapture", lambda device: TapeCapture())
    model = unpacked_model(dataclasses.replace(narrow_config(), num_layers=3))
    config = EngineConfig(graphs=graphs, compile="off", kernels="off", attention=attention)
    runner = speed_parts(model, config).runner
    assert runner is not None
    assert runner.is_strict is is_strict


def test_the_engine_tells_its_graphs():
    config = EngineConfig(device="cpu", dtype="float32")
    assert Engine.from_random(narrow_config(), config).graphs == "none: each pass runs anew"
