"""Command line of the measurements: `worldstream bench` engine, session, live.

Owns their options. Nothing heavy is imported before a command has checked its input.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.session_speed import SessionScenario, run_sessions
from engine.config import (
    SPARSE_STEPS,
    AttentionName,
    EngineConfig,
    GraphChoice,
    KernelChoice,
    LoraChoice,
    preset,
)
from engine.errors import ConfigError
from stream.jobs import File, Text

EXIT_OK, EXIT_FAILURE = 0, 1
_GRAPHS: dict[str, GraphChoice] = {"auto": "auto", "on": True, "off": False, "strict": "strict"}


@dataclass(frozen=True, kw_only=True)
class BenchEngine:
    """Transformer and decoder, as a session uses them."""

    preset: Literal["mini", "h3_33b", "tiny"] = "mini"
    """Which model."""
    weights: str = "auto"
    """shipped, random, or a folder; auto: shipped where they are, else random."""
    geometry: Text = None
    """Picture size, such as 320x192; by default the preset's own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the transformer blocks and the decoder."""
    compile: Literal["auto", "off", "blocks", "full"] = "auto"
    """Compile the blocks, or the whole pass; auto: the whole pass on CUDA."""
    graphs: Literal["auto", "on", "off", "strict"] = "auto"
    """Replay passes as CUDA graphs; strict fails where one cannot be recorded."""
    attention: AttentionName = "auto"
    """Backend of the attention over the window, or sparse, which is an approximation."""
    sparse_tau: float = 1.0
    """Of sparse attention: larger reads less."""
    sparse_block: int = 64
    """Of sparse attention: keys that share a summary."""
    sparse_steps: int = SPARSE_STEPS
    """Of sparse attention: denoise steps, the first of a chunk, that read a part."""
    kernels: KernelChoice = "auto"
    """Fused kernels and where they round."""
    linear: str = "bf16"
    """Products of the blocks: bf16, fp8_rowwise, fp8_mixed, fp8_block, or a json file."""
    lora: File = None
    """Adapter (LoRA): a file, or the folder that training left it in."""
    lora_mode: LoraChoice = "auto"
    """How it is used; auto: the best here that loses nothing of it."""
    chunks: int = 20
    """Chunks to measure once the window is full; 1000 show whether memory stays flat."""
    ablations: Text = None
    """Measure again with one thing changed at a time: all, or some of prefix_cache, adaln_tables,
    packed_history, compile, dtype with commas between them."""
    ladder: bool = False
    """Transformer alone, from the plain path up, one change more a row, each with its error."""
    rows: Text = None
    """With --ladder: names of rows with commas between them, fp8_block too, which is left out by
    default."""
    plot: File = None
    """With --ladder: PNG to write."""
    record: File = None
    """File to append the JSON line to, such as benchmarks/engine.jsonl; with --ladder one line a
    row, such as benchmarks/ladder.jsonl."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Measure and print the record."""
        if self.ladder:
            return self._climb()
        for name in ("rows", "plot"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: {getattr(self, name)}; allowed with ladder")
        from benchmarks.record import parse_geometry
        from stream.bench import bench_engine, parse_ablations
        from stream.measure import Scenario

        ships = preset(self.preset).weights is not None or self.preset == "tiny"
        scenario = Scenario(
            preset=self.preset,
            weights=("shipped" if ships else "random") if self.weights == "auto" else self.weights,
            geometry=None if self.geometry is None else parse_geometry(self.geometry),
            engine=EngineConfig(
                device=self.device,
                dtype=self.dtype,
                compile=self.compile,
                graphs=_GRAPHS[self.graphs],
                attention=self.attention,
                sparse_tau=self.sparse_tau,
                sparse_block=self.sparse_block,
                sparse_steps=self.sparse_steps,
                kernels=self.kernels,
                linear=self.linear,
                lora=self.lora,
                lora_mode=self.lora_mode,
            ),
            chunk_count=self.chunks,
        )
        record = None if self.record is None else Path(self.record)
        ablations = () if self.ablations is None else parse_ablations(self.ablations)
        print(bench_engine(scenario, ablations=ablations, record=record), flush=True)
        return EXIT_OK

    def _climb(self) -> int:
        """Run the ladder, which chooses for itself how each row runs."""
        for name in (
            "compile", "graphs", "attention", "sparse_tau", "sparse_block", "sparse_steps",
            "kernels", "linear", "lora", "lora_mode", "ablations",
        ):  # fmt: skip
            default = next(each.default for each in fields(self) if each.name == name)
            if getattr(self, name) != default:
                raise ConfigError(f"{name}: {getattr(self, name)}; allowed without ladder")
        from benchmarks.ladder import run_ladder
        from benchmarks.ladder_rows import LadderScenario
        from benchmarks.record import parse_geometry
        from engine.ranks import Ranks

        scenario = LadderScenario(
            preset=self.preset,
            weights=self.weights,
            geometry=None if self.geometry is None else parse_geometry(self.geometry),
            device=self.device,
            dtype=self.dtype,
            chunk_count=self.chunks,
            rows=None if self.rows is None else tuple(self.rows.split(",")),
        )
        record = None if self.record is None else Path(self.record)
        plot = None if self.plot is None else Path(self.plot)
        ladder = run_ladder(scenario, Ranks(), plot=plot, record=record)
        print(ladder.line, flush=True)
        return EXIT_OK if ladder.is_climbed else EXIT_FAILURE


@dataclass(frozen=True, kw_only=True)
class BenchSession:
    """A session from its start to the steady window: start-up, frame rate, time to a first frame,
    memory against its plan.
    """

    scenario: tyro.conf.OmitArgPrefixes[SessionScenario] = field(default_factory=SessionScenario)
    """What is measured."""
    record: File = None
    """File to append a JSON line a row to, such as benchmarks/session.jsonl."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Measure and print the record."""
        record = None if self.record is None else Path(self.record)
        print(run_sessions(self.scenario, record=record), flush=True)
        return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class BenchLive:
    """The live service, played in a real Chromium on this machine: frame rate, latency, cost."""

    preset: Literal["mini", "tiny"] = "mini"
    """Which model."""
    transport: Literal["webrtc", "ws-h264", "ws-jpeg"] = "webrtc"
    """How video reaches the page."""
    seconds: int = 300
    """To play, after a warm-up."""
    viewers: int = 3
    """Pages that watch in a second, shorter part; 0 leaves it out."""
    seed: int = 0
    """Of the keys that are pressed."""
    record: File = None
    """File to append the JSON line to, such as benchmarks/live.jsonl."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Measure and print the record."""
        from stream.bench_live import LiveScenario, bench_live

        scenario = LiveScenario(
            preset=self.preset,
            transport=self.transport,
            seconds=self.seconds,
            viewers=self.viewers,
            seed=self.seed,
        )
        record = None if self.record is None else Path(self.record)
        print(bench_live(scenario, record=record), flush=True)
        return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure; a table goes to stderr, one line of JSON to stdout."""

    target: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[BenchEngine, tyro.conf.subcommand("engine")]
            | Annotated[BenchSession, tyro.conf.subcommand("session")]
            | Annotated[BenchLive, tyro.conf.subcommand("live")]
        ]
    ]
    """What is measured."""

    @property
    def verbose(self) -> bool:
        """Whether logs are wanted."""
        return self.target.verbose

    def run(self) -> int:
        """Measure and print the record."""
        return self.target.run()
