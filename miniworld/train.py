"""Training of the mini world, stage by stage: ``python -m miniworld.train STAGE --help``.

Owns the command line of the stages and the files that pass between them:

    vae      OUT/vae/                    the tiny video autoencoder
    flow     OUT/flow.safetensors        teacher-forced flow matching (needs vae)
    distil   OUT/distil.safetensors      distillation on own rollouts (needs vae and flow)
    export   a weights folder as shipped (needs vae and distil or flow)

Every stage takes ``--budget-seconds``, counts what it has spent in its checkpoint and goes on from
there with ``--resume``. Several GPUs: ``torchrun --nproc-per-node N -m miniworld.train ...``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import save_model
from engine.checkpoint.reading import load_model
from engine.checkpoint.source import open_source
from engine.config import ModelConfig, TextConfig, preset
from engine.model.dit import MiniMaxH3Transformer
from engine.text import WordEncoder
from miniworld.prompts import KNOWN_WORDS
from miniworld.stages.distil import DistilConfig, train_distil
from miniworld.stages.flow import FlowConfig, train_flow
from miniworld.stages.latents import ClipCache
from miniworld.stages.ranks import Ranks
from miniworld.stages.vae import VaeStageSettings, train_vae
from vae_stream.taehv import TinyVae

Log = Callable[[str], None]
_SHARD_BYTES = 15 << 20
"""Shards stay under 16 MiB, so that any of them is quick to move and to hash."""


def mini_config() -> ModelConfig:
    """Return the configuration of the mini world with its vocabulary."""
    model = preset("mini").model
    assert isinstance(model.text, TextConfig)
    text = dataclasses.replace(model.text, vocabulary=tuple(KNOWN_WORDS))
    return dataclasses.replace(model, text=text)


def logger(path: Path, *, quiet: bool) -> Log:
    """Return a function that writes lines with the elapsed time to ``path`` and the terminal."""
    started_s = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        if quiet:
            return
        stamped = f"[{time.monotonic() - started_s:7.1f}] {line}"
        with path.open("a", encoding="utf-8") as file:
            file.write(stamped + "\n")
        sys.stdout.write(stamped + "\n")
        sys.stdout.flush()

    return log


def save_shards(folder: Path, name: str, state: dict[str, torch.Tensor]) -> None:
    """Write weights as bf16 shards ``NAME-0000k.safetensors``, each below the shard limit."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in state.items():
        half = tensor.to(torch.bfloat16).contiguous()
        if size + half.nbytes > _SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][key] = half
        size += half.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"{name}-{index:05d}.safetensors")


