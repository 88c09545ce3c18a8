import pytest
import torch

from graphs.compile import CompileMode, compile_module

pytestmark = pytest.mark.cpu


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def test_eager_is_the_function_itself() -> None:
    assert compile_module(_twice, CompileMode.EAGER) is _twice


def test_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match=r"'fastest'.*eager, blocks, tuned"):
        compile_module(_twice, "fastest")  # type: ignore[arg-type]


def test_blocks_mode_traces_whole_graphs_of_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def note(fn: object, **options: object) -> object:
        asked.update(options)
        return fn

    monkeypatch.setattr(torch, "compile", note)
    compile_module(_twice)
    assert asked == {"dynamic": False, "fullgraph": True, "mode": None}


def test_graph_break_is_refused() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    compiled = compile_module(breaks)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(2))
