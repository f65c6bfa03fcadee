"""Each example under `outlast run`, with killed ranks, has the digest of plain torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from outlast.config import child_environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.documentation, pytest.mark.process, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLAIN = ROOT / "tests" / "scripts" / "plain"  # Outlast's names over plain torch.distributed
DIGEST = re.compile(r"parameters sha256 ([0-9a-f]{64})")
DEADLINE_S = 300
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
OUTLAST = ("outlast", "run", "--plain", "--nproc-per-node=2", "--run-dir=run")


def execute(
    folder: Path, launcher: Sequence[str], script: str, *flags: str, **environment: str
) -> str:
    """Run an example in `folder` and return its output. Its exit code must be 0."""
    done = launch(folder, launcher, script, *flags, **environment)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def launch(
    folder: Path, launcher: Sequence[str], script: str, *flags: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(EXAMPLES / script), *flags],
        cwd=folder,
        env=child_environment({"OMP_NUM_THREADS": "1", **environment}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )


def digest_of(output: str) -> str:
    found = DIGEST.findall(output)
    assert len(found) == 1, output[-6000:]
    return found[0]


def test_the_ported_script_has_the_digest_of_the_plain_one(tmp_path: Path) -> None:
    plain = execute(tmp_path, TORCHRUN, "plain_ddp.py")
    disturbed = (*OUTLAST, "--spares=1", "--fault=kill:rank=1,step=50,phase=backward")
    ported = execute(tmp_path, disturbed, "ported_ddp.py")
    assert "recovered in" in ported, "the fault did not strike"
    assert digest_of(plain) == digest_of(ported)


@pytest.mark.parametrize(
    ("name", "flag", "places"),
    [
        (
            "gpt",
            "--max-iters=60",
            ("rank=1,step=21", "rank=0,step=44,phase=between"),
        ),
        # its epochs have 20 steps: rank 0 dies in the validation behind the second
        (
            "classifier",
            "--epochs=3",
            ("rank=1,step=25", "rank=0,step=40,phase=eval"),
        ),
    ],
)
def test_longer_ports_have_the_digest_of_the_plain_script(
    tmp_path: Path, name: str, flag: str, places: tuple[str, str]
) -> None:
    plain = execute(tmp_path, TORCHRUN, f"plain_{name}.py", flag)
    disturbed = (*OUTLAST, "--spares=1", *(f"--fault=kill:{place}" for place in places))
    ported = execute(tmp_path, disturbed, f"ported_{name}.py", flag)
    assert ported.count("recovered in") >= len(places)
    assert digest_of(plain) == digest_of(ported)


def test_the_image_classifier_survives_two_kills(tmp_path: Path) -> None:
    flags = ("--epochs=2", "--images=256")
    modules = {"PYTHONPATH": str(PLAIN), "DIGESTS": str(tmp_path)}
    modules["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would ask that module for our backend
    plain = execute(tmp_path, TORCHRUN, "train_images.py", *flags, **modules)
    kills = ("--fault=kill:rank=1,step=4,phase=backward", "--fault=kill:rank=0,step=12,phase=apply")
    disturbed = execute(tmp_path, (*OUTLAST, "--spares=1", *kills), "train_images.py", *flags)
    assert disturbed.count("recovered in") >= len(kills)
    assert digest_of(plain) == digest_of(disturbed)
    assert "accuracy" in disturbed


def test_checkpoints_alone_continue_with_the_same_bits(tmp_path: Path) -> None:
    script, interrupted = "checkpoint_alone.py", ("--root=interrupted",)
    whole = execute(tmp_path, TORCHRUN, script, "--root=whole")
    killed = launch(tmp_path, TORCHRUN, script, *interrupted, "--stop-at=30")
    assert killed.returncode != 0
    assert "starts at step 0" in killed.stdout
    resumed = execute(tmp_path, TORCHRUN, script, *interrupted)
    assert "starts at step 20" in resumed
    assert digest_of(whole) == digest_of(resumed)
