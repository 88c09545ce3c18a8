"""Each fused operator of a block against its oracle: agreement first, then time.

    python -m benchmarks.kernels [--names swiglu,place] [--record benchmarks/kernels.jsonl]

Owns the command and the record of one operator on one case. A row is an operator at the size of a
pass: microseconds of the kernel, its share of the memory rate that a copy reaches here, and the
microseconds of the oracle as it is and compiled. An operator that does not agree has no times. On
CUDA calls are timed inside a graph, because a launch by the host takes as long as a kernel; inputs
are as warm in the cache as the product before leaves them. Elsewhere the smallest cases run, which
shows that the command works and nothing more (kernels are interpreted with TRITON_INTERPRET=1).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import command_parser
from benchmarks.record import append_record, describe_machine
from engine.device import resolve_device
from engine.errors import ConfigError, WorldStreamError
from engine.kernels import OPS, Op
from engine.kernels.cases import Case
from graphs.compile import compile_module

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
_CALLS, _REPLAYS = 10, 21
_COPIED_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRecord:
    """One operator on one case."""

    op: str
    case: str
    klass: str
    error: float
    """RMS of the distance from the oracle over that of the oracle, the largest of all outputs."""
    is_agreeing: bool
    fused_us: float | None = None
    plain_us: float | None = None
    compiled_us: float | None = None
    memory_share: float | None = None
    """Of the rate of a copy."""

    @property
    def line(self) -> str:
        """One line for a terminal."""
        head = f"{self.op:24}{self.case:22}{self.klass:3}{self.error:9.1e}"
        if not self.is_agreeing:
            return f"{head}  does not agree with its oracle: no times"
        times = (self.fused_us, self.plain_us, self.compiled_us)
        cells = "".join(f"{'-':>10}" if each is None else f"{each:10.1f}" for each in times)
        return head + cells + ("" if self.memory_share is None else f"{self.memory_share:8.0%}")


HEAD = f"{'operator':24}{'case':22}   {'error':>9}{'fused us':>10}{'plain us':>10}{'compiled':>10}"


def measure(names: Sequence[str], device: torch.device) -> Iterator[KernelRecord]:
    """Measure operators on the cases of this device.

    Raises: ConfigError for a name that is none.
    """
    for name in names:
        if name not in OPS:
            raise ConfigError(f"names: {name!r}; allowed: {', '.join(OPS)}")
    is_cuda = device.type == "cuda"
    copy_rate = _copy_rate(device) if is_cuda else None
    for op in (OPS[name] for name in names):
        fitting = [case for case in op.cases if case.is_full == is_cuda]
        for case in fitting if is_cuda else fitting[1:2]:
            yield _measure(op, case, device, copy_rate)


def _measure(op: Op, case: Case, device: torch.device, copy_rate: float | None) -> KernelRecord:
    error = _distance(op, case, device)
    bound = 2 * op.tolerance
    record = KernelRecord(
        op=op.name, case=case.name, klass=op.klass, error=error, is_agreeing=error <= bound
    )
    if not record.is_agreeing:
        return record
    given = op.inputs(case, device)
    if device.type != "cuda":
        return dataclasses.replace(record, fused_us=_host_us(op.fused, given))
    fused_us = device_us(op.fused, given)
    plain_us = compiled_us = None
    if op.is_oracle_timed:
        plain_us = device_us(op.reference, given)
        compiled_us = device_us(compile_module(op.reference), given)
    rate = op.bytes_moved(case) / (fused_us * 1e-6)
    return dataclasses.replace(
        record,
        fused_us=fused_us,
        plain_us=plain_us,
        compiled_us=compiled_us,
        memory_share=None if copy_rate is None else rate / copy_rate,
    )


def _distance(op: Op, case: Case, device: torch.device) -> float:
    outputs = []
    for form in (op.fused, op.reference):
        given = op.inputs(case, device)
        returned = form(**given)
        tensors = [] if returned is None else [returned]
        if isinstance(returned, tuple):
            tensors = list(returned)
        outputs.append(_values([*tensors, *op.written_in(given)]))
    pairs = zip(*outputs, strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def _values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Numbers behind outputs: codes are joined with the factors that follow them."""
    codes = [index for index, each in enumerate(tensors) if each.dtype == torch.float8_e4m3fn]
    values = [each.float() for each in tensors]
    for index in reversed(codes):
        values[index] = values[index] * values.pop(index + 1)
    return values


def _host_us(form: Callable[..., Any], given: dict[str, Any]) -> float:
    start_s = time.perf_counter()
    form(**given)
    return (time.perf_counter() - start_s) * 1e6


def device_us(form: Callable[..., Any], given: dict[str, Any]) -> float:
    """Return the median time of a call on CUDA, from a graph of some."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            form(**given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            form(**given)
    times_ms = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return sorted(times_ms)[_REPLAYS // 2] * 1e3 / _CALLS


def _copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / (device_us(target.copy_, {"other": source}) * 1e-6)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser("benchmarks.kernels", __doc__)
    parser.add_argument("--names", default=",".join(OPS), help="operators with commas between")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--record", type=Path, help="file to append the JSON line to")
    options = parser.parse_args(argv)
    try:
        device = resolve_device(options.device)
        print(HEAD, file=sys.stderr)
        records = []
        for record in measure(options.names.split(","), device):
            print(record.line, file=sys.stderr, flush=True)
            records.append(record)
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    line = {
        "scenario": "kernels",
        "kernels": [asdict(record) for record in records],
        "machine": asdict(describe_machine(device)),
    }
    if options.record is not None:
        append_record(options.record, line)
    print(json.dumps(line))
    return EXIT_OK if all(record.is_agreeing for record in records) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
