"""`ttp ckpt` takes URLs where it looks, compares and exports."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.signing import make_keys, save_signed
from tests.unit.mirror.test_fetch import _alter, mirrored
from tests.unit.mirror.test_upload import copy_all, uploader
from ttp.checkpoint.cli.main import main
from ttp.checkpoint.write import write_share
from ttp.mirror import view
from ttp.mirror.remote import Remote


def ckpt(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(words, Console(file=out, width=300)), out.getvalue()


def ckpt_json(*words: str) -> dict[str, Any]:
    status, text = ckpt(*words, "--json")
    found: dict[str, Any] = json.loads(text)
    assert found["status"] == status
    return found


def test_checkpoints_of_a_url_are_listed_inspected_verified_compared_and_exported(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    mirrored(url, folder, job, 3)
    mirrored(url, folder, job.later(), 5)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    listed = ckpt_json("list", url)
    assert [(each["step"], each["state"], each["path"]) for each in listed["checkpoints"]] == [
        (5, "complete", f"{url}/iter_0000005"),
        (3, "complete", f"{url}/iter_0000003"),
    ]
    assert listed["checkpoints"][0]["bytes"] > 1000
    status, text = ckpt("inspect", url)
    assert (
        status == 0
        and f"{url}/iter_0000005" in text.replace("\n", "")
        and "model.embed" in text
        and "ttp_ckpt_" not in text
    )
    assert ckpt("inspect", f"{url}/iter_0000003")[1].count("?") == 0, "every tensor's writers are known"
    status, text = ckpt("verify", url)
    assert (
        status == 0 and f"VALID {url}/iter_0000003: step 3" in text and "2 checkpoints checked: none is broken" in text
    )
    assert ckpt("diff", str(folder), url)[0] == 0 and ckpt("diff", f"{url}/iter_0000003", url)[0] == 1
    assert ckpt("export", f"{url}/iter_0000003", str(tmp_path / "gpt.safetensors"), "--to", "safetensors")[0] == 0
    assert (load_file(tmp_path / "gpt.safetensors")["embed"] == job.tensors["model.embed"]).all()
    assert not list(tmp_path.glob("ttp_ckpt_*")), "nothing remains in the folder for temporary files"


@pytest.mark.parametrize("url", [pytest.param("s3", marks=pytest.mark.long), "file"], indirect=True)
def test_a_broken_object_is_found_by_verify_and_passed_over_by_export(url: str, tmp_path: Path, job: Job) -> None:
    mirrored(url, tmp_path / "lost", job, 3, 5)
    name = next((tmp_path / "lost" / "iter_0000005").glob("*.distcp")).name
    _alter(Remote(url), f"iter_0000005/{name}")
    found = ckpt_json("verify", url)
    assert found["status"] == 1 and [each["valid"] for each in found["checkpoints"]] == [False, True]
    assert f"{url}/iter_0000005/{name} was altered" in found["checkpoints"][0]["error"]
    assert ckpt_json("verify", url, "--shallow")["status"] == 0
    assert ckpt("export", url, str(tmp_path / "out.pt"), "--to", "torch")[0] == 0
    assert ckpt_json("export", f"{url}/iter_0000005", str(tmp_path / "not.pt"), "--to", "torch")["status"] == 3


def test_verify_checks_the_signature_of_a_url(url: str, tmp_path: Path, job: Job) -> None:
    keys, folder, name = make_keys(tmp_path), tmp_path / "lost", "iter_0000003_tmp_a"
    shares = [write_share(folder, name, rank, share, {}, digests=True) for rank, share in enumerate(job.shares(2))]
    job.publish(folder, name, shares, 3, keys=keys)
    job.save(folder, 5)
    copy_all(uploader(url, folder))
    found = ckpt_json("verify", "--key", str(tmp_path / "job.pub.pem"), url)
    assert [each["valid"] for each in found["checkpoints"]] == [False, True]
    assert "is not signed" in found["checkpoints"][0]["error"] and "SHA-256" in found["checkpoints"][1]["checked"]
    store = Remote(url)
    content = next(name for name in store.sizes("iter_0000003") if name.endswith(".distcp"))
    _alter(store, f"iter_0000003/{content}")
    assert not ckpt_json("verify", "--key", str(tmp_path / "job.pub.pem"), f"{url}/iter_0000003")["valid"]


def test_a_file_in_a_checkpoint_cannot_say_that_its_bytes_are_elsewhere(tmp_path: Path, job: Job) -> None:
    """Weights that were altered, and a file as earlier versions had it in their own directories."""
    keys = make_keys(tmp_path)
    signed = save_signed(job, tmp_path / "checkpoints", 3, keys)
    shutil.copytree(signed, tmp_path / "original" / signed.name)
    flip_a_bit(signed)
    (signed / ".ttp_url").write_text(f"file://{tmp_path}/original")
    key = ("--key", str(tmp_path / "job.pub.pem"))
    assert "expected sha256:" in ckpt_json("verify", *key, str(signed))["error"]
    assert ckpt_json("verify", str(signed))["status"] == 1
    assert ckpt_json("export", *key, str(signed), str(tmp_path / "out.pt"), "--to", "torch")["status"] == 3


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_view_ends_with_its_folder(url: str, tmp_path: Path, job: Job) -> None:
    mirrored(url, tmp_path / "lost", job, 3)
    with view.folder_of_views() as root:
        path = view.make(Remote(url), 3, root, tables=False)
        assert view.is_view(path) and not view.is_view(tmp_path / "lost" / "iter_0000003")
    assert not view.is_view(path) and not root.exists()


def test_what_changes_directories_refuses_a_url_and_an_empty_one_is_answered(url: str, tmp_path: Path) -> None:
    assert "Set TTP_MIRROR_KEEP of the job" in ckpt_json("prune", url, "--keep", "3")["error"]
    assert "Sign the checkpoint in its directory" in ckpt_json("sign", url, "--sign-key", "k.pem")["error"]
    empty = ckpt_json("list", url)
    assert empty["status"] == 1 and f"no checkpoint in {url}" in empty["error"]
    assert ckpt_json("list", "s3://key:secret@bucket/a")["status"] == 2
