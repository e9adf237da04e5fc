"""Pools of nodes with GPUs: each file by its cloud's own schema where that is installed, and every pod of ours on them,
by the rules of Kubernetes' scheduler for labels, taints and resources."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_platforms import KSERVE, WORKERS

DEPLOY = Path(__file__).parents[2] / "deploy"
POOLS = DEPLOY / "node-pools"
EKS, GKE = (json.loads((POOLS / name).read_text()) for name in ("eks.json", "gke.json"))
[KARPENTER, NODE_CLASS] = yaml.safe_load_all((POOLS / "karpenter.yaml").read_text())
CLAIM = KARPENTER["spec"]["template"]
REQUIRED = {each["key"]: each["values"] for each in CLAIM["spec"]["requirements"]}
INSTANCE, COUNT = "node.kubernetes.io/instance-type", "karpenter.k8s.aws/instance-gpu-count"
# vCPUs, GiB and GPUs, as AWS and Google list them
MACHINES = {
    "g6.2xlarge": (8, 32, 1),
    "g6e.2xlarge": (8, 64, 1),
    "p5.4xlarge": (16, 256, 1),
    "g2-standard-8": (8, 32, 1),
}
KEPT = 0.8  # at least this share of a machine is left by the system for pods


@dataclass(frozen=True)
class Node:
    """A node of a pool as it will be, which is all that an autoscaler knows of it while there is none."""

    machine: str
    taints: list[dict[str, str]]
    labels: dict[str, str] = field(default_factory=dict)


def nodes() -> list[Node]:
    config = GKE["nodePool"]["config"]
    effects = {"NO_SCHEDULE": "NoSchedule"}
    own = [{**taint, "effect": effects[taint["effect"]]} for taint in EKS["taints"]]
    theirs = [{**taint, "effect": effects[taint["effect"]]} for taint in config["taints"]]
    return [
        *(Node(each, CLAIM["spec"]["taints"], CLAIM["metadata"]["labels"]) for each in REQUIRED[INSTANCE]),
        *(Node(each, own, EKS["labels"]) for each in EKS["instanceTypes"]),
        Node(config["machineType"], theirs, config["labels"]),
    ]


@cache
def built(folder: str) -> dict[str, Any]:
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    [found] = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Deployment"]
    return dict(found["spec"]["template"]["spec"])


def pod(name: str) -> dict[str, Any]:
    if name == "kuberay":
        return dict(WORKERS["template"]["spec"])
    return dict(KSERVE["spec"]["predictor"]) if name == "kserve" else built(name)


def tolerated(taint: dict[str, str], tolerations: list[dict[str, str]]) -> bool:
    """As Kubernetes has it: a toleration without an effect is for all, and `Exists` for every value."""
    return any(
        each.get("key", taint["key"]) == taint["key"]
        and each.get("effect", taint["effect"]) == taint["effect"]
        and (each.get("operator") == "Exists" or each.get("value", "") == taint.get("value", ""))
        for each in tolerations
    )


def refusal(spec: dict[str, Any], node: Node) -> str | None:
    """Why the scheduler would not put the pod there, or None."""
    if not spec.get("nodeSelector", {}).items() <= node.labels.items():
        return f"labels {node.labels}"
    for taint in node.taints:
        if not tolerated(taint, spec.get("tolerations", [])):
            return f"taint {taint['key']}"
    cpus, memory, gpus = MACHINES[node.machine]
    [container] = spec["containers"]
    asked = {**container["resources"]["limits"], **container["resources"]["requests"]}
    if int(asked.get("nvidia.com/gpu", 0)) > gpus:
        return "GPUs"
    wanted = int(re.fullmatch(r"(\d+)Gi", asked["memory"])[1])  # type: ignore[index]
    return None if int(asked["cpu"]) <= KEPT * cpus and wanted <= KEPT * memory else "room"


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@needs_kubectl
@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-spot", "kubernetes-spot-short", "kuberay", "kserve"])
def test_a_waiting_pod_starts_a_node_of_every_pool_that_it_may_use(name: str) -> None:
    """The label must be the pool's own: an autoscaler does not know what an operator writes on nodes that do not exist.
    Pods that do not expect to be interrupted stay off GKE's spot nodes, which have a taint of their own."""
    for node in nodes():
        spot = any("spot" in taint["key"] for taint in node.taints)
        expected = "taint cloud.google.com/gke-spot" if spot and "spot" not in name else None
        assert refusal(pod(name), node) == expected, node


@needs_kubectl
def test_other_pods_stay_off_them_and_pods_with_two_gpus_need_larger_machines() -> None:
    plain = {"containers": [{"resources": {"limits": {}, "requests": {"cpu": "1", "memory": "1Gi"}}}]}
    for node in nodes():
        assert refusal(plain, node) == "taint nvidia.com/gpu"
        assert refusal(built("kubernetes-multi-gpu"), node) in ("GPUs", "taint cloud.google.com/gke-spot")


