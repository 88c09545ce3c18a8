"""The doctor on this machine: what is missing is named with what to do, and nothing is touched."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.folder import save_model
from engine.config import preset
from engine.errors import ConfigError
from engine.memory import Present
from engine.text import WordEncoder
from stream import doctor_machine
from stream.cli import main
from stream.doctor import Question, Report, examine
from stream.doctor_machine import backend_findings
from stream.findings import Finding, Health
from stream.settings import load_settings
from stream.weight_folder import Role
from stream.weight_sources import sources_of
from tests.adapters import adapted_names, peft_keys, random_factors, write_adapter
from tests.released import original_state, write_sharded
from tests.tiny import tiny_config, tiny_model, unpacked_model
from tests.vae_stream.h3_tiny import random_vit, tensors_in, write_folder
from vae_stream.vit_weights import VitLayout

pytestmark = pytest.mark.cpu


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _examine(question: Question, **settings: object) -> Report:
    return examine(question, load_settings(**{"port": _free_port()} | settings))


def _found(report: Report, section: str) -> dict[str, Finding]:
    return {each.name: each for each in report.findings if each.section == section}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 20 GiB and no GPU, whatever this one has."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "stream.doctor.present_memory", lambda device, **shares: Present(device_gib=20.0)
    )


@pytest.mark.parametrize(("device", "health"), [("auto", Health.OK), ("cuda", Health.MISSING)])
def test_ranks_need_devices_of_their_own(device: str, health: Health) -> None:
    report = _examine(Question(preset="mini", ranks=2, device=device))
    assert _found(report, "device")["ranks"].health is health
    assert [size.plan.rank_count for size in report.sizes if size.plan] == [2]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", {"shared_by": 2, "machine_shared_by": 2}),
        ("cuda", {"shared_by": 1, "machine_shared_by": 2}),
    ],
)
def test_ranks_share_what_they_run_on(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: dict[str, int]
) -> None:
    asked = dict[str, int]()

    def present_memory(_: torch.device, **shares: int) -> Present:
        asked.update(shares)
        return Present(device_gib=20.0)

    monkeypatch.setattr("stream.doctor.present_memory", present_memory)
    monkeypatch.setattr("stream.doctor.resolve_device", lambda name: torch.device(device))
    monkeypatch.setattr("stream.doctor.backend_findings", lambda device, model: iter(()))
    _examine(Question(preset="tiny", ranks=2, device=device))
    assert asked == expected


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks: 4 for a model of 6 heads; allowed: 1, 2, 3, 6"):
        Question(preset="mini", ranks=4)


def test_a_bare_machine_can_serve_the_small_world() -> None:
    report = _examine(Question(preset="mini"))
    assert report.is_ready, report.missing
    assert report.licence == ""
    files = _found(report, "files")
    assert {files[role].health for role in (Role.TRANSFORMER, Role.DECODER)} == {Health.OK}


def _products(device: str) -> list[tuple[str, Health, str]]:
    found = backend_findings(torch.device(device), preset("h3_33b").model)
    return [(each.name, each.health, each.detail) for each in found if "FP8" in each.name]


def test_what_multiplies_in_eight_bits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _products("cpu") == [
        ("FP8 products: fp8_rowwise", Health.NOTE, "need CUDA of capability 8.9 or more"),
        ("FP8 products in blocks: fp8_block, fp8_mixed", Health.NOTE, "need CUDA"),
    ]
    present = Present(device_gib=80.0, is_cuda=True, has_fp8=True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(doctor_machine, "backends", dict)
    monkeypatch.setattr(doctor_machine, "likely_dtype", lambda device: "bfloat16")
    monkeypatch.setattr(doctor_machine, "present_memory", lambda device: present)
    for reason in (None, "it is no Hopper"):
        monkeypatch.setattr(doctor_machine, "blocks_refusal", lambda device, told=reason: told)
        health = Health.OK if reason is None else Health.NOTE
        assert _products("cuda") == [
            ("FP8 products: fp8_rowwise", Health.OK, ""),
            ("FP8 products in blocks: fp8_block, fp8_mixed", health, reason or ""),
        ]


def test_a_model_that_kernels_do_not_serve_is_told() -> None:
    model = replace(preset("h3_33b").model, attention_head_dim=96)
    found = {each.name: each for each in backend_findings(torch.device("cpu"), model)}
    assert "96 of them rotary" in found["fused kernels"].detail


@pytest.mark.parametrize(
    ("no_blocks", "expected"),
    [
        (None, r"linears fp8_mixed \(bf16 needs \d\d\.\d GiB\), modulation weights given up"),
        ("no Hopper", r"linears fp8_rowwise \(bf16 needs \d\d\.\d GiB, no fp8_mixed: no Hopper\),"),
    ],
)
def test_linears_that_were_chosen_for_want_of_memory_say_why(
    no_blocks: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = Present(device_gib=68.0, is_cuda=True, has_fp8=True, no_fp8_blocks=no_blocks)
    monkeypatch.setattr("stream.doctor.present_memory", lambda device, **shares: present)
    monkeypatch.setattr("stream.plan_world.likely_dtype", lambda device: "bfloat16")
    report = _examine(Question(preset="h3_33b", weights="random", size="832x480"))
    assert re.search(expected, _found(report, "memory")["832x480"].detail)
    (planned,) = report.as_json()["memory"]
    assert planned["linear_reason"].startswith("bf16 needs")


def test_a_bare_machine_is_told_all_that_the_large_model_lacks() -> None:
    report = _examine(Question(preset="h3_33b"))
    missing = {(each.section, each.name) for each in report.missing}
    needed = {("files", each.role) for each in sources_of("h3_33b") if each.is_needed}
    sizes = {("memory", "1344x768"), ("memory", "832x480")}
    assert missing >= needed | sizes
    files = _found(report, "files")
    assert "MiniMaxAI/MiniMax-H3" in files[Role.TRANSFORMER].detail
    assert "SolarWM-H3-33B" in files[Role.ADAPTER].detail
    assert files[Role.ADAPTER].health is Health.NOTE
    assert "StreamRender-H3" in files[Role.DECODER].detail
    assert "needs about" in _found(report, "memory")["832x480"].detail
    assert _found(report, "device")["GPU"].health is Health.NOTE
    assert "territories" in report.licence
    assert "Read it" in report.licence


@pytest.mark.parametrize(("preset", "health"), [("mini", Health.NOTE), ("h3_33b", Health.MISSING)])
def test_a_library_counts_for_the_preset_that_needs_it(
    preset: str, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "transformers":
            raise PackageNotFoundError
        return "1.0"

    monkeypatch.setattr("stream.doctor_machine.version", version)
    versions = _found(_examine(Question(preset=preset)), "versions")
    assert versions["transformers"].health is health
    assert ("worldstream[h3]" in versions["transformers"].detail) == (health is Health.MISSING)


def test_what_lies_in_a_folder_is_not_missing(tmp_path: Path) -> None:
    write_folder(tmp_path / "vit", tensors_in(random_vit(), VitLayout.CAUSAL))
    save_file({"other": torch.zeros(1)}, tmp_path / "b.safetensors")
    report = _examine(Question(preset="h3_33b", weights=str(tmp_path)))
    files = [each for each in report.findings if each.section == "files"]
    (decoder,) = (each for each in files if each.name == Role.DECODER)
    assert (decoder.health, decoder.detail) == (Health.OK, "vit: causal H3 ViT, hybrid_a3")
    assert [each.detail for each in files if each.name == "unknown"] == ["b.safetensors"]
    assert Role.TRANSFORMER in {each.name for each in files if each.health is Health.MISSING}


def _write_transformer(folder: Path, shards: int) -> None:
    """Weights of the tiny model as a release has them."""
    config = preset("tiny").model
    write_sharded(folder, original_state(tiny_model(config), config), "model", shards)


def test_a_network_that_is_not_whole_is_missing(tmp_path: Path) -> None:
    tensors = tensors_in(random_vit(), VitLayout.CAUSAL)
    del tensors["proj_out.bias"]
    write_folder(tmp_path / "vit", tensors)
    _write_transformer(tmp_path / "dit", 3)
    max((tmp_path / "dit").glob("*.safetensors")).unlink()
    found = _found(_examine(Question(preset="tiny", weights=str(tmp_path))), "files")
    assert found[Role.DECODER].health is found[Role.TRANSFORMER].health is Health.MISSING
    assert "lacks proj_out.bias" in found[Role.DECODER].detail
    assert "model-00003-of-00003.safetensors is missing" in found[Role.TRANSFORMER].detail


def test_two_networks_that_would_serve_alike_are_a_finding(tmp_path: Path) -> None:
    for name in ("transformer", "transformer_ref"):
        _write_transformer(tmp_path / name, 1)
    found = _found(_examine(Question(preset="tiny", weights=str(tmp_path))), "files")
    assert found[Role.TRANSFORMER].health is Health.MISSING
    assert "more than one transformer: transformer, transf" in found[Role.TRANSFORMER].detail


def test_a_decoder_that_waits_for_the_next_chunk_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "vae", tensors_in(random_vit(), VitLayout.ORIGINAL))
    found = _found(_examine(Question(preset="tiny", weights=str(tmp_path))), "files")
    assert "official, which waits for later latents: to play" in found[Role.DECODER].detail


def test_pickles_are_told_and_not_opened(tmp_path: Path) -> None:
    for name in ("decoder/model.bin", "adapter/ema.pt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"\x80\x04not even one")
    report = _examine(Question(preset="h3_33b", weights=str(tmp_path)))
    told = [each.detail for each in report.findings if each.name == "pickle"]
    assert [each.partition(":")[0] for each in told] == ["adapter/ema.pt", "decoder/model.bin"]
    assert ["no adapter" in each for each in told] == [True, False]


@pytest.mark.parametrize("content", [None, b"\0" * 9], ids=["no-folder", "damaged"])
def test_weights_that_cannot_be_read_are_a_finding(tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "weights"
    if content is not None:
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(content)
    report = _examine(Question(preset="h3_33b", weights=str(folder)))
    assert str(folder) in _found(report, "files")["weights"].detail
    assert not report.is_ready


def test_a_device_that_is_not_there_is_a_finding() -> None:
    report = _examine(Question(preset="mini", device="cuda:7"))
    chosen = _found(report, "device")["chosen"]
    assert chosen.health is Health.MISSING
    assert "cuda:7" in chosen.detail


def test_ports_that_are_taken_are_found() -> None:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp.bind(("127.0.0.1", 0))
        port, taken = tcp.getsockname()[1], udp.getsockname()[1]
        report = _examine(Question(preset="mini"), port=port, udp_ports=f"{taken}-{taken}")
    network = _found(report, "network")
    assert network["port"].health is Health.MISSING
    assert "--port" in network["port"].detail
    assert network["UDP for media"].health is Health.NOTE
    assert "WebSocket" in network["UDP for media"].detail


def test_memory_of_a_large_device_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stream.doctor.present_memory", lambda device, **shares: Present(device_gib=139.0)
    )
    report = _examine(Question(preset="h3_33b", size="832x480"))
    (size,) = report.sizes
    assert size.plan is not None
    assert {"blocks", "window", "decoder", "decoder, state", "picture encoder"} <= {
        part.name for part in size.plan.parts
    }
    assert _found(report, "memory")["832x480"].health is Health.OK


def test_json_says_the_same_and_the_exit_code_tells(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--preset", "h3_33b", "--json", "--port", str(_free_port())])
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert found["is_ready"] is False
    assert any(each.startswith("files: transformer:") for each in found["missing"])
    assert [each["geometry"] for each in found["memory"]] == ["1344x768", "832x480"]
    assert {each["health"] for each in found["findings"]} <= {"ok", "note", "missing"}


def test_tables_end_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--preset", "mini", "--port", str(_free_port())])
    out = capsys.readouterr().out
    assert code == 0
    assert "Memory at 256x160" in out
    assert out.rstrip().endswith("mini can be served here")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Weights of the tiny model, and an adapter whose updates are far below a bfloat16 step."""
    config = tiny_config()
    model = unpacked_model(config)
    weights = tmp_path / "weights"
    save_model(weights, model, config, text_encoder=WordEncoder.of(config), int8=False)
    factors = random_factors(model, adapted_names(config), size=1e-4)
    write_adapter(weights / "adapter" / "adapter_model.safetensors", peft_keys(factors))
    return weights


