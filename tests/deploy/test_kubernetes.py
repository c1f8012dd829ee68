"""The manifests: valid by the schemas of Kubernetes, locked down, and in step with the server's own limits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from engine.supervisor import SupervisorOptions
from monitoring.catalogue import SPECS
from server.settings import ENV_PREFIX, Settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.31", "1.33")
CUSTOM = ("ServiceMonitor",)  # defined by the Prometheus operator: no schema of Kubernetes has them


def objects(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


BASE = {
    found["kind"]: found
    for name in yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    for found in objects((FOLDER / "base" / name).read_text())
}
POD: dict[str, Any] = BASE["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
ENVIRONMENT = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [kind for kind in BASE if kind not in CUSTOM])
def test_every_object_is_valid(kind: str, version: str) -> None:
    kubernetes_validate.validate(BASE[kind], version, strict=True)


def test_the_schema_check_finds_faults() -> None:
    broken = {**BASE["Service"], "spec": {"ports": [{"port": "many"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_kustomize_makes_valid_objects_of_them(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    made = subprocess.run(["kubectl", "kustomize", FOLDER / overlay], capture_output=True, text=True, check=True)
    found = {each["kind"]: each for each in objects(made.stdout)}
    assert set(found) == set(BASE)
    for kind, each in found.items():
        assert kind == "Namespace" or each["metadata"]["namespace"] == "octavo"
        if kind not in CUSTOM:
            kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == {"base": "octavo:cpu", "gpu": "octavo:gpu"}[overlay]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (overlay == "gpu")


def test_every_file_is_used() -> None:
    listed = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in (FOLDER / "base").iterdir()} == {*listed, "kustomization.yaml"}


def test_selectors_choose_the_pods() -> None:
    labels = BASE["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == BASE["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels == BASE["Service"]["spec"]["selector"]
    assert labels == BASE["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert BASE["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == BASE["Service"]["metadata"]["labels"]
    assert BASE["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == BASE["Deployment"]["metadata"]["name"]


def test_ports_are_named_alike() -> None:
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": 8000, "metrics": int(ENVIRONMENT["OCTAVO_METRICS_PORT"])}
    assert {port["targetPort"] for port in BASE["Service"]["spec"]["ports"]} == set(ports)
    [endpoint] = BASE["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in BASE["Service"]["spec"]["ports"]}


def test_the_pod_is_locked_down() -> None:
    context = CONTAINER["securityContext"]
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    assert {mount["mountPath"] for mount in CONTAINER["volumeMounts"]} == {"/cache", "/tmp"}


def test_readiness_differs_from_liveness() -> None:
    paths = {probe: CONTAINER[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}


def test_there_is_time_to_drain_before_the_pod_is_killed() -> None:
    pre_stop = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(ENVIRONMENT["OCTAVO_DRAIN_TIMEOUT_SECONDS"])
    assert POD["terminationGracePeriodSeconds"] > pre_stop + drain + SupervisorOptions().shutdown_seconds + 7
    readiness = CONTAINER["readinessProbe"]
    assert pre_stop > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_variables_are_settings() -> None:
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert set(ENVIRONMENT) <= known


def test_the_autoscaler_asks_for_a_metric_that_exists() -> None:
    [metric] = BASE["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in {spec.full_name for spec in SPECS}
    assert "replicas" not in BASE["Deployment"]["spec"], "the autoscaler's"
