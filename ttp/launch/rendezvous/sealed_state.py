"""torch's c10d rendezvous, with a sealed state: torch pickles it, so that whoever writes it runs programs in every agent.

Owns the check before torch unpickles. A state that this job has not sealed is never unpickled: it is as a store that is lost.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from ttp.exchange.sealed_store import Seal
from ttp.identity.sealed import NotSealed, seal, unseal
from ttp.launch.rendezvous.job_secret import JobSecret


class StateRefused(RendezvousConnectionError):
    """The state in the store is not this job's."""


class SealedState(RendezvousBackend):
    """Seals what torch's backend stores."""

    def __init__(self, backend: RendezvousBackend, how: Seal) -> None:
        self._backend = backend
        self._how = how

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return torch's state and its token; None: there is none yet. Raises RendezvousError."""
        try:
            found = self._backend.get_state()
        except RendezvousStateError as error:  # no base64
            raise StateRefused(f"the rendezvous' state is refused: {error.__cause__ or error}") from error
        return found and (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Store the state unless it has changed since `token`; return the one that is there now. Raises RendezvousError."""
        try:
            found = self._backend.set_state(seal(self._how.key, self._how.context, state), token)
        except RendezvousStateError as error:
            raise StateRefused(f"the rendezvous' state is refused: {error.__cause__ or error}") from error
        return found and (self._opened(found[0]), *found[1:])

    def _opened(self, entry: Any) -> bytes:
        try:
            return unseal(self._how.key, self._how.context, entry)
        except NotSealed as error:
            raise StateRefused(f"the rendezvous' state is refused: {error}") from None


def make_c10d(parameters: RendezvousParameters, secret: JobSecret) -> RendezvousHandler:
    """Return torch's handler for its c10d backend, with a sealed state where the job was given a secret. Raises RendezvousError, ValueError as
    torch does, OtherSecret."""
    backend, store = create_backend(parameters)
    secret.compare(store)
    how = secret.seal("state", parameters.run_id)
    return create_handler(store, backend if how is None else SealedState(backend, how), parameters)
