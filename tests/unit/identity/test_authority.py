"""The job's certificate authority and what it issues."""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from ttp.identity.authority import LIFETIME_S, SKEW_S, Authority
from ttp.identity.credentials import RETRY_S, Credentials, Renewed
from ttp.identity.role import ANY_CONTROLLER, KEEPER_NAME, Identity, Role, controller_name
from ttp.identity.secret import Secret, make_secret

SECRET = Secret(b"a secret of the tests")
RANK = Identity("job/0", Role.RANK, (3,), node="host")


def certificate_of(credentials: Credentials) -> x509.Certificate:
    return x509.load_pem_x509_certificate(credentials.certificate)


def test_all_agents_of_a_job_derive_the_same_authority_to_the_byte() -> None:
    assert Authority(SECRET, "job/0").certificate == Authority(SECRET, "job/0").certificate


def test_another_attempt_and_another_secret_have_another_authority() -> None:
    certificates = {
        authority.certificate
        for authority in (Authority(SECRET, "job/0"), Authority(SECRET, "job/1"), Authority(make_secret(), "job/0"))
    }
    assert len(certificates) == 3
    read = [x509.load_pem_x509_certificate(one) for one in certificates]
    assert len({one.public_key().public_numbers() for one in read}) == 3  # type: ignore[union-attr]
    assert len({one.subject.rfc4514_string() for one in read}) == 2  # by the attempt
    constraints = read[0].extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_a_certificate_of_one_agent_is_believed_by_another_and_not_by_another_jobs() -> None:
    issued = certificate_of(Authority(SECRET, "job/0").issue(RANK))
    issued.verify_directly_issued_by(x509.load_pem_x509_certificate(Authority(SECRET, "job/0").certificate))
    for other in (Authority(make_secret(), "job/0"), Authority(SECRET, "job/1")):
        with pytest.raises((InvalidSignature, ValueError)):
            issued.verify_directly_issued_by(x509.load_pem_x509_certificate(other.certificate))


def test_only_a_controllers_and_a_keepers_certificate_serve_and_a_controllers_only_for_its_term() -> None:
    authority = Authority(SECRET, "job/0")
    for role in Role:
        certificate = certificate_of(authority.issue(Identity("job/0", role, term=7 if role is Role.CONTROLLER else 0)))
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns = names.get_values_for_type(x509.DNSName)
        assert (ExtendedKeyUsageOID.SERVER_AUTH in usages) == (role in (Role.CONTROLLER, Role.KEEPER))
        expected = {Role.CONTROLLER: [controller_name(7), ANY_CONTROLLER], Role.KEEPER: [KEEPER_NAME]}
        assert dns == expected.get(role, [])


def test_a_certificate_says_who_it_is_for_and_cannot_issue_others() -> None:
    certificate = certificate_of(Authority(SECRET, "job/0").issue(RANK))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [RANK.uri]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_a_certificate_lives_a_day_and_a_clock_that_is_set_back_does_not_end_it() -> None:
    now = 1_800_000_000.0
    issued = Authority(SECRET, "job/0", clock=lambda: now).issue(RANK)
    certificate = certificate_of(issued)
    begins, ends = (
        moment.replace(tzinfo=datetime.UTC).timestamp()
        for moment in (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    )
    assert begins < now - 1e7 and ends == now + LIFETIME_S + SKEW_S
    assert issued.renew_unix_s == now + LIFETIME_S / 2


def test_each_process_has_a_key_of_its_own_that_fits_its_certificate() -> None:
    authority = Authority(SECRET, "job/0")
    one, other = authority.issue(RANK), authority.issue(RANK)
    assert one.key != other.key
    assert load_pem_private_key(one.key, None).public_key() == certificate_of(one).public_key()


def test_credentials_cross_a_socket_as_they_are_and_show_no_key() -> None:
    issued = Authority(SECRET, "job/0").issue(RANK)
    assert Credentials.decode(issued.encode()) == issued
    assert "PRIVATE KEY" not in repr(issued) and repr(issued.store_key) not in repr(issued)


def test_the_store_key_is_the_attempts_and_no_operators() -> None:
    authority = Authority(SECRET, "job/0")
    assert (
        authority.issue(RANK).store_key == Authority(SECRET, "job/0").store_key != Authority(SECRET, "job/1").store_key
    )
    assert authority.issue(Identity("job/0", Role.OPERATOR)).store_key == b""


@pytest.mark.parametrize("error", [OSError("the agent is gone"), ValueError("the agent refuses")])
def test_old_credentials_are_renewed_beside_connections_and_kept_where_that_fails(error: Exception) -> None:
    now, answers = [0.0], queue.SimpleQueue[float]()
    asked, going_on = threading.Semaphore(0), threading.Semaphore(0)

    def obtain() -> Credentials:
        if now[0]:
            asked.release()
            going_on.acquire()  # as an agent that hangs
        if now[0] >= 200.0:
            answers.put(now[0])
            raise error
        answers.put(now[0])
        return Credentials(b"", str(now[0]).encode(), b"", renew_unix_s=now[0] + 50.0)

    renewed = Renewed(obtain, clock=lambda: now[0])
    assert renewed().certificate == renewed().certificate == b"0.0"
    assert answers.get(timeout=10.0) == 0.0 and answers.empty()
    now[0] = 60.0
    assert renewed().certificate == b"0.0"  # at once
    assert asked.acquire(timeout=10.0)
    assert renewed().certificate == b"0.0"
    going_on.release()
    assert answers.get(timeout=10.0) == 60.0
    until(lambda: renewed().certificate == b"60.0")
    now[0] = 200.0
    assert renewed().certificate == b"60.0"
    assert asked.acquire(timeout=10.0)
    going_on.release()
    assert answers.get(timeout=10.0) == 200.0
    assert renewed().certificate == b"60.0" and not asked.acquire(blocking=False)  # it is not tried again at once


def test_where_no_thread_can_be_started_old_credentials_are_kept_and_renewed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def obtain() -> Credentials:
        return Credentials(b"", str(now[0]).encode(), b"", renew_unix_s=now[0] + 50.0)

    renewed = Renewed(obtain, clock=lambda: now[0])
    first = renewed()
    now[0] = 60.0
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert renewed() is first
    now[0] += RETRY_S
    until(lambda: renewed() is not first)


def test_the_first_credentials_are_waited_for_and_their_error_is_raised() -> None:
    def refuse() -> Credentials:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Renewed(refuse)()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
