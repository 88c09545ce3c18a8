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


def test_the_compiler_reports_operators_without_their_arguments() -> None:
    # torch 2.11 writes them out even where nobody reads that, which took minutes.
    class Expression:
        def __str__(self) -> str:
            raise AssertionError("was written out")

    compile_module(_twice)
    found = torch._inductor.exc.OperatorIssue.operator_str(
        "op", [Expression()], {"x": Expression()}
    )
    assert found.strip() == "target: op"
