"""Losses of products, layer by layer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.sqnr import main, watched
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.reference import quantize_rows
from engine.quant import Fp8Linear, sqnr_db
from tests.tiny import random_action, random_anchor, tiny_config
from tests.tolerances import FP8_LINEAR_SQNR_DB

pytestmark = pytest.mark.cpu


@pytest.fixture
def scheme(tmp_path: Path) -> str:
    path = tmp_path / "scheme.json"
    path.write_text(json.dumps([{"format": "fp8_rowwise", "blocks": [1, 1], "linears": ["down"]}]))
    return str(path)


def test_a_layer_that_is_watched_shows_what_eight_bits_would_make_of_its_rows(scheme: str) -> None:
    config = EngineConfig(device="cpu", dtype="float32")
    engine = Engine.from_random(tiny_config(), config)
    model = engine.core.model
    rollout = engine.new_rollout("night", anchor_BCTHW=random_anchor(engine.model_config))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    linear = model.block(1).ff.net[2]
    handle = linear.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    with watched(model, [scheme]) as found:
        engine.step(rollout, random_action(0))
    watched_count = len(seen)
    engine.step(rollout, random_action(1))
    handle.remove()

    powers = found[scheme]
    assert list(powers) == [(1, "down")]
    signal, error = powers[1, "down"].tolist()
    codes, scale = quantize_rows(linear.state_dict()["weight"])
    eight = Fp8Linear(codes, scale[:, 0].contiguous())
    products = [(y, eight(x)) for x, y in seen[:watched_count]]
    true, made = (torch.cat([pair[i].flatten() for pair in products]) for i in (0, 1))
    found_db = 10 * torch.log10(torch.tensor(signal / error))
    assert float(found_db) == pytest.approx(sqnr_db(true, made), abs=1e-3)


def test_the_command_tells_and_keeps_a_layer_a_number(
    tmp_path: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sqnr.jsonl"
    arguments = ["--preset", "tiny", "--device", "cpu", "--dtype", "float32", "--linear", scheme]

    assert main([*arguments, "--record", str(path)]) == 0

    out, err = capsys.readouterr()
    record = json.loads(path.read_text())
    assert json.loads(out) == record
    assert list(record["layers"]) == ["blocks.1.down"]
    assert record["lowest_db"] == record["layers"]["blocks.1.down"] >= FP8_LINEAR_SQNR_DB
    assert "least" in err


def test_schemes_are_compared_on_one_walk(
    tmp_path: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other, path = tmp_path / "other.json", tmp_path / "sqnr.jsonl"
    other.write_text(json.dumps([{"format": "fp8_rowwise", "blocks": [1, 2]}]))
    arguments = ["--preset", "tiny", "--device", "cpu", "--dtype", "float32", "--record", str(path)]

    assert main([*arguments, "--linear", f"{scheme},{other}"]) == 0

    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert [first, second] == list(map(json.loads, path.read_text().splitlines()))
    assert (first["linear"], second["linear"]) == (scheme, str(other))
    assert second["layers"]["blocks.1.down"] == first["layers"]["blocks.1.down"]
    assert re.search(rf"^gain +- +- +- +\+0\.00  dB, {other} over {scheme}$", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--linear", "bf16"], "a scheme that names linears of theirs"),
        (["--preset", "tiny"], "allowed for tiny with its 3 blocks"),
        (["--linear", "fp8_block,fp4"], "fp4: [Errno 2]"),
        (["--chunks", "0"], "chunks: 0; allowed: 1 to 100"),
        (["--geometry", "10x"], "geometry: '10x'"),
    ],
)
def test_wrong_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
