"""A worker of Ray is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

STAND_IN = """
import sys, types
context = types.SimpleNamespace(get_actor_id=lambda: {actor!r})
ray = types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
sys.modules["ray"] = ray
import outlast
outlast.init()
print("a job of one rank")
"""
REAL = """
import ray
ray.init(num_cpus=1, include_dashboard=False)

@ray.remote
class Worker:
    def train(self):
        import outlast
        outlast.init()

ray.get(Worker.remote().train.remote())
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


def test_an_actor_is_refused_and_a_driver_is_not(tmp_path: Path) -> None:
    refused = run_script(tmp_path, STAND_IN.format(actor="1f"))
    assert refused.returncode == 1 and "in an actor of Ray" in refused.stderr
    driver = run_script(tmp_path, STAND_IN.format(actor=None))
    assert driver.stdout == "a job of one rank\n", driver.stderr


@pytest.mark.extended
def test_a_real_actor_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install ray==2.60.0")
    refused = run_script(tmp_path, REAL)
    assert refused.returncode == 1 and "in an actor of Ray" in refused.stderr
