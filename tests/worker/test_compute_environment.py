"""Devices of workers: a spare beyond the host's GPUs opens no context on another rank's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# A host with GPUs: torch believes in two, and whatever would initialise CUDA is counted.
HOST = """
import json, sys
import torch
opened = []
def opens(name):
    def call(*args, **kwargs):
        opened.append(name)
        raise RuntimeError(f"{name} opens a context")
    return call
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
for name in ("_lazy_init", "set_device", "get_device_name", "current_device", "init",
             "get_device_properties", "synchronize", "get_rng_state"):
    setattr(torch.cuda, name, opens(name))
from outlast.worker import compute_environment as environment
from outlast import random_state
error = ""
facts = {}
try:
    device = environment.device_of(int(sys.argv[1]), is_spare=sys.argv[2] == "spare")
    facts = environment.fingerprint(device)
    random_state.of_process()
except RuntimeError as failure:
    error = str(failure)
print(json.dumps({"opened": opened, "facts": facts, "error": error}))
"""


def born(local_rank: int, kind: str) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, "-c", HOST, str(local_rank), kind],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.process
def test_a_spare_beyond_the_gpus_opens_no_context() -> None:
    result = born(2, "spare")
    assert result["opened"] == [] and result["error"] == ""
    facts = result["facts"]
    assert isinstance(facts, dict) and facts["device"] == "cuda" and "cpu" in facts
    assert not {"gpu", "arithmetic"} & facts.keys()  # it shows these with its seat


@pytest.mark.process
@pytest.mark.parametrize(("local_rank", "kind"), [(1, "spare"), (2, "rank")])
def test_others_take_their_device_at_once(local_rank: int, kind: str) -> None:
    assert born(local_rank, kind)["opened"] == ["set_device"]