def test_what_a_merge_would_lose_of_an_adapter_is_told(adapter: Path) -> None:
    found = _found(_examine(Question(preset="tiny", weights=str(adapter))), "adapter")
    assert found["file"].health is Health.OK
    lost = found["lost by a merge"]
    assert lost.health is Health.NOTE
    assert re.search(r"% in \S+, whose update comes out \d+% off: keep it apart: --l", lost.detail)
    assert float(lost.detail.partition("%")[0]) > 30.0


def test_an_adapter_alone_is_read_without_weights(adapter: Path) -> None:
    file = adapter / "adapter" / "adapter_model.safetensors"
    found = _found(_examine(Question(preset="tiny", lora=str(file))), "adapter")
    assert found["file"].health is Health.OK
    assert "--weights" in found["lost by a merge"].detail


def test_an_adapter_of_another_model_is_a_finding(adapter: Path) -> None:
    file = adapter / "adapter" / "adapter_model.safetensors"
    report = _examine(Question(preset="mini", lora=str(file)))
    assert _found(report, "adapter")["file"].health is Health.MISSING
    assert str(file) in _found(report, "adapter")["file"].detail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "huge"], "preset is 'huge'; allowed: mini"),
        (["--preset", "mini", "--size", "9x9"], "size: '9x9'; allowed for mini: 256x160"),
        (["--port", "0"], "port"),
    ],
)
def test_bad_questions_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err
