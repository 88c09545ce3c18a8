"""Frozen dataclasses from decoded json.

Owns the reading. Invariants: no key is missing or left over; a value has the type that its field
has; a message names the key.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

from engine.errors import ConfigError

Config = TypeVar("Config")


def read_dataclass(cls: type[Config], data: Any, where: str) -> Config:
    """Return a dataclass from decoded json, section by section.

    Args:
        cls: its class, and of its fields.
        data: what json gave.
        where: of the file, for messages.

    Raises: ConfigError naming the key that is missing, unknown or of a wrong type.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is {type(data).__name__}; allowed: an object")
    hints = typing.get_type_hints(cls)
    allowed = ", ".join(hints)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}; allowed: {allowed}")
    for key in hints:
        if key not in data:
            raise ConfigError(f"{where}: missing key {key!r}; needed: {allowed}")
    values = {key: _value(hint, data[key], f"{where}: {key}") for key, hint in hints.items()}
    return cls(**values)


def _has_keys_of(cls: Any, value: Any) -> bool:
    return isinstance(value, dict) and set(value) == set(typing.get_type_hints(cls))


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_dataclass(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} is {value!r}; allowed: {', '.join(map(repr, arguments))}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [each for each in arguments if each is not type(None)]
        # Sections that are alternatives differ in their keys; the first is named where none fits.
        fits = (each for each in inner[1:] if _has_keys_of(each, value))
        return _value(next(fits, inner[0]), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}; allowed: a list")
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ConfigError(f"{where} has {len(value)} items; allowed: {len(arguments)}")
        return tuple(_value(arguments[0], item, where) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} is {value!r}; allowed: {hint.__name__}")
    return value
