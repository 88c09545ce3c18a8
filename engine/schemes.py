"""Which linears of the blocks are in eight bits, and in which form.

Owns `Scheme`, the schemes that have a name, and the file that one of one's own is read from. A
scheme is a tuple of rules, of which the last that names a layer holds; a layer that none names
stays as it is. Pure: nothing here touches a weight or a device.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kernels.fp8_linear import WIDTH_MULTIPLE
from engine.kernels.reference import FP8_BLOCK, weight_scale_shape

LinearName = Literal["qkv", "out", "up", "down"]
LINEARS: tuple[LinearName, ...] = get_args(LinearName)
"""Of a block: queries with keys and values, output of attention, both of the feed-forward part."""
Layer = tuple[int, LinearName]
_KEPT_FIRST, _KEPT_LAST = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """Some linears of some blocks in e4m3."""

    blocks: tuple[int, int] | None = None
    """First and last block. None: all but the first two and the last three, which work on raw
    inputs and next to the output and so bear the least: 2 to 46 of 50."""
    linears: tuple[LinearName, ...] = LINEARS

    in_blocks: ClassVar[bool]
    """Whether factors are those of blocks of channels."""
    width_multiple: ClassVar[int]
    """Of both sides of a weight."""

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

    def serves(self, channels: int, width: int) -> bool:
        """Whether a weight [channels, width] can have this form."""
        return not (channels % self.width_multiple or width % self.width_multiple)

    def factors_shape(self, channels: int, width: int) -> tuple[int, ...]:
        """Shape of the fp32 factors of a weight [channels, width]."""
        return weight_scale_shape(channels, width, self.in_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Rowwise(_Rule):
    """One fp32 factor for each row of activations and each output channel."""

    in_blocks: ClassVar[bool] = False
    width_multiple: ClassVar[int] = WIDTH_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Block(_Rule):
    """One fp32 factor for each 128 input channels of a row, and each 128 by 128 of a weight.

    What stands far out in a row then takes range from its own block alone.
    """

    in_blocks: ClassVar[bool] = True
    width_multiple: ClassVar[int] = FP8_BLOCK


Rule = Fp8Rowwise | Fp8Block
Scheme = tuple[Rule, ...]

_FORMATS: dict[str, type[Rule]] = {"fp8_rowwise": Fp8Rowwise, "fp8_block": Fp8Block}
SCHEMES: dict[str, Scheme] = {
    "bf16": (),
    "fp8_rowwise": (Fp8Rowwise(),),
    "fp8_block": (Fp8Block(),),
    # On the small world the output of attention alone carries what eight bits lose: a model without
    # it errs as another rounding does. Of what enters the other linears, the product of a gate and
    # a value ranges most.
    "fp8_mixed": (Fp8Rowwise(linears=("qkv", "up")), Fp8Block(linears=("down",))),
}
"""Schemes by name. `miniworld/README.md` has the figures behind the mixed one."""


def rule_of(scheme: Scheme, block: int, block_count: int, linear: LinearName) -> Rule | None:
    """Return the rule that holds for a layer; None where it stays as it is."""
    named = (rule for rule in reversed(scheme) if rule.names(block, block_count, linear))
    return next(named, None)


def linear_shapes(model: ModelConfig) -> dict[LinearName, tuple[int, int]]:
    """Output and input channels of the linears of a block."""
    hidden, inner, ffn = model.hidden_size, model.attention_dim, model.ffn_dim
    return {
        "qkv": (3 * inner, hidden), "out": (hidden, inner), "up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }  # fmt: skip


def layer_rules(scheme: Scheme, model: ModelConfig) -> dict[Layer, Rule]:
    """Return the layers of a model that a scheme puts into eight bits, and the rule of each."""
    shapes, rules = linear_shapes(model), dict[Layer, Rule]()
    for index in range(model.num_layers):
        for name, shape in shapes.items():
            rule = rule_of(scheme, index, model.num_layers, name)
            if rule is not None and rule.serves(*shape):
                rules[index, name] = rule
    return rules


def width_refusal(scheme: Scheme, model: ModelConfig) -> str | None:
    """Return which width of a model a scheme does not serve, or None.

    A layer that a rule names and that cannot have its form would stay as it is, unasked.
    """
    heads = "num_attention_heads x attention_head_dim", model.attention_dim
    hidden, ffn = ("hidden_size", model.hidden_size), ("ffn_dim", model.ffn_dim)
    sides: dict[LinearName, tuple[tuple[int, tuple[str, int]], ...]] = {
        "qkv": ((3, heads), (1, hidden)), "out": ((1, hidden), (1, heads)),
        "up": ((2, ffn), (1, hidden)), "down": ((1, hidden), (1, ffn)),
    }  # fmt: skip
    for index in range(model.num_layers):
        for name in LINEARS:
            rule = rule_of(scheme, index, model.num_layers, name)
            if rule is None:
                continue
            for times, (field, value) in sides[name]:
                if times * value % rule.width_multiple:
                    form = "eight bits in blocks" if rule.in_blocks else "eight bits"
                    step = rule.width_multiple // math.gcd(rule.width_multiple, times)
                    return f"{field} is {value} and {name} in {form} needs multiples of {step}"
    return None


def check_blocks(scheme: Scheme, count: int) -> None:
    """Raises: ConfigError for blocks that a model of ``count`` blocks does not have."""
    for rule in scheme:
        if rule.blocks is not None and rule.blocks[1] >= count:
            raise ConfigError(
                f"linear: blocks are {rule.blocks}; allowed: 0 to {count - 1}, those of this model"
            )


def scheme_of(name: str) -> Scheme:
    """Return a scheme by its name, or from a json file.

    Raises: ConfigError, see `read_scheme`.
    """
    return SCHEMES[name] if name in SCHEMES else read_scheme(Path(name))


def read_scheme(path: Path) -> Scheme:
    """Read a scheme of one's own.

    The file holds a list of rules, {"format": "fp8_rowwise", "blocks": [2, 46], "linears": ["up",
    "down"]}; the other format is "fp8_block"; blocks and linears may be left out.

    Raises: ConfigError naming what is missing, unknown or of a wrong type.
    """
    try:
        rules = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {error}; expected a json list of rules") from error
    if not isinstance(rules, list):
        raise ConfigError(f"{path} is {type(rules).__name__}; allowed: a list of rules")
    return tuple(_rule(rule, f"{path}: rule {index}") for index, rule in enumerate(rules))


def _rule(rule: Any, where: str) -> Rule:
    kind = rule.get("format") if isinstance(rule, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        formats = " or ".join(map(repr, _FORMATS))
        raise ConfigError(f"{where} is {rule!r}; allowed: an object with format {formats}")
    unknown = rule.keys() - {"format", "blocks", "linears"}
    if unknown:
        raise ConfigError(f"{where}: unknown {sorted(unknown)}; allowed: format, blocks, linears")
    blocks, linears = rule.get("blocks"), rule.get("linears", list(LINEARS))
    is_pair = isinstance(blocks, list) and [type(each) for each in blocks] == [int, int]
    if not (blocks is None or is_pair) or not isinstance(linears, list):
        raise ConfigError(f"{where} is {rule!r}; allowed: blocks [first, last], a list of linears")
    made = _FORMATS[kind]
    return made(blocks=(blocks[0], blocks[1]) if blocks else None, linears=tuple(linears))
