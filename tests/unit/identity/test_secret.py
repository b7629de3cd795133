"""The job's secret: where it comes from, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.errors import ConfigError
from ttp.identity.secret import Secret, SecretSource, from_file, from_text, make_secret

TEXT = "0123456789abcdef0123456789abcdef"


def file_with(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_and_a_variable_with_the_same_text_give_the_same_secret(tmp_path: Path) -> None:
    path = file_with(tmp_path, f"{TEXT}\n".encode())
    assert SecretSource(file=str(path)).read() == SecretSource(text=f" {TEXT} ").read() == Secret(TEXT.encode())
    assert SecretSource().read() is None


def test_the_variables_are_taken_out_of_the_environment() -> None:
    environ = {"TTP_SECRET": TEXT, "TTP_SECRET_FILE": "/some/file", "PATH": "/bin"}
    source = SecretSource.take(environ)
    assert environ == {"PATH": "/bin"}
    assert (source.text, source.file) == (TEXT, "/some/file")
    with pytest.raises(ConfigError, match="expected one of them"):
        source.read()


def test_a_file_is_read_again_for_each_attempt(tmp_path: Path) -> None:
    source = SecretSource(file=str(file_with(tmp_path, TEXT.encode())))
    first = source.read()
    file_with(tmp_path, TEXT[::-1].encode())
    assert source.read() not in (None, first)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644, 0o666])
def test_a_file_that_others_can_read_or_its_group_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"got mode {mode:04o}.*chmod 600"):
        from_file(file_with(tmp_path, TEXT.encode(), mode))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_a_file_of_this_user_and_its_group_is_taken(tmp_path: Path, mode: int) -> None:
    assert from_file(file_with(tmp_path, TEXT.encode(), mode)).value == TEXT.encode()


def test_a_file_that_is_missing_or_a_pipe_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("none", "No such file"), ("pipe", "regular file"), (".", "regular file")):
        with pytest.raises(ConfigError, match=why) as refused:
            from_file(tmp_path / name)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [0, 15, 4097, 100_000])
def test_a_secret_that_is_too_short_or_too_long_is_refused_without_showing_it(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match="expected 16 to 4096") as refused:
        from_file(file_with(tmp_path, b"s" * length))
    assert "sss" not in str(refused.value)


def test_no_representation_shows_a_secret() -> None:
    secret = make_secret()
    shown = f"{secret!r} {secret} {SecretSource(text=TEXT)!r} {secret.name}"
    assert TEXT not in shown and secret.value.hex() not in shown and repr(secret.value) not in shown


def test_each_new_secret_is_another_one() -> None:
    assert len({make_secret().value for _ in range(100)}) == 100


@given(st.binary(min_size=16, max_size=64), st.text(max_size=20), st.text(max_size=20))
def test_keys_differ_with_their_purpose_and_their_secret(value: bytes, one: str, other: str) -> None:
    secret = from_text(b"x" * 16 + value.hex().encode(), "test")
    assert secret.key(one) == secret.key(one)
    assert (secret.key(one) == secret.key(other)) == (one == other)
    assert secret.key(one) != make_secret().key(one)
