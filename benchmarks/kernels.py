"""Each fused operator against its oracle: agreement first, then time.

    python -m benchmarks.kernels [--names swiglu,place] [--record benchmarks/kernels.jsonl]

Owns the command and the record of one operator on one case. A row is an operator at the size of a
pass: microseconds of the kernel, those of the plain form where somebody would run it, and its share
of what this machine cannot go below: least traffic at the rate of a copy, or products at that of a
large one, whichever takes longer. An operator that does not agree has no times, one that cannot run
here a reason. A form that rounds as eager code stands beside eager code; one that does not, beside
what a compiler makes of it, at the smaller size alone, because that takes a second each.
On CUDA calls are timed inside a graph, because a launch by the host takes as long as a kernel;
inputs are as warm in the cache as the product before leaves them. Elsewhere the smallest cases run,
which shows that the command works and nothing more (kernels are interpreted with
TRITON_INTERPRET=1).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_rows import Bound, Rates, all_rows, cases_on, refusal
from benchmarks.options import command_parser
from benchmarks.record import append_record, describe_machine
from engine.device import resolve_device
from engine.errors import ConfigError, DeviceError, WorldStreamError
from engine.kernels import Op
from engine.kernels.cases import CASES, Case
from engine.kernels.reference import dequantize_rows
from graphs.compile import compile_module

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_ENVIRONMENT = 0, 1, 2, 3
_GRAPH_MS, _MOST_CALLS = 1.0, 20
"""Length of a graph, and calls in it at most."""
_REPLAYS, _SETTLING = 24, 8
"""How often a graph runs without a pause, and how many of these are left out."""
_COMPILED_ROWS = min(case.rows for case in CASES if case.is_full)


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
    tflops: float | None = None
    """Of the products that were asked for."""
    bound: Bound | None = None
    """What the call cannot be faster than."""
    share: float | None = None
    """Of that bound."""

    @property
    def line(self) -> str:
        """One line for a terminal."""
        head = f"{self.op:27}{self.case:22}{self.klass:3}{self.error:9.1e}"
        if not self.is_agreeing:
            return f"{head}  does not agree with its oracle: no times"
        times = (self.fused_us, self.plain_us, self.compiled_us, self.tflops)
        cells = "".join(f"{'-':>10}" if each is None else f"{each:10.1f}" for each in times)
        return head + cells + ("" if self.share is None else f"{self.share:8.0%} of {self.bound}")


HEAD = (
    f"{'operator':27}{'case':22}   {'error':>9}{'fused us':>10}{'plain us':>10}{'compiled':>10}"
    f"{'TFLOP/s':>10}"
)


def measure(ops: Sequence[Op], device: torch.device) -> Iterator[KernelRecord]:
    """Measure operators on the cases of this device."""
    rates = Rates.of(device, device_us) if device.type == "cuda" else None
    for op in ops:
        for case in cases_on(op, device):
            yield _measure(op, case, device, rates)


def _measure(op: Op, case: Case, device: torch.device, rates: Rates | None) -> KernelRecord:
    error = _distance(op, case, device)
    bound = 2 * op.tolerance
    record = KernelRecord(
        op=op.name, case=case.name, klass=op.klass, error=error, is_agreeing=error <= bound
    )
    if not record.is_agreeing:
        return record
    given = op.inputs(case, device)
    if rates is None:
        return dataclasses.replace(record, fused_us=_host_us(op.fused, given))
    fused_us = device_us(op.fused, given)
    plain_us = compiled_us = None
    rounds = "rounding" in given
    if op.is_oracle_timed and not (rounds and case.rounding == "fast"):
        plain_us = device_us(op.reference, given)
    # A compiler leaves products as they are.
    is_compiled = op.is_oracle_timed and op.flops is None and case.rows == _COMPILED_ROWS
    if is_compiled and not (rounds and case.rounding == "eager"):
        compiled_us = device_us(compile_module(op.reference), given)
    kind, least_us = rates.bound(op, case, given)
    return dataclasses.replace(
        record,
        fused_us=fused_us,
        plain_us=plain_us,
        compiled_us=compiled_us,
        tflops=None if op.flops is None else op.flops(case, given) / fused_us * 1e-6,
        bound=kind,
        share=least_us / fused_us,
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
        values[index] = dequantize_rows(values[index], values.pop(index + 1))
    return values


def _host_us(form: Callable[..., Any], given: dict[str, Any]) -> float:
    start_s = time.perf_counter()
    form(**given)
    return (time.perf_counter() - start_s) * 1e6


def device_us(form: Callable[..., Any], given: dict[str, Any]) -> float:
    """Return the median time of a call on CUDA, from a graph of some, without pauses."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        for _ in range(2):
            form(**given)
        begin.record()
        form(**given)
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    calls = max(1, min(_MOST_CALLS, int(_GRAPH_MS / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            form(**given)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    pairs = list(itertools.pairwise(events))[_SETTLING:]
    return statistics.median(one.elapsed_time(other) for one, other in pairs) * 1e3 / calls


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser("benchmarks.kernels", __doc__)
    parser.add_argument("--names", help="operators with commas between; all by default")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--record", type=Path, help="file to append the JSON line to")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(argv)
    begin_s = time.perf_counter()
    try:
        device = resolve_device(options.device)
        ops, left_out = _chosen(options.names, device)
        for name, reason in left_out.items():
            print(f"{name} is left out: {reason}", file=sys.stderr)
        print(HEAD, file=sys.stderr)
        records = []
        for record in measure(ops, device):
            print(record.line, file=sys.stderr, flush=True)
            records.append(record)
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ENVIRONMENT
    line = {
        "scenario": "kernels",
        "kernels": [asdict(record) for record in records],
        "left_out": left_out,
        "seconds": round(time.perf_counter() - begin_s, 1),
        "machine": asdict(describe_machine(device, commit=options.commit)),
    }
    if options.record is not None:
        append_record(options.record, line)
    print(json.dumps(line))
    return EXIT_OK if all(record.is_agreeing for record in records) else EXIT_FAILURE


def _chosen(names: str | None, device: torch.device) -> tuple[list[Op], dict[str, str]]:
    """Return the operators that are asked for and run here, and why others do not.

    Raises: ConfigError for a name that is none, DeviceError where nothing is left to measure.
    """
    rows = all_rows()
    chosen = list(rows) if names is None else names.split(",")
    for name in chosen:
        if name not in rows:
            raise ConfigError(f"names: {name!r}; allowed: {', '.join(rows)}")
    reasons = {name: refusal(rows[name], device) for name in chosen}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(left_out) == len(reasons):
        told = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DeviceError(f"names: nothing of them can be measured on {device}: {told}")
    return [rows[name] for name in chosen if name not in left_out], left_out


if __name__ == "__main__":
    sys.exit(main())
