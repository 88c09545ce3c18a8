"""The ladder of the engine: what each way of running it takes, and what it costs in exactness.

    python -m benchmarks.ladder --preset h3_33b --geometry 832x480 --plot ladder.png
    torchrun --nproc-per-node 2 -m benchmarks.ladder --preset h3_33b --geometry 1344x768

`worldstream bench engine --ladder` is the same. Owns the command; needs torch, triton, numpy,
einops, safetensors and pillow alone. Rows go to stderr as they are done, the last line of stdout is
JSON; the first rank alone tells them. A rank that fails says so and is gone at once, whereupon
torchrun ends the others.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.climb import Climbed, Step, climb, measure_grounds
from benchmarks.ladder_output import as_json, as_record, bars, captions, head, row_line
from benchmarks.ladder_rows import DEFAULT_ROWS, ROW_NAMES, LadderScenario
from benchmarks.options import command_parser
from benchmarks.plot import save_waterfall
from benchmarks.record import append_record, parse_geometry
from engine.config import PRESET_NAMES
from engine.errors import ConfigError, WorldStreamError
from engine.ranks import Ranks, end_process, joined_ranks

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_ENVIRONMENT = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """What came of all rows."""

    line: str
    """JSON."""
    is_climbed: bool
    """Whether any row that was asked for was measured."""


def run_ladder(
    scenario: LadderScenario,
    ranks: Ranks,
    *,
    plot: Path | None,
    record: Path | None,
    commit: str | None = None,
) -> Ladder:
    """Climb, tell and keep each row as it is done; say so where none of them was measured.

    Args:
        scenario: what is climbed.
        ranks: who climbs.
        plot: PNG to write.
        record: file to append one JSON line a row to.
        commit: see `describe_machine`.

    Raises: CheckpointError, ConfigError, DeviceError, UnsupportedError.
    """
    scenario = dataclasses.replace(scenario, device=ranks.device(scenario.device))
    steps = list[Step]()
    exchange = ranks.exchange(scenario.model.num_attention_heads)
    ranks.require_alike(scenario.dtype)
    grounds = measure_grounds(scenario, exchange, commit=commit)
    if ranks.is_first:
        print(head(scenario, grounds), file=sys.stderr, flush=True)
    for step in climb(scenario, grounds, exchange):
        steps.append(step)
        if ranks.is_first:
            print(row_line(scenario, grounds, step), file=sys.stderr, flush=True)
            if record is not None and isinstance(step, Climbed):
                append_record(record, as_record(scenario, grounds, step))
    line = as_json(scenario, grounds, steps)
    if ranks.is_first and plot is not None:
        records = [row for row in line["rows"] if "reason" not in row]
        title, caption = captions(records)
        save_waterfall(plot, bars(records), title=title, caption=caption)
    climbed = {step.row.name for step in steps if isinstance(step, Climbed)}
    is_climbed = not climbed.isdisjoint(scenario.row_names)
    if ranks.is_first and not is_climbed:
        print("error: none of the rows was measured, see above", file=sys.stderr, flush=True)
    return Ladder(line=json.dumps(line), is_climbed=is_climbed)


def _tell_failure(error: Exception, rank: int) -> int:
    """Say what a rank failed of, and return the exit code."""
    if isinstance(error, WorldStreamError):
        print(f"error: rank {rank}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return _exit_code(error)


def _exit_code(error: Exception) -> int:
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ENVIRONMENT


def main(arguments: Sequence[str] | None = None) -> int:
    """Climb as the command line says and return the exit code."""
    parser = command_parser("benchmarks.ladder", __doc__)
    parser.add_argument("--preset", choices=PRESET_NAMES, default="h3_33b")
    parser.add_argument("--weights", choices=("auto", "shipped", "random"), default="auto")
    parser.add_argument("--geometry", help="picture size, such as 832x480")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--chunks", type=int, default=10, help="that count, of each row")
    parser.add_argument(
        "--rows",
        help=f"names with commas, of {', '.join(ROW_NAMES)}; by default those that run here of "
        f"{', '.join(DEFAULT_ROWS)}",
    )
    parser.add_argument("--reference", default=ROW_NAMES[0], help="row that errors are against")
    parser.add_argument("--start", default=ROW_NAMES[0], help="first row to measure after that")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/ladder.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    try:
        scenario = LadderScenario(
            preset=options.preset,
            weights=options.weights,
            geometry=None if options.geometry is None else parse_geometry(options.geometry),
            device=options.device,
            dtype=options.dtype,
            chunk_count=options.chunks,
            rows=None if options.rows is None else tuple(options.rows.split(",")),
            reference=options.reference,
            start=options.start,
        )
        with joined_ranks(scenario.device, _tell_failure) as ranks:
            ladder = run_ladder(
                scenario, ranks, plot=options.plot, record=options.record, commit=options.commit
            )
            if ranks.is_first:
                print(ladder.line, flush=True)
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return _exit_code(error)
    return EXIT_OK if ladder.is_climbed else EXIT_FAILURE


if __name__ == "__main__":
    end_process(main())
