"""Whole rollouts by fused kernels on a GPU: eager, compiled, from graphs; 16 bits and 8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.quant import Fp8Linear
from engine.schemes import SCHEMES, Fp8Block, Fp8Rowwise, Rule
from tests.tiny import block_config, random_action, random_anchor
from tests.tolerances import FUSED_ROLLOUT_RATIO

pytestmark = [
    pytest.mark.gpu,
    # The compiler gives advice about settings that would change the numbers.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

# Nine chunks: the window slides three times, so keys of the past are rotated from their raw form.
CHUNKS = 9


def _roll(**changes: object) -> torch.Tensor:
    config = block_config()
    plain = {"device": "cuda", "dtype": "bfloat16", "compile": "off", "graphs": False}
    engine = Engine.from_random(config, EngineConfig(**plain | {"attention": "sdpa"} | changes))
    rollout = engine.new_rollout("snow", anchor_BCTHW=random_anchor(config))
    made = [engine.step(rollout, random_action(i)).latents_BCTHW.cpu() for i in range(CHUNKS)]
    engine.close()
    return torch.cat(made, dim=2)


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    made = _roll(dtype="float32")
    torch.backends.cuda.matmul.allow_tf32 = before
    return made


@pytest.fixture(scope="module")
def schemes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("schemes")
    names = {"bf16": "bf16"}
    for name in ("fp8_rowwise", "fp8_block", "fp8_mixed"):
        path = folder / f"{name}.json"
        rules = [
            {
                "format": "fp8_block" if rule.in_blocks else "fp8_rowwise",
                "blocks": [0, 2],
                "linears": rule.linears,
            }
            for rule in SCHEMES[name]
        ]
        path.write_text(json.dumps(rules))
        names[name] = str(path)
    return names


FORMS = {
    "eager": {"compile": "off", "graphs": False},
    "compiled": {"compile": "full", "graphs": False},
    "graphs": {"compile": "full", "graphs": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", ["eager", "fast"])
@pytest.mark.parametrize("linears", ["bf16", "fp8_rowwise", "fp8_block", "fp8_mixed"])
def test_fused_rollouts_are_as_near_to_fp32_as_plain_ones(exact, schemes, linears, kernels, form):
    linear = {"linear": schemes[linears]}
    plain_error = (_roll(**linear) - exact).norm()
    made = _roll(kernels=kernels, **linear, **FORMS[form])
    assert plain_error > 0
    assert (made - exact).norm() <= FUSED_ROLLOUT_RATIO * plain_error


@pytest.mark.parametrize("linears", ["fp8_rowwise", "fp8_block", "fp8_mixed"])
def test_graphs_replay_fused_passes_bit_for_bit(schemes, linears):
    changes = {"kernels": "fast", "linear": schemes[linears]}
    assert torch.equal(_roll(**changes, **FORMS["compiled"]), _roll(**changes, **FORMS["graphs"]))


@torch.no_grad()
@pytest.mark.parametrize("rule", [Fp8Rowwise(), Fp8Block()], ids=["rows", "blocks"])
def test_products_on_a_side_stream_and_from_a_graph_are_the_same_bits(rule: Rule):
    # Row-wise products of some builds ran on the default stream whatever the current one was.
    linear = Fp8Linear.of(torch.randn(256, 384, device="cuda"), rule)
    x = torch.randn(1, 1950, 384, device="cuda", dtype=torch.bfloat16)
    expected = linear(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = linear(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = linear(x)
    x.copy_(x.flip(1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(aside, expected)
    assert torch.equal(replayed, expected.flip(1))
