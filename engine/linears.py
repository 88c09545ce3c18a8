"""What becomes of the linears of a loaded model: its adapter, eight bits, and what is kept of them.

Owns the order: eight bits are made of the fp32 sum of a weight and its update, then whatever stays
wide gets the adapter in its own way; and the file that keeps what was quantised, so that the next
start reads half of the bytes and computes nothing. Invariant: what comes from that file has the
bits that quantising would give again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.adapters import Adapter
from engine.checkpoint.shards import read_shard, write_shard
from engine.checkpoint.source import Source
from engine.config import EngineConfig, ModelConfig
from engine.errors import CheckpointError, UnsupportedError
from engine.lora import change_weights, install_adapter, merged
from engine.model.dit import MiniMaxH3Transformer
from engine.quant import Fp8Linear, quantize_, refusal, whole_groups
from engine.schemes import Rule, check_blocks, layer_rules, scheme_of, width_refusal

_FORM = 2
"""Raised when the same weights would give other codes."""
_ROOM = 1.5
"""Times its size that a file needs on disk, so that no disk is filled by it."""
_KEPT_COUNT = 2
"""Files of 16 GB each for the large model: that in use and the one before."""
_STALE_S = 3600.0
"""Age at which a half-written file is no longer anybody's."""

_log = logging.getLogger(__name__)


class QuantCache:
    """The eight-bit linears of one model under one scheme, in a file.

    Args:
        folder: of all such files.
        model_hash: of the weights, and of the adapter that is merged into them.
        config: resolved; the device's kind counts, because sums are ordered otherwise on another.
    """

    def __init__(self, folder: Path, model_hash: str, config: EngineConfig) -> None:
        device = config.device.partition(":")[0]
        label = f"{_FORM} {model_hash} {scheme_of(config.linear)} {config.dtype} {device}"
        self.path = folder / f"{hashlib.sha256(label.encode()).hexdigest()[:32]}.safetensors"

    def find(self) -> Path | None:
        """Return the file, if it is there and whole; a damaged one is removed."""
        if not self.path.is_file():
            return None
        try:
            read_shard(self.path)
        except CheckpointError as error:
            _log.warning("quantized_dropped %s", error)
            with suppress(OSError):
                self.path.unlink()
            return None
        with suppress(OSError):  # a folder that takes no writes still serves
            os.utime(self.path)
        return self.path

    def keep(self, model: MiniMaxH3Transformer) -> None:
        """Write the linears in eight bits; where that cannot be done, go on without."""
        tensors: dict[str, Tensor] = {
            f"{name}.{part}": getattr(module, part)
            for name, module in model.named_modules()
            if isinstance(module, Fp8Linear)
            for part in ("codes_NK", "scale")
        }
        size = sum(tensor.nbytes for tensor in tensors.values())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._tidy()
            free = shutil.disk_usage(self.path.parent).free
            if free < _ROOM * size:
                _log.warning("quantized_not_kept needed=%d free=%d", size, free)
                return
            entries = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
            with self._alone():
                write_shard(self.path, entries, iter(tensors.values()))
        except FileExistsError:
            _log.info("quantized_kept_elsewhere %s", self.path)
            return
        except OSError as error:
            _log.warning("quantized_not_kept %s: %s", self.path, error)
            return
        self._tidy()
        _log.info("quantized_kept %s gb=%.2f", self.path, size / 1e9)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process write the file: ranks that share a rollout all have the same to write.

        Raises: FileExistsError where another does.
        """
        mark = self.path.with_name(f"{self.path.name}.lock.part")
        mark.touch(exist_ok=False)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove what lay unused longest, and what somebody left half written."""
        files: list[tuple[float, Path]] = []
        for each in self.path.parent.iterdir():
            with suppress(OSError):  # another process may be faster
                age_s = time.time() - each.stat().st_mtime
                if each.suffix == self.path.suffix:
                    files.append((age_s, each))
                elif each.suffix == ".part" and age_s > _STALE_S:
                    each.unlink()
        for _, each in sorted(files)[_KEPT_COUNT:]:
            with suppress(OSError):
                each.unlink()


def prepare_linears(
    model: MiniMaxH3Transformer,
    config: EngineConfig,
    *,
    adapter: Adapter | None = None,
    cache: QuantCache | None = None,
) -> None:
    """Put linears into eight bits and an adapter into the model.

    Args:
        model: as it was loaded.
        config: resolved, the mode of the adapter as well.
        adapter: that of the config.
        cache: keeps what is quantised here.

    Raises: ConfigError for a scheme that is no such thing, UnsupportedError where it does not run
        or touches nothing.
    """
    if adapter is not None:
        change_weights(model, adapter)
    if config.linear != "bf16":
        check_linears(config.linear, model.config, model.proj_in.weight.device, model.dtype)
        _quantize(model, config.linear, adapter, cache)
    if adapter is not None:
        assert config.lora_mode != "auto"
        install_adapter(model, adapter, config.lora_mode)


def check_linears(name: str, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a scheme that could not be followed, before weights are read.

    Raises: ConfigError for a scheme that is no such thing or names blocks that are not there,
        UnsupportedError where eight bits do not run, or not in all linears that it names.
    """
    scheme = scheme_of(name)
    check_blocks(scheme, model.num_layers)
    reason = refusal(scheme, device, dtype)
    if reason is not None:
        raise UnsupportedError(f"linear is {name!r}; allowed here: 'bf16', because {reason}")
    reason = width_refusal(scheme, model)
    if reason is None and name != "bf16" and not layer_rules(scheme, model):
        reason = "the scheme names none of its linears"
    if reason is not None:
        raise UnsupportedError(
            f"linear is {name!r}; allowed for this model of {model.num_layers} blocks: 'bf16', "
            f"because {reason}"
        )


def kept_fp8(source: Source, config: EngineConfig, adapter: Adapter | None) -> dict[str, Rule]:
    """Weights that a source has in eight bits and that a resolved config wants so, with their rule.

    A factor a tensor is that of each row, and that of each block; factors of rows are not those of
    blocks. What an adapter changes is multiplied out, to be quantised with its update.
    """
    shapes, factors = source.shapes, source.fp8_factors
    changed: set[str] = set()
    if adapter is not None:
        changed = {f"{name}.weight" for name in adapter.pairs} | adapter.changes.keys()

    def fits(name: str, rule: Rule) -> bool:
        if name in changed or name not in factors:
            return False
        return rule.serves(*shapes[name]) and not (rule.in_blocks and factors[name] > 1)

    return whole_groups(fits, scheme_of(config.linear), source.config.num_layers)


def _quantize(
    model: MiniMaxH3Transformer, name: str, adapter: Adapter | None, cache: QuantCache | None
) -> None:
    """Put linears into eight bits and log what that costs."""

    def widen(linear: str, weight_NK: Tensor) -> Tensor:
        assert adapter is not None
        return merged(adapter, linear, weight_NK)

    report = quantize_(model, scheme_of(name), None if adapter is None else widen)
    _log.info(
        "linears_quantized scheme=%s layers=%d ready=%d skipped=%d sqnr_db=%.1f gib=%.2f "
        "was_gib=%.2f", name, len(report.layers), len(report.ready), len(report.skipped),
        report.lowest_db, report.after_gib, report.before_gib,
    )  # fmt: skip
    if cache is not None and report.layers:
        cache.keep(model)
