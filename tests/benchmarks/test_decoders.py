"""The command that measures the causal ViT decoder, at its smallest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decoders
from benchmarks.decoders import Bench, Row, call_flops, main
from benchmarks.windowed import random_vit
from engine.config import Geometry
from vae_stream.causal_vit import Form, Mode
from vae_stream.vit import VitConfig

pytestmark = pytest.mark.cpu

TINY = VitConfig(layer_count=2, head_count=2, ffn_width=96)


def test_it_measures_a_row_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decoders.jsonl"
    given = ["--tiny", "--device", "cpu", "--geometry", "64x32", "--calls", "5"]

    assert main([*given, "--record", str(path)]) == 0

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["row"] for row in rows] == ["plain, one latent", "plain, pair"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    for row in rows:
        assert row["call"]["n"] == row["paced"]["n"] == 1
        assert row["paced_p95"] == row["paced"]["p50"] > 0
        assert row["psnr_db"] > 40
        assert row["state_mib"] > 0


class Clock:
    """Time that passes while somebody sleeps, in seconds; calls take none."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, span_s: float) -> None:
        self.now_s += span_s
        self.slept_s.append(span_s)


@pytest.mark.parametrize("mode", [Mode.SINGLE_A1, Mode.PAIR])
def test_paced_calls_come_when_their_latents_are_due(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Geometry(height_px=32, width_px=64)
    bench = Bench(random_vit(TINY, torch.device("cpu")), size, calls=1, dropped=0)
    decoder = bench._decoder(Row(mode=mode, form=Form.PLAIN))
    clock = Clock()
    monkeypatch.setattr(decoders, "time", clock)
    assert len(bench._spans_ms(decoder, 3, dropped=1, latent_s=0.25)) == 3
    latents = 1 + decoder.lookahead_latents
    assert clock.slept_s == [0.0, *[pytest.approx(0.25 * latents)] * 3]
    decoder.close()


def test_a_row_that_would_begin_too_late_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--device", "cpu", "--geometry", "64x32", "--limit-s", "0"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == []
    assert "64x32 plain, pair: left out" in printed.err
    assert "error: nothing was measured: limit_s is 0; allowed: more" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--geometry", "large"], "error: geometry: 'large'"),
        (["--forms", "plain,fast"], "error: forms: 'fast'; allowed on cpu: all, plain\n"),
        (["--forms", "recorded"], "error: forms: 'recorded'; allowed on cpu: all, plain\n"),
    ],
)
def test_what_cannot_be_measured_is_bad_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_work_of_a_pair_at_the_released_size() -> None:
    """The known 28.5 TFLOP of a pair at 1344x768 and 11.0 at 832x480."""
    config = VitConfig(layer_count=24)
    for tokens, tera in ((48 * 84, 28.5), (30 * 52, 11.0)):
        flops = call_flops(config, tokens, latents=2, seen=6, window=16)
        assert flops / 1e12 == pytest.approx(tera, rel=0.01)
