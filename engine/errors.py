"""Errors that the engine raises on purpose.

    WorldStreamError
    |- ConfigError (ValueError)        a value that somebody chose is not allowed
    |- StateError (RuntimeError)       calls in an order that cannot work
    |- CheckpointError                 weights on disk are missing, damaged or of another model
    |- DeviceError                     the machine cannot run what was asked for
    |  `- OutOfMemoryError             its memory ran out while it ran
    `- UnsupportedError                a sound request that this build does not serve

Owns: the tree. Invariant: a message names the field, its value and what is allowed.
"""

from __future__ import annotations


class WorldStreamError(Exception):
    """Base of every error that is meant for people."""


class ConfigError(WorldStreamError, ValueError):
    """A setting or argument is outside what is allowed."""


class StateError(WorldStreamError, RuntimeError):
    """A call came in an order that cannot work."""


class CheckpointError(WorldStreamError):
    """Weights on disk are missing, damaged or belong to another model."""


class DeviceError(WorldStreamError):
    """The machine lacks the device, the memory or the data type that was asked for."""


class OutOfMemoryError(DeviceError):
    """Memory ran out in the middle of a rollout, which is over; the engine can begin another."""


class UnsupportedError(WorldStreamError):
    """A sound request that this build does not serve."""
