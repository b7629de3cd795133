"""Who a process is, as its certificate says it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.identity.role import Identity, Role

IDENTITIES = st.builds(
    Identity,
    job_id=st.text(st.characters(codec="utf-8"), max_size=40),
    role=st.sampled_from(Role),
    ranks=st.sets(st.integers(0, 5_000), max_size=30).map(lambda ranks: tuple(sorted(ranks))),
    term=st.integers(0, 2**63 - 1),
    node=st.text(st.characters(codec="utf-8"), max_size=40),
)


@given(IDENTITIES)
def test_a_uri_says_all_of_a_process_in_ascii(peer: Identity) -> None:
    assert peer.uri.isascii()
    assert Identity.parse(peer.uri) == peer


@given(IDENTITIES, st.data())
def test_a_changed_uri_is_another_process_or_refused(peer: Identity, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(peer.uri) - 1))
    changed = peer.uri[:position] + data.draw(st.sampled_from("aA0-,&=/?:%#")) + peer.uri[position + 1 :]
    with contextlib.suppress(ValueError):
        assert (Identity.parse(changed) == peer) == (changed == peer.uri)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://rank/job?ranks=1",
        "ttp://king/job?ranks=1",
        "ttp://rank/job?ranks=2-1",
        "ttp://rank/job?ranks=0-99999999",
        "ttp://rank/job?ranks=1&ranks=2",
        "ttp://rank/job?ranks=1,2",
        "ttp://rank/job?term=",
        "ttp://rank/job?" + "ranks=1&" * 2000,
    ],
)
def test_what_is_not_written_so_is_refused(uri: str) -> None:
    with pytest.raises(ValueError):
        Identity.parse(uri)
