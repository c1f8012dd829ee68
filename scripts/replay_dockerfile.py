#!/usr/bin/env python3
"""Replay the Dockerfile without an engine: each step of a target in a clean folder, then entry point and health check.

    python scripts/replay_dockerfile.py --target cpu
    python scripts/replay_dockerfile.py --target gpu --replace "pip install=pip install --dry-run" --no-start

Absolute paths that the Dockerfile makes (/src, /opt/octavo, /cache) lie below the folder; all stages share them. What
needs root or another base system is not run, and said: apt-get (whose packages must be here), useradd, FROM's images.
`--replace OLD=NEW` changes RUN lines, for indexes that cannot be reached from here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MADE_PATHS = ("/src", "/opt/octavo", "/cache")
_HERE_ONLY = re.compile(r"^(apt-get|useradd|chown|rm -rf /var/lib/apt)\b")
_START_SECONDS = 300.0
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Step:
    """One instruction, its continuation lines joined."""

    name: str
    text: str


@dataclass
class Stage:
    """FROM `parent` AS `name`."""

    parent: str
    name: str
    steps: list[Step] = field(default_factory=list)


def parse(dockerfile: str) -> list[Stage]:
    """The stages in order."""
    stages: list[Stage] = []
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, text = " ".join(line.split()).partition(" ")
        if name == "FROM":
            parent, _, own = text.partition(" AS ")
            stages.append(Stage(parent, own))
        elif name and stages:
            stages[-1].steps.append(Step(name, text))
    return stages


def steps_of(stages: Sequence[Stage], target: str) -> Iterator[Step]:
    """All that a target needs, what it copies from first."""
    stage = {stage.name: stage for stage in stages}.get(target)
    if stage is None:
        return
    for step in stage.steps:
        if found := re.match(r"--from=(\S+)", step.text):
            yield from steps_of(stages, found[1])
    yield from steps_of(stages, stage.parent)
    yield from stage.steps


class Replay:
    """The state that the steps change."""

    def __init__(self, folder: Path, replacements: Sequence[tuple[str, str]]) -> None:
        self.folder = folder
        self.directory = folder
        self.environment = dict(os.environ)
        self.entry: list[str] = []
        self.command: list[str] = []
        self.health: list[str] = []
        self._replacements = replacements
        self._ignored = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip()]

    def here(self, text: str) -> str:
        """Paths of the image as paths below the folder."""
        for path in MADE_PATHS:
            text = re.sub(rf"(?<![\w/.]){re.escape(path)}(?=[/\s:\"']|$)", str(self.folder) + path, text)
        return text

    def do(self, step: Step) -> None:
        """Raises CalledProcessError, OSError if the step fails."""
        print(f"--- {step.name} {step.text[:150]}", flush=True)  # noqa: T201
        match step.name:
            case "WORKDIR":
                self.directory = Path(self.here(step.text))
                self.directory.mkdir(parents=True, exist_ok=True)
            case "ENV":
                for name, value in (pair.split("=", 1) for pair in shlex.split(step.text)):
                    expanded = value.replace("$PATH", self.environment["PATH"])
                    self.environment[name] = self.here(expanded)
            case "COPY":
                self._copy(step.text)
            case "RUN":
                self._run(step.text)
            case "ENTRYPOINT":
                self.entry = json.loads(step.text)
            case "CMD":
                self.command = json.loads(step.text)
            case "HEALTHCHECK":
                self.health = json.loads(step.text.partition("CMD ")[2])
            case _:
                print("    (nothing to do here)")  # noqa: T201

    def _copy(self, text: str) -> None:
        *sources, target = re.sub(r"--from=\S+ ", "", text).split()
        if text.startswith("--from="):
            if not Path(self.here(sources[0])).exists() or sources != [target]:
                raise OSError(f"{sources} is not there, or would go elsewhere")
            return
        for source in sources:
            place = self.directory / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=self._ignore, dirs_exist_ok=True)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, place)

    def _ignore(self, folder: str, names: list[str]) -> set[str]:
        patterns = [pattern.removeprefix("**/") for pattern in self._ignored if pattern.startswith("**/")]
        return {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}

    def _run(self, text: str) -> None:
        for part in text.split(" && "):
            if _HERE_ONLY.match(part):
                print(f"    not run: {part}")  # noqa: T201
                continue
            for old, new in self._replacements:
                part = part.replace(old, new)
            subprocess.run(["bash", "-c", self.here(part)], cwd=self.directory, env=self.environment, check=True)

    def start(self, flags: Sequence[str]) -> None:
        """Run the entry point until its health check succeeds and a completion is answered, then stop it by SIGTERM; it
        must exit with 0."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = self.environment | {"OCTAVO_PORT": str(port), "OCTAVO_HOST": "127.0.0.1"}
        command = [*self.entry, *self.command, *flags]
        print(f"--- starting {shlex.join(command)}", flush=True)  # noqa: T201
        check = [part.replace(":8000", f":{port}") for part in self.health]
        deadline = time.monotonic() + _START_SECONDS
        process = subprocess.Popen(command, cwd=self.folder, env=environment)
        try:
            stages: list[tuple[str, Callable[[], bool]]] = [
                ("healthy", partial(_succeeds, check, environment)),
                ("answers", partial(_answers, port)),
            ]
            for what, works in stages:
                while not works():
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise OSError(f"not {what} in time")
                    time.sleep(0.5)
                print(f"--- {what}", flush=True)  # noqa: T201
            process.send_signal(signal.SIGTERM)
            if code := process.wait(60):
                raise OSError(f"it exited with {code} after SIGTERM")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _succeeds(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    return not subprocess.run(command, env=environment, check=False, stderr=subprocess.DEVNULL).returncode


def _answers(port: int) -> bool:
    """Whether a completion is answered; it is refused while the model loads."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", b'{"prompt": "Paper is", "max_tokens": 8}', _JSON
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError:
        return False
    print("    " + answer["choices"][0]["text"])  # noqa: T201
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--no-start", action="store_true", help="only the steps")
    parser.add_argument("flags", nargs="*", help="behind --: more flags for the entry point")
    options = parser.parse_args()
    replacements = [(old, new) for old, _, new in (text.partition("=") for text in options.replace)]
    stages = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="octavo-image-") as folder:
        replay = Replay(Path(folder), replacements)
        steps = list(steps_of(stages, options.target))
        if not steps:
            sys.exit(f"the Dockerfile has no target {options.target}")
        for step in steps:
            replay.do(step)
        if not options.no_start:
            replay.start(options.flags)
    print(f"--- {options.target}: every step succeeded")  # noqa: T201


if __name__ == "__main__":
    main()
