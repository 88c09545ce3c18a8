"""Command line: `worldstream` generate, replay, bench, encode, serve.

Owns options, messages, exit codes: 0 ok, 1 failure, 2 bad usage or input, 3 environment (device,
memory, weights), 130 stopped by Ctrl-C. Results go to stdout, progress and messages to stderr; a
message is one line. Nothing heavy is imported before a command has checked its input.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from engine.config import BackendName, EngineConfig, KernelChoice, preset
from engine.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    UnsupportedError,
    WorldStreamError,
)
from stream.encode import Encode
from stream.generate import Made, generate
from stream.idle_threads import SHARED_SPIN_COUNT, set_spin_count
from stream.jobs import (
    File,
    Job,
    JobOptions,
    Number,
    Text,
    options_from_json,
    plan,
    plan_outputs,
    read_batch,
)
from stream.replay import plan_replay, replay
from stream.trace import read_trace, trace_path
from stream.world_spec import prompt_options

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Make a video of a world from a picture, a prompt and held keys."""

    job: tyro.conf.OmitArgPrefixes[JobOptions]
    batch: File = None
    """File with one job a line: the job options as keys of a JSON object."""

    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Make one video, or those of a batch."""
        if self.batch is not None:
            return _run_batch(self.batch, self.job)
        job = plan(self.job)
        from stream.worlds import ModelCache

        made = generate(job, ModelCache())
        _print_made(made, job)
        return EXIT_INTERRUPTED if made.is_interrupted else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Make the latents of a trace again and compare their digest with the recorded one."""

    trace: tyro.conf.Positional[str]
    """NAME.trace.jsonl."""
    out: File = None
    """Video to write; without it only latents are made."""
    png: File = None
    """Folder for numbered PNG files (with --out)."""
    gif: File = None
    """Animated GIF to write (with --out)."""
    image: File = None
    """Where the first picture is now, if it moved."""
    prompt_encoder: File = None
    """Folder of the Qwen3-VL of a trace of h3_33b, where its prompts are not kept encoded."""
    prompt_cache: File = None
    """Folder of encoded prompts; by default ~/.cache/worldstream/prompts."""
    refinement_prompt: bool = False
    """The trace was made with it."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""
    force: bool = False
    """Replay with other weights or another picture; replace files that exist."""

    def run(self) -> int:
        """Replay, print both digests, fail where they differ."""
        if self.out is None and (self.png is not None or self.gif is not None):
            raise ConfigError("png, gif: given without out; allowed with --out NAME.mp4")
        outputs = None
        if self.out is not None:
            outputs = plan_outputs(self.out, png=self.png, gif=self.gif, force=self.force)
        trace = read_trace(self.trace)
        ready = plan_replay(
            trace,
            Path(self.trace).parent,
            image=self.image,
            outputs=outputs,
            force=self.force,
            prompts=prompt_options(
                encoder=self.prompt_encoder,
                cache=self.prompt_cache,
                refinement=self.refinement_prompt,
            ),
        )
        if trace.is_torn or trace.end is None:
            _say("note: the trace broke off; replaying the chunks that it holds")

        from stream.worlds import ModelCache

        result = replay(ready, ModelCache())
        for warning in result.warnings:
            _say(f"warning: {warning}")
        made = result.made
        for path in made.paths:
            print(path)
        print(f"{made.digest_of} sha256 {made.digest}")
        if result.first_difference is not None:
            _say(f"error: {made.digest_of} differ from chunk {result.first_difference} on")
            return EXIT_FAILURE
        print(f"same as recorded: {made.chunk_count} of {len(trace.chunks)} chunks")
        return EXIT_INTERRUPTED if made.is_interrupted else EXIT_OK


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
    graphs: Literal["auto", "on", "off"] = "auto"
    """Replay passes as CUDA graphs."""
    attention: BackendName = "auto"
    """Backend of the attention over the window."""
    kernels: KernelChoice = "auto"
    """Fused kernels and where they round."""
    linear: str = "bf16"
    """Products of the blocks: bf16, fp8_rowwise, or a json file with a scheme."""
    chunks: int = 20
    """Chunks to measure once the window is full; 1000 show whether memory stays flat."""
    ablations: Text = None
    """Measure again with one thing changed at a time: all, or some of prefix_cache, adaln_tables,
    packed_history, compile, dtype with commas between them."""
    ladder: bool = False
    """Transformer alone, from the plain path up, one change more a row, each with its error."""
    rows: Text = None
    """With --ladder: names of rows with commas between them; by default all."""
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
                graphs="auto" if self.graphs == "auto" else self.graphs == "on",
                attention=self.attention,
                kernels=self.kernels,
                linear=self.linear,
            ),
            chunk_count=self.chunks,
        )
        record = None if self.record is None else Path(self.record)
        ablations = () if self.ablations is None else parse_ablations(self.ablations)
        print(bench_engine(scenario, ablations=ablations, record=record), flush=True)
        return EXIT_OK

    def _climb(self) -> int:
        """Run the ladder, which chooses for itself how each row runs."""
        for name in ("compile", "graphs", "attention", "kernels", "linear", "ablations"):
            default = next(field.default for field in fields(self) if field.name == name)
            if getattr(self, name) != default:
                raise ConfigError(f"{name}: {getattr(self, name)}; allowed without ladder")
        from benchmarks.climb import ROW_NAMES, LadderScenario
        from benchmarks.ladder import alone, run_ladder
        from benchmarks.record import parse_geometry

        scenario = LadderScenario(
            preset=self.preset,
            weights=self.weights,
            geometry=None if self.geometry is None else parse_geometry(self.geometry),
            device=self.device,
            dtype=self.dtype,
            chunk_count=self.chunks,
            rows=ROW_NAMES if self.rows is None else tuple(self.rows.split(",")),
        )
        record = None if self.record is None else Path(self.record)
        plot = None if self.plot is None else Path(self.plot)
        print(run_ladder(alone(scenario), plot=plot, record=record), flush=True)
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


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve the world to browsers. Each option is also WORLDSTREAM_NAME in the environment."""

    preset: Text = None
    """mini, h3_33b or tiny; by default mini."""
    renderer: bool = False
    """Show true frames of the scenes instead of the model's."""
    weights: Text = None
    """shipped, random, or a folder."""
    scene: Text = None
    """What a session begins with."""
    prompt_encoder: File = None
    """Folder of the Qwen3-VL that h3_33b reads; by default the one beside the weights."""
    prompt_residency: Text = None
    """Where its weights stay: auto, gpu, cpu, or free, which reads them for each new prompt."""
    prompt_cache: File = None
    """Folder of encoded prompts; by default ~/.cache/worldstream/prompts."""
    prompt_cache_mib: Number = None
    """Bound on it; 0 keeps none."""
    refinement_prompt: bool = False
    """Encode one canonical prompt about looks in place of every prompt."""
    device: Text = None
    """auto, cpu, cuda or cuda:N."""
    dtype: Text = None
    """auto, float32 or bfloat16."""
    host: Text = None
    """Address to listen on; by default 127.0.0.1, this machine only."""
    port: Number = None
    """1 to 65535; by default 8000."""
    tls_cert: File = None
    """PEM file of the certificate; needed, with its key, where other machines can connect."""
    tls_key: File = None
    """PEM file of the certificate's key."""
    trusted_proxies: Text = None
    """Addresses of proxies that have TLS instead, with commas between them."""
    token: Text = None
    """Access token; made up and printed when other machines can reach the service."""
    ice_server: Text = None
    """stun:host:port or turn:user:password@host:port?transport=tcp, with commas between them."""
    turn_secret: Text = None
    """Shared with a TURN server that makes short-lived users; user:password@ is left out."""
    media_hosts: Text = None
    """Local addresses for WebRTC; by default those on which the service can be reached."""
    udp_ports: Text = None
    """UDP ports for media, as A-B; by default any."""
    max_sessions: Number = None
    """Worlds at a time, each with a worker of its own; by default 1."""
    record: File = None
    """Folder that keeps traces and recordings."""
    print_config: bool = False
    """Print all settings as JSON and end."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Serve until SIGTERM or Ctrl-C."""
        from stream.settings import load_settings

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        del given["print_config"], given["verbose"]
        for flag in ("renderer", "refinement_prompt"):
            given[flag] = given[flag] or None
        settings = load_settings(**given)
        if self.print_config:
            print(settings.printable())
            return EXIT_OK
        from stream.serve import serve

        if not self.verbose:
            from stream.logs import configure_logs

            configure_logs(logging.WARNING)
        serve(settings)
        return EXIT_OK


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Encode, tyro.conf.subcommand("encode")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        command = read_command(arguments)
        # The service, also one that is measured, chooses for itself.
        if not isinstance(getattr(command, "target", command), Serve | BenchLive):
            set_spin_count(SHARED_SPIN_COUNT)
        if command.verbose:
            from stream.logs import configure_logs

            configure_logs()
        return command.run()
    except (WorldStreamError, OSError) as error:
        _say(f"error: {_one_line(error)}")
        return _exit_code(error)
    except KeyboardInterrupt:
        _say("error: interrupted")
        return EXIT_INTERRUPTED


