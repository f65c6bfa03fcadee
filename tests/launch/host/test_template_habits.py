"""Habits of training scripts that could make a forked worker differ from one of torchrun's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.launch.conftest import TRAINER
from tests.launch.host.test_worker_template import SECONDS, live, play

from outlast import events
from outlast.launch.host.worker_pool import WorkerPool
from outlast.launch.template import script_imports
from outlast.telemetry.event_store import read_events

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

pytestmark = pytest.mark.process
EXTENDED = pytest.mark.extended

NUMPY_THEN_VARIABLE = """
import numpy
numpy.random.seed(1)
variables = os.environ  # not seen in the text: it would be spawned from the start
variables["OMP_NUM_THREADS"] = "2"
import torch
print(torch.get_num_threads())
"""
LOGGING_BEFORE = """
import logging.config
logging.config.dictConfig({"version": 1, "disable_existing_loggers": EXISTING})
import torch, torch._dynamo
names = ("torch._dynamo", "torch._dynamo.convert_frame", "asyncio")
print([logging.getLogger(name).disabled for name in names])
"""
LOGGING_AFTER = """
import logging.config, torch
logging.config.dictConfig({"version": 1})
logging.getLogger("torch._dynamo.utils").setLevel(35)
import torch._dynamo
names = ("torch", "torch._dynamo", "torch._dynamo.convert_frame", "torch._dynamo.utils")
print([(one.disabled, one.level, one.getEffectiveLevel()) for one in map(logging.getLogger, names)])
print(torch._dynamo.utils.log.level, logging.getLogger("torch._dynamo.utils").parent)
"""
LEVEL_BEFORE = """
import logging
logging.getLogger("torch").setLevel(logging.ERROR)
import torch
print(logging.getLogger("torch"))
"""
PATH_WITH_QUEUE = """
sys.path.insert(0, f"{ROOT}/lib")
import queue
import torch
print(queue.__file__)
"""
PATH_WITHOUT = """
sys.path.insert(0, f"{ROOT}/other")
import torch
print(torch.__name__)
"""
LATER_MODULES = """
import numpy, torch
torch.manual_seed(1)  # imports torch._dynamo
numpy.random.seed(1)
print(numpy.random.rand(), torch._inductor.__name__)
"""
LATE_VARIABLE = """
import torch
variables = os.environ  # not seen in the text: it would be spawned from the start
variables["TORCHDYNAMO_VERBOSE"] = "1"
import torch._dynamo
print(torch._dynamo.config.verbose)
"""
LATE_VARIABLE_OF_NOBODY = LATE_VARIABLE.replace("TORCHDYNAMO_VERBOSE", "MINE")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(NUMPY_THEN_VARIABLE, "changed OMP_NUM_THREADS", marks=EXTENDED),
        pytest.param(
            LOGGING_BEFORE.replace("EXISTING", "True"), "changed the logger", marks=EXTENDED
        ),
        pytest.param(LOGGING_BEFORE.replace("EXISTING", "False"), "", marks=EXTENDED),
        (LOGGING_AFTER, ""),
        pytest.param(LEVEL_BEFORE, "made the logger torch", marks=EXTENDED),
        pytest.param(PATH_WITH_QUEUE, "where queue is another module", marks=EXTENDED),
        pytest.param(PATH_WITHOUT, "", marks=EXTENDED),
        pytest.param(LATER_MODULES, "", marks=EXTENDED),
        (LATE_VARIABLE, "changed TORCHDYNAMO_VERBOSE"),
        pytest.param(LATE_VARIABLE_OF_NOBODY, "", marks=EXTENDED),
    ],
)
def test_a_habit_of_scripts_has_the_same_outcome_as_without_a_template(
    stage: Stage, text: str, reason: str
) -> None:
    """A worker is forked where no reason is expected, and starts anew for that reason elsewhere."""
    for folder in ("lib", "other"):
        (stage.root / folder).mkdir()
    (stage.root / "lib" / "queue.py").write_text("from _queue import *\nQueue = LifoQueue = list")
    script = stage.script(text)
    plain = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds, stage.notes
        _, outcome, out = await live(crew, "w1-0")
        assert (outcome.exit_code, out) == (0, plain.stdout)
        assert own_errors(outcome.stderr_tail) == own_errors(plain.stderr)
        assert bool(crew.template.fds) == (not reason)
        assert reason in " ".join(" ".join(stage.notes).split())

    play(stage, script, act)


def own_errors(text: str) -> str:
    """Return what a script has written: torch 2.15 lists addresses of what it leaks at exit."""
    return text.partition("nanobind: ")[0]


PACKAGE = """
import os
os.environ["TORCHDYNAMO_VERBOSE"] = "1"
"""
LOOP = """
for batch in session.batches(loader, until=2):
    session.run(step, batch)
