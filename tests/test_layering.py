"""Imports run one way: server → engine → kernels."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "engine", "kernels", "monitoring", "loadtest")

# What a package (or a part of one, longest prefix first) may import of ours. `server` may start `loadtest`
# for `octavo bench`, nothing else may.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "server.cli": ("server", "engine", "monitoring", "loadtest"),
    "server": ("server", "engine", "monitoring"),
    "engine.core": ("engine.core", "engine.types", "engine.errors"),
    "engine.models": ("engine.models", "engine.errors", "kernels"),
    "engine": ("engine", "kernels"),
    "kernels": ("kernels",),
    "monitoring": ("monitoring", "engine.types"),
    "loadtest": ("loadtest",),
}
# Third-party modules that only some places may import.
RESERVED: dict[str, tuple[str, ...]] = {
    "torch": ("kernels.reference", "kernels.triton", "kernels.bench", "engine.runner.cuda"),
    "triton": ("kernels.triton",),
    "prometheus_client": ("monitoring.metrics", "loadtest"),
    "fastapi": ("server",),
    "opentelemetry": ("server.tracing",),
    "tokenizers": ("server.text", "engine.constraints", "loadtest"),
    "llguidance": ("engine.constraints", "server.structured"),
    "jinja2": ("server.text", "loadtest"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_there_is_code_to_check() -> None:
    assert len(source_files()) > 20


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_packages_run_one_way(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = module_name(path)
        allowed = MAY_IMPORT[max((p for p in MAY_IMPORT if under(name, p)), key=len)]
        for target in imports_of(path):
            if target.split(".")[0] not in PACKAGES or target in PACKAGES:
                continue
            assert any(under(target, a) or under(a, target) for a in allowed), f"{name} imports {target}"


def test_no_module_imports_in_a_circle_not_even_for_types() -> None:
    files = {module_name(path): path for path in source_files()}
    imports = {name: (imports_of(path) & files.keys()) - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(imports).prepare()  # CycleError names the circle


def test_third_party_modules_stay_where_they_belong() -> None:
    for path in source_files():
        name = module_name(path)
        for target in imports_of(path):
            places = RESERVED.get(target.split(".")[0])
            if places is not None:
                assert any(under(name, place) for place in places), f"{name} imports {target}"


def test_the_policy_core_uses_integers_and_the_standard_library_alone() -> None:
    forbidden = {"time", "datetime", "logging", "asyncio", "random", "threading"}
    for path in sorted((ROOT / "engine" / "core").rglob("*.py")):
        for target in imports_of(path):
            top = target.split(".")[0]
            assert top in sys.stdlib_module_names | {"engine"}, f"{path.name} imports {target}"
            assert top not in forbidden, f"{path.name} imports {target}"


@pytest.mark.parametrize(
    "module", ["engine.core.scheduler", "engine.client", "engine.loop", "server.cli", "server.app"]
)
def test_importing_the_module_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
