"""The identities of one node's processes, attempt after attempt: the agent's own certificate, and the socket at which the others get theirs.

Owns the issuer. The agent is the only process of the node that has the secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from ttp.errors import ConfigError
from ttp.identity import own
from ttp.identity.authority import Authority
from ttp.identity.credentials import Renewed
from ttp.identity.issuer import Issuer
from ttp.identity.role import Identity, Role
from ttp.identity.secret import Secret
from ttp.runtime.standby import last_term_of, term_of


class Identities:
    """Made once a job; used on the agent's thread."""

    def __init__(self, node: str) -> None:
        """`node`: this host. Raises ConfigError: no socket can be made."""
        self._node = node
        try:
            self._issuer = Issuer(node)
        except OSError as error:
            raise ConfigError(
                f"no socket can be made ({error.strerror or error}), expected one at which the ranks get their certificates. Raise the limit of"
                " open files (ulimit -n), or set TTP_TLS=False on a network that is closed to others"
            ) from error

    def begin(self, secret: Secret, job_id: str, number: int, ranks: Iterable[int]) -> str:
        """Begin an attempt; return what its processes are to have as TTP_IDENTITY. `ranks`: of this node."""
        authority = Authority(secret, job_id)
        peer = Identity(job_id, Role.AGENT, tuple(sorted(ranks)), node=self._node)
        own.use(Renewed(partial(authority.issue, peer)))
        self._issuer.begin(authority, range(term_of(number), last_term_of(number)))
        return self._issuer.address

    def started(self, pids: Mapping[int, int]) -> None:
        """The attempt's workers run (rank -> pid)."""
        self._issuer.workers(pids)

    def starting(self) -> None:
        """Another worker is being started: whoever asks now is answered once `started` says which one it is."""
        self._issuer.workers(None)

    def close(self) -> None:
        self._issuer.close()
        own.use(None)
