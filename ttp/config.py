"""TTP's own settings: the only reader of `os.environ` for TTP's variables.

| variable | default | meaning |
| --- | --- | --- |
| ENABLE_TTP | True | False: no controller, no processors, no holding; saving and resuming still work |
| TTP_OT | 120 | seconds that bound a fault, from the first freeze to the exit |
| TTP_CONTROLLER_PORT | 0 | port of the controller, standbys take the next ones (0: any free ones) |
| TTP_HEARTBEAT_S, TTP_LEASE_S | 1, 3; with more than 10,000 ranks (2,000 without relays) in proportion, up to 5, 15 | a rank silent for a lease is dead |
| TTP_VOUCHED_LEASE_S | 10 | the same for a silent rank whose agent sees its process running; three times as long before step 8 |
| TTP_HANG_FLOOR_S | 10, and 60 before 50 steps | no progress of any rank for less than this is not a hang; a value that is set holds from step 8 on |
| TTP_HANG_FACTOR | 10 | nor is one of less than so many slow steps |
| TTP_HANG_START_S | 1800 | the same for the first steps, which compile and load: before the job's pace is known |
| TTP_BOUNDARY_S | 5 | a rank with a preemption notice (SIGTERM) waits so long for the end of the step in flight |
| TTP_STANDBYS | 2 | standby controllers on further nodes (a single node has one); 0: none |
| TTP_ATTEMPT | TTP_ROUND_ID, else TORCHELASTIC_RESTART_COUNT, else 0 | set by ttprun: the attempt's number, 0 at the job's first start, higher after it |
| TTP_ROUND_ID | none | the earlier name of TTP_ATTEMPT: kept for one release, set by ttprun too |
| TTP_LAUNCHED | no | set by ttprun: the parent process is the launcher |
| TTP_SHARED_DIRS | True | False: every node has checkpoint directories of its own, not shared with the others |
| TTP_HOST | the host's name | this node's name, as the other nodes see it |
| TTP_MINDIO_DIR | output/mindio | trainers of ttp.mindio: where the controller's journal goes, and shards during a fault; all nodes share it |
| TTP_WARM_START | True | False: every worker is a new interpreter that imports for itself; else ttprun forks workers from one that has imported |
| TTP_FORK_SERVER | none | set by ttprun: the socket of the process from which controllers are forked |
| TTP_TLS | True | False: the controller's connections are plain, and open to whoever reaches its port |
| TTP_SECRET, TTP_SECRET_FILE | none | the job's secret, or a file with it: the same on every node; ttprun takes it out of the environment |
| TTP_TLS_CERT, TTP_TLS_KEY, TTP_TLS_CA | none | PEM files of the site's own authority, in place of certificates that are made of the job's secret |
| TTP_IDENTITY | none | set by ttprun: the socket at which this node's processes get their certificates |
| TTP_COPIES | none | set by ttprun: the socket at which this node's ranks get memory for copies |
| TTP_RELAY | with more than 2,000 ranks | True: each node's agent carries its ranks' streams to controllers in one connection; False: each rank connects itself |
| TTP_RELAY_SOCKET | none | set by ttprun: the socket of this node's relay |
| TTP_FILE_MODE | 0600 | octal mode of journals, logs, reports and error files; their folders get an x for each r. Checkpoints and sockets do not follow it |
| TTP_SIGN_KEY | none | a private Ed25519 key (PEM): checkpoints are signed with it; ttprun sets it by --sign-key |
| TTP_VERIFY_KEY | none | a public Ed25519 key (PEM): only checkpoints that are signed with its private key are loaded; ttprun sets it by --verify-key |
| TTP_MIRROR | none | a URL (s3://bucket/prefix, or another of fsspec's): ttprun copies published checkpoints there, and a job whose directories are lost resumes from there |
| TTP_MIRROR_KEEP | as many as the job keeps | checkpoints that stay in the mirror; 0: all |
| TTP_MIRROR_END_S | 600 | seconds that ttprun waits at the job's end for the newest checkpoint's copy |
| TTP_MIRROR_OPTIONAL | False | True: a job that finds no checkpoint, and no answer from its mirror, begins at step 1 |
| TTP_REHEARSE | none | `every:N`: at every N-th step the ranks leave `train`, make their process groups again and enter it again, and a step that is not the same twice ends the job |
| TTP_IN_PLACE | what the trainer asks for | False: a lost rank always costs a checkpoint and a restart; True: the others keep running wherever they can, on the CPU; unrehearsed: also where no rehearsal has shown that they can; cuda: on an accelerator too, where it was tried on one device |
| TTP_IN_PLACE_S | 5 | seconds that all ranks have for it before a checkpoint is written instead |
| TTP_MAX_IN_PLACE | 100 | faults of one attempt that may end in place: the next one is written, and ends in a restart |
| TTP_GASP | if_needed | if_needed: the newest step is written if the others cannot go on in place; always: it is written first in every fault, and then they go on in place. With TTP_IN_PLACE=cuda always is the default |
| TTP_STATUS_PORT | none | port at which the leading controller's page and metrics are served; 0: any free one; not set: nowhere. ttprun sets it by --status-port |
| TTP_STATUS_TOKEN_FILE | status_token beside the journals | the file of the token that the page asks for; ttprun sets it by --status-token-file |
| TTP_VACANT | none | set by ttprun: this process takes a lost one's place: the fault's number, and the controller that leads the job |
| TTP_REQUIRE_SECRET | False | True: ttprun refuses a job on several nodes that were given no secret |
| TTP_FAULTS | none | faults to inject (ttp.chaos.faults.inject) |
| TTP_START_ID | none | set by ttprun: marks the controllers of one attempt |
| TTP_ATTEMPT_DIR | none | set by ttprun: where this node's first rank writes for its agent which controllers lead the ranks |
| TTP_CHAOS | none | set by `ttp chaos`: its socket, from which this rank takes faults and to which it reports its steps (ttp.chaos.faults.rank_hook) |

A variable that is set to nothing counts as not set. Names that begin with `TTP_TEST_` are the tests' own.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from ttp.errors import ConfigError
from ttp.hang_limits import HangLimits
from ttp.heartbeats import is_relayed, usual_heartbeat_s
from ttp.inputs import checked
from ttp.nccl import nccl_warnings

VARIABLES = (
    "ENABLE_TTP", "TTP_OT", "TTP_CONTROLLER_PORT", "TTP_HEARTBEAT_S", "TTP_LEASE_S", "TTP_VOUCHED_LEASE_S",
    "TTP_HANG_FLOOR_S", "TTP_HANG_FACTOR", "TTP_HANG_START_S", "TTP_BOUNDARY_S", "TTP_STANDBYS", "TTP_ATTEMPT", "TTP_ROUND_ID", "TTP_LAUNCHED", "TTP_SHARED_DIRS", "TTP_HOST",
    "TTP_MINDIO_DIR", "TTP_WARM_START", "TTP_FORK_SERVER", "TTP_TLS", "TTP_SECRET", "TTP_SECRET_FILE", "TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA",
    "TTP_IDENTITY", "TTP_COPIES", "TTP_RELAY", "TTP_RELAY_SOCKET", "TTP_FILE_MODE", "TTP_SIGN_KEY", "TTP_VERIFY_KEY", "TTP_MIRROR", "TTP_MIRROR_KEEP", "TTP_MIRROR_END_S", "TTP_MIRROR_OPTIONAL",
    "TTP_REHEARSE", "TTP_IN_PLACE", "TTP_IN_PLACE_S", "TTP_MAX_IN_PLACE", "TTP_GASP", "TTP_STATUS_PORT", "TTP_STATUS_TOKEN_FILE", "TTP_VACANT", "TTP_REQUIRE_SECRET", "TTP_FAULTS", "TTP_START_ID", "TTP_ATTEMPT_DIR", "TTP_CHAOS",
)  # fmt: skip
"""All of them, in the order of the table above."""
_TESTS_OWN = "TTP_TEST_"
MOST_S = 1e9
"""No time may be longer: thirty years, and what the system's timers take."""
LEAST_S = 1e-3
"""Nor shorter, where it is not 0: no clock and no thread is so exact."""
_HEARTBEATS_A_LEASE = 3
"""One of them may be late."""
LEASES_LOST = 5
"""Without a word for so many, the other side is lost for good: several standbys may have to be tried, a lease each."""
_LARGEST = 2**31 - 1
FILE_MODE = 0o600
"""Of TTP_FILE_MODE where it is not set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One process's settings, fixed at start. Times in seconds."""

    enable: bool = True
    total_timeout_s: float = 120.0
    controller_port: int = 0
    heartbeat_s: float = 1.0
    lease_s: float = 3.0
    vouched_lease_s: float = 10.0
    hang: HangLimits = field(default_factory=HangLimits)
    boundary_s: float = 5.0
    round_number: int = 0
    launched: bool = False
    faults: str = ""
    chaos: str = ""
    attempt_dir: str = ""
    fork_server: str = ""
    tls: bool = True
    tls_files: tuple[str, ...] = ()
    """The site's certificate, key and authority; empty: the job's own."""
    identity: str = ""
    copies: str = ""
    relayed: bool = False
    """The ranks of this job reach controllers by their nodes' relays."""
    relay: str = ""
    """The socket of this node's; empty: it has none."""
    rehearse_every: int = 0
    """Steps from one rehearsal to the next; 0: none."""
    in_place: str = ""
    """What TTP_IN_PLACE says: `off`, `on`, `unrehearsed`, `cuda`; empty: nothing."""
    in_place_s: float = 5.0
    most_in_place: int = 100
    gasp: str = "if_needed"
    """When the emergency checkpoint of a fault is written that ends in place: `always`, first; `if_needed`, if it does not end so."""
    status_port: int = -1
    """Of the status page; 0: any free one; -1: there is no page."""
    status_token_file: str = ""
    """Empty: the job makes one of its own."""
    replaces: int = 0
    """The fault in which this process was started in a lost one's place; 0: it was not."""
    require_secret: bool = False
    job_id: str = "ttp"
    host: str = "localhost"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    one_node: bool = True
    node_rank: int = -1
    nodes: int = 1
    local_rank: int = -1
    standbys: int = 2
    shared_dirs: bool = True
    mindio_dir: str = "output/mindio"
    sign_key: str = ""
    """The path of a private key; empty: checkpoints are not signed."""
    verify_key: str = ""
    """The path of a public key; empty: signatures are not checked."""
    mirror: str = ""
    """The URL to which published checkpoints are copied; empty: they are not."""
    mirror_keep: int = -1
    """Checkpoints that stay there; 0: all; -1: as many as in the directories."""
    mirror_end_s: float = 600.0
    mirror_optional: bool = False
    nccl_warnings: tuple[str, ...] = ()
    """Lines about NCCL's settings, for a job that trains on CUDA devices."""

    @property
    def lost_s(self) -> float:
        """How long a rank looks for a controller after a fault of its own, and a controller waits for the first rank to come back."""
        return max(15.0, LEASES_LOST * self.lease_s)

    @property
    def answer_s(self) -> float:
        """How long a rank may take to answer a freeze: longer than a lease, in which a message that was lost is repeated, or its rank dead."""
        return max(10.0, self.lease_s * 4 / 3)

    @property
    def start_name(self) -> str:
        """What controllers and ranks of one attempt call it: a process that remains from an earlier attempt is turned away.

        Without ttprun the attempts are not distinguished: torchrun's nodes may count them differently.
        """
        return start_name(self.job_id, self.round_number) if self.launched else self.job_id

    def __post_init__(self) -> None:
        if not LEAST_S <= self.total_timeout_s <= MOST_S:
            raise ConfigError(f"invalid TTP_OT={self.total_timeout_s}: expected seconds above 0, at most {MOST_S:g}")
        if not LEAST_S <= self.heartbeat_s < self.lease_s <= MOST_S:
            raise ConfigError(
                f"invalid TTP_HEARTBEAT_S={self.heartbeat_s}, TTP_LEASE_S={self.lease_s}: expected 0 < heartbeat < lease, at most"
                f" {MOST_S:g}"
            )
        if not LEAST_S <= self.vouched_lease_s <= MOST_S:
            raise ConfigError(
                f"invalid TTP_VOUCHED_LEASE_S={self.vouched_lease_s}: expected seconds from {LEAST_S:g}, at most {MOST_S:g}. A value up to"
                " TTP_LEASE_S gives a silent rank no more time than that"
            )
        if not LEAST_S <= self.hang.floor_s <= MOST_S or not 1 <= self.hang.factor <= MOST_S:
            raise ConfigError(
                f"invalid TTP_HANG_FLOOR_S={self.hang.floor_s}, TTP_HANG_FACTOR={self.hang.factor}: expected seconds above 0, at"
                f" most {MOST_S:g}, and a number from 1"
            )
        if not LEAST_S <= self.hang.start_s <= MOST_S:
            raise ConfigError(
                f"invalid TTP_HANG_START_S={self.hang.start_s}: expected seconds above 0, at most {MOST_S:g}"
            )
        if not 0 <= self.boundary_s <= MOST_S:
            raise ConfigError(f"invalid TTP_BOUNDARY_S={self.boundary_s}: expected seconds from 0, at most {MOST_S:g}")
        if not 0 <= self.controller_port < 65536:
            raise ConfigError(f"invalid TTP_CONTROLLER_PORT={self.controller_port}: expected 0 to 65535")
        if not 0 <= self.master_port < 65536:
            raise ConfigError(f"invalid MASTER_PORT={self.master_port}: expected 0 to 65535; ttprun sets it")
        if not 0 <= self.mirror_end_s <= MOST_S:
            raise ConfigError(
                f"invalid TTP_MIRROR_END_S={self.mirror_end_s}: expected seconds from 0, at most {MOST_S:g}"
            )
        if self.mirror_keep < -1:
            raise ConfigError(f"invalid TTP_MIRROR_KEEP={self.mirror_keep}: expected an integer >= 0")
        if not LEAST_S <= self.in_place_s <= MOST_S:
            raise ConfigError(f"invalid TTP_IN_PLACE_S={self.in_place_s}: expected seconds above 0, at most {MOST_S:g}")
        if not 1 <= self.most_in_place <= _LARGEST:
            raise ConfigError(
                f"invalid TTP_MAX_IN_PLACE={self.most_in_place}: expected an integer >= 1. Set TTP_IN_PLACE=False to allow none"
            )
        if not 0 <= self.standbys < 10:
            raise ConfigError(f"invalid TTP_STANDBYS={self.standbys}: expected 0 to 9")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables above. Raises ConfigError naming the variable, its value and what was expected."""
        file_mode(environ)  # refused here; `ttp.files` reads it
        world_size, launched = _integer(environ, "WORLD_SIZE", 1), environ.get("TTP_LAUNCHED", "") == "1"
        relayed = is_relayed(relay(environ), world_size) and launched
        usual_s = usual_heartbeat_s(world_size, relayed)
        longest_s = max(usual_s, _number(environ, "TTP_HEARTBEAT_S", usual_s))
        lease_s = _number(environ, "TTP_LEASE_S", _HEARTBEATS_A_LEASE * longest_s)
        return cls(
            enable=enabled(environ),
            total_timeout_s=_number(environ, "TTP_OT", 120.0),
            controller_port=_integer(environ, "TTP_CONTROLLER_PORT", 0),
            heartbeat_s=_number(environ, "TTP_HEARTBEAT_S", min(usual_s, max(1.0, lease_s / _HEARTBEATS_A_LEASE))),
            lease_s=lease_s,
            vouched_lease_s=_number(environ, "TTP_VOUCHED_LEASE_S", 10.0),
            hang=HangLimits(
                floor_s=_number(environ, "TTP_HANG_FLOOR_S", 10.0),
                early_floor_s=_number(environ, "TTP_HANG_FLOOR_S", 60.0),
                start_s=_number(environ, "TTP_HANG_START_S", 1800.0),
                factor=_number(environ, "TTP_HANG_FACTOR", 10.0),
            ),
            boundary_s=_number(environ, "TTP_BOUNDARY_S", 5.0),
            round_number=_attempt(environ),
            launched=launched,
            faults=_text(environ, "TTP_FAULTS"),
            chaos=_text(environ, "TTP_CHAOS"),
            attempt_dir=_text(environ, "TTP_ATTEMPT_DIR"),
            fork_server=_text(environ, "TTP_FORK_SERVER"),
            tls=tls(environ),
            tls_files=tls_files(environ),
            identity=identity_socket(environ),
            copies=_text(environ, "TTP_COPIES"),
            relayed=relayed,
            relay=_text(environ, "TTP_RELAY_SOCKET"),
            rehearse_every=_rehearse(environ),
            in_place=_in_place(environ),
            in_place_s=_number(environ, "TTP_IN_PLACE_S", 5.0),
            most_in_place=_integer(environ, "TTP_MAX_IN_PLACE", 100),
            gasp=_gasp(environ),
            status_port=status_port(environ),
            status_token_file=status_token_file(environ),
            replaces=replaces(environ),
            require_secret=_flag(environ, "TTP_REQUIRE_SECRET", False),
            job_id=_text(environ, "TORCHELASTIC_RUN_ID", "ttp"),
            host=host_name(environ),
            master_addr=_text(environ, "MASTER_ADDR", "127.0.0.1"),
            master_port=_integer(environ, "MASTER_PORT", 0),
            one_node=environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"),
            node_rank=_integer(environ, "GROUP_RANK", -1),
            nodes=_integer(environ, "GROUP_WORLD_SIZE", 1),
            local_rank=_integer(environ, "LOCAL_RANK", -1),
            standbys=_integer(environ, "TTP_STANDBYS", 2),
            shared_dirs=_flag(environ, "TTP_SHARED_DIRS", True),
            mindio_dir=_text(environ, "TTP_MINDIO_DIR", "output/mindio"),
            sign_key=_text(environ, "TTP_SIGN_KEY"),
            verify_key=verify_key(environ),
            mirror=_text(environ, "TTP_MIRROR"),
            mirror_keep=_integer(environ, "TTP_MIRROR_KEEP", -1),
            mirror_end_s=_number(environ, "TTP_MIRROR_END_S", 600.0),
            mirror_optional=_flag(environ, "TTP_MIRROR_OPTIONAL", False),
            nccl_warnings=nccl_warnings(environ),
        )


def relay(environ: Mapping[str, str]) -> bool | None:
    """Return whether the job is to have relays; None: it is not set. Raises ConfigError."""
    return _flag(environ, "TTP_RELAY", False) if environ.get("TTP_RELAY", "").strip() else None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are named like TTP's and that nothing reads, each with the nearest name that there is (empty:
    none is near)."""
    own = [name for name in environ if name.startswith("TTP_") and not name.startswith(_TESTS_OWN)]
    near = {name: difflib.get_close_matches(name, VARIABLES, 1) for name in sorted(own) if name not in VARIABLES}
    return {name: found[0] if found else "" for name, found in near.items()}


