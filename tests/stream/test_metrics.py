"""Metrics: each is there, none of two services meet."""

from dataclasses import replace

import pytest

from stream.metrics import Metrics, WorkerFigures
from stream.worker_messages import GraphUse, Ready

pytestmark = pytest.mark.cpu


def test_values_come_out_as_prometheus_text() -> None:
    metrics = Metrics()
    metrics.photon_s.labels(transport="webrtc").observe(0.5)
    metrics.errors.labels(code="BAD_MESSAGE").inc()
    text = metrics.text().decode()
    assert 'worldstream_action_to_photon_seconds_bucket{le="0.5",transport="webrtc"} 1.0' in text
    assert 'worldstream_errors_total{code="BAD_MESSAGE"} 1.0' in text


def test_two_services_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.epochs.inc()
    assert "worldstream_epoch_changes_total 0.0" in second.text().decode()


READY = Ready(
    device="cuda:0", dtype="bfloat16", model_hash="x", width_px=832, height_px=480, fps=24.0,
    chunk_ms=900.0, linear="/home/somebody/own.json", attention="audio sdpa, video cudnn",
)  # fmt: skip
USE = GraphUse(
    part="decoder", replayed_count=9, recorded_count=2, plain_count=3, unlisted_count=4,
    refused_count=5, evicted_count=6, entry_count=7, held_bytes=2**20,
)  # fmt: skip


def test_workers_are_told_apart() -> None:
    metrics = Metrics()
    metrics.by_worker.workers = (
        WorkerFigures(info=None, graphs=()),
        WorkerFigures(info=READY, graphs=(USE,)),
    )
    lines = metrics.text().decode().splitlines()
    own = 'part="decoder",worker="1"'
    passes = {"replayed": 9, "recorded": 2, "plain": 3, "unlisted": 4, "refused": 5}
    for outcome, count in passes.items():
        labels = f'outcome="{outcome}",{own}'
        assert f"worldstream_graph_passes_total{{{labels}}} {count}.0" in lines
    assert f"worldstream_graph_evictions_total{{{own}}} 6.0" in lines
    assert f"worldstream_graph_recordings{{{own}}} 7.0" in lines
    assert f"worldstream_graph_bytes{{{own}}} 1.048576e+06" in lines
    assert not [line for line in lines if 'worker="0"' in line]


def test_how_a_worker_runs_names_no_place_on_disk() -> None:
    metrics = Metrics()
    metrics.by_worker.workers = (WorkerFigures(info=READY, graphs=()),)
    (line,) = [each for each in metrics.text().decode().splitlines() if "worker_info{" in each]
    assert 'linear="own.json"' in line
    assert 'attention="audio sdpa, video cudnn"' in line
    assert "somebody" not in line


def test_a_worker_that_starts_again_counts_from_zero() -> None:
    metrics = Metrics()
    for count in (9, 1):
        use = replace(USE, replayed_count=count)
        metrics.by_worker.workers = (WorkerFigures(info=READY, graphs=(use,)),)
        assert (
            f'outcome="replayed",part="decoder",worker="0"}} {count}.0' in metrics.text().decode()
        )
