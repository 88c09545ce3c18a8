"""Jobs of `generate`: what was asked for, checked to the end before torch or weights are loaded.

Owns the limits of prompts, seeds and lengths, and the check of places to write to. Options arrive
as text from the command line or as values of one JSON line; both pass the same checks.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from engine.config import SPARSE_BLOCKS, SPARSE_STEPS, SPARSE_STEPS_LIMIT
from engine.errors import ConfigError
from stream.record import GIF_LIMIT_S
from stream.script import FRAMES_PER_CHUNK, FRAMES_PER_SECOND, KeyScript, load_script
from stream.world_spec import Start, WorldSpec, prompt_options, read_start, world_spec

PROMPT_LIMIT = 1_000
SEED_LIMIT = 2**64 - 1
CHUNK_LIMIT = 100_000
BATCH_LIMIT_BYTES = 16 * 1024 * 1024


# Numbers stay text here: `plan` refuses a wrong one in a single line that names what is allowed.
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", constructor=str, help_behavior_hint="")]
File = Annotated[str | None, tyro.conf.arg(metavar="PATH", constructor=str, help_behavior_hint="")]
Number = Annotated[
    str | int | float | None,
    tyro.conf.arg(metavar="NUMBER", constructor=str, help_behavior_hint=""),
]
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "Text": (str, type(None)),
    "File": (str, type(None)),
    "Number": (str, int, float, type(None)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """The world, its first picture, the held keys, the files."""

    out: File = None
    """Video to write, NAME.mp4; a trace NAME.trace.jsonl is written beside it."""
    actions: Text = None
    """Held keys and frames, such as "w*34 wd*17 left*17", or a file of them."""
    image: File = None
    """First picture: a file (PNG, JPEG, WEBP, BMP, GIF, TIFF), stretched to the model's size."""
    scene: Text = None
    """First picture: a named scene of the small world; a wrong name lists them all."""
    prompt: Text = None
    """What the world looks like, at most 1000 characters; by default the scene's own."""
    seed: Number = "0"
    """0 to 2^64-1; equal seeds and inputs make equal videos."""
    seconds: Number = None
    """Length, rounded up to whole chunks of 17 frames at 24 a second."""
    chunks: Number = None
    """Length in chunks; without either the length of the actions."""
    preset: str = "mini"
    """mini, h3_33b or tiny."""
    weights: str = "shipped"
    """shipped, random, or a folder."""
    size: Text = None
    """Picture size, such as 832x480, of those that the preset knows."""
    png: File = None
    """Folder for numbered PNG files."""
    gif: File = None
    """Animated GIF to write."""
    prompt_encoder: File = None
    """Folder of the Qwen3-VL that h3_33b reads; by default the one beside the weights, or what is
    kept of its work."""
    prompt_residency: str = "auto"
    """Where its weights stay: gpu, cpu, or free, which reads them for each new prompt."""
    prompt_cache: File = None
    """Folder of encoded prompts; by default ~/.cache/worldstream/prompts."""
    refinement_prompt: bool = False
    """Encode one canonical prompt about looks in place of every prompt (h3_33b)."""
    decoder: str = "auto"
    """Mode of the decoder, which also chooses among several; auto: the best that is there."""
    linear: str = "auto"
    """Products of the blocks: auto (bf16 wherever that fits, else fp8_mixed, else fp8_rowwise),
    bf16, fp8_rowwise, fp8_mixed, fp8_block, or a json file."""
    attention: str = "auto"
    """Over the window: auto, the name of a backend, or sparse, which is an approximation."""
    sparse_tau: Number = "1"
    """Of sparse attention: larger reads less."""
    sparse_block: Number = "64"
    """Of sparse attention: keys that share a summary."""
    sparse_steps: Number = str(SPARSE_STEPS)
    """Of sparse attention: denoise steps, the first of a chunk, that read a part."""
    kernels: str = "auto"
    """Fused kernels and where they round: auto, off, eager or fast."""
    lora: File = None
    """Adapter (LoRA): a file or a folder of training; by default the one beside the weights."""
    lora_mode: str = "auto"
    """merged, separate or fused; auto: the best here that loses nothing of it."""
    qkv_layout: str = "auto"
    """Fused projections of the original layout: interleaved (shards) or stacked (one file)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32 or bfloat16."""
    renderer: bool = False
    """Show the true frames of the scene instead of the model's."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where results go."""

    video: Path
    png: Path | None
    gif: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that can start."""

    world: WorldSpec
    start: Start
    prompt: str | None
    """None: the scene's own, or empty for an image."""
    script: KeyScript
    seed: int
    chunk_count: int
    outputs: Outputs


