"""Checks of the fused form where Triton interprets, for a process that was started in that mode.

    TRITON_INTERPRET=1 python -m tests.vae_stream.causal_vit.interpreted

prints what differs, as json by name of the check; nothing where all is well.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from graphs.compile import CompileMode
from graphs.runner import GraphRunner, RunnerLimits
from tests.engine.kernels.interpreter import mend_interpreter
from tests.graphs.tape import TapeCapture
from tests.vae_stream import row_cases
from tests.vae_stream.causal_vit import attention_cases
from tests.vae_stream.h3_tiny import random_vit
from vae_stream.causal_vit import CausalConfig, CausalVitDecoder, Mode
from vae_stream.causal_vit.fused import FusedCalls
from vae_stream.causal_vit.modes import kinds
from vae_stream.vit import VitConfig
from vae_stream.window_fused import FusedWindows

_VIT = random_vit(VitConfig(layer_count=2, head_count=1, ffn_width=32))
_CAUSAL = CausalConfig(window=4)
_HEIGHT, _WIDTH, _LATENTS = 2, 3, 6


def _decoder(mode: Mode) -> CausalVitDecoder:
    return CausalVitDecoder(
        _VIT, height_px=16 * _HEIGHT, width_px=16 * _WIDTH, mode=mode, causal=_CAUSAL
    )


def _fused(runner: GraphRunner | None) -> FusedCalls:
    return FusedCalls(
        _VIT, _CAUSAL, height=_HEIGHT, width=_WIDTH, compile_mode=CompileMode.EAGER, runner=runner
    )


def _decode(decoder: CausalVitDecoder, first: int) -> tuple[Tensor, Tensor]:
    """Return pictures of a stream, and the keys that it leaves."""
    z_ZBFHW = torch.randn(
        _LATENTS, 1, 24, _HEIGHT, _WIDTH, generator=torch.Generator().manual_seed(1)
    )
    state = decoder.new_state(first)
    chunks = [chunk for z in z_ZBFHW for chunk in decoder.push(state, z)]
    return torch.cat([chunk.frames_THWC for chunk in chunks]), state.snapshot().tensors["keys"]


def _calls(mode: Mode) -> list[str]:
    """The fused form against the plain one."""
    plain, fused = _decoder(mode), _decoder(mode)
    fused._calls = _fused(None)
    frames, keys = _decode(plain, 5)
    fused_frames, fused_keys = _decode(fused, 5)
    far = (fused_frames.int() - frames.int()).abs()
    wrong = []
    if far.max() > 1 or (far > 0).float().mean() > 1e-3:
        wrong.append(f"frames {int(far.max())} levels, {float((far > 0).float().mean()):.1e}")
    if not torch.allclose(fused_keys, keys, atol=1e-5, rtol=0):
        wrong.append(f"keys {float((fused_keys - keys).abs().max()):.1e}")
    return wrong


def _recorded(mode: Mode) -> list[str]:
    """Recorded calls against fused ones: the same bits, in streams of any time."""
    fused, recorded = _decoder(mode), _decoder(mode)
    tape = TapeCapture()
    runner = GraphRunner(tape, RunnerLimits(captures_per_turn=1, is_strict=True))
    fused._calls, recorded._calls = _fused(None), _fused(runner)
    wrong = []
    for first in (0, 1000):  # the second stream takes the memory and graphs of the first
        for got, expected in zip(_decode(recorded, first), _decode(fused, first), strict=True):
            if not torch.equal(got, expected):
                wrong.append(f"stream at {first}: {float((got - expected).abs().max())}")
    if runner.counts.captures != len(kinds(mode)):
        wrong.append(f"{runner.counts.captures} graphs")
    if runner.counts.plain != len(kinds(mode)):
        wrong.append(f"{runner.counts.plain} plain calls")
    return wrong


def _windows() -> list[str]:
    """Whole windows of two tiles, which are placed by the same operator."""
    z_BCTHW = torch.randn(2, 24, 2, 2, 3, generator=torch.Generator().manual_seed(2))
    far = (FusedWindows(_VIT, CompileMode.EAGER)(z_BCTHW) - _VIT(z_BCTHW)).abs().max()
    return [] if far < 1e-5 else [f"frames {float(far):.1e}"]


@torch.no_grad()
def main() -> None:
    """Run all checks."""
    mend_interpreter()
    found = {
        f"attention {case.name}": attention_cases.complaints(case, torch.device("cpu"))
        for case in attention_cases.CASES
        if not case.is_full
    }
    found |= {
        f"rows {case.name}": row_cases.complaints(case, torch.device("cpu"))
        for case in row_cases.SMALL
    }
    found |= {f"calls {mode}": _calls(mode) for mode in (Mode.PAIR, Mode.SINGLE_A1)}
    found["windows"] = _windows()
    found["recorded"] = _recorded(Mode.PAIR)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
