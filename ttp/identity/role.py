"""What a process of the job is: its role, its attempt, and which ranks it may speak for. Written into its certificate as a URI.

Owns the URI's form, and nothing else: PURE.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

SCHEME = "ttp"
MOST_URI = 4096
ANY_CONTROLLER = "controller.ttp"
"""A name in the certificate of every controller of the job."""
KEEPER_NAME = "keeper.ttp"
"""The name in the certificate of every copy keeper."""


def controller_name(term: int) -> str:
    """Return the name in the certificate of the controller of one term."""
    return f"term-{term}.{ANY_CONTROLLER}"


class Role(enum.Enum):
    """What a process may do follows from it."""

    AGENT = "agent"
    RANK = "rank"
    CONTROLLER = "controller"
    KEEPER = "keeper"  # holds copies for other nodes, and talks to their keepers alone
    OPERATOR = "operator"  # looks at the job, and changes nothing


@dataclass(frozen=True, slots=True)
class Identity:
    """One process."""

    job_id: str
    """The attempt's name: a process of an earlier attempt is another one."""
    role: Role
    ranks: tuple[int, ...] = ()
    """Of a rank: itself. Of an agent: the ranks on its node. Ascending."""
    term: int = 0
    """Of a controller."""
    node: str = ""
    """The host, for messages."""

    @property
    def uri(self) -> str:
        fields = {"ranks": _spans(self.ranks), "term": str(self.term or ""), "node": self.node}
        query = urlencode({name: text for name, text in fields.items() if text})
        return f"{SCHEME}://{self.role.value}/{quote(self.job_id, safe='')}?{query}"

    def __str__(self) -> str:
        which = {Role.RANK: _spans(self.ranks), Role.CONTROLLER: f"of term {self.term}"}.get(self.role, "")
        return " ".join(filter(None, (self.role.value, which, f"on {self.node}" if self.node else "")))

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Raises ValueError for what `uri` does not write."""
        if len(uri) > MOST_URI:
            raise ValueError(f"invalid certificate: got a URI of {len(uri)} characters, expected at most {MOST_URI}")
        parts = urlsplit(uri)
        fields = {name: values[0] for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
        found = cls(
            job_id=unquote(parts.path.removeprefix("/")),
            role=Role(parts.netloc),
            ranks=_from_spans(fields.get("ranks", "")),
            term=int(fields.get("term", "0")),
            node=fields.get("node", ""),
        )
        if found.uri != uri:
            raise ValueError(f"invalid certificate: got the URI {uri!r}, expected {found.uri!r}")
        return found


def _spans(ranks: tuple[int, ...]) -> str:
    """Return `0-7,9` for ascending ranks."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _from_spans(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        ends = int(first), int(last or first)
        if not 0 <= ends[0] <= ends[1] < 1 << 20:
            raise ValueError(f"invalid certificate: got ranks {span!r}, expected ascending ones")
        ranks += range(ends[0], ends[1] + 1)
    return tuple(ranks)
