"""How gRPC is set up on both sides: message sizes, keepalive, no proxies, no shared ports.

Import gRPC through this module: it must find GRPC_ENABLE_FORK_SUPPORT=0 when it loads, or a data loader's forked
workers crash or crawl. Never decides anything.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc

__all__ = ["CLIENT_OPTIONS", "MAX_MESSAGE_BYTES", "SERVER_OPTIONS", "Options", "grpc", "join_address", "open_channel"]

Options = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES = 16 << 20
"""A larger message is refused on both sides; a larger table is sent in chunks (`chunks.py`)."""

_BOTH: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: Options = (
    *_BOTH,
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not half of the connections
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

CLIENT_OPTIONS: Options = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),  # the control plane stays inside the cluster, whatever http_proxy says
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once: no backoff inherited from the last one
    ("grpc.enable_retries", 0),
)


def open_channel(address: str) -> grpc.Channel:
    """Return a channel of its own to `address` (`host:port`); the caller closes it."""
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
