"""The exceptions that ttp raises.

    TTPError
    ├── ConfigError        a setting is unknown, ill-typed or contradicts another      (also a ValueError)
    ├── LayoutError        the state cannot be split over this world                   (also a ValueError)
    ├── CheckpointError    a checkpoint cannot be read or written
    │   ├── CorruptCheckpoint      truncated, altered or incomplete
    │   ├── CheckpointMismatch     it belongs to another model or optimizer
    │   └── NotWritable            the directory cannot take a checkpoint
    ├── DatasetError       the training text cannot be read or is too small
    ├── ControllerError    the controller could not be started or reached
    └── ProtocolError      an event that the protocol's state does not allow

Every message says what, who, got, wanted, and what to do next.
"""

from __future__ import annotations


class TTPError(Exception):
    """Base of all errors that ttp raises on purpose."""


class ConfigError(TTPError, ValueError):
    """A setting is unknown, ill-typed or contradicts another."""


class LayoutError(TTPError, ValueError):
    """The optimizer state cannot be split over this world."""


class CheckpointError(TTPError):
    """A checkpoint cannot be read or written."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is truncated, altered or incomplete."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint belongs to another model or optimizer; the message names the first difference."""


class NotWritable(CheckpointError):
    """A directory cannot take a checkpoint."""


class DatasetError(TTPError):
    """The training text cannot be read or is too small."""


class ControllerError(TTPError):
    """The controller could not be started or reached."""


class ProtocolError(TTPError):
    """An event that the protocol's state does not allow; the state is unchanged."""
