"""Which certificate a rank's connections show: its agent's, the site's, or none where they stay on this host."""

from __future__ import annotations

from ttp.config import Settings
from ttp.errors import ConfigError
from ttp.identity import own
from ttp.identity.role import Identity, Role


def identify(settings: Settings, rank: int) -> str:
    """Set this process's credentials; return what is to be said of them at the start, empty: nothing.

    Raises ConfigError: connections to other nodes would be plain, and TTP_TLS does not allow that.
    """
    if settings.tls_files:
        own.use_site(settings.tls_files, settings.host)
        return ""
    if not settings.tls:
        own.use(None)
        return "TTP_TLS=False: whoever reaches the controller's port can end this job or lead its ranks astray"
    if settings.identity:
        own.use_agents(settings.identity, Identity(settings.start_name, Role.RANK, (rank,)))
        return ""
    own.use(None)
    if not settings.one_node:
        raise ConfigError(
            f"invalid TTP_TLS=True on rank {rank}: got {settings.nodes} nodes without ttprun, expected certificates for connections between"
            " nodes. Start the job with ttprun, name the site's own in TTP_TLS_CERT, TTP_TLS_KEY and TTP_TLS_CA, or set TTP_TLS=False on a"
            " network that is closed to others"
        )
    return "without ttprun, connections are plain and stay on this host: any of its users can reach the controller"