def plan(options: JobOptions) -> Job:
    """Check everything that can be checked without the model.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """
    if options.out is None or options.actions is None:
        missing = "out" if options.out is None else "actions"
        raise ConfigError(f"{missing}: not given; needed for each video")
    prompt = None if options.prompt is None else check_prompt(options.prompt)
    seed = parse_seed(options.seed)
    script = load_script(options.actions)
    for _, switched in script.prompts:
        check_prompt(switched)
    chunk_count = _chunk_count(options, script)
    world = world_spec(
        options.preset,
        size=options.size,
        weights=options.weights,
        renderer=options.renderer,
        device=options.device,
        dtype=options.dtype,
        decoder=options.decoder,
        linear=options.linear,
        attention=options.attention,
        sparse_tau=_number(options.sparse_tau, "sparse_tau"),
        sparse_block=_one_of(options.sparse_block, "sparse_block", SPARSE_BLOCKS),
        sparse_steps=_whole(options.sparse_steps, "sparse_steps", 1, SPARSE_STEPS_LIMIT),
        kernels=options.kernels,
        prompts=prompt_options(
            encoder=options.prompt_encoder,
            residency=options.prompt_residency,
            cache=options.prompt_cache,
            refinement=options.refinement_prompt,
        ),
        lora=options.lora,
        lora_mode=options.lora_mode,
        qkv_layout=options.qkv_layout,
    )
    start = read_start(world, image=options.image, scene=options.scene)
    outputs = plan_outputs(options.out, png=options.png, gif=options.gif, force=options.force)
    duration_s = chunk_count * FRAMES_PER_CHUNK / FRAMES_PER_SECOND
    if outputs.gif is not None and duration_s > GIF_LIMIT_S:
        raise ConfigError(f"gif: {duration_s:.0f} s asked for; allowed: at most {GIF_LIMIT_S}")
    return Job(
        world=world,
        start=start,
        prompt=prompt,
        script=script,
        seed=seed,
        chunk_count=chunk_count,
        outputs=outputs,
    )


def plan_outputs(out: str, *, png: str | None, gif: str | None, force: bool) -> Outputs:
    """Check the places to write to; nothing is made yet.

    Raises:
        ConfigError: a folder is missing or takes no file, a file exists, a name does not fit.
    """
    video = _output_file(out, "out", ".mp4", force=force)
    gif_path = None if gif is None else _output_file(gif, "gif", ".gif", force=force)
    png_path = None if png is None else Path(png)
    if png_path is not None:
        if png_path.exists() and not png_path.is_dir():
            raise ConfigError(f"png: {png!r} is a file; allowed: a folder")
        if png_path.is_dir() and any(png_path.iterdir()) and not force:
            raise ConfigError(f"png: {png!r} is not empty; allowed with --force")
        check_writable(png_path if png_path.is_dir() else png_path.parent, "png")
    return Outputs(video=video, png=png_path, gif=gif_path)


def check_prompt(prompt: str) -> str:
    """Return the prompt, or refuse it. Empty is allowed.

    Raises:
        ConfigError: longer than 1,000 characters, or with control characters.
    """
    if len(prompt) > PROMPT_LIMIT:
        raise ConfigError(f"prompt: {len(prompt)} characters; allowed: at most {PROMPT_LIMIT}")
    for position, character in enumerate(prompt):
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise ConfigError(
                f"prompt: control character U+{ord(character):04X} at position {position}; "
                "allowed: printable text"
            )
    return prompt


def parse_seed(value: object) -> int:
    """Whole number from 0 to 2**64 - 1."""
    return _whole(value, "seed", 0, SEED_LIMIT)


