"""Linears of the blocks in eight bits: the layer itself, and what it costs in accuracy.

Owns `Fp8Linear`, `quantize_` and its report; `engine.schemes` says which linears are meant. Weights
are quantised once, rows as they come, with the factors of one form. Norms, modulation, embedders
and heads are never touched. Class A: the schedule is the same, the numbers are not.
Shape suffixes: N output channels, K input channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.device import FP8_CAPABILITY, blocks_refusal
from engine.kernels.fp8_linear import fp8_linear, quantize_rows
from engine.kernels.reference import dequantize_weight, quantize_weight
from engine.model.dit import MiniMaxH3Transformer, TransformerBlock
from engine.schemes import LINEARS, LinearName, Rule, Scheme, check_blocks, rule_of

_PATHS: dict[LinearName, tuple[str, ...]] = {
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "out": ("attn.to_out.0",),
    "up": ("ff.net.0.proj",),
    "down": ("ff.net.2",),
}
_GIB = 2**30
_PROBE_ROWS = 64


def refusal(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why products in eight bits of a scheme do not run on a device, or None."""
    if not scheme or device.type != "cuda":
        return None
    if dtype != torch.bfloat16:
        return f"blocks are {dtype} and products in eight bits give bfloat16"
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no products in eight bits"
    return blocks_refusal(device) if any(rule.in_blocks for rule in scheme) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer in eight bits."""

    name: str
    weight_sqnr_db: float
    """Power of the weights over that of their error."""
    output_sqnr_db: float
    """The same for the products of Gaussian rows, which are quantised as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantReport:
    """What became of each linear of the blocks."""

    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    """Layers that stay as they are, and why."""
    ready: tuple[str, ...]
    """Layers that were in eight bits already: from a cache, or released so."""
    before_gib: float
    """Weights of the quantised layers as they were."""
    after_gib: float

    @property
    def lowest_db(self) -> float:
        """Worst output; infinite where nothing is quantised."""
        return min((layer.output_sqnr_db for layer in self.layers), default=math.inf)


