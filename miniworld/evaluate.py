"""Quality of the mini world: ``python -m miniworld.evaluate``.

Owns the command: which items run, on what, and where table, json and contact sheets go. All cases
are held out, all seeds fixed; every rollout has its own history and the sampler of the product.
What was measured is written after each item, so that a run that is cut keeps what it has. float32
is float32: convolutions of the autoencoder do not round to fewer bits on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch

from engine.config import SPARSE_STEPS, AttentionName, preset
from engine.errors import WorldStreamError
from engine.provenance import processor_name, source_commit
from miniworld.evaluation import endurance, quality
from miniworld.evaluation.figures import Report
from miniworld.evaluation.models import Models, load
from miniworld.evaluation.quality import SHORT, Settings

Item = Callable[[Models, Settings, Report], None]
ITEMS: dict[str, Item] = {
    "vae": quality.measure_vae,
    "rollout": quality.measure_rollout,
    "yaw": quality.measure_yaw,
    "walking": quality.measure_walking,
    "return": quality.measure_return,
    "prompt": quality.measure_prompts,
    "leading": quality.measure_leading,
    "long": endurance.measure_long,
    "outside": endurance.measure_outside,
    "endless": endurance.measure_endless,
}


def evaluate(
    models: Models,
    settings: Settings,
    items: Sequence[str] = tuple(ITEMS),
    *,
    json_path: Path | None = None,
    commit: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure items one after another.

    Args:
        models: what is judged.
        settings: cases and seeds.
        items: names of `ITEMS`.
        json_path: file to write after each item.
        commit: of the files, where they are no checkout.
        log: hears of each item.

    Raises: KeyError for an unknown item.
    """
    measures = {name: ITEMS[name] for name in items}
    report = Report(environment=describe(models, settings, commit=commit))
    for name, measure in measures.items():
        started_s = time.perf_counter()
        with _exact_convolutions():
            measure(models, settings, report)
        report.seconds[name] = round(time.perf_counter() - started_s, 2)
        log(f"{name}: {report.seconds[name]:.1f} s")
        if json_path is not None:
            part = json_path.with_suffix(".part")
            part.write_text(report.to_json(), encoding="utf-8")
            part.replace(json_path)
    return report


@contextmanager
def _exact_convolutions() -> Iterator[None]:
    """Let convolutions of this process, which does nothing else, multiply in fp32 on a GPU."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def describe(models: Models, settings: Settings, *, commit: str | None = None) -> dict[str, Any]:
    """Say what was measured, with what, and where; for ``commit`` see `evaluate`."""
    device = models.device
    is_cuda = device.type == "cuda"
    return {
        "weights": _place(models.source),
        "weights_hash": models.weights_hash,
        "dtype": str(models.core.model.dtype).removeprefix("torch."),
        "linear": models.linear,
        "attention": models.attention,
        "sparse_tau": models.sparse_tau,
        "sparse_block": models.sparse_block,
        "sparse_steps": models.sparse_steps,
        "device": torch.cuda.get_device_name(device) if is_cuda else processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or source_commit(),
        "settings": {
            key: value for key, value in dataclasses.asdict(settings).items() if key != "sheet_dir"
        },
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _place(source: str) -> str:
    """Return a folder as it is called inside the repository, or its name alone elsewhere."""
    path, root = Path(source), Path(__file__).resolve().parent.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miniworld.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--weights", default="", help="folder of shipped weights or of a training run, or "
        "'random'; the shipped ones by default")  # fmt: skip
    add("--stage", default="", help="stage of a training run: distil or flow")
    add("--cases", type=int, help="held-out clips of each item (64; 8 with --short)")
    add("--seed", type=int, default=0, help="added to the fixed seeds")
    add("--short", action="store_true", help="fewer clips and chunks, for a CPU")
    add("--items", default=",".join(ITEMS), help="comma-separated; all by default")
    add("--json", type=Path, help="write every figure here")
    add("--commit", help="of the files, where they are no checkout")
    add("--sheet-dir", type=Path, help="write contact sheets here")
    add("--device", default="auto", help="cuda, cpu; cuda where present by default")
    add("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on CUDA by default")
    add("--linear", default="bf16", help="bf16, fp8_rowwise, fp8_mixed, fp8_block, or a json file")
    add("--attention", choices=get_args(AttentionName), default="auto", help="over the window")
    add("--sparse-tau", type=float, default=1.0, help="of sparse attention: larger reads less")
    add("--sparse-block", type=int, default=64, help="of sparse attention: keys that share a "
        "summary; 8 cover as much of a picture here as 64 do at 832x480")  # fmt: skip
    add("--sparse-steps", type=int, default=SPARSE_STEPS, help="of sparse attention: denoise "
        "steps, the first of a chunk, that read a part")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    items = [name for name in args.items.split(",") if name]
    unknown = sorted(set(items) - set(ITEMS))
    if unknown or not items:
        parser.error(f"--items: {unknown or 'none'}; allowed: {','.join(ITEMS)}")
    settings = dataclasses.replace(
        SHORT if args.short else Settings(), seed=args.seed, sheet_dir=args.sheet_dir
    )
    if args.cases is not None:
        settings = dataclasses.replace(settings, cases=args.cases)
    if not 2 <= settings.cases <= 4096:
        parser.error(f"--cases: {settings.cases}; allowed: 2 to 4096")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    dtype = getattr(torch, args.dtype or ("bfloat16" if name == "cuda" else "float32"))
    try:
        models = load(
            args.weights or str(preset("mini").weights),
            device=device,
            dtype=dtype,
            stage=args.stage,
            linear=args.linear,
            attention=args.attention,
            sparse_tau=args.sparse_tau,
            sparse_block=args.sparse_block,
            sparse_steps=args.sparse_steps,
        )
    except WorldStreamError as error:
        parser.error(f"{error}")
    report = evaluate(models, settings, items, json_path=args.json, commit=args.commit, log=_print)
    _print(report.table())
    return 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
