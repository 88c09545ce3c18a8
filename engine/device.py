"""What the machine can do: device, memory, and the faster dtype of its CPU.

Owns the resolution of "auto", and copies to and from a device that nothing else waits for.
Invariant: no global torch setting changes, but for the device of a thread in `use`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed, select_backend
from engine.config import Geometry, ModelConfig
from engine.errors import DeviceError, OutOfMemoryError
from engine.memory import DtypeName, Present
from engine.model.dit import TransformerBlock

T = TypeVar("T")
FP8_CAPABILITY = (8, 9)
"""Of CUDA devices that have products in eight bits."""
_FP8_BLOCK_MAJOR, _FP8_BLOCK_CUDA = 9, (12, 9)
"""Of devices and libraries that have them in blocks of channels with factors of their own."""
_GIB = 2**30
_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypeChoice:
    """Outcome of the measurement of one block, in milliseconds."""

    dtype: DtypeName
    float32_ms: float | None = None
    bfloat16_ms: float | None = None

    @property
    def reason(self) -> str:
        """One phrase for a log or a terminal."""
        if self.float32_ms is None or self.bfloat16_ms is None:
            return "not measured"
        return f"one block: float32 {self.float32_ms:.1f} ms, bfloat16 {self.bfloat16_ms:.1f} ms"


def gpu_count() -> int:
    """CUDA devices of this machine that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_device(name: str) -> torch.device:
    """Device by name; "auto" is CUDA where present.

    Raises: DeviceError when CUDA or the index is missing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= gpu_count():
        raise DeviceError(f"device is {name!r}; this machine has {gpu_count()} CUDA devices")
    return device


def use(device: torch.device) -> None:
    """Make a CUDA device the one that kernels and events of this thread go to by default.

    A Triton kernel goes there wherever its tensors are.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def send(value: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for what is under way there."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def fetch(value: Tensor) -> Callable[[], Tensor]:
    """Begin to copy to the host; the result waits for the copy, and for nothing launched later.

    On a CPU there is nothing to copy, and the value itself comes.
    """
    if value.device.type != "cuda":
        return lambda: value
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(value.device))

    def take() -> Tensor:
        done.synchronize()
        return copy

    return take


def available_gib(device: torch.device) -> float:
    """Free memory of the device, or of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / _GIB
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / _GIB
    return total_gib(device)


def total_gib(device: torch.device) -> float:
    """Memory of the device, or of the machine for a CPU, whoever uses it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / _GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB


def held_bytes(device: str) -> int:
    """Memory that this process holds on a CUDA device; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.startswith("cuda") else 0


def present_memory(
    device: torch.device, *, shared_by: int = 1, machine_shared_by: int = 1
) -> Present:
    """Memory that is free, and whether the device has products in eight bits.

    Args:
        device: where.
        shared_by: processes that will each want as much of it, whether they are there yet or not.
        machine_shared_by: the same of the machine's memory, beside that of a CUDA device.
    """

    def part_gib(place: torch.device, count: int) -> float:
        free_gib = available_gib(place)
        return free_gib if count == 1 else min(free_gib, total_gib(place) / count)

    device_gib = part_gib(device, shared_by)
    if device.type != "cuda":
        return Present(device_gib=device_gib, shared_by=shared_by)
    return Present(
        device_gib=device_gib,
        host_gib=part_gib(torch.device("cpu"), machine_shared_by),
        is_cuda=True,
        has_fp8=torch.cuda.get_device_capability(device) >= FP8_CAPABILITY,
        no_fp8_blocks=blocks_refusal(device),
        shared_by=shared_by,
    )


def blocks_refusal(device: torch.device) -> str | None:
    """Return why a CUDA device has no products in eight bits of blocks, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != _FP8_BLOCK_MAJOR:
        name = torch.cuda.get_device_name(device)
        return f"{name} is of capability {major}.{minor} and products of blocks need 9.x (Hopper)"
    version = torch.version.cuda or "0.0"
    if tuple(map(int, version.split(".")[:2])) < _FP8_BLOCK_CUDA:
        return f"torch is built for CUDA {version} and products of blocks need 12.9"
    return None


