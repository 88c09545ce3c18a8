"""Encodings on disk: made once, then read with the same bits.

    CACHE/
    `- first 16 digits of the hash of an encoder/
       `- hash of prompt and picture.safetensors    rows, tags; the hashes, and that of the contents

Owns names, the check of what is read, the bound on all of it. Invariants: a file under its name is
whole; one that is damaged or of another encoder counts as none and is removed; the files used least
of late go first when there is no room.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.text import PromptEncoding

SUFFIX = ".safetensors"
_VERSION = 1
"""Of what is shown to an encoder, and of the file."""
_FOLDER_DIGITS = 16
_PART_SUFFIX = ".part"
_PART_AGE_S = 3600.0
_MIB = 2**20
_log = logging.getLogger(__name__)


def encoding_key(model_hash: str, prompt: str, picture_HWC: Tensor) -> str:
    """Name of an encoding: hash of the encoder, the prompt and the pixels of the picture."""
    pixels = hashlib.sha256(picture_HWC.contiguous().cpu().numpy().data).hexdigest()
    parts = [_VERSION, model_hash, prompt, pixels, list(picture_HWC.shape)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class EncodingStore:
    """Encodings of one encoder.

    Args:
        folder: of all encoders.
        model_hash: of the encoder.
        limit_mib: bound on the encodings of all encoders together.
    """

    def __init__(self, folder: Path, model_hash: str, *, limit_mib: int) -> None:
        self._root = folder
        self._folder = folder / model_hash[:_FOLDER_DIGITS]
        self._model_hash = model_hash
        self._limit_bytes = limit_mib * _MIB

    def read(self, key: str) -> PromptEncoding | None:
        """Return an encoding, or None where there is none that is whole."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                head = file.metadata() or {}
                rows_BRE, tags_R = file.get_tensor("rows"), file.get_tensor("tags")
            _check(head, self._model_hash, key, rows_BRE, tags_R)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError) as error:
            _log.warning("prompt_cache_damaged path=%s: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # a folder that takes no writes still serves
            os.utime(path)
        return PromptEncoding(rows_BRE=rows_BRE, tags_R=tags_R)

    def write(self, key: str, encoding: PromptEncoding) -> None:
        """Keep an encoding. A folder that takes none is done without, with a warning."""
        path = self._path(key)
        part = path.with_name(f".{key}.{os.getpid()}{_PART_SUFFIX}")
        rows_BRE, tags_R = encoding.rows_BRE.contiguous(), encoding.tags_R.contiguous()
        head = {
            "model_hash": self._model_hash,
            "key": key,
            "sha256": _contents_hash(rows_BRE, tags_R),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({"rows": rows_BRE, "tags": tags_R}, part, metadata=head)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
            self._make_room(keep=path)
        except (OSError, SafetensorError) as error:
            _log.warning("prompt_not_kept path=%s: %s", path, error)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"

    def _make_room(self, keep: Path) -> None:
        """Remove what was used least of late, and what an interrupted process left."""
        found = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            with suppress(OSError):  # another process may be faster
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit_bytes:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
        for part in self._root.glob(f"*/.*{_PART_SUFFIX}"):
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > _PART_AGE_S:
                    part.unlink()


def kept_model(folder: Path) -> str | None:
    """Hash of the encoder whose encodings a folder holds; None unless there is exactly one."""
    hashes = set()
    for path in folder.glob(f"*/*{SUFFIX}"):
        try:
            with safe_open(path, framework="pt") as file:
                hashes.add((file.metadata() or {}).get("model_hash"))
        except (OSError, SafetensorError):
            continue  # `read` tells of it when its turn comes
    return hashes.pop() if len(hashes) == 1 else None


def _check(
    head: dict[str, str], model_hash: str, key: str, rows_BRE: Tensor, tags_R: Tensor
) -> None:
    for name, expected in (("model_hash", model_hash), ("key", key)):
        if head.get(name) != expected:
            raise ValueError(f"{name} is {head.get(name)!r}; expected {expected!r}")
    found = _contents_hash(rows_BRE, tags_R)
    if head.get("sha256") != found:
        raise ValueError(f"contents have sha256 {found[:16]}; expected {head.get('sha256')!r}")


def _contents_hash(rows_BRE: Tensor, tags_R: Tensor) -> str:
    digest = hashlib.sha256(f"{rows_BRE.dtype} {list(rows_BRE.shape)}".encode())
    for tensor in (rows_BRE, tags_R):
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
