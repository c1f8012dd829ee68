"""The openai package for Node.js, run by Node's own test runner."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import MODEL
from tests.e2e.live import LiveServer

FOLDER = Path(__file__).parent / "node"
OLDEST_NODE = 20
INSTALL_SECONDS, RUN_SECONDS = 120, 120


@pytest.fixture(scope="module")
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed; kept in pytest's cache from one run to the next."""
    if shutil.which("npm") is None or _node_version() < OLDEST_NODE:
        pytest.skip(f"needs npm and Node.js {OLDEST_NODE} or newer")
    cache = request.config.cache
    folder = cache.mkdir("conformance-node") if cache is not None else tmp_path_factory.mktemp("node")
    fresh = not (folder / "package.json").exists() or _differs(folder)
    if fresh or not (folder / "node_modules" / "openai").exists():
        shutil.copy(FOLDER / "package.json", folder)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        if done.returncode:
            (folder / "package.json").unlink()
            pytest.skip(f"npm cannot install the openai package here: {done.stderr.strip()[-300:]}")
    shutil.copy(FOLDER / "check.mjs", folder)
    return folder


def _node_version() -> int:
    """Its first number; 0 where there is none."""
    if shutil.which("node") is None:
        return 0
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.removeprefix("v").partition(".")[0])


def _differs(folder: Path) -> bool:
    return (folder / "package.json").read_bytes() != (FOLDER / "package.json").read_bytes()


def test_the_openai_package_for_node(project: Path, live_server: LiveServer) -> None:
    environment = os.environ | {"OCTAVO_BASE_URL": live_server.base_url, "OCTAVO_MODEL": MODEL}
    done = subprocess.run(
        ["node", "--test", "check.mjs"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# fail 0" in done.stdout
    assert "# pass 0" not in done.stdout
