"""The Kubernetes example is a manifest that the API takes, and its numbers agree with each other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ttp.launch.arguments import make_parser
from ttp.launch.endings import REQUEUE_EXIT_CODE
from ttp.launch.health.check_command import split_check

MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "kubernetes" / "job.yaml"
VERSIONS = ("1.31", "1.37")


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_follows_the_schema_of_its_kind(version: str) -> None:
    """Strictly: a field that the API does not know is refused."""
    kinds = []
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)
        kinds.append(document["kind"])
    assert kinds == ["Service", "Job"]


def test_a_pod_that_asks_to_be_started_again_is_replaced_and_not_counted() -> None:
    """Exit code 75 of its ttprun; any other counts as a failure."""
    _, job = documents()
    (rule,) = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    expected = {"containerName": container["name"], "operator": "In", "values": [REQUEUE_EXIT_CODE]}
    assert (rule["action"], rule["onExitCodes"]) == ("Ignore", expected)


def test_the_schema_finds_a_misspelt_field() -> None:
    """Lest the check above could not fail."""
    _, job = documents()
    wrong = copy.deepcopy(job)
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 180
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_the_parts_of_the_manifest_agree() -> None:
    """Pods, GPUs, names, ports; what the API demands beyond its schema; and the grace is longer than a fault's deadline."""
    service, job = documents()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    args = make_parser().parse_args(container["args"])
    assert spec["completions"] == spec["parallelism"] == int(args.nnodes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(args.nproc_per_node)
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert pod["terminationGracePeriodSeconds"] > float(environ["TTP_OT"])
    name, port = job["metadata"]["name"], container["ports"][0]["containerPort"]
    assert args.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:{port}"  # the host name of index 0
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["selector"] == {"job-name": name}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    names = list(environ)
    assert args.local_addr == "$(POD_IP)" and names.index("POD_IP") < names.index(
        "TTP_HOST"
    )  # only earlier ones expand
    assert args.module and args.training_script == "ttp.trainer"
    assert split_check(args.health_check)[1:] == [
        "-m", "ttp.doctor.health_check", "--save-dirs", container["volumeMounts"][0]["mountPath"],
    ]  # fmt: skip
