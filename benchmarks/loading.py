"""Weights from disk to a device: rate, time, and what the host needs for it.

    python -m benchmarks.loading --preset h3_33b --gb 20 --record benchmarks/loading.jsonl

Writes a checkpoint of the original layout (shards with an index, fused projections interleaved per
head) whose tensors all come from one random buffer, with as many blocks as make the size, and loads
it: as it is; into eight bits, which are kept; and from what was kept. The files were just written,
so they come from the page cache where that is large enough. Owns the command; needs torch, numpy
and safetensors alone. Rows go to stderr as they are done, the last line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.options import command_parser
from benchmarks.record import append_record, describe_machine, resident_mib
from engine.checkpoint.folder import sampled_hash
from engine.checkpoint.layouts import to_diffusers
from engine.checkpoint.reading import load_model
from engine.checkpoint.shards import INDEX_PATTERN, read_shard, write_shard
from engine.checkpoint.source import Source, expected_shapes, open_source
from engine.config import PRESET_NAMES, EngineConfig, ModelConfig, preset
from engine.device import resolve_device
from engine.errors import WorldStreamError
from engine.linears import QuantCache, prepare_linears
from engine.model.dit import FP32_MODULES, MiniMaxH3Transformer

EXIT_OK, EXIT_ENVIRONMENT = 0, 3
SHARD_BYTES = 5 * 10**9
_GB = 1e9
_SAMPLE_S = 0.01
_DRAWN, _STEP = 2**24, 7919
RowName = Literal["bf16", "fp8", "kept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingScenario:
    """What is written and loaded."""

    preset: str = "h3_33b"
    gb: float = 20.0
    """At least so much is written, in 10^9 bytes."""
    device: str = "auto"
    folder: Path | None = None
    """Where the files are written, in a folder that goes away again; by default for temporary
    files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingRow:
    """One way of loading."""

    name: RowName
    gb: float
    """That was read."""
    headers_s: float
    """Recognition, checks and hash."""
    read_s: float
    linears_s: float
    """Quantising, and keeping what came of it."""
    host_peak_mib: float
    """Most memory of the process that was resident, libraries included."""
    host_growth_mib: float
    """The same above what it was before."""
    is_exact: bool
    """Whether weights on the device are those on disk, bit for bit."""

    @property
    def gb_per_s(self) -> float:
        """Rate of reading."""
        return self.gb / self.read_s


def run_loading(
    scenario: LoadingScenario, *, record: Path | None = None, commit: str | None = None
) -> str:
    """Write, load in each way, tell and keep each row; return the JSON line of all.

    Raises: CheckpointError, DeviceError, OSError.
    """
    device = resolve_device(scenario.device)
    machine = dataclasses.asdict(describe_machine(device, commit=commit))
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=scenario.folder) as name:
        folder, config = Path(name), sized_config(scenario.preset, scenario.gb)
        begin_s = time.perf_counter()
        size = write_checkpoint(folder / "transformer", config)
        write_s = time.perf_counter() - begin_s
        _say(
            f"{scenario.preset}, {config.num_layers} blocks, {size / _GB:.2f} GB written in "
            f"{write_s:.1f} s; to {machine['gpu'] or machine['cpu']}"
        )
        for name_of_row in ("bf16", "fp8", "kept"):
            row = _load(folder, config, device, name_of_row)
            found = {
                "preset": scenario.preset,
                "blocks": config.num_layers,
                "gpu_count": int(device.type == "cuda"),
                "class": "X" if row.name == "bf16" else "A",
                "row": row.name,
                "file_gb": round(size / _GB, 3),
                "gb_per_s": round(row.gb_per_s, 3),
                **{key: _rounded(value) for key, value in dataclasses.asdict(row).items()},
                **machine,
            }
            records.append(found)
            _say(
                f"{row.name:5} {row.gb:6.2f} GB  {row.gb_per_s:5.2f} GB/s  headers "
                f"{row.headers_s:5.2f} s  read {row.read_s:6.2f} s  linears {row.linears_s:5.2f} s"
                f"  host {row.host_peak_mib:6.0f} MiB, {row.host_growth_mib:+.0f}  "
                f"{'exact' if row.is_exact else 'NOT EXACT'}"
            )
            if record is not None:
                append_record(record, found)
    return json.dumps(records)


