"""`ttprun`: torchrun's command with TTP's agent.

Owns `launch`, the counterpart of `torch.distributed.launcher.api.launch_agent` with another agent and rendezvous: torch's function has a fixed
agent class. From torch it uses public names only. `torch_names.py` lists the tested versions.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig

from ttp.checkpoint.format.signature import read_keys
from ttp.config import Settings, enabled, relay, unknown_variables
from ttp.errors import ConfigError
from ttp.fork_server.preload import BY_PROGRAM
from ttp.fork_server.servers import ForkServers
from ttp.identity import own
from ttp.identity.secret import SecretSource
from ttp.launch.agent import HoldAgent
from ttp.launch.arguments import death_poll_s, hides_stderr, make_parser
from ttp.launch.attempts.context import LaunchContext, Workers
from ttp.launch.attempts.copies import Copies
from ttp.launch.attempts.identities import Identities
from ttp.launch.attempts.mirror import Mirror
from ttp.launch.attempts.relays import Relays
from ttp.launch.attempts.signals import without_ignored
from ttp.launch.checks import check_arguments, check_local_addr, check_node_rank, check_workers, warn_of_taken_port
from ttp.launch.endings import Drained
from ttp.launch.health.check_command import split_check
from ttp.launch.health.node_health import NodeHealth, SickNode
from ttp.launch.hosts.topology import apply_rank_table, check_host_name, choose_rendezvous, explicit_arguments
from ttp.launch.links.controller_client import ControllerLink
from ttp.launch.msrun import apply_msrun
from ttp.launch.rendezvous.choose import check_spare_node, make_rendezvous, plain_endpoint
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.report.event_command import EventCommand, split_command
from ttp.launch.report.exit_status import summarize
from ttp.launch.report.reporter import Reporter
from ttp.mirror.url import check_url as check_mirror
from ttp.nccl import set_nccl
from ttp.status import page_access

log = logging.getLogger("ttp.launch")


@record
def main(argv: Sequence[str] | None = None, fork_servers: ForkServers | None = None) -> None:
    """Run a job on this node, as `torchrun` does: return when it has succeeded, raise ChildFailedError (exit code 1) when it has failed.
    `fork_servers`: fork the workers; they were started before torch was imported here."""
    identities = copies = events = health = relays = None
    try:
        use_ttp = enabled()
        parser = make_parser()
        args = parser.parse_args(argv)
        if use_ttp and args.ttp_ot is not None:
            os.environ["TTP_OT"] = str(args.ttp_ot)  # the workers have the same deadline
        if args.status_port is not None:
            os.environ["TTP_STATUS_PORT"] = str(args.status_port)
        for name, file in (
            ("TTP_SIGN_KEY", args.sign_key),
            ("TTP_VERIFY_KEY", args.verify_key),
            ("TTP_STATUS_TOKEN_FILE", args.status_token_file),
        ):
            if file is not None:
                os.environ[name] = str(file.absolute())  # the workers read it
        settings = Settings.from_env()
        source = SecretSource.take(os.environ)
        if args.secret_file:
            source = SecretSource(file=args.secret_file)
        read_keys(settings)
        if settings.status_token_file:
            page_access.read_token(Path(settings.status_token_file))
        event_words = split_command(args.on_event) if args.on_event and use_ttp else []
        check_words = split_check(args.health_check) if args.health_check and use_ttp else []
        if settings.mirror:
            check_mirror(settings.mirror)
        _log_to_stderr()
        if use_ttp:
            _warn_of_unknown_variables()
        given = explicit_arguments(make_parser, argv)
        apply_msrun(args, given)
        if args.rank_table_file is not None:
            apply_rank_table(args, given)
        if not use_ttp:
            if args.spare_node:
                raise ConfigError(
                    "invalid --spare-node: got it with ENABLE_TTP=False, expected a job of ttprun. Plain torchrun has no spare nodes: omit it"
                )
            args.rdzv_endpoint = plain_endpoint(args)
            torchrun.run(args)  # type: ignore[no-untyped-call]
            return
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # else data loaders that fork crash or crawl
        set_nccl(os.environ)
        config, command, command_args = _config_of(args)
        check_host_name(settings.host, config.max_nodes)
        check_local_addr(config.local_addr, config.max_nodes)
        warn_of_taken_port(settings.status_port)
        if fork_servers is not None:
            by_program = BY_PROGRAM.get(args.training_script, ()) if args.module else ()
            fork_servers.begin_controllers(os.environ, [*args.preload, *by_program])
        identities = make_identities(settings)
        copies = make_copies()
        events = EventCommand(event_words) if event_words else None
        health = NodeHealth(check_words) if check_words else None
        relays = Relays(relay(os.environ), lease_of)
        launching = replace(
            make_launching(settings, args, config.run_id, fork_servers, events),
            identities=identities,
            copies=copies,
            relays=relays,
            health=health,
            secret=source.read if settings.tls else None,
            require_secret=settings.require_secret,
        )
        launch(config, command, command_args, launching)
    except ConfigError as error:
        print(f"ttprun: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        with ExitStack() as closing:  # the events last: they may wait, and a second Ctrl-C then skips nothing
            for each in (events, fork_servers, identities, copies, relays, health):
                if each is not None:
                    closing.callback(each.close)


def lease_of(world_size: int) -> float:
    """Return the lease of a job of so many ranks, in seconds: its workers learn from the environment how many there are."""
    return Settings.from_env({**os.environ, "WORLD_SIZE": str(world_size), "TTP_LAUNCHED": "1"}).lease_s


def make_copies() -> Copies | None:
    """Return what gives this node's ranks memory for copies; None, with the reason in the log: nothing can."""
    try:
        return Copies()
    except OSError as error:
        log.warning("no rank can have copies in memory: no socket can be made (%s)", error)
        return None


