"""The same operations give the same plans, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.core.test_random_operations import World

ROOT = Path(__file__).resolve().parents[2]


def plans_of(seed: int) -> list[str]:
    world = World(seed)
    for _ in range(600):
        world.operate()
    world.finish()
    return [*world.log, *map(str, world.driver.plans)]


def test_the_same_operations_give_the_same_plans() -> None:
    assert plans_of(3) == plans_of(3)
    assert plans_of(3) != plans_of(4)


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import hashlib; from tests.core.test_determinism import plans_of;"
        "print(hashlib.sha256(repr([plans_of(s) for s in (5, 6)]).encode()).hexdigest())"
    )
    digests = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        digests.append(done.stdout)
    assert digests[0] == digests[1] != ""
