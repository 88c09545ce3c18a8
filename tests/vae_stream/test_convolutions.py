"""Convolutions that are told what cuDNN may do, thread by thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.vae_stream.convolutions_seen import ConvolutionsSeen, switches
from vae_stream.convolutions import convolutions_by_rule, exact_convolutions

pytestmark = pytest.mark.cpu

CUDA = torch.device("cuda")
X = torch.randn(2, 8, 6, 10, generator=torch.Generator().manual_seed(0))
CALLS: dict[str, Callable[[], Tensor]] = {
    "padded": lambda: nn.Conv2d(8, 12, 3, padding=1)(X),
    "strided": lambda: nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)(X),
    "groups": lambda: nn.Conv2d(8, 12, (3, 1), padding=(1, 0), dilation=(2, 1), groups=4)(X),
    "function": lambda: F.conv2d(X, torch.ones(4, 8, 3, 3), None, padding=1),
    "3d": lambda: nn.Conv3d(8, 12, (1, 3, 3), stride=(1, 2, 2))(X[None].transpose(1, 2)),
}


@pytest.fixture(autouse=True)
def _switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which cuDNN measures and rounds."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    # Tests run with deterministic algorithms, so that unwritten memory is found.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)


def _made(call: Callable[[], Tensor]) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return call()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (lambda: convolutions_by_rule(CUDA), {"benchmark": False, "allow_tf32": True}),
        (exact_convolutions, {"benchmark": True, "allow_tf32": False}),
    ],
    ids=["by rule", "exact"],
)
def test_a_convolution_is_told_and_no_switch_is_touched(
    settings: Callable[[], AbstractContextManager[object]], told: dict[str, bool], name: str
) -> None:
    before = switches()
    with ConvolutionsSeen() as seen, settings():
        made = _made(CALLS[name])
    (call,) = seen.calls
    assert call.told == before | told
    assert call.switches == before == switches()
    assert torch.equal(made, _made(CALLS[name]))


def test_a_deterministic_process_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with ConvolutionsSeen() as seen, exact_convolutions():
        _made(CALLS["padded"])
    assert seen.calls[0].told is not None
    assert seen.calls[0].told["deterministic"]


def test_other_threads_go_by_the_switches() -> None:
    seen: list[ConvolutionsSeen] = []

    def convolve() -> None:
        with ConvolutionsSeen() as theirs:
            _made(CALLS["padded"])
        seen.append(theirs)

    with exact_convolutions():
        thread = threading.Thread(target=convolve)
        thread.start()
        thread.join()
    assert [call.told for call in seen[0].calls] == [None]


def test_what_comes_after_goes_by_the_switches_again() -> None:
    with pytest.raises(ZeroDivisionError), exact_convolutions():
        _ = 1 / 0
    with ConvolutionsSeen() as seen:
        _made(CALLS["padded"])
    assert seen.calls[0].told is None


def test_a_cpu_has_no_rules() -> None:
    with ConvolutionsSeen() as seen, convolutions_by_rule(torch.device("cpu")):
        _made(CALLS["padded"])
    assert seen.calls[0].told is None