def make_identities(settings: Settings) -> Identities | None:
    """Return what gives this node's processes their certificates; None, with a warning where that is not safe: connections need none of the
    job's. Raises ConfigError."""
    if settings.tls_files:
        own.use_site(settings.tls_files, settings.host)
        return None
    if settings.tls:
        return Identities(settings.host)
    log.warning("TTP_TLS=False: whoever reaches the controllers' ports can end this job or lead its ranks astray")
    return None


def _config_of(args: Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Return torch's configuration for the arguments. Raises ConfigError for values that torch's parser lets through."""
    check_arguments(args)
    try:
        choose_rendezvous(args)
        check_spare_node(args)
        check_node_rank(args)
        config, command, command_args = torchrun.config_from_args(args)
        check_workers(config.nproc_per_node, args.nproc_per_node)
        return config, command, command_args
    except (ValueError, AssertionError, OSError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{_short(error)} (--nnodes {_short(args.nnodes)}, --nproc-per-node {_short(args.nproc_per_node)}). See ttprun --help"
        ) from error


def _short(value: object) -> str:
    """Return a message of torch's, or an argument, as one line: it may have thousands of digits."""
    text = " ".join(str(value).split())
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-200:]}"


def _warn_of_unknown_variables() -> None:
    for name, nearest in unknown_variables().items():
        meant = f"did you mean {nearest}?" if nearest else "TTP has no variable with a similar name"
        log.warning("unknown environment variable %s is ignored: %s", name, meant)


def make_launching(
    settings: Settings,
    args: Namespace,
    run_id: str,
    fork_servers: ForkServers | None = None,
    events: EventCommand | None = None,
) -> LaunchContext:
    """Bind the agent to the real controller; gRPC is loaded when the first controller is found."""
    launch_name = f"{run_id}_{uuid.uuid4().hex[:8]}"  # as torch names its folder of logs

    def open_link(address: str, job_id: str, pids: Mapping[int, int], workers: Workers) -> ControllerLink:
        from ttp.controller.agent_link import AgentLink

        ranks = tuple(sorted(pids))
        known = tuple(pids[rank] for rank in ranks)
        return AgentLink(address, job_id, settings.host, ranks, known, workers.running, workers.take, workers.places)

    def request_shutdown(address: str) -> None:
        from ttp.controller import agent_link

        agent_link.request_shutdown(address, reason="the agent ends this attempt")

    story = args.ttp_story.resolve() if args.ttp_story is not None else None
    reporter = Reporter(story, launch=launch_name, on_event=events.put if events is not None else None)
    return LaunchContext(
        total_timeout_s=settings.total_timeout_s,
        poll_s=death_poll_s(args),
        open_link=open_link,
        request_shutdown=request_shutdown,
        futile_starts=args.ttp_futile_starts,
        script="" if args.no_python or args.module or args.training_script == "-" else args.training_script,
        quotes_traces=hides_stderr(args),
        reporter=reporter,
        mirror=Mirror(reporter, settings.mirror_end_s),
        fork_servers=fork_servers,
        spare_node=args.spare_node,
    )