def test_the_pools_grow_from_none_to_the_pods_that_the_autoscaler_may_ask_for() -> None:
    [scaler] = yaml.safe_load_all((DEPLOY / "kubernetes" / "autoscaler.yaml").read_text())
    most = scaler["spec"]["maxReplicas"]
    assert KARPENTER["spec"]["limits"] == {"nvidia.com/gpu": most}
    assert (EKS["scalingConfig"]["minSize"], EKS["scalingConfig"]["maxSize"]) == (0, most)
    scaling = GKE["nodePool"]["autoscaling"]
    assert (scaling["enabled"], scaling["minNodeCount"], scaling["maxNodeCount"]) == (True, 0, most)
    assert GKE["nodePool"]["initialNodeCount"] == EKS["scalingConfig"]["desiredSize"] == 0


def test_the_pools_are_spot_machines_with_one_nvidia_gpu() -> None:
    assert REQUIRED["karpenter.sh/capacity-type"][0] == "spot"
    assert EKS["capacityType"] == "SPOT"
    assert EKS["amiType"].endswith("NVIDIA")
    config = GKE["nodePool"]["config"]
    assert config["spot"] is True
    [accelerator] = config["accelerators"]
    assert accelerator["gpuDriverInstallationConfig"]["gpuDriverVersion"] == "LATEST"
    assert REQUIRED[COUNT] == [accelerator["acceleratorCount"]] == ["1"]
    assert CLAIM["spec"]["nodeClassRef"]["name"] == NODE_CLASS["metadata"]["name"]


@needs_kubectl
def test_pods_of_gkes_pool_get_the_time_that_the_spot_manifest_asks_for() -> None:
    """The rest of the notice is for the system's pods."""
    kubelet = GKE["nodePool"]["config"]["kubeletConfig"]
    left = kubelet["shutdownGracePeriodSeconds"] - kubelet["shutdownGracePeriodCriticalPodsSeconds"]
    assert built("kubernetes-spot")["terminationGracePeriodSeconds"] <= left
    assert kubelet["shutdownGracePeriodSeconds"] in (0, 30, 120), "what GKE's API allows"


# ---- by the clouds' own schemas --------------------------------------------------------------------------------------


def test_aws_would_take_the_node_group() -> None:
    """By botocore's model of the call."""
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import validate_parameters

    shape = session.get_service_model("eks").operation_model("CreateNodegroup").input_shape
    validate_parameters(EKS, shape)
    assert EKS["amiType"] in shape.members["amiType"].enum
    assert EKS["capacityType"] in shape.members["capacityType"].enum
    assert {taint["effect"] for taint in EKS["taints"]} <= set(shape.members["taints"].member.members["effect"].enum)
    with pytest.raises(Exception, match="nodePool"):
        validate_parameters({**EKS, "nodePool": 1}, shape)


def test_google_would_take_the_node_pool() -> None:
    """By the call's message, of which JSON is one form. Unknown names and values are refused."""
    container = pytest.importorskip("google.cloud.container_v1")
    from google.protobuf import json_format

    empty = container.CreateNodePoolRequest.pb(container.CreateNodePoolRequest())
    read = json_format.ParseDict(GKE, empty)
    assert read.node_pool.config.taints[0].effect == container.NodeTaint.Effect.NO_SCHEDULE
    with pytest.raises(json_format.ParseError, match="preemptable"):
        json_format.ParseDict({"nodePool": {"preemptable": True}}, empty)


CHECK = """
import {readFileSync} from "node:fs";
import {NodePool} from "@kubernetes-models/karpenter/karpenter.sh/v1/NodePool";
import {EC2NodeClass} from "@kubernetes-models/karpenter/karpenter.k8s.aws/v1/EC2NodeClass";
for (const each of JSON.parse(readFileSync(0))) new ({NodePool, EC2NodeClass})[each.kind](each).validate();
"""


@pytest.mark.skipif("RIDGELINE_TEST_KARPENTER" not in os.environ, reason="RIDGELINE_TEST_KARPENTER names no folder")
def test_karpenter_would_take_the_node_pool() -> None:
    """By the schema of its resources, from npm's `@kubernetes-models/karpenter` in that folder."""
    command = ["node", "--input-type=module", "-e", CHECK]

    def check(*documents: Any) -> subprocess.CompletedProcess[str]:
        folder, given = os.environ["RIDGELINE_TEST_KARPENTER"], json.dumps(documents)
        return subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, check=False)

    done = check(KARPENTER, NODE_CLASS)
    assert done.returncode == 0, done.stderr
    wrong = {**KARPENTER, "spec": {**KARPENTER["spec"], "disruption": {"consolidationPolicy": "Never"}}}
    assert "consolidat" in check(wrong).stderr
