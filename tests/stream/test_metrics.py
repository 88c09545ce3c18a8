"""Metrics: each is there, none of two services meet."""

import pytest

from stream.metrics import Metrics

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
