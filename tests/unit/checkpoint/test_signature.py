"""A signed checkpoint is the one that was signed, to the last byte; another is refused in one line that says what to do."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.conftest import make_job
from tests.unit.checkpoint.damage import DATA, flip_a_bit
from tests.unit.checkpoint.signing import alter_manifest, fix_checksums, make_keys, save_signed, write
from ttp.checkpoint.cli.main import main
from ttp.checkpoint.format.manifest import read_bytes, read_manifest, sign_manifest
from ttp.checkpoint.format.signature import SIGNATURE_NAME, Keys, SignKey, read_sign_key, read_verify_key
from ttp.checkpoint.verify import verify
from ttp.errors import ConfigError, CorruptCheckpoint

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path)


def refused(path: Path, keys: Keys) -> str:
    """Return why a key refuses a checkpoint, in one line."""
    with pytest.raises(CorruptCheckpoint) as raised:
        verify(path, key=keys.verify)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- what is signed ---


def test_the_signature_is_of_the_exact_bytes_and_the_manifest_has_every_files_sha_256(
    job: Job, tmp_path: Path, keys: Keys
) -> None:
    """As any other program checks it: torch's index and the plain values are files as well."""
    path = save_signed(job, tmp_path / "c", 42, keys)
    content = (path / "manifest.json").read_bytes()
    load_pem_public_key((tmp_path / "job.pub.pem").read_bytes()).verify((path / SIGNATURE_NAME).read_bytes(), content)  # type: ignore[union-attr, call-arg]
    recorded = {file["name"]: file["sha256"] for file in json.loads(content)["files"]}
    names = {each.name for each in path.iterdir()} - {"manifest.json", SIGNATURE_NAME}
    assert recorded == {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    assert {".metadata", "__0_blobs_0.distcp", DATA} < names
    assert verify(path, key=keys.verify).step == 42


def test_openssl_makes_the_same_keys_and_signatures(job: Job, tmp_path: Path) -> None:
    """Its key signs here; its verification takes what was signed here."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "o.pem")
    openssl("pkey", "-in", "o.pem", "-pubout", "-out", "o.pub.pem")
    keys = Keys(read_sign_key(str(tmp_path / "o.pem")), read_verify_key(str(tmp_path / "o.pub.pem")))
    path = save_signed(job, tmp_path / "c", 42, keys)
    assert verify(path, key=keys.verify).step == 42
    files = ["-in", str(path / "manifest.json"), "-sigfile", str(path / SIGNATURE_NAME)]
    openssl("pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "o.pub.pem", *files)


def test_a_reader_without_a_key_reads_a_signed_checkpoint_as_any_other(job: Job, tmp_path: Path, keys: Keys) -> None:
    """The manifest has the same keys, its files one more; so earlier versions read it."""
    signed, unsigned = save_signed(job, tmp_path / "c", 42, keys), job.save(tmp_path / "d", 42, blobs={"x": 0.5})
    bodies = [json.loads(read_bytes(path)) for path in (signed, unsigned)]
    assert bodies[0].keys() == bodies[1].keys() and bodies[0]["format_version"] == bodies[1]["format_version"] == 2
    assert {tuple(file) for file in bodies[1]["files"]} == {("name", "nbytes", "checksum", "rank")}
    assert {tuple(file) for file in bodies[0]["files"]} == {("name", "nbytes", "checksum", "rank", "sha256")}
    assert all(file["checksum"].startswith("xxh3_128:") for file in bodies[0]["files"])
    assert verify(signed).step == 42 and not (unsigned / SIGNATURE_NAME).exists()
    job.assert_equal(job.read(signed))


def test_without_a_key_nothing_of_it_is_loaded() -> None:
    code = "import sys, ttp, ttp.session; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


# --- what is refused ---


def test_a_file_whose_fast_checksum_was_made_to_fit_is_found_by_its_sha_256(
    job: Job, tmp_path: Path, keys: Keys
) -> None:
    """Somebody found other bytes of the same checksum: here the manifest that is signed names that of the altered file."""
    path = save_signed(job, tmp_path, 42, keys)
    flip_a_bit(path)
    fix_checksums(path)
    assert keys.sign is not None
    sign_manifest(path, read_manifest(path), read_bytes(path), keys.sign)
    assert verify(path).step == 42, "its checksums fit"
    assert "__1_0_0.distcp was altered since rank 1 wrote it: checksum sha256:" in refused(path, keys)


def test_torchs_index_is_compared_before_it_is_read(job: Job, tmp_path: Path, keys: Keys) -> None:
    """By its SHA-256: it is a pickle."""
    path = save_signed(job, tmp_path, 42, keys)
    flip_a_bit(path, ".metadata")
    fix_checksums(path)
    assert keys.sign is not None
    sign_manifest(path, read_manifest(path), read_bytes(path), keys.sign)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata was altered since rank 0 wrote it: checksum sha256:"):
        verify(path, deep=False, key=keys.verify)


def with_other_files(path: Path) -> None:
    flip_a_bit(path)
    fix_checksums(path)


def with_another_state(path: Path) -> None:
    alter_manifest(path, lambda body: body["state"]["trainer"].update(samples=0))


def with_a_space(path: Path) -> None:
    """JSON has the same meaning."""
    (path / "manifest.json").write_bytes(read_bytes(path) + b" ")


def with_another_signature(path: Path) -> None:
    content = (path / SIGNATURE_NAME).read_bytes()
    (path / SIGNATURE_NAME).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def with_a_shorter_signature(path: Path) -> None:
    os.truncate(path / SIGNATURE_NAME, 63)


def with_a_longer_signature(path: Path) -> None:
    with open(path / SIGNATURE_NAME, "ab") as file:
        file.write(b"\0")


def with_an_empty_signature(path: Path) -> None:
    os.truncate(path / SIGNATURE_NAME, 0)


@pytest.mark.parametrize(
    "act",
    [
        with_other_files,
        with_another_state,
        with_a_space,
        with_another_signature,
        with_a_shorter_signature,
        with_a_longer_signature,
        with_an_empty_signature,
    ],
)
def test_what_was_not_signed_so_is_refused(act: Callable[[Path], None], job: Job, tmp_path: Path, keys: Keys) -> None:
    path = save_signed(job, tmp_path / "c", 42, keys)
    act(path)
    assert f"manifest.json was altered, or another key has signed it: its signature is not one for {tmp_path}/job.pub.pem" in refused(path, keys)  # fmt: skip


def test_another_keys_signature_is_refused(job: Job, tmp_path: Path, keys: Keys) -> None:
    """And taken for that key."""
    other = make_keys(tmp_path, "other")
    path = save_signed(job, tmp_path / "c", 42, other)
    assert "another key has signed it: its signature is not one for" in refused(path, keys)
    assert verify(path, key=other.verify).step == 42


def test_an_unsigned_checkpoint_is_refused_with_the_command_that_signs_it(job: Job, tmp_path: Path, keys: Keys) -> None:
    path = job.save(tmp_path / "c", 42)
    assert refused(path, keys) == (
        f"{path}/manifest.json is not signed: expected manifest.json.sig beside it. If you trust these files, run `ttp ckpt sign"
        f" --sign-key KEY {path}`"
    )
    (path / SIGNATURE_NAME).mkdir()
    assert "manifest.json.sig is invalid: expected a regular file" in refused(path, keys)


def test_a_signed_manifest_without_sha_256_is_refused(job: Job, tmp_path: Path, keys: Keys) -> None:
    """A program that signs must not leave a file out."""
    path = save_signed(job, tmp_path, 42, keys)
    alter_manifest(path, lambda body: body["files"][1].pop("sha256"))
    assert keys.sign is not None
    keys.sign.write_signature(path, read_bytes(path))
    assert "is signed and has no SHA-256 of __0_0_0.distcp: expected one of every file" in refused(path, keys)


@pytest.mark.parametrize("value", ["ab", "AB" * 32, 7, "g" * 64])
def test_a_sha_256_that_is_none_is_refused(value: object, job: Job, tmp_path: Path) -> None:
    path = job.save(tmp_path, 42)
    alter_manifest(path, lambda body: body["files"][1].update(sha256=value))
    with pytest.raises(CorruptCheckpoint, match=r"files\[1\]\.sha256: got "):
        verify(path)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a signed checkpoint, a copy of it, and the public key."""
    folder = tmp_path_factory.mktemp("signed")
    path = save_signed(make_job(), folder / "c", 42, make_keys(folder))
    return path, Path(shutil.copytree(path, folder / "copy" / path.name)), folder / "job.pub.pem"


@settings(max_examples=150)
@given(st.data())
def test_no_byte_of_any_file_can_be_another(signed: tuple[Path, Path, Path], data: st.DataObject) -> None:
    """Of the manifest, the signature, torch's index, the tables and the tensors; nor can one be missing or one more be there."""
    path, copy, key = signed
    name = data.draw(st.sampled_from(sorted(each.name for each in path.iterdir())))
    content = (path / name).read_bytes()
    place = data.draw(st.integers(0, len(content)))
    change: Any = data.draw(st.sampled_from(["flip", "cut", "add"]))
    byte = content[place : place + 1] or b"\0"
    flipped = bytes([byte[0] ^ data.draw(st.integers(1, 255))])
    new = {"flip": flipped, "cut": b"", "add": flipped + content[place : place + 1]}[change]
    altered = content[:place] + new + content[place + 1 :]
    if altered == content:
        return
    try:
        (copy / name).write_bytes(altered)
        assert main(["verify", "--key", str(key), str(copy)]) == 1, (name, place, change)
    finally:
        (copy / name).write_bytes(content)
    assert main(["verify", "--key", str(key), str(copy)]) == 0


# --- keys ---


def private_pem(key: Any, passphrase: bytes = b"") -> bytes:
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))


