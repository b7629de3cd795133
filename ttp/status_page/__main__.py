"""The status page's process, started by a controller that leads ranks (`controller/page_process.py`).

The kernel ends it with that controller. To that controller it is an operator: its
certificate is good for looking alone. Runs at low priority, and writes its address and its certificate beside the journals.

Exit status: 2 what it was given cannot be used (one line on stderr says what).
"""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import signal
import ssl
import sys
import time
from functools import partial
from pathlib import Path

from ttp import files
from ttp.config import host_name, identity_socket, tls, tls_files
from ttp.errors import ConfigError
from ttp.fork_server.linux import end_with_parent, lower_priority
from ttp.identity import own
from ttp.identity.role import Identity, Role
from ttp.identity.secret import Secret
from ttp.inputs.options import whole
from ttp.status import page_access
from ttp.status.ask import ask_from_inside
from ttp.status.find_job import Job
from ttp.status.look import look
from ttp.status.page_access import Access, PagePlace
from ttp.status_page import certificate
from ttp.status_page.curve import FILE_NAME
from ttp.status_page.http_server import CLOSE_S, PageServer, Responses
from ttp.status_page.looks import Looks
from ttp.text.streams import make_stderr_last

REFUSED = 2
NICE = 10
PORT_RETRY_S = 0.25
"""The port may still be held by the page of a controller that ends."""
CERTIFICATE_NAME = "status_page.pem"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ttp-status-page")
    parser.add_argument("--parent", type=whole(1), required=True, help="the process that starts this one")
    parser.add_argument("--job-id", required=True, help="the attempt's name")
    parser.add_argument("--log-dir", type=Path, required=True, help="where the journals are")
    parser.add_argument("--bind", required=True, help="address to listen on")
    parser.add_argument("--advertise", required=True, help="host that others reach it by")
    parser.add_argument("--port", type=whole(most=65535), required=True, help="0: any free one")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Serve until the parent ends; return the exit status where that cannot be done."""
    options = parse(arguments)
    make_stderr_last()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != options.parent:
        return 0  # it has ended meanwhile
    lower_priority(NICE)
    try:
        serve(options)
    except (ConfigError, OSError, ssl.SSLError) as error:
        print(f"ttp-status-page: the status page cannot be served: {error}", file=sys.stderr)
        return REFUSED
    return 0


def serve(options: argparse.Namespace) -> None:
    """Listen and serve; never returns. Raises ConfigError, OSError."""
    log_dir = options.log_dir.resolve()
    token_file = page_access.token_path(log_dir)
    token = page_access.read_token(token_file)
    own_pem, context = make_context(options.bind, token)
    be_operator(options.job_id)
    looks = Looks(partial(look, Job(log_dir), all_ranks=True, ask_at=ask_from_inside), curve_file=log_dir / FILE_NAME)
    started = secrets.token_hex(8)
    server = listen(options.bind, options.port, looks.answers, Access(token, started, time.time), context)
    host = f"[{options.advertise}]" if ":" in options.advertise else options.advertise
    place = PagePlace(
        url=f"{'https' if context is not None else 'http'}://{host}:{server.port}/",
        host=os.uname().nodename,
        pid=os.getpid(),
        started=started,
        token_file=str(token_file.resolve()),
        fingerprint=certificate.fingerprint(own_pem) if own_pem else "",
    )
    if own_pem:
        files.replace(log_dir / CERTIFICATE_NAME, own_pem.decode())
    page_access.write(log_dir, place)
    looks.start()
    server.serve_forever(poll_interval=CLOSE_S)


def make_context(bind: str, token: Secret) -> tuple[bytes, ssl.SSLContext | None]:
    """Return the certificate that this page makes for itself (PEM; empty: it does not) and its TLS; None on the loopback, where it is plain."""
    if bind in LOOPBACK:
        return b"", None
    if paths := tls_files():
        return b"", certificate.site_context(paths)
    key, pem = certificate.own_certificate(token)
    return pem, certificate.server_context(key, pem)


def be_operator(job_id: str) -> None:
    """Look at the job as what its certificates allow to look alone. Raises ConfigError."""
    if paths := tls_files():
        own.use_site(paths, host_name())
    elif tls():
        own.use_agents(identity_socket(), Identity(job_id, Role.OPERATOR, node=os.uname().nodename))


def listen(host: str, port: int, answers: Responses, access: Access, context: ssl.SSLContext | None) -> PageServer:
    """Get the port, however long that takes; raises OSError for a port that no waiting frees."""
    while True:
        try:
            return PageServer((host, port), answers, access, context)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        time.sleep(PORT_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
