"""Linears of the blocks in eight bits: schemes, the layer itself, and what it costs in accuracy.

Owns `Fp8Rowwise`, `quantize_` and its report. A scheme is a tuple of rules, of which the last that
names a layer holds; a layer that none names stays as it is. Weights are quantised once, with one
factor an output channel; rows are quantised as they come, with one factor each. Norms, modulation,
embedders and heads are never touched. Class A: the schedule is the same, the numbers are not.
Shape suffixes: N output channels, K input channels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from engine.device import FP8_CAPABILITY
from engine.errors import ConfigError
from engine.kernels.fp8_linear import WIDTH_MULTIPLE, fp8_linear, quantize_rows
from engine.kernels.reference import quantize_rows as quantized_rows
from engine.model.dit import MiniMaxH3Transformer, TransformerBlock

LinearName = Literal["qkv", "out", "up", "down"]
LINEARS: tuple[LinearName, ...] = get_args(LinearName)
"""Of a block: queries with keys and values, output of attention, both of the feed-forward part."""

_PATHS: dict[LinearName, tuple[str, ...]] = {
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "out": ("attn.to_out.0",),
    "up": ("ff.net.0.proj",),
    "down": ("ff.net.2",),
}
_GIB = 2**30
_PROBE_ROWS = 64
_KEPT_FIRST, _KEPT_LAST = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Rowwise:
    """E4M3 with one fp32 factor for each row of activations and each output channel."""

    blocks: tuple[int, int] | None = None
    """First and last block. None: all but the first two and the last three, which work on raw
    inputs and next to the output and so bear the least: 2 to 46 of 50."""
    linears: tuple[LinearName, ...] = LINEARS

    def __post_init__(self) -> None:
        if self.blocks is not None and not 0 <= self.blocks[0] <= self.blocks[1]:
            raise ConfigError(f"blocks are {self.blocks}; allowed: first <= last, from 0")
        for name in self.linears:
            if name not in LINEARS:
                raise ConfigError(f"linears has {name!r}; allowed: {', '.join(LINEARS)}")

    def names(self, block: int, block_count: int, linear: LinearName) -> bool:
        """Whether the rule is about this layer."""
        first, last = self.blocks or (_KEPT_FIRST, block_count - 1 - _KEPT_LAST)
        return first <= block <= last and linear in self.linears


Scheme = tuple[Fp8Rowwise, ...]

SCHEMES: dict[str, Scheme] = {"bf16": (), "fp8_rowwise": (Fp8Rowwise(),)}
"""Schemes by name."""


def scheme_of(name: str) -> Scheme:
    """Return a scheme by its name, or from a json file.

    Raises: ConfigError, see `read_scheme`.
    """
    return SCHEMES[name] if name in SCHEMES else read_scheme(Path(name))


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why products in eight bits do not run on a device, or None."""
    if device.type != "cuda":
        return None
    if dtype != torch.bfloat16:
        return f"blocks are {dtype} and products in eight bits give bfloat16"
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no products in eight bits"
    return None


def read_scheme(path: Path) -> Scheme:
    """Read a scheme of one's own.

    The file holds a list of rules, {"format": "fp8_rowwise", "blocks": [2, 46], "linears": ["up",
    "down"]}; blocks and linears may be left out.

    Raises: ConfigError naming what is missing, unknown or of a wrong type.
    """
    try:
        rules = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {error}; expected a json list of rules") from error
    if not isinstance(rules, list):
        raise ConfigError(f"{path} is {type(rules).__name__}; allowed: a list of rules")
    return tuple(_rule(rule, f"{path}: rule {index}") for index, rule in enumerate(rules))


