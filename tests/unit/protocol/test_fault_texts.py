"""Which exception texts mean that another rank is the cause."""

from __future__ import annotations

import pytest

from ttp.processor.core.causes import cause_of, classify
from ttp.proto.messages import Cause, CauseKind

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
PEER_ERRORS = [
    f"{GLOO}pair.cc:534] Connection closed by peer [127.0.0.1]:45612",
    f"{GLOO}pair.cc:553] Read error [127.0.0.1]:45612: Connection reset by peer. This may indicate a remote crash",
    f"{GLOO}pair.cc:459] writev [127.0.0.1]:2345: Broken pipe",
    f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    f"{GLOO}unbound_buffer.cc:133] Timed out waiting 8000ms for send operation to complete",
    f"{GLOO}unbound_buffer.cc:78] Application timeout caused pair closure",
    "Gloo connectFullMesh failed with [...]: Connection refused, remote=[127.0.0.1]:3",
    "NCCL error in: ProcessGroupNCCL.cpp:1333, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=17, OpType=ALLREDUCE) ran for 600 s",
    "NCCL communicator was aborted on rank 3.",
    "failed to recv, got 0 bytes",
]
OWN_ERRORS = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)",
    "[Errno 104] Connection reset by peer",
    "HTTPSConnectionPool(host='example.org'): Read timed out. (read timeout=10)",
    "NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.",
    "loss is nan at step 120",
    "",
]


@pytest.mark.parametrize("text", PEER_ERRORS)
def test_a_failed_collective_is_a_peers_error(text: str) -> None:
    assert classify(text) is CauseKind.PEER_ERROR


@pytest.mark.parametrize("text", OWN_ERRORS)
def test_everything_else_is_the_ranks_own(text: str) -> None:
    assert classify(text) is CauseKind.EXCEPTION


def test_a_cause_is_one_line_for_people() -> None:
    found = cause_of(3, "ValueError", "\n  bad batch 17\nmore\n")
    assert found == Cause(CauseKind.EXCEPTION, (3,), "ValueError: bad batch 17")
    assert len(cause_of(3, "RuntimeError", "x" * 5000).text) < 400
    assert cause_of(3, "KeyError", "").text == "KeyError"


@pytest.mark.parametrize(
    ("type_name", "kind"),
    [
        ("AbortedCollective", CauseKind.PEER_ERROR),
        ("DistNetworkError", CauseKind.PEER_ERROR),
        ("WrongPeer", CauseKind.PEER_ERROR),
        ("ReplicasDiffer", CauseKind.DIVERGED),
        ("WrongReplica", CauseKind.DIVERGED),
        ("ValueError", CauseKind.EXCEPTION),
    ],
)
def test_some_types_say_whose_fault_it_is_whatever_their_text(type_name: str, kind: CauseKind) -> None:
    assert classify("something happened", type_name) is kind
    assert cause_of(3, type_name, "something happened").kind is kind


def test_a_text_of_300_characters_is_whole_and_a_longer_one_is_cut() -> None:
    head = "ValueError: "
    assert cause_of(0, "ValueError", "x" * (300 - len(head))).text == head + "x" * (300 - len(head))
    assert cause_of(0, "ValueError", "x" * (301 - len(head))).text == head + "x" * (300 - len(head)) + "..."
