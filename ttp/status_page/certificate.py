"""The certificate of a page that other machines reach.

The site's own where it has one. Else it is made of the page's token, the same in every attempt and on every node, and signed by itself: who has the
token can compute it, a scraper checks it as its authority with the server name SERVER_NAME, and a browser shows its fingerprint. No key is written to
a disk.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ttp.identity.authority import P256_ORDER
from ttp.identity.secret import Secret

SERVER_NAME = "page.ttp"
_FROM = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2124, 1, 1, tzinfo=datetime.UTC)


def own_certificate(token: Secret) -> tuple[bytes, bytes]:
    """Return key and certificate, PEM each; the same for the same token."""
    number = int.from_bytes(token.key("status page certificate", 48)) % (P256_ORDER - 1) + 1
    key = ec.derive_private_key(number, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "TTP status page")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, SHA256(), ecdsa_deterministic=True)
    )
    return (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    )


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a PEM certificate, as browsers show it."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(SHA256()).hex(":").upper()


def server_context(key: bytes, certificate: bytes) -> ssl.SSLContext:
    """Return the settings of a server that shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    memory = os.memfd_create("page")  # Python loads keys from files alone
    try:
        os.write(memory, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def site_context(paths: Sequence[str]) -> ssl.SSLContext:
    """Return the same for the site's certificate and key. Raises OSError, ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(paths[0], paths[1])
    return context