def read_command(arguments: Sequence[str] | None = None) -> Command:
    """Read the command line, that of the process by default.

    Raises:
        SystemExit: 2 where it is wrong, after saying why.
    """
    return tyro.cli(
        Command,
        prog="worldstream",
        description="A streaming world model: picture, prompt and held keys become video.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _run_batch(path: str, defaults: JobOptions) -> int:
    """Run the jobs of a file one after the other; a bad one does not stop the rest."""
    lines = read_batch(path)
    from stream.worlds import ModelCache

    models = ModelCache()
    failed: list[int] = []
    done_count = 0
    for number, line in lines:
        try:
            job = plan(options_from_json(line, defaults))
            made = generate(job, models)
        except (WorldStreamError, OSError) as error:
            failed.append(number)
            _say(f"error: line {number}: {_one_line(error)}")
            continue
        done_count += 1
        _print_made(made, job)
        if made.is_interrupted:
            _say(f"stopped: {done_count} of {len(lines)} jobs done, {len(failed)} failed")
            return EXIT_INTERRUPTED
    listed = f" (lines {', '.join(map(str, failed))})" if failed else ""
    print(f"batch: {done_count} of {len(lines)} jobs done, {len(failed)} failed{listed}")
    return EXIT_FAILURE if failed else EXIT_OK


def _print_made(made: Made, job: Job) -> None:
    for path in made.paths:
        print(path)
    print(trace_path(job.outputs.video))
    if not made.paths:
        _say(f"note: no decoder for preset {job.world.preset}; wrote the trace, no video")
    if made.is_interrupted:
        _say(f"stopped after {made.chunk_count} of {job.chunk_count} chunks")
    speed = f"{made.frames_per_second:.1f} fps on {made.device}"
    print(f"{made.chunk_count} chunks, {made.frame_count} frames, {speed}")
    print(f"{made.digest_of} sha256 {made.digest}", flush=True)


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, (DeviceError, CheckpointError, UnsupportedError)):
        return EXIT_ENVIRONMENT
    return EXIT_FAILURE


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return " ".join(f"{where}{error.strerror}".split())
    return " ".join(str(error).split())


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
