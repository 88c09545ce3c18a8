"""Command line: `worldstream` generate, replay, serve, doctor; bench and encode elsewhere.

Owns options, messages, exit codes: 0 ok, 1 failure, 2 bad usage or input, 3 environment (device,
memory, weights), 130 stopped by Ctrl-C. Results go to stdout, progress and messages to stderr; a
message is one line. Nothing heavy is imported before a command has checked its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from engine.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    UnsupportedError,
    WorldStreamError,
)
from stream.cli_bench import Bench, BenchLive
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
from stream.load_news import LoadNews, TerminalNews
from stream.replay import plan_replay, replay
from stream.trace import read_trace, trace_path
from stream.world_spec import prompt_options

if TYPE_CHECKING:
    from engine.ranks import Ranks

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Make a video of a world from a picture, a prompt and held keys. Several GPUs share it where
    torchrun starts this: torchrun --nproc-per-node 2 -m stream.cli generate ...
    """

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
        from engine.ranks import joined_ranks
        from stream.worlds import ModelCache

        with joined_ranks(self.job.device, _tell_failure) as ranks:
            made = generate(job, ModelCache(_news(ranks), ranks))
            if ranks.is_first:
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
    lora: File = None
    """Where the adapter of the trace is now; by default the one that lies with the weights."""
    lora_mode: str = "auto"
    """merged, separate or fused, as it was."""
    qkv_layout: str = "auto"
    """interleaved or stacked, as it was."""
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
            lora=self.lora,
            lora_mode=self.lora_mode,
            qkv_layout=self.qkv_layout,
        )
        if trace.is_torn or trace.end is None:
            _say("note: the trace broke off; replaying the chunks that it holds")

        from engine.ranks import joined_ranks
        from stream.worlds import ModelCache

        with joined_ranks(ready.world.engine.device, _tell_failure) as ranks:
            result = replay(ready, ModelCache(_news(ranks), ranks))
            if not ranks.is_first:
                return EXIT_OK if result.first_difference is None else EXIT_FAILURE
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
class Serve:
    """Serve the world to browsers. Each option is also WORLDSTREAM_NAME in the environment."""

    preset: Text = None
    """mini, h3_33b or tiny; by default mini."""
    renderer: bool = False
    """Show true frames of the scenes instead of the model's."""
    weights: Text = None
    """shipped, random, or a folder."""
    size: Text = None
    """Picture size, such as 832x480, of those that the preset knows."""
    decoder: Text = None
    """Mode of the decoder, which also chooses among several; by default the best that is there."""
    linear: Text = None
    """Products of the blocks: auto (bf16 wherever that fits, else fp8_mixed, else fp8_rowwise),
    bf16, fp8_rowwise, fp8_mixed, fp8_block, or a json file."""
    attention: Text = None
    """Over the window: auto, the name of a backend, or sparse, which is an approximation."""
    sparse_tau: Number = None
    """Of sparse attention, by default 1: larger reads less."""
    sparse_block: Number = None
    """Of sparse attention: keys that share a summary, 64 by default."""
    sparse_steps: Number = None
    """Of sparse attention: denoise steps, the first of a chunk, that read a part, by default 2."""
    kernels: Text = None
    """Fused kernels and where they round: auto, off, eager or fast."""
    compile: Text = None
    """What is compiled at the first start: auto, off, blocks or full."""
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
    lora: File = None
    """Adapter (LoRA): a file or a folder of training; by default the one beside the weights."""
    lora_mode: Text = None
    """merged, separate or fused; by default the best here that loses nothing of it."""
    qkv_layout: Text = None
    """Fused projections of the original layout: interleaved (shards) or stacked (one file)."""
    device: Text = None
    """auto, cpu, cuda or cuda:N."""
    dtype: Text = None
    """auto, float32 or bfloat16."""
    ranks: Number = None
    """GPUs that share each world, of a number that divides its heads; by default 1."""
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


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say whether this machine can serve a preset, and what exactly is missing (exit code 1)."""

    preset: str = "h3_33b"
    """mini, h3_33b or tiny."""
    weights: Text = None
    """Folder to look into, shipped, or random; by default what ships, else nothing."""
    lora: File = None
    """Adapter to look at: what it is, and what of it merging into bfloat16 would lose."""
    prompt_encoder: File = None
    """Folder of the prompt encoder; by default the one with the weights."""
    decoder: str = "auto"
    """Mode of the decoder that serve would be given."""
    size: Text = None
    """Picture size to plan memory for, such as 832x480; by default those that the preset knows."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    ranks: int = 1
    """GPUs that would share each world."""
    host: Text = None
    """Address that the service would listen on."""
    port: Number = None
    """Its port."""
    udp_ports: Text = None
    """UDP ports for media, as A-B."""
    json: bool = False
    """Print JSON instead of tables."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Look, print, and return 0 where the preset can be served."""
        from stream.settings import load_settings

        settings = load_settings(
            host=self.host, port=self.port, udp_ports=self.udp_ports, ranks=self.ranks
        )
        from stream.doctor import Question, examine

        report = examine(
            Question(
                preset=self.preset,
                weights=self.weights,
                lora=self.lora,
                size=self.size,
                device=self.device,
                decoder=self.decoder,
                prompt_encoder=self.prompt_encoder,
                ranks=settings.ranks,
            ),
            settings,
        )
        if self.json:
            print(json.dumps(report.as_json(), indent=2))
        else:
            from rich.console import Console

            from stream.doctor_tables import print_report

            print_report(report, Console())
        return EXIT_OK if report.is_ready else EXIT_FAILURE


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Encode, tyro.conf.subcommand("encode")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
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
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("batch: several ranks; allowed: one process, or one job a torchrun")
    lines = read_batch(path)
    from stream.worlds import ModelCache

    models = ModelCache(TerminalNews())
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


def _news(ranks: Ranks) -> LoadNews:
    return TerminalNews() if ranks.is_first else LoadNews()


def _tell_failure(error: Exception, rank: int) -> int:
    """Say what a rank failed of, and return the exit code."""
    if isinstance(error, (WorldStreamError, OSError)):
        _say(f"error: rank {rank}: {_one_line(error)}")
    else:
        traceback.print_exception(error)
    return _exit_code(error)


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
    from engine.ranks import end_process

    end_process(main())
