"""Files of a Qwen3-VL: where they are, what of the weights is read, and their hash.

Owns the search in a folder and the map of names. Content decides, names of files do not, but for
those that every release has: `config.json`, `preprocessor_config.json`, the tokenizer's.
Invariants: what is wrong with a file is found before anything is allocated; nothing here needs
transformers.

    FOLDER                     a Qwen3-VL as released, or what one with an H3 model has:
    |- text_encoder/           config.json, shards *.safetensors
    |- tokenizer/              tokenizer.json, or vocab.json and merges.txt; tokenizer_config.json
    `- processor/              preprocessor_config.json
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.shards import TensorRecord, check_index, find_shards, read_shard
from engine.errors import CheckpointError

MODEL_TYPE = "qwen3_vl"
CONFIG = "config.json"
_WEIGHTS = ("text_encoder", "FL2VA/text_encoder", "Ref2VA/text_encoder", "")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json",
)  # fmt: skip
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PREFIXES = (
    ("model.language_model.", "language_model."),
    ("model.visual.", "visual."),
    ("language_model.", "language_model."),
    ("visual.", "visual."),
    ("model.", "language_model."),
)
"""Names in a file and in the model. The last is that of files with the layers of text right below
`model`."""
_UNUSED = re.compile(r"^(lm_head\..*|language_model\.norm\..*)$")
"""The head, and the norm after the last layer: what is read lies before both."""
_LAYER = re.compile(r"^language_model\.layers\.(\d+)\.")
_FLOATS = ("BF16", "F16", "F32")
_SAMPLES, _SAMPLE_BYTES = 4, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFiles:
    """Everything that one encoder is read from."""

    weights: Path
    """Folder of the shards."""
    config: Mapping[str, Any]
    tokenizer: Path
    processor: Path
    records: Mapping[str, TensorRecord]
    """Tensors that are read, by their names in the model."""
    model_hash: str
    """Of all of it: samples of every tensor that is read, the rest whole."""

    @property
    def size_bytes(self) -> int:
        """Size of the weights that are read."""
        return sum(record.nbytes for record in self.records.values())

    @property
    def largest_part_bytes(self) -> int:
        """Size of the part that takes most: one layer, or the embeddings."""
        sizes: dict[str, int] = {}
        for name, record in self.records.items():
            layer = _LAYER.match(name)
            part = name if layer is None else layer[0]
            sizes[part] = sizes.get(part, 0) + record.nbytes
        return max(sizes.values())


def holds_encoder(folder: Path) -> bool:
    """Whether `find_encoder` has something to look at in a folder."""
    return _find_weights(folder) is not None


def find_encoder(folder: Path, *, layers: int, text_dim: int) -> PromptFiles:
    """Find the parts of an encoder in a folder and check their headers.

    Args:
        folder: see above.
        layers: of the text that will run; later ones are not read.
        text_dim: width that the transformer takes.

    Raises: CheckpointError naming the file, and the tensor, what was expected and what is there.
    """
    weights = _find_weights(folder)
    if weights is None:
        raise CheckpointError(
            f"{folder} holds no prompt encoder; expected {CONFIG} of a {MODEL_TYPE} there or in "
            "text_encoder"
        )
    config = _read_config(weights / CONFIG)
    _check_config(weights / CONFIG, config, layers=layers, text_dim=text_dim)
    around = dict.fromkeys((weights, weights.parent, folder))
    tokenizer = _first(
        [each / name for each in around for name in ("", "tokenizer", "processor")],
        ("tokenizer.json", "vocab.json"), what="tokenizer", where=folder,
    )  # fmt: skip
    processor = _first(
        [each / name for each in around for name in ("", "processor", "tokenizer")],
        _PROCESSOR_FILES, what="processor", where=folder,
    )  # fmt: skip
    records = _read_records(weights, layers=layers)
    return PromptFiles(
        weights=weights,
        config=config,
        tokenizer=tokenizer,
        processor=processor,
        records=records,
        model_hash=_hash(config, tokenizer, processor, records, layers),
    )


def _find_weights(folder: Path) -> Path | None:
    for name in _WEIGHTS:
        path = folder / name / CONFIG
        if path.is_file() and _read_config(path).get("model_type") == MODEL_TYPE:
            return folder / name
    return None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not usable: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not usable: it holds no object")
    return config


def _check_config(path: Path, config: Mapping[str, Any], *, layers: int, text_dim: int) -> None:
    text = config.get("text_config")
    if not isinstance(text, dict) or not isinstance(config.get("vision_config"), dict):
        raise CheckpointError(f"{path}: text_config or vision_config is missing; expected both")
    for key, needed in (("hidden_size", text_dim), ("num_hidden_layers", layers)):
        found = text.get(key)
        is_enough = found == needed or (
            key == "num_hidden_layers" and isinstance(found, int) and found > needed
        )
        if not is_enough:
            least = "" if key == "hidden_size" else "at least "
            raise CheckpointError(
                f"{path}: text_config.{key} is {found!r}; expected {least}{needed}"
            )


def _first(folders: list[Path], names: tuple[str, ...], *, what: str, where: Path) -> Path:
    for folder in folders:
        if any((folder / name).is_file() for name in names):
            return folder
    raise CheckpointError(
        f"{where}: the {what} is missing; expected {' or '.join(names)} beside the weights or in a "
        f"folder {what}"
    )


def _read_records(weights: Path, *, layers: int) -> dict[str, TensorRecord]:
    shards = [read_shard(path) for path in find_shards(weights)]
    check_index(weights, shards)
    records: dict[str, TensorRecord] = {}
    for shard in shards:
        for stored, record in shard.records.items():
            name = _model_name(stored)
            layer = _LAYER.match(name)
            if _UNUSED.match(name) or (layer is not None and int(layer[1]) >= layers):
                continue
            if name in records:
                raise CheckpointError(
                    f"{record.path}: tensor {stored} is there twice, too in {records[name].path}"
                )
            if record.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{record.path}: tensor {stored} is {record.dtype}; expected "
                    f"{', '.join(_FLOATS)}"
                )
            records[name] = record
    return records


def _model_name(stored: str) -> str:
    for prefix, new in _PREFIXES:
        if stored.startswith(prefix):
            return new + stored[len(prefix) :]
    return stored


def _hash(
    config: Mapping[str, Any],
    tokenizer: Path,
    processor: Path,
    records: Mapping[str, TensorRecord],
    layers: int,
) -> str:
    parts = {key: config[key] for key in ("text_config", "vision_config")}
    digest = hashlib.sha256(f"{layers} {json.dumps(parts, sort_keys=True)}".encode())
    for folder, names in ((tokenizer, _TOKENIZER_FILES), (processor, _PROCESSOR_FILES)):
        for name in names:
            if (folder / name).is_file():
                digest.update(name.encode() + (folder / name).read_bytes())
    # In the order of the disk, a thousand reads from 50 GB take a second or two; in the order of
    # names, files that are cut into other shards have the same hash.
    samples = {}
    for name, record in sorted(records.items(), key=lambda item: (item[1].path, item[1].start)):
        sample = hashlib.sha256(f"{name} {record.dtype} {record.shape}".encode())
        with record.path.open("rb") as file:
            step = max(record.nbytes // _SAMPLES, _SAMPLE_BYTES)
            for begin in range(record.start, record.stop, step):
                file.seek(begin)
                sample.update(file.read(min(_SAMPLE_BYTES, record.stop - begin)))
        samples[name] = sample.digest()
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()