def launch(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[str], launching: LaunchContext
) -> dict[int, Any]:
    """Run this node's agent until the job ends, and return the workers' results by rank.

    Raises ChildFailedError (the workers failed, no restart left), SignalException (a signal to the agent), ConfigError
    (nothing was started).
    """
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
    if hasattr(config, "signals_to_handle"):  # older versions of torch have no choice
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = without_ignored(config.signals_to_handle)
    try:
        handler = make_rendezvous(
            config,
            spare_node=launching.spare_node,
            secret=launching.secret,
            require_secret=launching.require_secret,
            health=launching.health,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{error} (--rdzv-backend {config.rdzv_backend}, --rdzv-endpoint {config.rdzv_endpoint!r}, --rdzv-conf"
            f" {config.rdzv_configs}). Correct it, or omit it for a job on one node"
        ) from error
    agent = make_agent(config, entrypoint, args, handler, launching)
    event_log = getattr(config, "event_log_handler", "null")  # older versions of torch have this one only
    here, over, why, ended, reason = socket.gethostname(), False, "", "failed", ""
    try:
        metrics.initialize_metrics(
            metrics.MetricsConfig(config.metrics_cfg)  # type: ignore[attr-defined]
        )
        result = agent.run()
        events.record(agent.get_event_succeeded(), event_log)
        if result is None:  # this node was not needed, and the job is over
            ended = "succeeded on other nodes"
            return {}
        over = True
        if result.is_failed():
            reason = agent.failure_reason
            why = f"{here}: the job failed: {reason}"
            brief = {rank: summarize(failure) for rank, failure in result.failures.items()}
            raise ChildFailedError(name=_entrypoint_name(entrypoint, args), failures=brief)
        values: dict[int, Any] = result.return_values
        elsewhere = handler.failed_elsewhere()
        ended = f"succeeded on this node, but failed on another node: {elsewhere}" if elsewhere else "succeeded"
        return values
    except ChildFailedError:
        raise
    except SignalException as signalled:
        ended = f"ended by {signal.Signals(signalled.sigval).name}"
        events.record(agent.get_event_failed(), event_log)
        raise
    except RendezvousClosedError as error:
        reason = str(error) or "the rendezvous was closed: the job is over"
        log.error("%s", reason)
        events.record(agent.get_event_failed(), event_log)
        raise
    except Drained as error:
        ended, reason = "left the job", str(error)
        handler.leave(reason)
        events.record(agent.get_event_succeeded(), event_log)
        raise
    except SickNode as error:
        ended, reason = "left the job: this node is sick", str(error)
        events.record(agent.get_event_failed(), event_log)
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        handler.leave(f"{here}: {reason}")
        events.record(agent.get_event_failed(), event_log)
        raise
    finally:
        try:
            try:
                launching.mirror.finish()
            finally:
                agent.seat.report_others()
                if launching.reporter is not None:
                    launching.reporter.finish(ended, reason)
        finally:  # a signal may have come there
            if over:  # else the rendezvous stays open: the other nodes may continue
                handler.shutdown(why)


def make_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: list[str],
    handler: FreshStoreRendezvous,
    launching: LaunchContext,
) -> HoldAgent:
    """Make the agent; settings of newer versions of torch are passed on where they exist."""
    own = {
        "local_world_size": config.nproc_per_node,
        "entrypoint": entrypoint,
        "args": tuple(args),
        "rdzv_handler": handler,
        "master_addr": None,  # each attempt has its own store
        "master_port": None,
    }
    known = [field.name for field in fields(WorkerSpec) if field.init and hasattr(config, field.name)]
    spec = WorkerSpec(**{name: getattr(config, name) for name in known} | own)
    accepted = inspect.signature(LocalElasticAgent.__init__).parameters
    names = ("start_method", "log_line_prefix_template", "shutdown_timeout")
    arguments = {name: getattr(config, name) for name in names if name in accepted and hasattr(config, name)}
    assert config.logs_specs is not None  # LaunchConfig fills it
    return HoldAgent(spec, config.logs_specs, launching, **arguments)


def _entrypoint_name(entrypoint: Callable[..., Any] | str, args: Sequence[str]) -> str:
    """Return the job's name for the failure report: the script, not the interpreter."""
    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__name__", "")
    if entrypoint != sys.executable:
        return entrypoint
    return next((arg for arg in args if not arg.startswith("-")), "")


def _log_to_stderr() -> None:
    """Write ttprun's own lines to stderr, each with its time."""
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[ttprun %(asctime)s.%(msecs)03d] %(message)s", datefmt="%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
