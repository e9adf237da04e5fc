"""Manifests for KubeRay, KServe and SkyPilot: pods by Kubernetes' schema, the rest by each tool's own where it is
installed, and every argument, path and port by the server."""

from __future__ import annotations

import ast
import importlib
import math
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from deploy.spot.watch import NOTICE
from ridgeline.cli.serve import ENGINE_FIELDS
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.processes.supervisor import MARGIN
from tests.deploy.test_manifests import CONTAINER, ENTRYPOINT, KEYS, POD, PROBES, parsed

DEPLOY = Path(__file__).parents[2] / "deploy"
RAY = yaml.safe_load((DEPLOY / "kuberay" / "rayservice.yaml").read_text())
KSERVE = yaml.safe_load((DEPLOY / "kserve" / "inferenceservice.yaml").read_text())
SKY = yaml.safe_load((DEPLOY / "skypilot" / "service.yaml").read_text())
CLUSTER = RAY["spec"]["rayClusterConfig"]
[APPLICATION] = yaml.safe_load(RAY["spec"]["serveConfigV2"])["applications"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
PREDICTOR = {name: value for name, value in KSERVE["spec"]["predictor"].items() if not name.endswith("Replicas")}
# No schema of KubeRay's is among Python's packages; this is our own list of the names that are used here.
GROUP = {"rayStartParams", "template"}
KUBERAY = [
    (RAY, {"apiVersion", "kind", "metadata", "spec"}),
    (RAY["spec"], {"serveConfigV2", "rayClusterConfig"}),
    (CLUSTER, {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}),
    (CLUSTER["headGroupSpec"], GROUP),
    (WORKERS, GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"}),
]


def gpus(container: dict[str, Any]) -> int:
    return int(container["resources"]["limits"].get("nvidia.com/gpu", 0))


def own(name: str) -> Any:
    """A constant of deploy/ray_serve.py, which needs Ray to be imported."""
    tree = ast.parse((DEPLOY / "ray_serve.py").read_text())
    [value] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.literal_eval(value)


@pytest.mark.parametrize(
    "spec",
    [CLUSTER["headGroupSpec"]["template"]["spec"], WORKERS["template"]["spec"], PREDICTOR],
    ids=["head", "worker", "predictor"],
)
@pytest.mark.parametrize("version", ["1.32", "1.35"])
def test_pods_are_what_kubernetes_accepts(spec: dict[str, Any], version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(pod, version, strict=True)
    if any(gpus(container) for container in spec["containers"]):
        assert "nvidia.com/gpu" in {each["key"] for each in spec["tolerations"]}, "nodes with GPUs keep others away"
        assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


# ---- KubeRay ---------------------------------------------------------------------------------------------------------


def test_the_ray_service_has_known_names_and_workers_for_all_replicas() -> None:
    for part, known in KUBERAY:
        assert part.keys() == known
    assert (RAY["apiVersion"], RAY["kind"]) == ("ray.io/v1", "RayService")
    [worker] = WORKERS["template"]["spec"]["containers"]
    settings, extra = APPLICATION["args"], own("OWN")
    assert settings["replicas"] <= WORKERS["replicas"] * gpus(worker)
    assert settings["max_replicas"] * extra["gpus"] == WORKERS["maxReplicas"] * gpus(worker)
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] > settings["shutdown_timeout"] + 2 * MARGIN
    assert {each["name"] for each in worker["env"]} == KEYS
    dockerfile = (DEPLOY / "kuberay" / "Dockerfile").read_text()
    assert re.findall(r"ray\[serve\]==([\d.]+)", dockerfile) == [CLUSTER["rayVersion"]], "of the image"
    module = APPLICATION["import_path"].partition(":")[0].replace(".", "/") + ".py"
    assert f" /opt/application/{module}" in dockerfile
    assert (DEPLOY.parent / module).is_file()


def test_the_applications_settings_are_the_servers() -> None:
    settings = {name: value for name, value in APPLICATION["args"].items() if name not in own("OWN")}
    assert settings.keys() <= ENGINE_FIELDS | {field.name for field in fields(ServeConfig)}
    msgspec.convert({name: settings[name] for name in settings if name not in ENGINE_FIELDS}, ServeConfig)


def test_ray_takes_the_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    told = schema.ServeDeploySchema.model_validate(yaml.safe_load(RAY["spec"]["serveConfigV2"]))
    module, _, function = told.applications[0].import_path.partition(":")
    getattr(importlib.import_module(module), function)(told.applications[0].args)


# ---- KServe ----------------------------------------------------------------------------------------------------------


def test_the_predictor_is_the_deployments_container() -> None:
    [container] = PREDICTOR["containers"]
    given = parsed([*ENTRYPOINT[2:], *container["args"]])
    assert [port["containerPort"] for port in container["ports"]] == [given["port"]]
    assert {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")} == PROBES
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + given["shutdown_timeout"] + 2 * MARGIN
    assert PREDICTOR["terminationGracePeriodSeconds"] > needed
    assert container["resources"] == CONTAINER["resources"]
    assert container["env"] == CONTAINER["env"]
    assert PREDICTOR["securityContext"]["fsGroup"] == POD["spec"]["securityContext"]["fsGroup"]


def test_kserves_own_models_know_every_field() -> None:
    """The package's classes carry the schema's names and types; reading with them ignores what they do not know."""
    models = pytest.importorskip("kserve.models")
    check_fields(models.V1beta1InferenceService, KSERVE, models)
    wrong = {**KSERVE, "spec": {"predictor": {**KSERVE["spec"]["predictor"], "maxReplica": 4}}}
    with pytest.raises(AssertionError, match="maxReplica"):
        check_fields(models.V1beta1InferenceService, wrong, models)


def check_fields(model: Any, given: dict[str, Any], models: Any) -> None:
    names = {theirs: ours for ours, theirs in model.attribute_map.items()}
    for name, value in given.items():
        assert name in names, f"{model.__name__} has no {name}"
        inner = getattr(models, model.openapi_types[names[name]], None)
        if inner is not None:
            check_fields(inner, value, models)


# ---- SkyPilot --------------------------------------------------------------------------------------------------------


def test_the_service_runs_the_server_under_the_notice() -> None:
    words = shlex.split(SKY["run"].replace("\\\n", " "))
    program, command = words[1 : words.index("--")], words[words.index("--") + 1 :]
    assert program[1:] == ["deploy/spot/watch.py", SKY["resources"]["infra"]]
    assert command[0].endswith("/ridgeline")
    given = parsed(command[2:])
    assert (given["port"], given["host"]) == (SKY["resources"]["ports"], "0.0.0.0")
    assert given["shutdown_timeout"] + 2 * MARGIN < NOTICE[program[-1]]
    assert SKY["service"]["readiness_probe"]["path"] in PROBES
    assert set(SKY["secrets"]) <= KEYS
    assert math.prod(SKY["resources"]["accelerators"].values()) == 1, "one GPU of either kind"


def test_skypilot_takes_the_service() -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    for schema, part in (
        (schemas.get_task_schema(), SKY),
        (schemas.get_service_schema(), SKY["service"]),
        (schemas.get_resources_schema(), SKY["resources"]),
    ):
        jsonschema.validate(part, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**SKY["service"], "replica": 1}, schemas.get_service_schema())