def sized_config(preset_name: str, gb: float) -> ModelConfig:
    """Return a model of a preset with as many blocks as make the size."""
    model = preset(preset_name).model
    one, two = (
        sum(
            _nbytes(*entry) for entry in _entries(dataclasses.replace(model, num_layers=n)).values()
        )
        for n in (1, 2)
    )
    more = max(0, -(-int(gb * _GB - one) // (two - one)))
    return dataclasses.replace(model, num_layers=1 + more)


def write_checkpoint(folder: Path, config: ModelConfig) -> int:
    """Write shards and index of the original layout; return their size in bytes."""
    folder.mkdir(parents=True)
    entries = _entries(config)
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, entry in entries.items():
        size = _nbytes(*entry)
        if filled + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = entry
        filled += size
    weight_map: dict[str, str] = {}
    fill = _filler(
        max(shape.numel() for shape in map(torch.Size, (e[1] for e in entries.values())))
    )
    for number, part in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file, part, (fill(*entry) for entry in part.values()))
        weight_map |= dict.fromkeys(part, file)
    index = folder / INDEX_PATTERN.replace("*", "model")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _entries(config: ModelConfig) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor as a release has them, blocks in order."""
    shapes = expected_shapes(config, "original", None)
    return {
        name: (torch.float32 if _is_island(name, config) else torch.bfloat16, shape)
        for name, shape in shapes.items()
    }


def _is_island(name: str, config: ModelConfig) -> bool:
    (item, *_) = to_diffusers(name, torch.empty(3 * config.attention_dim, 0), config)
    return item.name.split(".")[0] in FP32_MODULES


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _filler(largest: int) -> Callable[[torch.dtype, tuple[int, ...]], Tensor]:
    """Return what makes a tensor of any shape out of one random buffer, each from another place."""
    drawn = torch.randn(min(largest, _DRAWN)).mul_(0.02)
    wide = drawn.repeat(2 + largest // drawn.numel())
    by_dtype = {torch.float32: wide, torch.bfloat16: wide.bfloat16()}
    places = itertools.count(1)

    def fill(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        begin = _STEP * next(places) % drawn.numel()
        return by_dtype[dtype][begin : begin + size].view(shape)

    return fill


class HostPeak(AbstractContextManager["HostPeak"]):
    """Largest resident memory of this process while it lasts."""

    def __init__(self) -> None:
        self.before_mib = self.peak_mib = resident_mib()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostPeak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self.peak_mib = max(self.peak_mib, resident_mib())


def _load(folder: Path, config: ModelConfig, device: torch.device, name: RowName) -> LoadingRow:
    """Load once, as an engine does, and throw the model away."""
    linear = "bf16" if name == "bf16" else "fp8_rowwise"
    engine = EngineConfig(device=str(device), dtype="bfloat16", linear=linear, free_adaln=False)
    torch.zeros(1, device=device)  # a GPU's libraries are loaded before anything is measured
    with HostPeak() as host:
        times_s = [time.perf_counter()]
        source = open_source(folder / "transformer", config)
        cache = QuantCache(folder / "linears", sampled_hash(source), engine)
        kept = cache.find() if name == "kept" else None
        times_s.append(time.perf_counter())
        read: list[int] = []
        model = load_model(
            source, dtype=torch.bfloat16, device=device, eight_bits=kept,
            on_progress=lambda event: read.append(event.done_bytes),
        )  # fmt: skip
        times_s.append(time.perf_counter())
        prepare_linears(model, engine, cache=cache if name == "fp8" else None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter())
    headers_s, read_s, linears_s = (b - a for a, b in itertools.pairwise(times_s))
    is_exact = all(_checks(source, model, kept))
    del model
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        torch.cuda.empty_cache()
    return LoadingRow(
        name=name,
        gb=read[-1] / _GB,
        headers_s=headers_s,
        read_s=read_s,
        linears_s=linears_s,
        host_peak_mib=host.peak_mib,
        host_growth_mib=host.peak_mib - host.before_mib,
        is_exact=is_exact,
    )


def _checks(source: Source, model: MiniMaxH3Transformer, kept: Path | None) -> Iterator[bool]:
    """Hold weights of the first, a middle and the last block against the bytes on disk."""
    from safetensors import safe_open

    state = model.state_dict()
    last = source.config.num_layers - 1
    for piece in source.pieces:
        if any(piece.name.startswith(f"blocks.{index}.") for index in {0, last // 2, last}):
            with safe_open(piece.record.path, framework="pt") as file:
                stored = file.get_tensor(piece.record.name)
            for name, value in source.split(piece, stored):
                if name in state:
                    yield torch.equal(state[name].cpu(), value)
    if kept is not None:
        for record in list(read_shard(kept).records.values())[:2]:
            with safe_open(kept, framework="pt") as file:
                stored = file.get_tensor(record.name)
            found = state[record.name].cpu()
            yield torch.equal(found.view(torch.uint8), stored.view(torch.uint8))


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = command_parser("benchmarks.loading", __doc__)
    parser.add_argument("--preset", choices=PRESET_NAMES, default="h3_33b")
    parser.add_argument(
        "--gb", type=float, default=20.0, help="least size of the files, 10^9 bytes"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--folder", type=Path, help="where to write; the files go away again")
    parser.add_argument("--record", type=Path, help="file to append one JSON line a row to")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    given = parser.parse_args(arguments)
    scenario = LoadingScenario(
        preset=given.preset, gb=given.gb, device=given.device, folder=given.folder
    )
    try:
        print(run_loading(scenario, record=given.record, commit=given.commit), flush=True)
    except (WorldStreamError, OSError) as error:
        _say(f"error: {error}")
        return EXIT_ENVIRONMENT
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