print(torch._dynamo.config.verbose)
"""
MEMBER = """
import torch, torch.distributed
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{ROOT}/store", rank=0, world_size=1)
import setting_package
import torch._dynamo
"""


@pytest.mark.extended
def test_a_package_that_sets_variables_of_the_compiler_ends_no_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are spawned from there on: all start anew before they have said Hello."""
    (stage.root / "site").mkdir()
    (stage.root / "site" / "setting_package.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(stage.root / "site"))
    trainer = TRAINER.replace("import torch, outlast", "import torch, outlast, setting_package")
    script = stage.script(trainer + LOOP)
    launcher = stage.launch(script, "--nproc-per-node", "2", "--spares", "1", "--plain")
    out, err = launcher.communicate(timeout=SECONDS)
    assert (launcher.returncode, out.count("True")) == (0, 2), out + err
    notes = [e.text for e in read_events(stage.root / "run") if isinstance(e, events.Note)]
    anew = [note for note in notes if "started anew" in note and "TORCHDYNAMO_VERBOSE" in note]
    assert anew, notes


def test_a_member_of_a_process_group_does_not_start_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other members would lose it: the import is refused."""
    (stage.root / "site").mkdir()
    (stage.root / "site" / "setting_package.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(stage.root / "site"))

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds, stage.notes
        _, outcome, _ = await live(crew, "w1-0")
        assert outcome.exit_code == 1
        assert "with a process group cannot start anew" in outcome.stderr_tail
        assert "TORCHDYNAMO_VERBOSE" in outcome.stderr_tail

    play(stage, stage.script(MEMBER), act)


@pytest.mark.parametrize(
    ("files", "script"),
    [
        ({"main.py": "import torch\nfrom helpers import env"}, "main.py"),
        ({"main.py": "import torch\nimport helpers.env"}, "main.py"),
        ({"helpers/__main__.py": "import torch\nfrom . import env"}, "helpers/__main__.py"),
        ({"helpers/train.py": "import torch\nfrom .env import SET"}, "helpers/train.py"),
        ({"helpers/train.py": "import torch\nfrom helpers import env"}, "helpers/train.py"),
        (
            {"helpers/train.py": "import torch", "helpers/__init__.py": "import helpers.env"},
            "helpers/train.py",
        ),
    ],
)
@pytest.mark.parametrize("is_found", [True, False])
def test_modules_of_the_script_that_set_variables_are_found(
    stage: Stage, files: dict[str, str], script: str, is_found: bool
) -> None:
    """Workers are spawned then, as nothing above an import of torch may be executed twice."""
    (stage.root / "helpers").mkdir()
    (stage.root / "helpers" / "__init__.py").touch()
    text = "import os\nos.environ['SET'] = '1'" if is_found else "SET = 1"
    for name, content in {"helpers/env.py": text, **files}.items():
        (stage.root / name).write_text(content)
    modules = script_imports.template_modules(stage.root / script, stage.root)
    assert modules == (() if is_found else ("torch", "torch._dynamo"))
