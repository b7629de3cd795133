"""The Kubeflow example is what Trainer's API takes, and ttprun reads what Trainer gives it."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ttp.launch.arguments import make_parser
from ttp.launch.endings import REQUEUE_EXIT_CODE
from ttp.launch.health.check_command import split_check

MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "kubernetes" / "trainjob.yaml"
VERSION = "1.37"


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = yaml.safe_load_all(MANIFEST.read_text())
    return runtime, job


def replicated(runtime: dict[str, Any]) -> dict[str, Any]:
    """Return the Job that a runtime's JobSet has for its nodes."""
    (found,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": found["name"]},
        "spec": found["template"]["spec"],
    }


def taken(document: dict[str, Any]) -> dict[str, Any]:
    """Return what the API makes of a document, by the classes of its own package (of Trainer and JobSet): a field that it does not know is lost. Raises
    ValueError for one that is missing or of another type."""
    api = importlib.import_module("kubeflow_trainer_api.models")  # here: it takes a second, of each collection
    model: Any = getattr(api, f"TrainerV1alpha1{document['kind']}")
    found: dict[str, Any] = model.from_dict(document).to_dict()
    return found


def test_the_api_takes_both_documents_whole() -> None:
    """The Job within by Kubernetes' own schema, strictly."""
    runtime, job = documents()
    assert (taken(runtime), taken(job)) == (runtime, job)
    assert [document["kind"] for document in (runtime, job)] == ["ClusterTrainingRuntime", "TrainJob"]
    kubernetes_validate.validate(replicated(runtime), VERSION, strict=True)


def test_the_checks_find_what_is_wrong() -> None:
    """Lest the ones above could not fail: in the runtime, its JobSet, the Job, its pods, and the TrainJob."""
    for path, key, value in (
        (("spec",), "mlPolicies", {}),
        (("spec", "template", "spec"), "failurPolicy", {}),
        (("spec", "template", "spec", "replicatedJobs", 0), "count", 2),
        (("spec", "template", "spec", "replicatedJobs", 0, "template", "spec"), "podFailurPolicy", {}),
    ):
        wrong = copy.deepcopy(documents()[0])
        place: Any = wrong
        for step in path:
            place = place[step]
        place[key] = value
        assert taken(wrong) != wrong, key
    wrong = copy.deepcopy(documents()[1])
    wrong["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        taken(wrong)
    job = replicated(documents()[0])
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 180
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_ttprun_reads_what_trainer_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of Trainer's torch plug-in, and the TrainJob's arguments after the runtime's command."""
    runtime, job = documents()
    spec = replicated(runtime)["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {
        "PET_NNODES": str(job["spec"]["trainer"]["numNodes"]),
        "PET_NPROC_PER_NODE": str(job["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "ttp-gpt-node-0-0.ttp-gpt",
        "PET_MASTER_PORT": "29500",
    }
    own = {"POD_IP": "10.0.0.2", "JOBSET_NAME": "ttp-gpt"}
    names = [entry["name"] for entry in container["env"]]
    assert set(own) <= set(names) and names.index("POD_IP") < names.index("TTP_HOST")  # only earlier ones expand
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    program, *options = container["command"]
    words = [re.sub(r"\$\((\w+)\)", lambda found: (given | own)[found[1]], word) for word in options]
    args = make_parser().parse_args([*words, *job["spec"]["trainer"]["args"]])
    assert program == "ttprun"
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.rdzv_id) == ("2", "8", "c10d", "ttp-gpt")
    assert (args.rdzv_endpoint, args.local_addr) == ("ttp-gpt-node-0-0.ttp-gpt:29500", "10.0.0.2")
    assert (args.module, args.training_script) == (True, "ttp.trainer")
    assert split_check(args.health_check)[3:] == ["--save-dirs", container["volumeMounts"][0]["mountPath"]]


def test_the_parts_of_the_manifest_agree() -> None:
    """Names that Trainer looks for, what a pod failure policy needs, and a grace that is longer than a fault's deadline."""
    runtime, job = documents()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    template = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    assert template["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = replicated(runtime)["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node" and pod["restartPolicy"] == "Never"
    (rule,) = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    expected = {"containerName": "node", "operator": "In", "values": [REQUEUE_EXIT_CODE]}
    assert (rule["action"], rule["onExitCodes"]) == ("Ignore", expected)
    (timeout,) = [entry["value"] for entry in container["env"] if entry["name"] == "TTP_OT"]
    assert pod["terminationGracePeriodSeconds"] > float(timeout)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