def smaller_geometries(size: Geometry) -> list[Geometry]:
    """Picture sizes below ``size`` of about the same shape, one for each height."""
    return [
        Geometry(
            height_px=height_px,
            width_px=max(32, round(height_px * size.width_px / size.height_px / 32) * 32),
        )
        for height_px in range(size.height_px - 32, 0, -32)
    ]


def within_memory(device: torch.device, what: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns.

    Args:
        device: where it allocates.
        what: it is, in a few words.
        work: anything.

    Raises: OutOfMemoryError where memory runs out in it. Nothing that it held is held by the error,
        and memory that lies idle has been given back.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = f"{error}".split("\n")[0]
    # Out of the handler, so that the new error does not keep the frames of the old one alive.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemoryError(
        f"memory ran out in {what} ({reason}); {available_gib(device):.1f} GiB of {device} are "
        "free now; a smaller picture needs less, and so does a device that nothing else uses"
    )


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU torch raises no type of its own.
    is_typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_typed or "can't allocate memory" in str(error)


def choose_dtype(model: ModelConfig, device: torch.device) -> DtypeChoice:
    """Dtype of the blocks for "auto".

    CUDA: bfloat16. A CPU with bfloat16 products: the faster of the two on one block with attention
    over a full window, best of five in turn, so that a busy machine slows both. Other CPUs:
    float32.
    """
    if device.type == "cuda":
        return DtypeChoice(dtype="bfloat16")
    if not _has_bfloat16_products():
        return DtypeChoice(dtype="float32")
    times = _block_times_ms(model)
    faster: DtypeName = "bfloat16" if times["bfloat16"] < times["float32"] else "float32"
    return DtypeChoice(dtype=faster, float32_ms=times["float32"], bfloat16_ms=times["bfloat16"])


def likely_dtype(device: torch.device) -> DtypeName:
    """Dtype that `choose_dtype` is likely to find, without measuring anything."""
    return "bfloat16" if device.type == "cuda" or _has_bfloat16_products() else "float32"


_DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: DtypeName) -> torch.dtype:
    """Dtype by name."""
    return _DTYPES[name]


def _has_bfloat16_products() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    flags = cpuinfo.read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _block_times_ms(model: ModelConfig) -> dict[DtypeName, float]:
    blocks = {name: _block(model, dtype) for name, dtype in _DTYPES.items()}
    times_ms = dict.fromkeys(blocks, float("inf"))
    for name in [*blocks] * (1 + _REPEATS):
        start_s = time.perf_counter()
        blocks[name]()
        times_ms[name] = min(times_ms[name], (time.perf_counter() - start_s) * 1e3)
    return times_ms


def _block(model: ModelConfig, dtype: torch.dtype) -> Callable[[], Tensor]:
    """One block and attention as a rollout runs them, over zeros."""
    block = TransformerBlock(model).to(dtype)
    heads, head_dim = model.num_attention_heads, model.attention_head_dim
    backend = select_backend(AttentionNeed(device_type="cpu", dtype=dtype, head_dim=head_dim))
    x_BRD = torch.zeros(1, model.rows_per_chunk, model.hidden_size, dtype=dtype)
    modulation = torch.zeros(1, 1, 6, model.hidden_size, dtype=dtype)
    window_rows = model.window_chunks * model.rows_per_chunk
    keys_BSNK = torch.zeros(1, heads, window_rows, head_dim, dtype=dtype).transpose(1, 2)

    @torch.no_grad()
    def once() -> Tensor:
        q_BRNK, _, _ = block.project(x_BRD, modulation)
        return block.finish(x_BRD, backend(q_BRNK, keys_BSNK, keys_BSNK), modulation)

    return once
