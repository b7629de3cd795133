"""Makes the rendezvous that a command line asks for: torch's handler for its backend, in TTP's wrapper.

A c10d job with a TCP store at a named endpoint can fail over to another endpoint (`multi_endpoint.py`, `store_failover.py`). One node alone has
no other to meet (`one_node.py`). All other handlers are torch's own, as torchrun makes them: static, etcd, c10d in a file. Owns that choice. Never
joins anything.
"""

from __future__ import annotations

import functools
import logging
import math
import socket
from argparse import Namespace

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_min_max_nnodes

from ttp.config import LEAST_S, MOST_S
from ttp.errors import ConfigError
from ttp.identity.secret import HOW_TO_MAKE
from ttp.inputs import checked
from ttp.launch.rendezvous.fresh_store import JOIN_S, FreshStoreRendezvous, no_trouble
from ttp.launch.rendezvous.job_secret import NONE, UNSAFE, JobSecret, Read
from ttp.launch.rendezvous.multi_endpoint import CONNECT_S, Endpoint, Stores, parse_endpoints, why_not_reached
from ttp.launch.rendezvous.one_node import OneNode
from ttp.launch.rendezvous.sealed_state import make_c10d
from ttp.launch.rendezvous.store_failover import FailoverRendezvous
from ttp.launch.rendezvous.waiting_spare import Health

log = logging.getLogger("ttp.launch")

MOVED_CALL_S = 45
"""How long nodes that have moved to another endpoint, and do not know whether the others are lost, wait there for more than the job needs: as long as torch
waits at the old one for the heartbeats of lost nodes (15 s), and then for more (30 s)."""


def make_rendezvous(
    config: LaunchConfig,
    *,
    spare_node: bool = False,
    secret: Read | None = None,
    require_secret: bool = False,
    health: Health | None = None,
) -> FreshStoreRendezvous:
    """Make torch's handler for the chosen backend, in the wrapper that gives each attempt a fresh store. `spare_node`: this node waits until
    the job has lost another one (`check_spare_node` has accepted that). `secret`: see JobSecret; `require_secret`: several nodes must be given
    one; `health`: checks a spare before it takes a place. Raises ConfigError, ValueError (torch's, for values that it rejects), RendezvousError."""
    job_secret = JobSecret(config.run_id, secret)
    if config.max_nodes > 1:
        _check_secret(job_secret, require_secret)
    if has_places(config.rdzv_backend, config.rdzv_endpoint, _store_type(config)):
        failover = make_failover(config, spare_node=spare_node, secret=job_secret, health=health)
        return FreshStoreRendezvous(
            failover,
            store_host(config),
            same_keys_every_round=False,
            waits_for=_nodes_text(config),
            trouble=failover.trouble,
            secret=job_secret,
        )
    if config.max_nodes == 1 and config.rdzv_backend == "c10d" and _store_type(config) == "tcp":
        for name in ("timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"):
            _seconds(config, name, JOIN_S)
        one_node = OneNode(config.run_id)
        return FreshStoreRendezvous(one_node, store_host(config), same_keys_every_round=False, secret=job_secret)
    static = config.rdzv_backend == "static"
    try:
        parameters = _parameters(config, config.rdzv_endpoint)
        c10d = config.rdzv_backend == "c10d"
        inner = make_c10d(parameters, job_secret) if c10d else get_rendezvous_handler(parameters)
    except ImportError as error:
        raise ConfigError(
            f"invalid --rdzv-backend: got {config.rdzv_backend!r}, whose client cannot be imported ({error}). Install it (for etcd, the"
            " package python-etcd), or use --rdzv-backend c10d, which needs none"
        ) from error
    return FreshStoreRendezvous(
        inner,
        store_host(config),
        same_keys_every_round=static,
        waits_for=_nodes_text(config),
        trouble=functools.partial(_static_trouble, config.rdzv_endpoint) if static else no_trouble,
        join_timeout_s=_seconds(config, "timeout", JOIN_S),
        secret=job_secret,
    )


def _check_secret(secret: JobSecret, required: bool) -> None:
    """Warn of a job on several nodes without a secret that each was given. Raises ConfigError where it is required."""
    if secret.name not in UNSAFE:
        return
    if required:
        raise ConfigError(
            f"invalid TTP_REQUIRE_SECRET=True: got several nodes and {UNSAFE[secret.name]}, expected a secret that every node is given."
            f" {HOW_TO_MAKE}, and start every node with --secret-file FILE"
        )
    if secret.name == NONE:
        log.warning(
            "this job was given no secret: node 0 makes one and publishes it in the rendezvous store. That protects from accidents only, as"
            " whoever reaches the store can read it. %s, and start every node with --secret-file FILE", HOW_TO_MAKE,
        )  # fmt: skip


def _store_type(config: LaunchConfig) -> str:
    return str(config.rdzv_configs.get("store_type", "tcp")).strip().lower()


