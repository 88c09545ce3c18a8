"""Rows of the ladder of the engine, one change each, and what is climbed of them.

Owns the rows, the scenario, and what is refused before anything is measured: rows that build on
others which are left out, and rows that a device can never run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.record import size_name
from engine.config import (
    PRESET_NAMES,
    SPARSE_STEPS,
    EngineConfig,
    Geometry,
    ModelConfig,
    preset,
)
from engine.device import likely_dtype, torch_dtype
from engine.engine import Engine
from engine.errors import ConfigError, UnsupportedError
from engine.linears import check_linears
from engine.memory import DtypeName
from engine.parallel import Exchange
from engine.speed import check_attention, resolve_speed

SEED = 0
CHUNK_LIMIT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One change on top of the rows before it."""

    name: str
    title: str
    changes: dict[str, Any]
    """Fields of `EngineConfig`."""
    is_approximate: bool = False
    is_extra: bool = False
    """Left out unless it is named: another way to do what the next row does."""


PLAIN: dict[str, Any] = {
    "prefix_cache": False, "adaln_tables": False, "packed_history": False, "compile": "off",
    "graphs": False, "attention": "sdpa", "kernels": "off", "linear": "bf16",
}  # fmt: skip
ROWS = (
    Row(name="eager", title="eager, prefix recomputed", changes={}),
    Row(
        name="prefix",
        title="prefix and modulation once",
        changes={"prefix_cache": True, "adaln_tables": True},
    ),
    Row(name="blocks", title="blocks compiled", changes={"compile": "blocks"}),
    Row(name="attention", title="attention backend measured", changes={"attention": "auto"}),
    Row(name="packed", title="packed history", changes={"packed_history": True}),
    Row(name="full", title="whole pass compiled", changes={"compile": "full"}),
    Row(name="graphs", title="CUDA graphs", changes={"graphs": "strict"}),
    # In place of what a compiler makes: nothing is left for it to fuse.
    Row(name="kernels", title="fused kernels", changes={"kernels": "fast", "compile": "off"}),
    Row(
        name="fp8_block",
        title="FP8 linears, in blocks",
        changes={"linear": "fp8_block"},
        is_approximate=True,
        is_extra=True,
    ),
    Row(
        name="fp8_linear",
        title="FP8 linears",
        changes={"linear": "fp8_rowwise"},
        is_approximate=True,
    ),
    Row(
        name="fp8_mixed",
        title="FP8, attention's output bf16",
        changes={"linear": "fp8_mixed"},
        is_approximate=True,
    ),
    Row(
        name="sparse",
        title=f"sparse attention, first {SPARSE_STEPS} steps",
        changes={"attention": "sparse"},
        is_approximate=True,
    ),
)
ROW_NAMES = tuple(row.name for row in ROWS)
DEFAULT_ROWS = tuple(row.name for row in ROWS if not row.is_extra)


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderScenario:
    """What is climbed. Raises ConfigError for what cannot be."""

    preset: str = "h3_33b"
    weights: str = "auto"
    """shipped or random; auto: those that ship, else random."""
    geometry: Geometry | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    chunk_count: int = 10
    """Chunks of a row that count."""
    rows: tuple[str, ...] | None = None
    """Names of `ROWS`; the others are left out. None: `DEFAULT_ROWS`, of which those that do not
    run are refused when it is their turn."""
    reference: str = ROW_NAMES[0]
    """Row that errors are against. It is measured first; those before it are taken as they are,
    which saves an hour where the first row is slow."""
    start: str = ROW_NAMES[0]
    """Rows between the reference and this one are taken without being measured."""

    def __post_init__(self) -> None:
        if self.preset not in PRESET_NAMES:
            raise ConfigError(f"preset: {self.preset!r}; allowed: {', '.join(PRESET_NAMES)}")
        if not 1 <= self.chunk_count <= CHUNK_LIMIT:
            raise ConfigError(f"chunks: {self.chunk_count}; allowed: 1 to {CHUNK_LIMIT}")
        for option, names in (
            ("rows", self.row_names), ("start", (self.start,)), ("reference", (self.reference,)),
        ):  # fmt: skip
            for name in names:
                if name not in ROW_NAMES:
                    raise ConfigError(f"{option}: {name!r}; allowed: {', '.join(ROW_NAMES)}")
        for row in ROWS:
            if self.takes(row):
                self._require_ground(row)
        if not any(self.measures(row) and row.name in self.row_names for row in ROWS):
            raise ConfigError(
                f"rows: {', '.join(self.row_names)}; allowed with start {self.start!r}: one at "
                f"least that is measured, of {', '.join(filter(self._is_after_start, ROW_NAMES))}"
            )
        if self.weights not in ("auto", "shipped", "random"):
            raise ConfigError(f"weights: {self.weights!r}; allowed: auto, shipped, random")
        if self.weights == "shipped" and not self._ships:
            raise ConfigError(
                f"weights: none ship with {self.preset} at {size_name(self.model.geometry)}; "
                "allowed: random"
            )

    @property
    def row_names(self) -> tuple[str, ...]:
        """Rows that are climbed."""
        return DEFAULT_ROWS if self.rows is None else self.rows

    def takes(self, row: Row) -> bool:
        """Whether later rows build on a row."""
        return row.name in (*self.row_names, self.reference)

    def measures(self, row: Row) -> bool:
        """Whether a row is run and not just taken."""
        is_due = row.name == self.reference or self._is_after_start(row.name)
        return self.takes(row) and is_due

    def _is_after_start(self, name: str) -> bool:
        first = max(ROW_NAMES.index(self.reference), ROW_NAMES.index(self.start))
        return ROW_NAMES.index(name) >= first

    def _require_ground(self, row: Row) -> None:
        """Raises: ConfigError for a row that cannot be had without rows that are left out."""
        before = ROWS[: ROWS.index(row)]
        taken = [each for each in before if self.takes(each)]
        if _stands(row, taken):
            return
        missing = [each for each in before if each not in taken]
        for each in tuple(missing):
            others = [other for other in before if other in (*taken, *missing) and other != each]
            if _stands(row, others):
                missing.remove(each)
        names = ", ".join(each.name for each in missing)
        raise ConfigError(f"rows: {row.name!r} builds on {names}; allowed: with these named, too")

    def configs(self, device: torch.device, dtype: DtypeName) -> Iterator[tuple[Row, EngineConfig]]:
        """Yield the rows that are taken, each on top of all before it."""
        config = plain_config(device, dtype)
        for row in ROWS:
            if self.takes(row):
                config = dataclasses.replace(config, **row.changes)
                yield row, config

    def require_device(self, device: torch.device) -> None:
        """Refuse rows that were asked for by name and that a device can never run.

        Raises: ConfigError, UnsupportedError, as when it would be their turn.
        """
        dtype = likely_dtype(device) if self.dtype == "auto" else self.dtype
        for row, config in self.configs(device, dtype):
            is_named = self.rows is not None or row.name == self.reference
            if not is_named or not self.measures(row):
                continue
            try:
                resolve_speed(config, device, self.model)
                check_linears(config.linear, self.model, device, torch_dtype(dtype))
                check_attention(config, self.model, device, torch_dtype(dtype))
            except (ConfigError, UnsupportedError) as error:
                raise type(error)(f"rows: {row.name!r} never runs here: {error}") from error

    @property
    def model(self) -> ModelConfig:
        """The model at the picture size asked for."""
        return preset(self.preset, self.geometry).model

    @property
    def _ships(self) -> bool:
        found = preset(self.preset)
        return found.weights is not None and self.geometry in (None, found.model.geometry)

    @property
    def is_random(self) -> bool:
        """Whether the weights are."""
        return self.weights == "random" or not self._ships

    def load(self, config: EngineConfig, exchange: Exchange) -> Engine:
        """Make or read the weights; the same ones each time."""
        found = preset(self.preset, self.geometry)
        if not self.is_random:
            return Engine.from_pretrained(self.preset, config, exchange=exchange)
        return Engine.from_random(
            found.model, config, seed=SEED, geometries=found.geometries, exchange=exchange
        )


def plain_config(device: torch.device, dtype: DtypeName) -> EngineConfig:
    """Return what the first row has."""
    config = EngineConfig(device=str(device), dtype=dtype, **PLAIN)
    if device.type == "cuda":
        # torch's own choice differs from release to release; published ladders begin with flash.
        config = dataclasses.replace(config, attention="flash")
    return config


def _stands(row: Row, taken: Sequence[Row]) -> bool:
    """Whether a row can be had on top of others."""
    fields = dict(PLAIN)
    for each in (*taken, row):
        fields |= each.changes
    try:
        EngineConfig(**fields)
    except ConfigError:
        return False
    return True
