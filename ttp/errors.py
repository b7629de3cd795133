"""The exceptions that ttp raises.

    TTPError
    ├── ConfigError        a setting is unknown, ill-typed or contradicts another      (also a ValueError)
    ├── LayoutError        the state cannot be split over this world                   (also a ValueError)
    ├── CheckpointError    a checkpoint cannot be read or written
    │   ├── CorruptCheckpoint      truncated, altered or incomplete
    │   │   └── TornShare          files that are not what their writers reported
    │   ├── CheckpointMismatch     it belongs to another model or optimizer
    │   └── NotWritable            the directory cannot take a checkpoint
    ├── DataMismatch       after a restart the trainer has other batches or learning rates   (also a ValueError)
    ├── DatasetError       the training text cannot be read or is too small
    ├── ControllerError    the controller could not be started, or was lost: a fault
    ├── ProtocolError      an event that the protocol's state does not allow
    ├── AbortedCollective  a collective's result lacks some rank's contribution; another rank failed
    ├── NonFinite          a loss or a gradient is NaN or infinite, and the trainer asked to be stopped then
    ├── NotRepeatable      a step has another result when the training function is entered again (also a ValueError)
    ├── NotAsBefore        training that was entered again, after a recovery in place, does something else than before: the job restarts
    ├── ReplicasDiffer     replicas hold different bits, and the job ends: `on_divergence="stop"`, or no majority proves which are wrong
    ├── WrongReplica       this rank's replica is wrong, as most holders of its shard prove: its process is replaced, or the job restarts
    ├── WrongPeer          another rank's is
    └── Overtaken          the update that a training thread waits to do was done for it: not an error, a way out
    Regroup                training leaves its function, and enters it again with new process groups (a BaseException)

Every message has the form `<what is invalid>: got <value>, expected <what>. <what to do next>`.

Two kinds of failure when an attempt begins: what stays wrong until somebody corrects it (STAY_WRONG below: ttprun makes no restart; a
program that catches them ends with status 2), and faults, which the next attempt may not meet (ControllerError; status 75). A
controller's port that is taken at the job's first start is a ConfigError, at a restart a fault: an earlier controller may
still have it. NotWritable is final at the job's first start too. Another CheckpointError may be either, as what it is about
may be a disk: the bundled trainer ends with status 2, and of another program ttprun makes restarts while they are of use.
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


class TornShare(CorruptCheckpoint):
    """Files of a staging directory are there and are not what their writers reported; `ranks` are those writers.

    A file that is missing is another matter: perhaps the directory is not the same for all.
    """

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class CheckpointMismatch(CheckpointError):
    """A checkpoint belongs to another model or optimizer; the message names the first difference."""


class NotWritable(CheckpointError):
    """A directory cannot take a checkpoint."""


class DataMismatch(TTPError, ValueError):
    """After a restart the trainer has other batches, or other learning rates, than the run had in the same place."""


class DatasetError(TTPError):
    """The training text cannot be read or is too small."""


class ControllerError(TTPError):
    """The controller could not be started, or was lost before the ranks had assembled: a fault, the next attempt may succeed."""


class NonFinite(TTPError):
    """A loss or a gradient is NaN or infinite, and `on_nonfinite="stop"` was given; no update was made with it."""


class NotRepeatable(TTPError, ValueError):
    """A step has another result when the training function is entered again: it does not begin from the session's state alone."""


class NotAsBefore(TTPError):
    """In a recovery in place, training that was entered again has other batches or learning rates than before, or a new process runs another program or
    configuration than the others. A restart begins the program anew, and all ranks have the same."""


class ReplicasDiffer(TTPError):
    """Replicas of a shard hold different bits, and the job ends without a checkpoint of that state: `on_divergence="stop"`, or no majority of the
    shard's holders proves which of them are wrong."""


class WrongReplica(TTPError):
    """What this rank holds differs from what most holders of a shard hold: its process is replaced, or the others save and the job restarts."""


class WrongPeer(TTPError):
    """The same of another rank."""


STAY_WRONG = (
    ConfigError, LayoutError, DataMismatch, DatasetError, CheckpointMismatch, NonFinite, NotRepeatable, ReplicasDiffer,
)  # fmt: skip
"""Errors of an attempt that are the same in the next one, until somebody corrects what is wrong."""
END_THE_JOB = (ReplicasDiffer,)
"""Those of them after which no restart is made, however many steps were finished: a person says where the job goes on."""
STAY_WRONG_AT_FIRST = (NotWritable,)
"""The same at the job's first start. Later a disk may have failed, and may come back."""


class ProtocolError(TTPError):
    """An event that the protocol's state does not allow; the state is unchanged. Its text names the event, shortened in the middle where it is long."""

    LONGEST = 2000

    def __init__(self, text: str) -> None:
        half = self.LONGEST // 2
        super().__init__(text if len(text) <= self.LONGEST else f"{text[: half - 3]} ... {text[-half + 2 :]}")


class AbortedCollective(TTPError):
    """A collective returned a result that lacks some rank's contribution, or its communicator reports an error: another rank failed, and
    what was returned must not be used."""


class Overtaken(TTPError):
    """The work thread has rolled forward the step whose update the training thread waits to do; the state is that step's.

    Raised only where the trainer asked for it (`Gate.lets_go`): it finishes its own bookkeeping of the step, and no more.
    """


class Regroup(BaseException):
    """The training thread leaves `train`, whose decorator makes the process groups again and calls it again. Not an Exception, so that a
    program's own `except Exception` lets it pass."""