def public_pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


ED25519, ELLIPTIC = Ed25519PrivateKey.generate(), generate_private_key(SECP256R1())
WRONG = {
    "empty": (b"", "holds no such key"),
    "rubbish": (b"\xff\0rubbish", "holds no such key"),
    "with a passphrase": (private_pem(ED25519, b"x"), "holds no such key"),
    "of the other half": (public_pem(ED25519), "holds no such key"),
    "of another kind": (private_pem(ELLIPTIC), "holds a key of another kind"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_private_key_that_is_none_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, why = WRONG[kind]
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_sign_key(str(tmp_path / "k"))
    assert str(raised.value) == (
        f"invalid TTP_SIGN_KEY: got {tmp_path}/k, which {why}, expected an Ed25519 private key without a passphrase in PEM form;"
        " `ttp ckpt keygen` makes a pair"
    )


@pytest.mark.parametrize("content", [b"", private_pem(ED25519), public_pem(ELLIPTIC)])
def test_a_public_key_that_is_none_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"^invalid --key: got \S+/k, which [^\n]*, expected an Ed25519 public key in PEM"
    ):
        read_verify_key(str(tmp_path / "k"), "--key")


def test_a_key_that_is_not_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """Missing, a folder, or a pipe, which is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "regular file"), (tmp_path / "pipe", "regular")):
        with pytest.raises(ConfigError, match=rf"^invalid TTP_SIGN_KEY: got {path} \([^\n]*{why}[^\n]*\), expected an"):
            read_sign_key(str(path))


def test_a_key_behind_a_symbolic_link_is_taken(job: Job, tmp_path: Path) -> None:
    """Schedulers mount secrets so."""
    make_keys(tmp_path)
    for name in ("job.pem", "job.pub.pem"):
        (tmp_path / f"link_{name}").symlink_to(name)
    keys = Keys(read_sign_key(str(tmp_path / "link_job.pem")), read_verify_key(str(tmp_path / "link_job.pub.pem")))
    assert verify(save_signed(job, tmp_path / "c", 42, keys), key=keys.verify).step == 42


# --- publishing ---


def test_a_key_that_goes_after_the_start_signs_all_the_same(job: Job, tmp_path: Path, keys: Keys) -> None:
    """It is read once: a file server that is lost in a fault takes no signature along."""
    (tmp_path / "job.pem").unlink()
    assert verify(save_signed(job, tmp_path / "c", 42, keys), key=keys.verify).step == 42


class BrokenKey(SignKey):
    """Signs nothing."""

    error: Exception = OSError(28, "No space left on device")

    def write_signature(self, directory: Path, manifest: bytes, like: os.stat_result | None = None) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("x"), ValueError("x")])
def test_a_step_that_cannot_be_signed_is_published_and_said(
    error: Exception,
    job: Job,
    tmp_path: Path,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost would be worse: the line says how to sign it, and that makes it whole."""
    monkeypatch.setattr(BrokenKey, "error", error)
    assert keys.sign is not None
    with caplog.at_level(logging.WARNING):
        path = save_signed(job, tmp_path / "c", 42, Keys(BrokenKey(keys.sign.path, keys.sign._key)))
    assert verify(path).step == 42 and not (path / SIGNATURE_NAME).exists()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == (
        f"step 42 is published without a signature: {error}; run `ttp ckpt sign --sign-key {tmp_path}/job.pem {path}`"
    )
    assert "is not signed" in refused(path, keys)
    assert main(["sign", "--sign-key", str(tmp_path / "job.pem"), str(path)]) == 0
    assert verify(path, key=keys.verify).step == 42


def test_a_rank_without_the_key_costs_the_signature_and_not_the_step(
    job: Job, tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names it."""
    results = write(job, tmp_path / "c", "iter_0000042_tmp_a")
    results[1] = job.write(tmp_path / "c", "iter_0000042_tmp_b", 3)[1]
    (tmp_path / "c" / "iter_0000042_tmp_b" / DATA).replace(tmp_path / "c" / "iter_0000042_tmp_a" / DATA)
    path = job.publish(tmp_path / "c", "iter_0000042_tmp_a", results, 42, keys=keys)
    assert (
        "published without a signature: __1_0_0.distcp has no SHA-256: rank 1 wrote it without TTP_SIGN_KEY"
        in caplog.text
    )
    assert verify(path).step == 42 and not (path / SIGNATURE_NAME).exists()


def test_a_step_that_comes_again_replaces_one_that_the_key_refuses(job: Job, tmp_path: Path, keys: Keys) -> None:
    """A resume has refused it, and has trained it again; the signed one stays, as any valid one does."""
    unsigned = job.save(tmp_path / "c", 42)
    assert save_signed(job, tmp_path / "c", 42, keys) == unsigned
    assert verify(unsigned, key=keys.verify).step == 42
    assert [path.name for path in (tmp_path / "c").glob("*_broken_*")] == ["iter_0000042_broken_1"]
    before = (unsigned / "manifest.json").read_bytes()
    save_signed(job, tmp_path / "c", 42, keys, attempt="b", term=9)
    assert (unsigned / "manifest.json").read_bytes() == before


def test_what_this_run_could_not_sign_is_not_moved_aside(job: Job, tmp_path: Path, keys: Keys) -> None:
    """Another publisher comes late, and the staging directory is gone: there would be nothing to put in its place."""
    results = write(job, tmp_path / "c", "iter_0000042_tmp_a")
    path = job.publish(tmp_path / "c", "iter_0000042_tmp_a", results, 42, keys=Keys(None, keys.verify))
    assert job.publish(tmp_path / "c", "iter_0000042_tmp_a", results, 42, keys=keys, rank=1) == path
    assert not list((tmp_path / "c").glob("*_broken_*"))