def _seconds(config: LaunchConfig, name: str, default: float) -> float:
    """Return a time of --rdzv-conf. Raises ConfigError."""
    given = config.rdzv_configs.get(name, default)
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not LEAST_S <= value <= MOST_S:
        raise ConfigError(
            f"invalid --rdzv-conf {name}: got {checked.shown(given)}, expected {LEAST_S:g} to {MOST_S:g} seconds"
        )
    return value


def _static_trouble(endpoint: str) -> str:
    """Return why node 0's store accepts no connection; empty when it does."""
    place = Endpoint(*parse_rendezvous_endpoint(endpoint, default_port=-1))
    why = why_not_reached(place, CONNECT_S)
    return f"{place}: {why}" if why else ""


def _nodes_text(config: LaunchConfig) -> str:
    """Return for how many nodes a rendezvous waits, and at which endpoint, as text; empty for one node alone."""
    least, most = config.min_nodes, config.max_nodes
    if most == 1:
        return ""
    count = f"{most} nodes" if least == most else f"{least} to {most} nodes"
    return f"{count}, this one included, to join at {config.rdzv_endpoint}"


def has_places(backend: str, endpoint: str, store_type: str) -> bool:
    """Return whether the nodes meet in a c10d store at endpoints that all know. One node alone has a free port, `:0`; with the store type
    `file` the endpoint is a path."""
    return backend == "c10d" and store_type.strip().lower() == "tcp" and bool(endpoint) and not endpoint.endswith(":0")


def plain_endpoint(args: Namespace) -> str:
    """Return the endpoint for plain torchrun, which accepts one only: the first of several. Raises ConfigError."""
    endpoint = str(args.rdzv_endpoint)
    if "," not in endpoint or not has_places(args.rdzv_backend, endpoint, _given_store_type(args)):
        return endpoint
    first = str(parse_endpoints(endpoint)[0])
    log.warning("ENABLE_TTP=False: only the first endpoint, %s, is used, as torchrun accepts one", first)
    return first


def _given_store_type(args: Namespace) -> str:
    options = dict(part.split("=", 1) for part in args.rdzv_conf.split(",") if "=" in part)
    return str({key.strip(): value for key, value in options.items()}.get("store_type", "tcp"))


def check_spare_node(args: Namespace) -> None:
    """Check that this node can be a spare of its job. Raises ConfigError."""
    if not args.spare_node:
        return
    got = ""
    if parse_min_max_nnodes(args.nnodes)[1] == 1:
        got = "a job on one node (--nnodes 1)"
    elif args.rdzv_backend != "c10d":
        got = f"--rdzv-backend {args.rdzv_backend}"
    elif (store_type := _given_store_type(args)) != "tcp":
        got = f"--rdzv-conf store_type={store_type}"
    elif not has_places(args.rdzv_backend, args.rdzv_endpoint, store_type):
        got = "no --rdzv-endpoint that other nodes know"
    if got:
        raise ConfigError(
            f"invalid --spare-node: got it with {got}, expected several nodes that meet by --rdzv-backend c10d --rdzv-endpoint HOST:PORT."
            " Start every node of the job with these, or omit --spare-node"
        )


def make_failover(
    config: LaunchConfig, *, spare_node: bool = False, secret: JobSecret | None = None, health: Health | None = None
) -> FailoverRendezvous:
    """Make the handler that survives the loss of its store. Raises ConfigError for invalid endpoints, ValueError for an invalid value in
    --rdzv-conf."""
    hosting = _parameters(config, config.rdzv_endpoint).get_as_bool("is_host")
    job_secret = secret or JobSecret(config.run_id)
    stores = Stores(parse_endpoints(config.rdzv_endpoint), hosting=hosting, secret=job_secret)

    given = "last_call_timeout" in config.rdzv_configs

    def make(place: Endpoint, epoch: int, nodes: int, moved: bool) -> RendezvousHandler:
        # torch keeps the participants under the job's name: under a new one those that are lost are not waited for.
        name = config.run_id if epoch <= 1 else f"{config.run_id}@{epoch}"
        longer = {"last_call_timeout": str(MOVED_CALL_S)} if moved and not given else {}
        return make_c10d(_parameters(config, str(place), name, nodes, is_host="0", **longer), job_secret)

    return FailoverRendezvous(
        stores,
        make,
        config.run_id,
        join_timeout_s=_seconds(config, "join_timeout", 600),
        node=config.local_addr or socket.gethostname(),
        spare_node=spare_node,
        health=health,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        waits_for_more=given,
    )


def _parameters(
    config: LaunchConfig, endpoint: str, run_id: str = "", nodes: int = 0, **changed: str
) -> RendezvousParameters:
    """Return torch's parameters. `nodes`: the rendezvous is complete with so many; 0: with as many as the job may have."""
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=endpoint,
        run_id=run_id or config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=nodes or config.max_nodes,
        local_addr=config.local_addr,
        **{**config.rdzv_configs, **changed},
    )


def store_host(config: LaunchConfig) -> str:
    """Return the host name under which the workers reach a store in this process, in case this node gets rank 0."""
    if config.local_addr:
        return config.local_addr
    if config.rdzv_backend == "static":
        return parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)[0]
    return "127.0.0.1" if config.max_nodes == 1 else socket.getfqdn()
