"""Who resumes, opens, prunes, exports or compares with a key takes what is signed, and passes over the rest as over what is broken."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ttp
from tests.umasks import mode_of, umask
from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.signing import alter_manifest, fix_checksums, make_keys, save_signed, write
from tests.unit.checkpoint.test_checksum import BEFORE, OLD
from tests.unit.checkpoint.test_prune import steps
from tests.unit.checkpoint.test_store import opened
from ttp.checkpoint import find
from ttp.checkpoint.cli import main
from ttp.checkpoint.cli.sign import run as sign
from ttp.checkpoint.format.manifest import read_bytes, read_manifest, sign_manifest
from ttp.checkpoint.format.signature import SIGNATURE_NAME, Keys
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, ConfigError, CorruptCheckpoint
from ttp.runtime.retention import Retention
from ttp.trainer.config.schema import ModelConfig, plain
from ttp.trainer.data.tokenizer import BYTES
from ttp.trainer.model.gpt import build_model


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path)


def run(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    status = main.main([str(word) for word in words], Console(file=out, width=300, no_color=True, highlight=False))
    return status, out.getvalue()


# --- resume ---


def test_a_resume_falls_back_to_the_newest_that_is_signed(job: Job, tmp_path: Path, keys: Keys) -> None:
    """Each other one is said in a line."""
    folder = tmp_path / "c"
    signed = save_signed(job, folder, 40, keys)
    job.later().save(folder, 41)
    tampered = save_signed(job.later(), folder, 42, keys)
    flip_a_bit(tampered)
    fix_checksums(tampered)
    said: list[str] = []
    found = opened(job, folder, key=keys.verify, on_skip=lambda path, reason: said.append(reason))
    assert found is not None and found.path == signed
    assert len(said) == 2 and "another key has signed it" in said[0] and "is not signed" in said[1]
    assert not any("\n" in line for line in said)
    without = opened(job, folder)
    assert without is not None and without.path == tampered
    program = find.find_newest_valid([folder], key=keys.verify)
    assert program is not None and program.path == signed


def test_ranks_hash_by_sha_256_what_they_load(job: Job, tmp_path: Path, keys: Keys) -> None:
    """A file of which the fast checksum fits."""
    folder = tmp_path / "c"
    older, path = save_signed(job, folder, 41, keys), save_signed(job, folder, 42, keys)
    flip_a_bit(path)
    fix_checksums(path)
    assert keys.sign is not None
    sign_manifest(path, read_manifest(path), read_bytes(path), keys.sign)
    found = opened(job, folder, key=keys.verify)
    assert found is not None and found.path == older and "checksum sha256:" in found.skipped[0]


# --- nodes with directories of their own ---


def cluster_of(tmp_path: Path, keys: Keys) -> Cluster:
    return Cluster(tmp_path / "nodes", keys=keys)


def test_parts_are_signed_each_and_stay_so_where_they_are_moved(job: Job, tmp_path: Path, keys: Keys) -> None:
    """The ranks have changed places and a third node is new: it gets files by their SHA-256, the manifest as it is, and its signature."""
    cluster = cluster_of(tmp_path, keys)
    cluster.save(job, 7)
    found = cluster.gather(job, hosts=("c", "b", "a", "a", "c"))
    job.assert_equal(cluster.read(job, found))
    assert cluster.said and cluster.skipped == []
    for host in "abc":
        assert verify(cluster.root / host / "iter_0000007", key=keys.verify).step == 7
    job.assert_equal(cluster.read(job, cluster.gather(job)))


def test_a_step_of_which_a_nodes_part_is_not_signed_is_passed_over(job: Job, tmp_path: Path, keys: Keys) -> None:
    """Its files do not count without it; an older step is taken."""
    cluster = cluster_of(tmp_path, keys)
    cluster.save(job, 7)
    cluster.save(job.later(), 9)
    (cluster.root / "a" / "iter_0000009" / SIGNATURE_NAME).unlink()
    found = cluster.gather(job)
    assert {one.manifest.step for one in found if one is not None} == {7}
    assert "is not signed" in cluster.skipped[0] and "is on none of the 2 nodes" in cluster.skipped[1]


def test_a_nodes_file_whose_fast_checksum_was_made_to_fit_is_not_taken(job: Job, tmp_path: Path, keys: Keys) -> None:
    cluster = cluster_of(tmp_path, keys)
    cluster.save(job, 5)
    cluster.save(job.later(), 7)
    for host in "ab":
        part = cluster.root / host / "iter_0000007"
        name = next(path.name for path in sorted(part.glob("*.distcp")))
        flip_a_bit(part, name, 1 / 4)
    fixed = {path.name: path for path in cluster.root.glob("*/iter_0000007/*.distcp")}
    for host in "ab":
        part = cluster.root / host / "iter_0000007"
        for path in fixed.values():
            if not (part / path.name).exists():
                shutil.copy(path, part / path.name)
        fix_checksums(part)
        assert keys.sign is not None
        sign_manifest(part, read_manifest(part), read_bytes(part), keys.sign)
    found = cluster.gather(job)
    assert {one.manifest.step for one in found if one is not None} == {5}
    assert "checksum sha256:" in cluster.skipped[0]


def test_bytes_that_change_on_the_way_are_found_by_their_sha_256(job: Job, tmp_path: Path, keys: Keys) -> None:
    cluster = cluster_of(tmp_path, keys)
    cluster.save(job, 7)
    cluster.spoil = lambda chunk: bytes([chunk[0] ^ 1]) + chunk[1:]
    with pytest.raises(CheckpointError, match="it arrived with checksum sha256:"):
        cluster.gather(job, hosts=("b", "b", "a", "a"))


def test_parts_are_pruned_and_put_together_by_the_key(job: Job, tmp_path: Path, keys: Keys) -> None:
    """An unsigned step does not count as one that stays; files of all nodes in one folder are a checkpoint."""
    cluster = cluster_of(tmp_path, keys)
    for step in (5, 7):
        cluster.save(job, step)
    cluster.keys = Keys()
    cluster.save(job, 9)
    key = ("--key", tmp_path / "job.pub.pem")
    status, text = run("prune", cluster.root / "a", cluster.root / "b", "--keep", 1, "--yes", *key)
    assert status == 0, text
    assert {steps(cluster.root / host) == [7, 9] for host in "ab"} == {True}
    whole = cluster.root / "a" / "iter_0000007"
    for path in (cluster.root / "b" / "iter_0000007").glob("*.distcp"):
        shutil.copy(path, whole)
    assert ttp.open_checkpoint(whole, key=tmp_path / "job.pub.pem").step == 7


# --- programs and commands ---


def test_a_program_opens_what_is_signed_by_an_argument_or_the_environment(
    job: Job, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, public = tmp_path / "c", tmp_path / "job.pub.pem"
    save_signed(job, folder, 41, keys)
    job.later().save(folder, 42)
    assert ttp.open_checkpoint(folder).step == 42
    opened = ttp.open_checkpoint(folder, key=public)
    assert opened.step == 41 and "is not signed" in opened.skipped[0]
    assert torch.equal(opened.weights(["norm"])["norm"], job.tensors["model.norm"])
    monkeypatch.setenv("TTP_VERIFY_KEY", str(public))
    assert ttp.open_checkpoint(folder).step == 41
    with pytest.raises(CorruptCheckpoint, match="is not signed"):
        ttp.open_checkpoint(folder / "iter_0000042")
    monkeypatch.setenv("TTP_VERIFY_KEY", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"invalid TTP_VERIFY_KEY: got .*none"):
        ttp.open_checkpoint(folder)


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_commands_take_what_is_signed(
    given: str, job: Job, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` names what is not; `export` and `diff` take the newest that is; `prune` keeps it."""
    folder, public = tmp_path / "c", tmp_path / "job.pub.pem"
    words: tuple[object, ...] = ("--key", public)
    if given == "environment":
        words = ()
        monkeypatch.setenv("TTP_VERIFY_KEY", str(public))
    for step in (40, 41):
        save_signed(job, folder, step, keys)
    unsigned = job.later().save(folder, 42)
    status, text = run("verify", folder, *words)
    assert status == 1 and "(checked: signature, SHA-256, sizes and completeness)" in text and "is not signed" in text
    status, text = run("verify", folder / "iter_0000041", "--shallow", *words)
    assert status == 0 and "(checked: signature, names, sizes and completeness, not the SHA-256)" in text
    assert run("export", folder, tmp_path / "w.pt", "--to", "torch", *words)[0] == 0
    assert torch.equal(torch.load(tmp_path / "w.pt")["model"]["norm"], job.tensors["model.norm"])
    assert run("diff", folder / "iter_0000041", folder, *words)[0] == 0, "the newest that is signed is itself"
    assert run("diff", folder / "iter_0000041", unsigned, *words)[0] == 3
    status, text = run("prune", folder, "--keep", 1, "--yes", *words)
    assert status == 0 and steps(folder) == [41, 42], text


