"""Safetensors of a folder, by tensor name.

Owns the search for files and the checks of their form. Invariants: tensors are read one at a time
and only when asked for, so that a large checkpoint never lies in host memory as a whole; what a
file holds is told by its tensors' names, not by its own; `check` reads heads of files alone, so
that what is wrong is known before there is memory for any of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEXES = "*.safetensors.index.json"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_PICKLE_STARTS = (b"\x80", b"PK")
_FLOATS = ("F32", "BF16", "F16")


class WeightFiles:
    """Tensors of one safetensors file, or of all that lie in a folder or one folder below it.

    Args:
        source: file or folder.

    Raises:
        FileNotFoundError: there is no such file, or no safetensors in the folder.
        ValueError: a file is damaged or a pickle, an index names a file that is missing, or two
            files hold a tensor of the same name.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = Path(source)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in _find(self.source):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name in self._file_of:
                        raise ValueError(
                            f"{file}: {name} is in {self._file_of[name].name} too; "
                            "expected each tensor once"
                        )
                    self._file_of[name] = file
                    head = tensors.get_slice(name)
                    self._shapes[name] = tuple(head.get_shape())
                    self._dtypes[name] = head.get_dtype()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        return self._shapes

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU as stored.

        Raises:
            ValueError: its file is damaged.
        """
        with _open(self._file_of[name]) as tensors:
            try:
                tensor: Tensor = tensors.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(
                    f"{self._file_of[name]}: {name} cannot be read: {error}"
                ) from error
        return tensor

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, ignored: Iterable[str] = ()
    ) -> None:
        """Check by the heads of the files that they hold these tensors and no others.

        Args:
            expected: shape of each tensor by name.
            ignored: names that may be there too.

        Raises:
            ValueError: a tensor is missing, not expected, of another shape, or not of floating
                point.
        """
        wanted = set(expected)
        missing = sorted(wanted - set(self._shapes))
        if missing:
            raise ValueError(f"{self.source}: lacks {_some(missing)}")
        unknown = sorted(set(self._shapes) - wanted - set(ignored))
        if unknown:
            raise ValueError(f"{self.source}: has {_some(unknown)}; not expected")
        for name, shape in expected.items():
            if self._shapes[name] != shape:
                raise ValueError(
                    f"{self._file_of[name]}: {name} has shape {self._shapes[name]}; "
                    f"expected {shape}"
                )
            if self._dtypes[name] not in _FLOATS:
                raise ValueError(
                    f"{self._file_of[name]}: {name} is {self._dtypes[name]}; "
                    f"expected {' or '.join(_FLOATS)}"
                )


def _find(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such file or folder")
    files, indexes = sorted(source.glob("*.safetensors")), sorted(source.glob(_INDEXES))
    if not files:
        files = sorted(source.glob("*/*.safetensors"))
        indexes += sorted(source.glob(f"*/{_INDEXES}"))
    for index in indexes:
        missing = sorted(name for name in _indexed(index) if not (index.parent / name).is_file())
        if missing:
            raise ValueError(f"{index}: names {_some(missing)}, which the folder lacks")
    if not files:
        pickles = sorted(file.name for file in source.iterdir() if file.suffix in _PICKLES)
        found = f"; found {_some(pickles)}, which may run code when it is read" if pickles else ""
        raise FileNotFoundError(f"{source}: no *.safetensors{found}")
    return files


def _indexed(index: Path) -> set[str]:
    """Return the files that an index names."""
    try:
        return {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: {error!r}; expected an index of safetensors") from error


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as opened:
            first = opened.read(8)
        # The length of a header may begin as a pickle does.
        is_header = int.from_bytes(first, "little") <= file.stat().st_size - 8
        is_pickle = first.startswith(_PICKLE_STARTS) and not is_header
        what = "a pickle" if is_pickle else f"damaged or cut off ({error})"
        raise ValueError(f"{file}: {what}; expected safetensors") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