def read_batch(path: str) -> list[tuple[int, str]]:
    """Lines of a batch file that hold a job, with their numbers from 1."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(BATCH_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"batch: cannot read {path!r}: {error.strerror}") from error
    if len(data) > BATCH_LIMIT_BYTES:
        raise ConfigError(f"batch: {path!r} is larger than {BATCH_LIMIT_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"batch: {path!r} is not UTF-8 text") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"batch: {path!r} holds no job")
    return lines


def options_from_json(line: str, defaults: JobOptions) -> JobOptions:
    """One job of a batch file: options as keys of a JSON object, over those of the command line."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("job: not JSON; allowed: one object a line") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"job: {type(data).__name__}; allowed: one object a line")
    kinds = {field.name: str(field.type) for field in fields(JobOptions)}
    for key, value in data.items():
        if key not in kinds:
            raise ConfigError(f"job: unknown key {key!r}; allowed: {', '.join(kinds)}")
        _check_kind(key, value, kinds[key])
    return replace(defaults, **data)


def _check_kind(key: str, value: object, kind: str) -> None:
    if not isinstance(value, _JSON_TYPES[kind]) or isinstance(value, bool) != (kind == "bool"):
        allowed = {"bool": "true or false", "Number": "a number"}.get(kind, "text")
        raise ConfigError(f"job: {key} is {json.dumps(value)[:40]}; allowed: {allowed}")


def _chunk_count(options: JobOptions, script: KeyScript) -> int:
    if options.seconds is not None and options.chunks is not None:
        raise ConfigError("seconds, chunks: both given; allowed: at most one of them")
    if options.chunks is not None:
        return _whole(options.chunks, "chunks", 1, CHUNK_LIMIT)
    if options.seconds is None:
        return min(script.chunk_count, CHUNK_LIMIT)
    limit_s = CHUNK_LIMIT * FRAMES_PER_CHUNK / FRAMES_PER_SECOND
    try:
        seconds = float(options.seconds)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= limit_s:
        raise ConfigError(
            f"seconds: {str(options.seconds)[:40]!r}; allowed: more than 0, at most {limit_s:.0f}"
        )
    return max(1, math.ceil(round(seconds * FRAMES_PER_SECOND, 6) / FRAMES_PER_CHUNK))


def _number(value: object, name: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(f"{name}: {str(value)[:40]!r}; allowed: a number") from None


def _whole(value: object, name: str, low: int, high: int) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,20}", text):
        raise ConfigError(
            f"{name}: {text[:40]!r}; allowed: whole numbers from {low} to {_power(high)}"
        )
    if not low <= int(text) <= high:
        raise ConfigError(f"{name}: {text}; allowed: whole numbers from {low} to {_power(high)}")
    return int(text)


def _one_of(value: object, name: str, allowed: tuple[int, ...]) -> int:
    if str(value) not in map(str, allowed):
        known = ", ".join(map(str, allowed))
        raise ConfigError(f"{name}: {str(value)[:40]!r}; allowed: {known}")
    return int(str(value))


def _power(number: int) -> str:
    return "2^64-1" if number == SEED_LIMIT else str(number)


def _output_file(value: str, name: str, suffix: str, *, force: bool) -> Path:
    path = Path(value)
    if path.suffix.lower() != suffix or not path.stem.strip("."):
        raise ConfigError(f"{name}: {value!r}; allowed: a file name that ends in {suffix}")
    if path.is_dir():
        raise ConfigError(f"{name}: {value!r} is a folder; allowed: a file name")
    if path.exists() and not force:
        raise ConfigError(f"{name}: {value!r} exists; allowed with --force")
    check_writable(path.parent, name)
    return path


def check_writable(folder: Path, name: str) -> None:
    """Refuse a folder that is missing or that takes no new file; the permission bits do not tell.

    Raises:
        ConfigError: names the folder and the reason.
    """
    if not folder.is_dir():
        raise ConfigError(f"{name}: folder {str(folder)!r} does not exist; make it first")
    probe = folder / ".worldstream-write-check"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{name}: cannot write in {str(folder)!r}: {error.strerror}") from error