def test_without_the_key_signed_ones_do_not_go_for_unsigned_ones(job: Job, tmp_path: Path, keys: Keys) -> None:
    """A job with the key would have nothing to resume from."""
    folder = tmp_path / "c"
    for step in (10, 20):
        save_signed(job, folder, step, keys)
    for step in (80, 90):
        job.save(folder, step)
    status, text = run("prune", folder, "--keep", 1, "--yes")
    assert status == 3 and "iter_0000020 is signed and would go" in text and "Give --key" in text
    assert steps(folder) == [10, 20, 80, 90]
    assert run("prune", folder, "--keep", 1, "--yes", "--key", tmp_path / "job.pub.pem")[0] == 0
    assert steps(folder) == [20, 80, 90]
    assert run("prune", folder, "--keep", 3, "--yes")[0] == 0 and steps(folder) == [20, 80, 90]
    save_signed(job, folder, 100, keys)
    assert run("prune", folder, "--keep", 2, "--yes")[0] == 0 and steps(folder) == [90, 100]


def test_a_model_is_exported_from_what_is_signed(tmp_path: Path, keys: Keys) -> None:
    """`--to hf` opens the checkpoint by way of the trainer."""
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)
    model = build_model(config, 0, torch.device("cpu"))
    trained = Job({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    layout = {"model_config": plain(config), "tokenizer": BYTES}
    save_signed(trained, tmp_path / "c", 41, keys, layout=layout)
    trained.save(tmp_path / "c", 42, layout=layout)
    words = ("export", tmp_path / "c", tmp_path / "m", "--to", "hf", "--json", "--key", tmp_path / "job.pub.pem")
    status, text = run(*words)
    assert status == 0 and json.loads(text)["step"] == 41, text


def test_a_key_that_is_none_is_wrong_usage(job: Job, tmp_path: Path) -> None:
    """Of every command that takes one."""
    job.save(tmp_path / "c", 42)
    (tmp_path / "k").write_text("")
    commands = (["verify"], ["diff", tmp_path / "c"], ["export", tmp_path / "w.pt", "--to", "torch"],
                ["export", tmp_path / "m", "--to", "hf"], ["prune", "--keep", 1])  # fmt: skip
    for command, *others in commands:
        status, text = run(command, tmp_path / "c", *others, "--key", tmp_path / "k")
        assert status == 2 and "invalid --key: got" in text, text
    status, text = run("sign", tmp_path / "c", "--sign-key", tmp_path / "k")
    assert status == 2 and "invalid --sign-key: got" in text


def test_a_run_that_keeps_few_keeps_the_signed_ones(job: Job, tmp_path: Path, keys: Keys) -> None:
    """A checkpoint that no resume would take does not count."""
    folder = tmp_path / "c"
    for step in (10, 20):
        save_signed(job, folder, step, keys)
    job.save(folder, 30)
    retention = Retention(1, keys.verify)
    retention.saved_in([str(folder)])
    retention.close()
    assert steps(folder) == [20, 30]


def test_inspect_says_whether_there_is_a_signature(job: Job, tmp_path: Path, keys: Keys) -> None:
    for path, signed in ((save_signed(job, tmp_path / "c", 42, keys), True), (job.save(tmp_path / "d", 42), False)):
        shown = json.loads(run("inspect", path, "--json")[1])
        assert shown["signed"] is signed and all(("sha256" in file) is signed for file in shown["files"])
        assert ("verify --key checks it" in run("inspect", path)[1]) is signed


# --- sign, keygen ---


def test_sign_makes_checkpoints_valid_for_the_key(job: Job, tmp_path: Path, keys: Keys) -> None:
    """One, or all of a folder; what is broken is refused and stays as it is."""
    folder, words = tmp_path / "c", ("--sign-key", tmp_path / "job.pem")
    for step in (40, 41, 42):
        job.save(folder, step)
    flip_a_bit(folder / "iter_0000041")
    broken = read_bytes(folder / "iter_0000041")
    assert run("sign", folder / "iter_0000042", *words) == (0, f"SIGNED {folder}/iter_0000042: step 42, 4 files\n")
    assert verify(folder / "iter_0000042", key=keys.verify).step == 42 and verify(folder / "iter_0000042").step == 42
    status, text = run("sign", folder, *words)
    assert status == 1 and text.count("SIGNED") == 2 and "INVALID" in text and "was altered since rank 1" in text
    assert read_bytes(folder / "iter_0000041") == broken and not (folder / "iter_0000041" / SIGNATURE_NAME).exists()
    assert verify(folder / "iter_0000040", key=keys.verify).step == 40
    job.assert_equal(job.read(folder / "iter_0000040"))
    assert run("sign", tmp_path, *words)[0] == 3


def test_sign_is_durable_and_shows_how_far_it_is(
    job: Job, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ttp.checkpoint.sign.fsync_directory", synced.append)
    path, out = job.save(tmp_path / "c", 42), io.StringIO()
    given = main.parser().parse_args(["sign", str(path), "--sign-key", str(tmp_path / "job.pem")])
    sign(given, Console(file=out, width=200, force_terminal=True))
    assert synced == [path] and "checking iter_0000042" in out.getvalue()


def test_who_signs_does_not_take_the_checkpoint_from_its_job(
    job: Job, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user, with a umask of 077: mode, owner and group are the manifest's; the group alone where no more is permitted."""
    path, given = job.save(tmp_path / "c", 42), list[tuple[int, int]]()
    (path / "manifest.json").chmod(0o664)
    like = (path / "manifest.json").stat()

    def refuse(descriptor: int, owner: int, group: int) -> None:
        given.append((owner, group))
        if owner != -1:
            raise PermissionError(1, "Operation not permitted")

    with umask(0o077), monkeypatch.context() as patch:
        patch.setattr("os.fchown", refuse)
        assert run("sign", path, "--sign-key", tmp_path / "job.pem")[0] == 0
    assert mode_of(path / "manifest.json") == mode_of(path / SIGNATURE_NAME) == 0o664
    assert given == [(like.st_uid, like.st_gid), (-1, like.st_gid)] * 2
    with monkeypatch.context() as patch:
        patch.setattr("os.fchown", lambda *owner: given.append(owner[1:]))
        assert run("sign", path, "--sign-key", tmp_path / "job.pem")[0] == 0
    assert given[4:] == [(like.st_uid, like.st_gid)]


def test_sign_compares_the_sha_256_that_a_manifest_has(job: Job, tmp_path: Path, keys: Keys) -> None:
    """And leaves such a manifest as it is: another key may have signed it."""
    path = save_signed(job, tmp_path / "c", 42, make_keys(tmp_path, "other"))
    before = read_bytes(path)
    assert run("sign", path, "--sign-key", tmp_path / "job.pem")[0] == 0
    assert read_bytes(path) == before and verify(path, key=keys.verify).step == 42
    flip_a_bit(path)
    fix_checksums(path)
    status, text = run("sign", path, "--sign-key", tmp_path / "job.pem")
    assert status == 1 and "__1_0_0.distcp was altered: SHA-256" in text
    alter_manifest(path, lambda body: None)


def test_an_older_checkpoint_is_signed_as_it_is(tmp_path: Path, keys: Keys) -> None:
    """Its checksums are SHA-256 already: the manifest stays, and older versions read it."""
    path = Path(shutil.copytree(BEFORE / "shared", tmp_path / "shared")) / "iter_0000042"
    before = read_bytes(path)
    assert run("sign", path, "--sign-key", tmp_path / "job.pem")[0] == 0
    assert read_bytes(path) == before and verify(path, key=keys.verify).step == 42
    OLD.assert_equal(OLD.read(path))


def test_a_nodes_part_is_signed_where_it_has_the_sha_256_of_the_others_files(
    job: Job, tmp_path: Path, keys: Keys
) -> None:
    """Which a writer with the key has taken; else no node can vouch for what another has."""
    cluster = cluster_of(tmp_path, keys)
    cluster.save(job, 7)
    part = cluster.root / "a" / "iter_0000007"
    (part / SIGNATURE_NAME).unlink()
    assert run("sign", part, "--sign-key", tmp_path / "job.pem")[0] == 0
    assert verify(part, key=keys.verify).step == 7
    cluster.keys = Keys()
    cluster.save(job, 9)
    before = read_bytes(cluster.root / "a" / "iter_0000009")
    status, text = run("sign", cluster.root / "a" / "iter_0000009", "--sign-key", tmp_path / "job.pem")
    assert status == 1 and "has no SHA-256: it is on another node" in text
    assert read_bytes(cluster.root / "a" / "iter_0000009") == before


@pytest.mark.parametrize("mask", [0, 0o022])
def test_keygen_makes_a_pair_that_only_its_user_can_sign_with(
    mask: int, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever TTP_FILE_MODE says; the public key follows the umask. Nothing is overwritten."""
    monkeypatch.setenv("TTP_FILE_MODE", "0666")
    with umask(mask):
        assert run("keygen", tmp_path / "job")[0] == 0
        assert run("keygen", tmp_path)[0] == 0
    assert {each.name for each in tmp_path.iterdir()} == {"job.pem", "job.pub.pem", "ttp.pem", "ttp.pub.pem"}
    for name in ("job", "ttp"):
        assert mode_of(tmp_path / f"{name}.pem") == 0o600 and mode_of(tmp_path / f"{name}.pub.pem") == 0o666 & ~mask
        path = job.save(tmp_path / f"of {name}", 42)
        assert run("sign", path, "--sign-key", tmp_path / f"{name}.pem")[0] == 0
        assert run("verify", path, "--key", tmp_path / f"{name}.pub.pem")[0] == 0
    before = (tmp_path / "job.pem").read_bytes()
    (tmp_path / "job.pub.pem").unlink()
    status, text = run("keygen", tmp_path / "job")
    assert status == 2 and "job.pem is there already" in text and (tmp_path / "job.pem").read_bytes() == before
    assert run("keygen", tmp_path / "no folder" / "job")[0] == 3


def test_a_writer_without_the_key_takes_no_sha_256(job: Job, tmp_path: Path) -> None:
    """Signing costs nothing where it is off."""
    assert {file.digest for share in job.write(tmp_path, "iter_0000042_tmp_a", 2) for file in share.files} == {""}
    assert all(len(file.digest) == 64 for share in write(job, tmp_path, "iter_0000042_tmp_b") for file in share.files)