class Fp8Linear(nn.Module):
    """A linear without bias; has no gradient.

    Args:
        codes_NK: e4m3.
        scale: fp32, a factor an output channel [N], or of blocks (`reference.quantize_weight`).
    """

    codes_NK: Tensor
    scale: Tensor

    def __init__(self, codes_NK: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes_NK", codes_NK)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, weight_NK: Tensor, rule: Rule) -> Fp8Linear:
        """Quantise a weight."""
        return cls(*quantize_weight(weight_NK, rule.in_blocks))

    @property
    def in_blocks(self) -> bool:
        """Whether factors are those of blocks of channels."""
        return self.scale.ndim == 2

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] in the dtype of ``x``."""
        rows = quantize_rows(x, self.in_blocks)
        return fp8_linear(*rows, self.codes_NK, self.scale, x.dtype)


Widen = Callable[[str, Tensor], Tensor]
"""Name of a linear and its weight to the weight in fp32, an update included."""


@torch.no_grad()
def quantize_(
    model: MiniMaxH3Transformer, scheme: Scheme, widen: Widen | None = None
) -> QuantReport:
    """Replace the linears that the scheme names; the weights that they had are given up.

    Queries, keys and values of a block go together and lie in one piece.

    Args:
        model: changed in place.
        scheme: which linears.
        widen: what is quantised in the place of a weight.

    Raises: ConfigError for blocks that the model does not have.
    """
    count = model.config.num_layers
    check_blocks(scheme, count)
    layers, skipped, ready, sizes = [], {}, [], [0, 0]
    for index in range(count):
        for linear, places in block_linears(model.block(index)).items():
            name = f"blocks.{index}.{linear}"
            modules = [getattr(owner, attribute) for owner, attribute in places]
            if all(isinstance(module, Fp8Linear) for module in modules):
                ready.append(name)
                continue
            rule = rule_of(scheme, index, count, linear)
            if rule is None:
                skipped[name] = "not named by the scheme"
                continue
            reason = _reason(modules, rule)
            if reason is not None:
                skipped[name] = reason
                continue
            dtype = modules[0].weight.dtype
            weights = [module.weight for module in modules]
            sizes[0] += sum(weight.nbytes for weight in weights)
            if widen is not None:
                names = linear_names(index, linear)
                weights = [widen(*pair) for pair in zip(names, weights, strict=True)]
            weight_NK = torch.cat(weights)
            whole = Fp8Linear.of(weight_NK, rule)
            layers.append(_report(name, weight_NK, whole, dtype))
            sizes[1] += whole.codes_NK.nbytes + whole.scale.nbytes
            channels = [module.weight.shape[0] for module in modules]
            shapes = [rule.factors_shape(*module.weight.shape) for module in modules]
            codes_parts = whole.codes_NK.split(channels)
            scale_parts = whole.scale.split([shape[0] for shape in shapes])
            for (owner, attribute), *parts in zip(places, codes_parts, scale_parts, strict=True):
                setattr(owner, attribute, Fp8Linear(*parts))
    return QuantReport(
        layers=tuple(layers),
        skipped=skipped,
        ready=tuple(ready),
        before_gib=sizes[0] / _GIB,
        after_gib=sizes[1] / _GIB,
    )


def block_linears(block: TransformerBlock) -> dict[LinearName, list[tuple[nn.Module, str]]]:
    """Where the linears of a block hang: owner and attribute."""
    split = {name: [path.rpartition(".") for path in paths] for name, paths in _PATHS.items()}
    return {
        name: [(block.get_submodule(owner), attribute) for owner, _, attribute in places]
        for name, places in split.items()
    }


def linear_names(index: int, linear: LinearName) -> list[str]:
    """Names of the linears of a block that go together."""
    return [f"transformer_blocks.{index}.{path}" for path in _PATHS[linear]]


def whole_groups(
    fits: Callable[[str, Rule], bool], scheme: Scheme, block_count: int
) -> dict[str, Rule]:
    """Weights that a scheme names and that fit its rule, together with all that go with them."""
    found: dict[str, Rule] = {}
    for index in range(block_count):
        for linear in LINEARS:
            rule = rule_of(scheme, index, block_count, linear)
            names = [f"{name}.weight" for name in linear_names(index, linear)]
            if rule is not None and all(fits(name, rule) for name in names):
                found |= dict.fromkeys(names, rule)
    return found


def _reason(modules: Sequence[nn.Module], rule: Rule) -> str | None:
    """Return why a layer stays as it is though a rule names it, or None."""
    for module in modules:
        if not isinstance(module, nn.Linear):
            return f"is {type(module).__name__}, not a plain linear"
        channels, width = module.weight.shape
        if not rule.serves(channels, width):
            form = "eight bits, in blocks," if rule.in_blocks else "eight bits"
            sides = f"multiples of {rule.width_multiple}"
            return f"is {channels} x {width}; products in {form} need {sides}"
    return None


def _report(name: str, weight_NK: Tensor, linear: Fp8Linear, dtype: torch.dtype) -> LayerReport:
    generator = torch.Generator(weight_NK.device).manual_seed(0)
    shape = (_PROBE_ROWS, weight_NK.shape[1])
    probe = torch.randn(shape, generator=generator, device=weight_NK.device).to(dtype)
    restored_NK = dequantize_weight(linear.codes_NK, linear.scale)
    return LayerReport(
        name=name,
        weight_sqnr_db=sqnr_db(weight_NK, restored_NK),
        output_sqnr_db=sqnr_db(probe.float() @ weight_NK.float().mT, linear(probe)),
    )


def sqnr_db(true: Tensor, approximate: Tensor) -> float:
    """Power of the signal over that of the error, in decibels."""
    error = (true.float() - approximate.float()).square().sum()
    return float(10.0 * torch.log10(true.float().square().sum() / error))