def start_name(job_id: str, round_number: int) -> str:
    """Return the name of one attempt of a job, from ttprun's run id and the attempt's number."""
    return f"{job_id}/{round_number}"


def _attempt(environ: Mapping[str, str]) -> int:
    """Return the attempt's number. TTP_ROUND_ID is what TTP_ATTEMPT was called before; torchrun counts restarts."""
    restarts = _integer(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    return _integer(environ, "TTP_ATTEMPT", _integer(environ, "TTP_ROUND_ID", restarts))


def attempt_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the attempt that a process with these variables takes part in; empty: it is not one of ttprun's. Raises ConfigError."""
    run_id = _text(environ, "TORCHELASTIC_RUN_ID")
    return start_name(run_id, _attempt(environ)) if run_id and environ.get("TTP_LAUNCHED") == "1" else ""


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks the launcher has started (WORLD_SIZE), 1 without a launcher. Raises ConfigError."""
    return _integer(environ, "WORLD_SIZE", 1)


def launched_place(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the rank that the launcher has given this process, and how many ranks there are. Raises ConfigError."""
    return _integer(environ, "RANK", 0), launched_ranks(environ)


def replaces(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of the fault in which ttprun has started this process in a lost one's place; 0: it has not. Raises ConfigError."""
    return _integer({"TTP_VACANT": _text(environ, "TTP_VACANT").partition(" ")[0]}, "TTP_VACANT", 0)


def ordered_by(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the controller that had this process started in a lost one's place; empty: it was not, or that is not known."""
    return _text(environ, "TTP_VACANT").partition(" ")[2]


def in_place_on_devices(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether TTP_IN_PLACE=cuda asks for recoveries without a checkpoint on an accelerator, too."""
    return _text(environ, "TTP_IN_PLACE").strip().lower() == "cuda"


def enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether ENABLE_TTP allows TTP (default: yes)."""
    return _flag(environ, "ENABLE_TTP", True)


def warm_start(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether ttprun forks its workers (default: yes, with TTP). Raises ConfigError."""
    return enabled(environ) and _flag(environ, "TTP_WARM_START", True)


def identity_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Return where this process asks its agent for a certificate; empty: nowhere."""
    return _text(environ, "TTP_IDENTITY")


def status_port(environ: Mapping[str, str] = os.environ) -> int:
    """Return the port of the status page; 0: any free one; -1: there is no page. Raises ConfigError."""
    port = _integer(environ, "TTP_STATUS_PORT", -1)
    if not -1 <= port < 65536 or (port < 0 and environ.get("TTP_STATUS_PORT", "").strip()):
        raise ConfigError(f"invalid TTP_STATUS_PORT={port}: expected 0 to 65535, 0 for any free port")
    return port


def status_token_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the status page's token; empty: the job makes one of its own."""
    return _text(environ, "TTP_STATUS_TOKEN_FILE")


def tls(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether connections to controllers are TLS (default: yes). Raises ConfigError."""
    return _flag(environ, "TTP_TLS", True)


def tls_files(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the PEM files of the site's certificate, key and authority; empty: none are named. Raises ConfigError."""
    names = ("TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA")
    paths = tuple(_text(environ, name) for name in names)
    missing = [name for name, path in zip(names, paths, strict=True) if not path]
    if missing and len(missing) < len(names):
        raise ConfigError(f"invalid {missing[0]}='': expected a PEM file, as with the others of {', '.join(names)}")
    return () if missing else paths


def file_mode(environ: Mapping[str, str] = os.environ) -> int:
    """Return the mode of the files that TTP makes beside checkpoints. Raises ConfigError."""
    text = environ.get("TTP_FILE_MODE", "").strip()
    mode = int(text, 8) if re.fullmatch("[0-7]{3,4}", text) else 0 if text else FILE_MODE
    if mode & ~0o066 != FILE_MODE:
        raise ConfigError(
            f"invalid TTP_FILE_MODE={_shown(text)}: expected octal digits as in 0640, with 6 for the owner and without execute bits"
        )
    return mode


def verify_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the public key that checkpoints must be signed for; empty: none. Raises ConfigError."""
    return _text(environ, "TTP_VERIFY_KEY")


def credentials(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the values of object stores' variables that no message may quote."""
    names = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET")
    return [environ[name] for name in names if environ.get(name)]


def error_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return where this process's exception is to be recorded; empty without a launcher, or with ENABLE_TTP=False."""
    return environ.get("TORCHELASTIC_ERROR_FILE", "") if enabled(environ) else ""


def worker_error_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the same where ttprun has started this very process, which leads its session; empty in what a worker has started itself, which
    inherits the variables (unless it leads a session of its own, too)."""
    return error_file(environ) if environ.get("TTP_LAUNCHED") and os.getsid(0) == os.getpid() else ""


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name, as the other nodes see it."""
    return _text(environ, "TTP_HOST") or socket.gethostname()


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "").strip().lower()
    if not value:
        return default
    if value in ("true", "1", "yes", "on"):
        return True
    if value in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"invalid {name}={_shown(environ[name])}: expected True or False")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"invalid {name}={_shown(text)}: expected a number")
    return value


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        value = _LARGEST + 1
    if abs(value) > _LARGEST:
        raise ConfigError(f"invalid {name}={_shown(text)}: expected an integer, at most {_LARGEST}")
    return value


def _in_place(environ: Mapping[str, str]) -> str:
    """Return what TTP_IN_PLACE says: `off`, `on`, `unrehearsed`, `cuda`; empty where it is not set."""
    if (said := _text(environ, "TTP_IN_PLACE").lower()) in ("", "cuda", "unrehearsed"):
        return said
    try:
        return "on" if _flag(environ, "TTP_IN_PLACE", False) else "off"
    except ConfigError as error:
        raise ConfigError(f"{error}, unrehearsed or cuda") from None


def _gasp(environ: Mapping[str, str]) -> str:
    """Return what TTP_GASP says. Where it is not set: `always` on accelerators, of which little is known yet."""
    said = _text(environ, "TTP_GASP", "always" if in_place_on_devices(environ) else "if_needed").lower()
    if said not in ("always", "if_needed"):
        raise ConfigError(f"invalid TTP_GASP={_shown(said)}: expected always or if_needed")
    return said


def _rehearse(environ: Mapping[str, str]) -> int:
    """Return N of TTP_REHEARSE=every:N; 0 where it is not set."""
    text = environ.get("TTP_REHEARSE", "").strip()
    found = re.fullmatch(r"every:([1-9][0-9]{0,8})", text)
    if text and found is None:
        raise ConfigError(f"invalid TTP_REHEARSE={_shown(text)}: expected every:N, N a number of steps from 1")
    return int(found[1]) if found is not None else 0


def _text(environ: Mapping[str, str], name: str, default: str = "") -> str:
    """Return a name or a path: what files, hosts and messages can carry."""
    text = environ.get(name, "").strip() or default
    try:
        return checked.string(text, name)
    except checked.Invalid as error:
        raise ConfigError(str(error)) from None


def _shown(text: str) -> str:
    return checked.shown(text)
