"""Fused operators between two attentions: what compilers make of them, borders, the choice.

What they compute is compared in `causal_vit.interpreted` on a CPU, and here on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.compile import CompileMode
from tests.vae_stream import row_cases
from tests.vae_stream.row_cases import RowCase
from vae_stream import kernel_contract, row_ops, vit_rows
from vae_stream.row_ops import GATED_LEAST_ROWS, PLAIN_ROWS, RowForms, add_norm, add_two_norm, gated

ROWS, WIDTH = 9, 128
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fp32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def added(rows: int = ROWS, width: int = WIDTH) -> dict[str, Any]:
    return {
        "x_RD": fp32(rows, width), "y_RD": bf16(rows, width), "bias_D": bf16(width),
        "scale_D": fp32(width), "weight_D": fp32(width), "eps": 1e-5,
    }  # fmt: skip


def added_twice(rows: int = ROWS, width: int = WIDTH) -> dict[str, Any]:
    one = added(rows, width)
    y, bias, scale = one["y_RD"], one["bias_D"], one["scale_D"]
    return {
        "x_RD": one["x_RD"], "y_RD": y, "y_bias_D": bias, "y_scale_D": scale, "z_RD": y,
        "z_bias_D": bias, "z_scale_D": scale, "weight_D": one["weight_D"], "eps": 1e-5,
    }  # fmt: skip


def weights(rows: int = ROWS, width: int = WIDTH, gate: int = 512) -> dict[str, Any]:
    return {"n_RD": bf16(rows, width), "weight_GD": bf16(gate, width), "bias_G": bf16(gate)}


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "given"), [("add_norm", added), ("add_two_norm", added_twice)])
def test_row_kernels_compile_for_an_h200(name: str, given: Callable[..., dict[str, Any]]) -> None:
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    kernels = pytest.importorskip("vae_stream.row_ops_triton")

    (kernel,) = sm90.compiled_launches(lambda: getattr(kernels, name)(*given(17, 2048).values()))

    # Sixteen bytes at a time, and one sum: the row stays in registers between the two.
    loads = [line for line in kernel.asm["ptx"].splitlines() if "ld.global" in line]
    assert loads
    assert all(".v4.b32" in line for line in loads)
    assert len(sm90.summed(kernel)) == 1


@pytest.mark.cpu
def test_the_gated_product_compiles_for_an_h200() -> None:
    sm90 = pytest.importorskip("tests.engine.kernels.sm90")
    kernels = pytest.importorskip("vae_stream.gated_gluon")

    (kernel,) = sm90.compiled_launches(
        lambda: kernels.gated(*weights(150, 2048, 16384).values(), programs=132)
    )

    # Each of two groups multiplies on, while the product before is awaited.
    assert kernel.asm["ptx"].count("wgmma.wait_group.sync.aligned 1;") == 2
    assert "m64n256k16" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.cpu
def test_a_compiler_sees_through() -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(given: dict[str, Any]) -> list[Any]:
            values = given.values()
            return [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in values]

        made = [
            add_norm(*fake(added())),
            *add_two_norm(*fake(added_twice())),
            gated(*fake(weights())),
        ]
    assert [tuple(each.shape) for each in made] == [(9, 128), (9, 128), (9, 128), (9, 256)]
    one, two = torch.bfloat16, torch.float32
    assert [each.dtype for each in made] == [one, two, one, one]


BAD = {
    "x": (add_norm, added() | {"x_RD": bf16(9, 128)}, "add_norm: x is torch.bfloat16; allowed"),
    "product": (add_norm, added() | {"y_RD": bf16(8, 128)}, "add_norm: product has shape"),
    "scale": (
        add_two_norm, added_twice() | {"z_scale_D": fp32(64)}, "add_two_norm: scale has shape",
    ),
    "weight": (
        add_two_norm, added_twice() | {"weight_D": fp32(64)}, "add_two_norm: x has shape",
    ),
    "dense": (
        gated, weights() | {"n_RD": bf16(128, 9).T}, r"gated: n has strides \(1, 9\); allowed",
    ),
    "bias": (gated, weights() | {"bias_G": fp32(512)}, "gated: bias is torch.float32; allowed"),
    "rows": (gated, weights(0), "gated: 0 rows of 128, 512 columns; allowed: 1 or more"),
    "columns": (gated, weights(9, 128, 384), "9 rows of 128, 384 columns; .* multiple of 256"),
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("bad", BAD)
def test_wrong_arguments_are_refused(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_contract, "kernels_run_on", lambda device: True)
    op, given, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        op(*given.values())


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("op", "given"), [(add_norm, added()), (add_two_norm, added_twice()), (gated, weights())]
)
def test_kernels_refuse_a_cpu(op: Callable[..., Any], given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is on cpu; allowed: cuda with triton"):
        op(*given.values())


@pytest.mark.cpu
def test_rows_stay_plain_on_a_cpu_and_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_ops.row_forms(bf16(512, 128), bf16(512)) == PLAIN_ROWS
    monkeypatch.setattr(row_ops, "kernels_run_on", lambda device: True)
    assert row_ops.row_forms(fp32(512, 128), fp32(512)) == PLAIN_ROWS
    assert row_ops.row_forms(bf16(512, 128), bf16(512)) == row_cases.ROW_KERNELS


@pytest.mark.cpu
def test_eager_rows_stay_plain_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_ops, "kernels_run_on", lambda device: True)
    layer = row_cases.layers(RowCase(rows=1, heads=1, ffn_width=128))[0]
    assert vit_rows.forms_of(layer, CompileMode.EAGER) == PLAIN_ROWS
    assert vit_rows.forms_of(layer, CompileMode.BLOCKS) == row_cases.ROW_KERNELS


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = CUDA


@pytest.mark.cpu
@pytest.mark.parametrize("works", [True, False])
def test_a_gated_product_that_does_not_compile_is_left_out_and_said(
    works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = pytest.importorskip("vae_stream.gated_gluon")
    errors = pytest.importorskip("triton.errors")

    def compile_it(*given: Tensor, programs: int) -> None:
        if not works:
            raise errors.TritonError("no such layout\nat line 1")

    monkeypatch.setattr(kernels, "gated", compile_it)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(row_ops, "kernels_run_on", lambda device: True)
    weight_GD = bf16(512, 128).as_subclass(OnGpu)
    with caplog.at_level(logging.INFO):
        assert row_ops.row_forms(weight_GD, bf16(512)) == RowForms(True, works)
    assert caplog.messages == ([] if works else ["vit_gated_left_out: no such layout"])


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("forms", "rows", "expected"),
    [
        (PLAIN_ROWS, GATED_LEAST_ROWS, []),
        (row_cases.ROW_KERNELS, GATED_LEAST_ROWS, ["add_norm", "add_two_norm"]),
        (RowForms(True, True), GATED_LEAST_ROWS - 1, ["add_norm", "add_two_norm"]),
        (RowForms(True, True), GATED_LEAST_ROWS, ["add_norm", "gated", "add_two_norm"]),
    ],
    ids=["plain", "rows", "few rows", "many rows"],
)
def test_operators_serve_where_they_are_faster(
    forms: RowForms, rows: int, expected: list[str]
) -> None:
    case = RowCase(rows=rows, heads=1, ffn_width=128)
    layers = [[each.detach() for each in layer] for layer in row_cases.layers(case)]
    with torch._subclasses.FakeTensorMode() as mode:
        first, second = (vit_rows.Layer(*map(mode.from_tensor, layer)) for layer in layers)
        x_RD, o_RD = torch.empty(rows, 64), torch.empty(rows, 64, dtype=torch.bfloat16)
        with _Seen() as seen:
            x_RD, qkv_RF = vit_rows.between(x_RD, o_RD, first, second, 1e-5, forms)
    names = [name for name in seen.names if name.startswith("worldstream::")]
    assert names == [f"worldstream::vit_{name}" for name in expected]
    assert (x_RD.shape, qkv_RF.shape) == ((rows, 64), (rows, 192))


@pytest.mark.gpu
@pytest.mark.parametrize("case", row_cases.SMALL + row_cases.RELEASED, ids=lambda case: case.name)
def test_row_kernels_agree_with_the_plain_form(case: RowCase) -> None:
    assert row_cases.complaints(case, CUDA) == []


GATED = (
    RowCase(rows=1, heads=1, ffn_width=128), RowCase(rows=63, heads=3, ffn_width=256),
    RowCase(rows=130, heads=2, ffn_width=384), RowCase(rows=1565, heads=32, ffn_width=512),
    RowCase(rows=4037, heads=32, ffn_width=8192),
)  # fmt: skip


@pytest.fixture
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the gated product is for Hopper")


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("case", GATED, ids=lambda case: case.name)
def test_the_gated_product_agrees_with_the_plain_form(case: RowCase) -> None:
    assert row_cases.gated_complaints(case, CUDA) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
def test_rows_have_the_bits_that_they_have_among_fewer() -> None:
    case = RowCase(rows=4037, heads=4, ffn_width=512)
    layer = row_cases.moved(row_cases.layers(case)[0], CUDA)
    n_RD = row_cases.inputs(case, CUDA)[1]

    many, few = (gated(each, layer.up_weight, layer.up_bias) for each in (n_RD, n_RD[:300]))

    assert torch.equal(many[:300], few)


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
def test_the_gated_product_serves_hopper_where_its_tiles_fit() -> None:
    for ffn_width, has_gated in ((128, True), (96, False)):
        layer = row_cases.moved(
            row_cases.layers(RowCase(rows=1, heads=1, ffn_width=ffn_width))[0], CUDA
        )
        assert row_ops.row_forms(layer.up_weight, layer.up_bias) == RowForms(True, has_gated)