def load_shards(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Read what ``save_shards`` wrote, as fp32.

    Raises: FileNotFoundError naming the pattern when there is none.
    """
    paths = sorted(folder.glob(f"{name}-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}/{name}-*.safetensors: none; run stage {name!r} first")
    return {key: value.float() for path in paths for key, value in load_file(path).items()}


def _cache(args: argparse.Namespace, config: ModelConfig, ranks: Ranks, log: Log) -> ClipCache:
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    vae = TinyVae.from_pretrained(args.out / "vae", dtype=dtype, device=ranks.device)
    channels_last: Any = {"memory_format": torch.channels_last}  # not in torch's annotations
    vae = vae.to(**channels_last)
    text = WordEncoder.of(config)
    # Each process makes its own clips: together they see twice as many, at no cost in time.
    return ClipCache.build(
        vae,
        text,
        groups=args.groups,
        clips_per_group=args.clips_per_group,
        chunks=args.chunks,
        seed=args.clip_seed + 7919 * ranks.rank,
        device=ranks.device,
        folder=args.clip_folder,
        log=log,
    )


def _vae(args: argparse.Namespace, ranks: Ranks, log: Log) -> None:
    train_vae(
        args.out,
        budget_s=args.budget_seconds,
        seed=args.seed,
        device=ranks.device,
        batch=args.batch,
        resume=args.resume,
        log=log,
        settings=VaeStageSettings(start_from=args.start_from),
        ranks=ranks,
    )


def _flow(args: argparse.Namespace, ranks: Ranks, log: Log) -> None:
    config = mini_config()
    cache = _cache(args, config, ranks, log)
    trained = train_flow(
        args.out,
        cache,
        config,
        recipe=FlowConfig(batch=args.batch, muon_lr=args.muon_lr, adamw_lr=0.75 * args.muon_lr),
        budget_s=args.budget_seconds,
        seed=args.seed,
        ranks=ranks,
        resume=args.resume,
        log=log,
        start=None if args.start_from is None else shipped_state(args.start_from),
        max_steps=args.max_steps,
    )
    if ranks.is_first:
        save_shards(args.out, "flow", trained.averaged_state())


def _distil(args: argparse.Namespace, ranks: Ranks, log: Log) -> None:
    config = mini_config()
    cache = _cache(args, config, ranks, log)
    trained = train_distil(
        args.out,
        cache,
        config,
        load_shards(args.out, "flow"),
        recipe=DistilConfig(batch=args.batch, rollouts=args.rollouts, replays=args.replays),
        budget_s=args.budget_seconds,
        seed=args.seed,
        ranks=ranks,
        resume=args.resume,
        log=log,
        max_steps=args.max_steps,
    )
    if ranks.is_first:
        save_shards(args.out, "distil", trained.averaged_state())


def shipped_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read an exported folder of weights back to names and fp32 values of a stage.

    Raises: CheckpointError.
    """
    config = mini_config()
    text = WordEncoder.of(config)
    device = torch.device("cpu")
    source = open_source(folder, config)
    model = load_model(source, dtype=torch.float32, device=device, text_encoder=text)
    state = dict(model.state_dict())
    return state | {f"text.{name}": value for name, value in text.state_dict().items()}


def build_models(
    config: ModelConfig, state: dict[str, torch.Tensor]
) -> tuple[MiniMaxH3Transformer, WordEncoder]:
    """Return transformer and word encoder with the weights of a stage, fp32."""
    model = MiniMaxH3Transformer(config)
    text = WordEncoder.of(config)
    model.load_state_dict({k: v for k, v in state.items() if not k.startswith("text.")})
    text.load_state_dict(
        {k.removeprefix("text."): v for k, v in state.items() if k.startswith("text.")}
    )
    return model, text


def _export(args: argparse.Namespace, log: Log) -> None:
    """Write the folder that an engine loads: int8 rows, the autoencoder, hashes of all files."""
    config = mini_config()
    state = load_shards(args.out, args.stage_weights)
    if args.flow_share > 0.0:
        flow = load_shards(args.out, "flow")
        state = {
            name: torch.lerp(value, flow[name], args.flow_share) for name, value in state.items()
        }
    model, text = build_models(config, state)
    args.to.mkdir(parents=True, exist_ok=True)
    shutil.copytree(args.out / "vae", args.to / "vae", dirs_exist_ok=True)
    model_hash = save_model(args.to, model, config, text_encoder=text)
    size = sum(path.stat().st_size for path in args.to.rglob("*") if path.is_file())
    log(f"exported {args.stage_weights} to {args.to}: {size / 2**20:.1f} MiB, hash {model_hash}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miniworld.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stages = parser.add_subparsers(dest="stage", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, required=True, help="folder of all stages' results")
    common.add_argument("--seed", type=int, default=0)
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--budget-seconds", type=float, required=True, help="time of the stage")
    timed.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    timed.add_argument("--batch", type=int, default=16, help="clips a step on each process")
    clips = argparse.ArgumentParser(add_help=False)
    clips.add_argument("--groups", type=int, default=80, help="groups of clips to render")
    clips.add_argument("--clips-per-group", type=int, default=128)
    clips.add_argument("--chunks", type=int, default=10, help="chunks of each clip")
    clips.add_argument("--clip-seed", type=int, default=1)
    clips.add_argument("--clip-folder", type=Path, help="keep encoded clips here")
    clips.add_argument("--max-steps", type=int, help="stop earlier")
    vae = stages.add_parser("vae", parents=[common, timed], help="about 6 minutes on one H200")
    vae.add_argument(
        "--start-from", type=Path, help="exported autoencoder whose decoder alone goes on learning"
    )
    flow = stages.add_parser(
        "flow", parents=[common, timed, clips], help="teacher forcing, about 8 minutes"
    )
    flow.add_argument("--muon-lr", type=float, default=FlowConfig().muon_lr, help="peak rate")
    flow.add_argument("--start-from", type=Path, help="exported weights to begin with")
    distil = stages.add_parser(
        "distil", parents=[common, timed, clips], help="own rollouts, about 6 minutes"
    )
    export = stages.add_parser("export", parents=[common], help="write a folder of weights")
    export.add_argument("--to", type=Path, required=True, help="folder of the shipped weights")
    export.add_argument("--stage-weights", choices=("flow", "distil"), default="distil")
    export.add_argument(
        "--flow-share",
        type=float,
        default=0.0,
        help="share of stage flow's weights in a mean with the others': truer and softer",
    )
    distil.add_argument("--rollouts", type=int, default=128, help="rollouts made at once")
    distil.add_argument("--replays", type=int, default=1, help="parts replayed of each rollout")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run one stage."""
    args = _parser().parse_args(argv)
    ranks = Ranks.start()
    log = logger(args.out / f"{args.stage}.log", quiet=not ranks.is_first)
    log(json.dumps({k: str(v) for k, v in vars(args).items()} | {"processes": ranks.count}))
    if args.stage == "vae":
        _vae(args, ranks, log)
    elif args.stage == "flow":
        _flow(args, ranks, log)
    elif args.stage == "distil":
        _distil(args, ranks, log)
    else:
        _export(args, log)
    ranks.close()


if __name__ == "__main__":
    main()
