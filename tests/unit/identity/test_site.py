"""Certificates of the site's own authority: files, host names, no roles. And who has which at all."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ttp.config import Settings
from ttp.controller.agent_link import request_shutdown, request_status
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import start_controller
from ttp.errors import ConfigError, ControllerError
from ttp.identity import own
from ttp.identity.own import use_site
from ttp.identity.role import Identity, Role
from ttp.identity.secret import Secret
from ttp.launch.attempts.identities import Identities
from ttp.proto.transport import certified
from ttp.runtime.identity import identify
from ttp.runtime.standby import last_term_of, term_of

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "site")])


@pytest.fixture(autouse=True)
def no_certificate_before_or_after() -> Iterator[None]:
    own.use(None)
    yield
    own.use(None)


def site_files(folder: Path, host: str) -> tuple[str, str, str]:
    """Write a self-signed certificate for a host, its key, and the authority, which is itself."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    paths = tuple(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    shown = certificate.public_bytes(Encoding.PEM)
    for path, content in zip(
        paths, (shown, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), shown), strict=True
    ):
        Path(path).write_bytes(content)
    return paths[0], paths[1], paths[2]


def test_a_controller_on_the_loopback_has_the_name_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process with a certificate of the site's may ask it to end: such certificates name no roles."""
    paths = site_files(tmp_path / "site", "node-7.cluster")
    for name, value in zip(("TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA"), paths, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TTP_HOST", "node-7.cluster")
    controller = start_controller(ControllerSettings("job", 1, 2), tmp_path / "journal.jsonl")
    try:
        with pytest.raises(ControllerError):
            request_status(controller.address)
        use_site(site_files(tmp_path / "other", "node-7.cluster"), "node-7.cluster")
        with pytest.raises(ControllerError):
            request_status(controller.address)
        use_site(paths, "node-8.cluster")
        with pytest.raises(ControllerError):
            request_status(controller.address)
        use_site(paths, "node-7.cluster")
        assert request_status(controller.address).stage == "assembling"
        shown = own.credentials()
        assert shown is not None and 0 < shown.renew_unix_s - time.time() <= own.SITE_READ_S
    finally:
        use_site(paths, "node-7.cluster")
        request_shutdown(controller.address)
        assert controller.wait(30.0) == 0


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_files_that_are_missing_or_have_no_pem_are_refused_at_once(tmp_path: Path, wrong: int) -> None:
    paths = list(site_files(tmp_path / "site", "host"))
    Path(paths[wrong]).write_text("not one")
    with pytest.raises(ConfigError, match="has no PEM block"):
        use_site(paths, "host")
    Path(paths[wrong]).unlink()
    with pytest.raises(ConfigError, match=r"TTP_TLS_CERT.*No such file"):
        use_site(paths, "host")
    assert own.credentials() is None


@pytest.mark.parametrize("given", [("TTP_TLS_CERT",), ("TTP_TLS_CERT", "TTP_TLS_CA"), ("TTP_TLS_KEY",)])
def test_some_of_the_three_files_are_too_few(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="as with the others of TTP_TLS_CERT, TTP_TLS_KEY, TTP_TLS_CA"):
        Settings.from_env({name: "/some/file" for name in given})


def test_ranks_on_several_nodes_need_certificates_or_the_word_that_they_need_none() -> None:
    with pytest.raises(ConfigError, match="2 nodes without ttprun"):
        identify(Settings(one_node=False, nodes=2), 0)
    assert "TTP_TLS=False" in identify(Settings(one_node=False, nodes=2, tls=False), 0)
    assert "stay on this host" in identify(Settings(), 0)
    assert own.credentials() is None
    assert identify(Settings(one_node=False, nodes=2, identity="/no/socket"), 0) == ""
    with pytest.raises(ControllerError, match="has no certificate"):
        own.credentials()


def test_an_agent_speaks_for_its_nodes_ranks_and_issues_for_this_attempts_terms_alone() -> None:
    identities = Identities("node-7")
    try:
        path = identities.begin(Secret(b"a secret of the tests"), "job/2", 2, [5, 4])
        shown = own.credentials()
        assert shown is not None
        names = x509.load_pem_x509_certificate(shown.certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
        uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
        assert certified([uri.encode() for uri in uris]) == Identity("job/2", Role.AGENT, (4, 5), node="node-7")
        for term in (term_of(2), last_term_of(2) - 1):
            assert own.ask(path, Identity("job/2", Role.CONTROLLER, term=term)).certificate
        for term in (term_of(2) - 1, last_term_of(2), term_of(3)):
            with pytest.raises(ValueError, match="got term"):
                own.ask(path, Identity("job/2", Role.CONTROLLER, term=term))
    finally:
        identities.close()
    assert own.credentials() is None
