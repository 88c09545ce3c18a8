"""How much the products of a scheme lose, layer by layer, on what really comes to them.

    python -m benchmarks.sqnr --preset mini --record benchmarks/sqnr.jsonl
    python -m benchmarks.sqnr --preset h3_33b --geometry 832x480 --chunks 1 --linear fp8_block

Owns the measurement: a walk in the dtype of the weights, beside each of whose products the same one
is made in eight bits of the same rows, and the power of the first over that of their difference, in
decibels, over all passes (prefix, denoise, refresh). The walk itself goes on exactly, so that a
layer shows its own loss alone, and several schemes are measured on the same rows: where one is
better than another is then a number. Lines for people go to stderr; stdout has a line of JSON for
each scheme.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.options import command_parser
from benchmarks.record import append_record, describe_machine, parse_geometry, size_name
from engine.config import PRESET_NAMES, EngineConfig, preset
from engine.device import resolve_device
from engine.errors import ConfigError, UnsupportedError, WorldStreamError
from engine.linears import check_linears
from engine.model.dit import MiniMaxH3Transformer
from engine.quant import Fp8Linear, block_linears
from engine.schemes import LINEARS, Layer, Rule, layer_rules, scheme_of
from engine.types import FRAMES_PER_CHUNK, Action, Control

EXIT_OK, EXIT_USAGE, EXIT_ENVIRONMENT = 0, 2, 3
SCENE, SEED = "meadow-lake", 0
CHUNK_LIMIT = 100


@contextmanager
def watched(
    model: MiniMaxH3Transformer, linears: Sequence[str]
) -> Iterator[dict[str, dict[Layer, Tensor]]]:
    """Fill powers of signal and error, fp64 [2], for each layer that a scheme names, by scheme.

    Args:
        model: with plain linears, called as modules.
        linears: the schemes.
    """
    powers: dict[str, dict[Layer, Tensor]] = {linear: {} for linear in linears}
    handles = []
    for linear in linears:
        for (index, name), rule in layer_rules(scheme_of(linear), model.config).items():
            power = torch.zeros(2, dtype=torch.float64, device=model.proj_in.weight.device)
            powers[linear][index, name] = power
            for owner, attribute in block_linears(model.block(index))[name]:
                module = getattr(owner, attribute)
                handles.append(module.register_forward_hook(_beside(module, rule, power)))
    try:
        yield powers
    finally:
        for handle in handles:
            handle.remove()


def _beside(module: nn.Module, rule: Rule, power_2: Tensor) -> Callable[..., None]:
    weight_NK = module.state_dict()["weight"]  # of a packed one, too

    def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        product = Fp8Linear.of(weight_NK, rule)(inputs[0].contiguous())
        error = product.float() - output.float()
        power_2.add_(torch.stack([_power(output), _power(error)]))

    return hook


def _power(values: Tensor) -> Tensor:
    return values.float().square().sum(dtype=torch.float64)


def measure(
    preset_name: str,
    config: EngineConfig,
    *,
    weights: str,
    geometry: str | None,
    linears: Sequence[str],
    chunks: int,
) -> list[dict[str, Any]]:
    """Walk and return a record a scheme, the machine left out.

    Raises: CheckpointError, ConfigError, DeviceError, UnsupportedError.
    """
    from stream.world_spec import Start, WorldSpec
    from stream.worlds import default_prompt, first_picture, load_models

    found = preset(preset_name, None if geometry is None else parse_geometry(geometry))
    if not 1 <= chunks <= CHUNK_LIMIT:
        raise ConfigError(f"chunks: {chunks}; allowed: 1 to {CHUNK_LIMIT}")
    device = resolve_device(config.device)
    for linear in linears:
        if not layer_rules(scheme_of(linear), found.model):
            raise ConfigError(
                f"linear: {linear!r}; allowed for {preset_name} with its {found.model.num_layers} "
                "blocks: a scheme that names linears of theirs"
            )
        check_linears(linear, found.model, device, torch.bfloat16)
    spec = WorldSpec(
        source="model",
        preset=preset_name,
        geometry=found.model.geometry,
        weights=weights,
        engine=config,
    )
    start = Start(image=None, image_path=None, scene=SCENE)
    picture_HWC = first_picture(start, spec.geometry)
    models = load_models(spec)
    try:
        engine = models.engine
        with watched(engine.core.model, linears) as powers:
            rollout = engine.new_rollout(
                default_prompt(start),
                anchor_BCTHW=models.encoder.encode_image(picture_HWC).float(),
                picture_HWC=picture_HWC,
                seed=SEED,
            )
            for _ in range(chunks):
                engine.step(
                    rollout,
                    Action.from_keys([(Control.FORWARD, Control.LOOK_RIGHT)] * FRAMES_PER_CHUNK),
                )
        dtype = str(engine.dtype).removeprefix("torch.")
    finally:
        models.close()
    walk = {
        "name": "sqnr",
        "class": "A",
        "preset": preset_name,
        "weights": weights if weights in ("random", "shipped") else "folder",
        "geometry": size_name(spec.geometry),
        "dtype": dtype,
        "chunks": chunks,
    }
    return [walk | _figures(linear, powers[linear]) for linear in linears]


def _figures(linear: str, powers: dict[Layer, Tensor]) -> dict[str, Any]:
    """Decibels of a scheme, layer by layer."""
    signal_error = torch.stack(list(powers.values())).cpu()
    decibels = 10.0 * torch.log10(signal_error[:, 0] / signal_error[:, 1])
    if not decibels.isfinite().all():
        raise UnsupportedError(f"linear: {linear!r} made the same products, or none were finite")
    return {
        "linear": linear,
        "lowest_db": round(float(decibels.min()), 2),
        "layers": {
            f"blocks.{index}.{name}": round(db, 2)
            for (index, name), db in zip(powers, decibels.tolist(), strict=True)
        },
    }


def table(record: dict[str, Any]) -> str:
    """Return a line a block, and the least and the median of each kind."""
    found: dict[str, dict[str, float]] = {}
    for key, db in record["layers"].items():
        _, block, name = key.split(".")
        found.setdefault(block, {})[name] = db
    head = "".join(f"{name:>8}" for name in LINEARS)
    lines = [f"{'block':10}{head}  dB, {record['linear']}"]
    rows = {block: [known.get(name) for name in LINEARS] for block, known in found.items()}
    kinds = [[known[name] for known in found.values() if name in known] for name in LINEARS]
    rows["least"] = [min(kind, default=None) for kind in kinds]
    rows["median"] = [statistics.median(kind) if kind else None for kind in kinds]
    for title, cells in rows.items():
        lines.append(f"{title:10}" + "".join(f"{_cell(db):>8}" for db in cells))
    return "\n".join(lines)


def gains(records: Sequence[dict[str, Any]]) -> str:
    """Return what each scheme gains over the first, in the median over the layers of a kind."""
    first, *others = records
    lines = []
    for record in others:
        shared = record["layers"].keys() & first["layers"].keys()
        cells = []
        for name in LINEARS:
            gained = [record["layers"][key] - first["layers"][key] for key in shared
                      if key.endswith(f".{name}")]  # fmt: skip
            cells.append(f"{statistics.median(gained):+8.2f}" if gained else f"{'-':>8}")
        lines.append(f"{'gain':10}{''.join(cells)}  dB, {record['linear']} over {first['linear']}")
    return "\n".join(lines)


def _cell(db: float | None) -> str:
    return "-" if db is None else f"{db:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code."""
    parser = command_parser("benchmarks.sqnr", __doc__)
    parser.add_argument("--preset", choices=PRESET_NAMES, default="mini")
    parser.add_argument("--weights", help="shipped, random, or a folder; those that ship, if any")
    parser.add_argument("--geometry", help="picture size, such as 832x480")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--linear", default="fp8_rowwise,fp8_block",
        help="schemes with commas between: names, or json files",
    )  # fmt: skip
    parser.add_argument("--chunks", type=int, default=1, help="to walk")
    parser.add_argument("--record", type=Path, help="file to append to: benchmarks/sqnr.jsonl")
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    options = parser.parse_args(arguments)
    ships = preset(options.preset).weights is not None and options.geometry is None
    try:
        config = EngineConfig(
            device=options.device, dtype=options.dtype, linear="bf16", compile="off", graphs=False,
            kernels="off",
        )  # fmt: skip
        records = measure(
            options.preset,
            config,
            weights=options.weights or ("shipped" if ships else "random"),
            geometry=options.geometry,
            linears=tuple(options.linear.split(",")),
            chunks=options.chunks,
        )
    except WorldStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ENVIRONMENT
    machine = describe_machine(resolve_device(options.device), commit=options.commit)
    for record in records:
        record |= dataclasses.asdict(machine)
        print(table(record), file=sys.stderr, flush=True)
        if options.record is not None:
            append_record(options.record, record)
        print(json.dumps(record), flush=True)
    if len(records) > 1:
        print(gains(records), file=sys.stderr, flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
