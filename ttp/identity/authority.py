"""The job's certificate authority: the same on every agent, as it is derived from the job's secret.

Owns the certificates' content. One for each attempt of a job; only agents can issue them.

The authority's key is a point of P-256 whose secret number is HKDF-SHA256(secret) (RFC 5869; 16 bytes longer than the group's order, so that the
remainder is as good as uniform: FIPS 186-5, A.2.1). Its own certificate is signed deterministically (RFC 6979): every agent writes the same bytes.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ttp.identity.credentials import Credentials
from ttp.identity.role import ANY_CONTROLLER, KEEPER_NAME, Identity, Role, controller_name
from ttp.identity.secret import Secret

LIFETIME_S = 86_400.0
"""Of a leaf certificate. A connection that is open stays so: certificates are looked at when one is made."""
SKEW_S = 300.0
"""A certificate is valid for so much longer: so far another node's clock may be ahead."""

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256's group (SEC 2, 2.4.2)."""
_FROM = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2124, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Issues the certificates of one attempt."""

    def __init__(self, secret: Secret, job_id: str, clock: Callable[[], float] = time.time) -> None:
        """`job_id`: the attempt's name."""
        self.job_id = job_id
        self.store_key = secret.key(f"store {job_id}")
        self._clock = clock
        number = int.from_bytes(secret.key(f"authority {job_id}", 48)) % (P256_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        digest = hashlib.sha256(job_id.encode(errors="surrogateescape")).hexdigest()[:16]
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"TTP job {digest}")])
        public = self._key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(1)
            .not_valid_before(_FROM)
            .not_valid_after(_UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, SHA256(), ecdsa_deterministic=True)
        )
        self.certificate = certificate.public_bytes(Encoding.PEM)

    def issue(self, peer: Identity) -> Credentials:
        """Return a new key and its certificate for a process of this attempt. Only a controller's and a keeper's are good for a server."""
        now = self._clock()
        key = ec.generate_private_key(ec.SECP256R1())
        serves = peer.role in (Role.CONTROLLER, Role.KEEPER)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(peer.uri)]
        if peer.role is Role.KEEPER:
            names.append(x509.DNSName(KEEPER_NAME))
        elif serves:
            names += [x509.DNSName(controller_name(peer.term)), x509.DNSName(ANY_CONTROLLER)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer.role.value)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_FROM)  # the attempt begins it: a clock that is set back must not end it
            .not_valid_after(_moment(now + LIFETIME_S + SKEW_S))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, SHA256())
        )
        return Credentials(
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            certificate=certificate.public_bytes(Encoding.PEM),
            authority=self.certificate,
            renew_unix_s=now + LIFETIME_S / 2,
            store_key=self.store_key if peer.role is not Role.OPERATOR else b"",
        )


def _moment(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(unix_s), tz=datetime.UTC)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
