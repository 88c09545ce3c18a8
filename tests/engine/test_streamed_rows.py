"""Rows that come to a device layer by layer: which ones are read, and where they lie."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from engine import streamed_rows
from engine.streamed_rows import HostBytes, StreamedRows

pytestmark = pytest.mark.cpu

ROWS, KEPT, WIDTH = 18, 6, 5


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    # A weight has 120 bytes, a layer 144: pieces end inside weights, between tensors and layers.
    monkeypatch.setattr(streamed_rows, "PIECE_BYTES", 100)


def _streamed(layers):
    linears = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS)) for _ in range(layers)]
    stream = StreamedRows(layers, KEPT, linears[0][0])
    for layer, (weight, bias) in enumerate(linears):
        stream.keep(layer, weight.clone(), bias.clone())
    stream.open()
    return linears, stream


def _expected(linear, x):
    return F.linear(x, *linear)[:, -KEPT:]


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_products_are_those_of_the_whole_linears(layers):
    linears, stream = _streamed(layers)
    for _ in range(2):
        x = torch.randn(2, WIDTH)
        for layer, linear in enumerate(linears):
            assert torch.equal(stream.product(layer, x), _expected(linear, x)), layer


def test_layers_may_be_asked_for_in_any_order():
    linears, stream = _streamed(4)
    x = torch.randn(1, WIDTH)
    for layer in (2, 2, 3, 0, 1, 0, 3):
        assert torch.equal(stream.product(layer, x), _expected(linears[layer], x))


def test_a_layer_is_brought_once_in_the_round(monkeypatch):
    _, stream = _streamed(3)
    brought = []
    original = StreamedRows._move

    def watched(self, layer, tensors, *, to_host):
        brought.append(layer)
        original(self, layer, tensors, to_host=to_host)

    monkeypatch.setattr(StreamedRows, "_move", watched)
    for layer in [*range(3)] * 2:
        stream.product(layer, torch.randn(1, WIDTH))
    # One ahead; the first of a round came at the end of the one before.
    assert brought == [1, 2, 0] * 2


def test_a_product_does_not_hold_the_place_of_its_rows():
    _, stream = _streamed(2)
    made = stream.product(0, torch.randn(1, WIDTH))
    assert made.untyped_storage().nbytes() == made.nbytes


def test_weights_are_aligned_as_memory_of_their_own():
    _, stream = _streamed(2)
    starts = [weight.data_ptr() for weight in stream._weights_WC]
    assert (starts[1] - starts[0]) % streamed_rows.ALIGNMENT == 0
    assert starts[1] - starts[0] >= KEPT * WIDTH * 4


def test_where_nothing_is_pinned_the_rest_is_ordinary_memory(monkeypatch, caplog):
    original, granted = torch.empty, [True, False, False]

    def empty(*sizes, pin_memory=False, **options):
        if pin_memory and not granted.pop(0):
            raise RuntimeError("CUDA error: out of memory\nmore words")
        return original(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    host = HostBytes(350, pins=True)
    with caplog.at_level(logging.WARNING, logger="engine.streamed_rows"):
        spans = list(host.spans(0, 350))
    assert [len(span) for span in spans] == [100, 100, 100, 50]
    assert (host.pinned_bytes, granted) == (100, [False])
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "CUDA error: out of memory"
    ]