def _rule(rule: Any, where: str) -> Fp8Rowwise:
    if not isinstance(rule, dict) or rule.get("format") != "fp8_rowwise":
        raise ConfigError(f"{where} is {rule!r}; allowed: an object with format 'fp8_rowwise'")
    unknown = rule.keys() - {"format", "blocks", "linears"}
    if unknown:
        raise ConfigError(f"{where}: unknown {sorted(unknown)}; allowed: format, blocks, linears")
    blocks, linears = rule.get("blocks"), rule.get("linears", list(LINEARS))
    is_pair = isinstance(blocks, list) and [type(each) for each in blocks] == [int, int]
    if not (blocks is None or is_pair) or not isinstance(linears, list):
        raise ConfigError(f"{where} is {rule!r}; allowed: blocks [first, last], a list of linears")
    return Fp8Rowwise(blocks=(blocks[0], blocks[1]) if blocks else None, linears=tuple(linears))


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
        scale_N: fp32; row of the weight = codes * scale.
    """

    codes_NK: Tensor
    scale_N: Tensor

    def __init__(self, codes_NK: Tensor, scale_N: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes_NK", codes_NK)
        self.register_buffer("scale_N", scale_N)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] in the dtype of ``x``."""
        return fp8_linear(*quantize_rows(x), self.codes_NK, self.scale_N, x.dtype)


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
            reason = _reason(modules, any(rule.names(index, count, linear) for rule in scheme))
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
            codes_NK, scale_N1 = quantized_rows(weight_NK)
            scale_N = scale_N1[:, 0].contiguous()
            layers.append(_report(name, weight_NK, codes_NK, scale_N, dtype))
            sizes[1] += codes_NK.nbytes + scale_N.nbytes
            rows = [module.weight.shape[0] for module in modules]
            parts = zip(places, codes_NK.split(rows), scale_N.split(rows), strict=True)
            for (owner, attribute), codes, scale in parts:
                setattr(owner, attribute, Fp8Linear(codes, scale))
    return QuantReport(
        layers=tuple(layers),
        skipped=skipped,
        ready=tuple(ready),
        before_gib=sizes[0] / _GIB,
        after_gib=sizes[1] / _GIB,
    )


def check_blocks(scheme: Scheme, count: int) -> None:
    """Raises: ConfigError for blocks that a model of ``count`` blocks does not have."""
    for rule in scheme:
        if rule.blocks is not None and rule.blocks[1] >= count:
            raise ConfigError(f"blocks are {rule.blocks}; this model has 0 to {count - 1}")


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


def whole_groups(weights: Collection[str], scheme: Scheme, block_count: int) -> frozenset[str]:
    """Those of some weights that a scheme names together with all that go with them."""
    found: set[str] = set()
    for index in range(block_count):
        for linear in LINEARS:
            names = [f"{name}.weight" for name in linear_names(index, linear)]
            is_named = any(rule.names(index, block_count, linear) for rule in scheme)
            if is_named and all(name in weights for name in names):
                found.update(names)
    return frozenset(found)


def _reason(modules: Sequence[nn.Module], is_named: bool) -> str | None:
    """Return why a layer stays as it is, or None."""
    if not is_named:
        return "not named by the scheme"
    for module in modules:
        if not isinstance(module, nn.Linear):
            return f"is {type(module).__name__}, not a plain linear"
        if any(side % WIDTH_MULTIPLE for side in module.weight.shape):
            sides = " x ".join(map(str, module.weight.shape))
            return f"is {sides}; products in eight bits need multiples of {WIDTH_MULTIPLE}"
    return None


def _report(
    name: str, weight_NK: Tensor, codes_NK: Tensor, scale_N: Tensor, dtype: torch.dtype
) -> LayerReport:
    generator = torch.Generator(weight_NK.device).manual_seed(0)
    shape = (_PROBE_ROWS, weight_NK.shape[1])
    probe = torch.randn(shape, generator=generator, device=weight_NK.device).to(dtype)
    restored_NK = codes_NK.float() * scale_N[:, None]
    product = Fp8Linear(codes_NK, scale_N)(probe)
    return LayerReport(
        name=name,
        weight_sqnr_db=sqnr_db(weight_NK, restored_NK),
        output_sqnr_db=sqnr_db(probe.float() @ weight_NK.float().mT, product),
    )


def sqnr_db(true: Tensor, approximate: Tensor) -> float:
    """Power of the signal over that of the error, in decibels."""
    error = (true.float() - approximate.float()).square().sum()
    return float(10.0 * torch.log10(true.float().square().sum() / error))
