"""Copies to and from a device that nothing else waits for."""

from __future__ import annotations

import pytest
import torch

from engine.device import fetch, send

CPU = torch.device("cpu")


@pytest.mark.cpu
def test_on_a_cpu_nothing_is_copied():
    value = torch.randn(3)
    assert fetch(value)() is value
    assert send(value, CPU) is value


@pytest.mark.gpu
def test_what_is_fetched_is_what_was_there_when_it_was_asked_for():
    value = torch.randn(1 << 20)
    on_gpu = send(value, torch.device("cuda"))
    take = fetch(on_gpu)
    on_gpu.zero_()
    assert torch.equal(take(), value)


@pytest.mark.gpu
def test_what_is_fetched_waits_for_nothing_that_is_launched_later():
    value = torch.ones(8, device="cuda")
    take, later = fetch(value), torch.cuda.Event()
    torch.cuda._sleep(1 << 30)
    later.record()
    take()
    assert not later.query()
