"""Recovery of scripts with several models, and with phases outside the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner

from outlast import events

pytestmark = pytest.mark.process
TWO_MODELS = Path(__file__).with_name("jobs") / "two_models_job.py"
ODD_JOB = Path(__file__).with_name("jobs") / "unusual_phases_job.py"
NEW_FUNCTIONS = Path(__file__).with_name("jobs") / "new_functions_job.py"
WEIGHT_READS = Path(__file__).with_name("jobs") / "weight_reads_job.py"
LOGGED = Path(__file__).with_name("jobs") / "logged_rates_job.py"
OWN_CHECKPOINT = Path(__file__).with_name("jobs") / "own_checkpoint_job.py"
BEHIND = Path(__file__).with_name("jobs") / "job_behind_its_loop.py"


@pytest.mark.long
def test_two_models_stepped_in_turn(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    undisturbed = Runner(tmp_path_factory.mktemp("two")).run(script=TWO_MODELS)
    assert undisturbed.code == 0, undisturbed.output
    outcome = runner.run("--spares=2", script=TWO_MODELS, job=("--die", "judge:4", "maker:8"))
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == undisturbed.ranks
    noticed = [e.fault.kind for e in outcome.events if isinstance(e, events.Noticed)]
    # The first joiner meets the second function when DDP was used already: it has its buckets.
    told = [kind for kind in noticed if kind in ("killed", "unsettled")]
    assert told == ["killed", "killed"]


@pytest.mark.extended
def test_phases_in_odd_places(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rank 0 dies behind a file that it has written between two phases: it writes it again."""
    undisturbed = Runner(tmp_path_factory.mktemp("odd")).run(script=ODD_JOB)
    assert undisturbed.code == 0, undisturbed.output
    places = ("2:evaluate:0", "1:draw:4", "2:look:5", "0:evaluate:6", "1:evaluate:10", "3:last:10")
    outcome = runner.run("--spares=2", script=ODD_JOB, job=("--die", *places))
    assert outcome.code == 0, outcome.output
    for seat, (got, want) in enumerate(zip(outcome.ranks, undisturbed.ranks, strict=True)):
        assert got == want, f"rank {seat}"
    assert len(want["history"]) == 13
    assert {(outcome.out / place).exists() for place in places} == {True}
    assert {i["rung"] for i in outcome.summary["incidents"]} <= {"replace", "respawn"}


UNCOUNTED = """
import torch
import outlast
session = outlast.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
def train_step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
for _ in range(3):
    session.run(train_step)
"""


def test_steps_outside_of_batches_are_noted(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "uncounted.py"
    script.write_text(UNCOUNTED)
    outcome = runner.run(script=script)
    assert outcome.code == 0, outcome.output
    notes = [e.text for e in outcome.events if isinstance(e, events.Note)]
    assert any("are not counted" in text for text in notes), notes


@pytest.mark.extended
@pytest.mark.parametrize("loops", [(), ("--epochs",)])
def test_code_behind_the_loop_has_run_once(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory, loops: tuple[str, ...]
) -> None:
    """A rank dies in the evaluation behind it: variables, draws and schedulers are as they were."""
    undisturbed = Runner(tmp_path_factory.mktemp("behind")).run(script=BEHIND, job=loops)
    assert undisturbed.code == 0, undisturbed.output
    outcome = runner.run("--spares=1", script=BEHIND, job=(*loops, "--die=0"))
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == undisturbed.ranks
    assert [i["rung"] for i in outcome.summary["incidents"]] == ["replace"]


@pytest.mark.extended
def test_a_place_behind_the_last_batch_of_an_epoch_is_resumed_once(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A rank dies behind the evaluation of an epoch that is not the last one."""
    undisturbed = Runner(tmp_path_factory.mktemp("epochs")).run(script=BEHIND, job=("--epochs",))
    fault = "--fault=kill:rank=1,step=3,phase=done"
    outcome = runner.run("--spares=1", fault, script=BEHIND, job=("--epochs",))
    assert outcome.code == 0, outcome.output
    assert "in the evaluation after step 2" in outcome.output
    assert outcome.ranks == undisturbed.ranks


def test_a_new_worker_continues_the_epochs_of_a_script_with_its_own_checkpoints(
    tmp_path: Path,
) -> None:
    """Each rank dies once, in epochs 1 and 2: its script begins behind the newest checkpoint."""
    ends = []
    faults = (
        "--fault=kill:rank=0,step=5,phase=forward",
        "--fault=kill:rank=1,step=9,phase=forward",
    )
    for name, flags in (("whole", ()), ("lost", ("--spares=1", *faults))):
        (folder := tmp_path / name).mkdir()
        outcome = Runner(folder, 2).run(*flags, script=OWN_CHECKPOINT)
        assert outcome.code == 0, outcome.output
        ends.append(outcome.ranks)
    assert len(outcome.summary["incidents"]) == 2
    assert ends[0] == ends[1]


def test_what_code_behind_a_step_logs_is_that_of_its_step(tmp_path: Path) -> None:
    """Each rank dies behind a step, whose rates the others have changed since. A logger's generator
    around the batches has counted."""
    ends = []
    places = "kill:rank=0,step=6,phase=between", "kill:rank=1,step=9,phase=between"
    faults = [f"--fault={place}" for place in places]
    for name, flags in (("whole", ()), ("lost", ("--spares=1", *faults))):
        (folder := tmp_path / name).mkdir()
        outcome = Runner(folder, 2).run(*flags, script=LOGGED)
        assert outcome.code == 0, outcome.output
        ends.append(outcome.ranks)
    assert len(outcome.summary["incidents"]) == 2
    assert len(ends[0][0]["rows"]) == 32
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "kind",
    ["nested", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("inline", "object"))],
)
def test_a_new_worker_leaves_functions_alone_that_are_made_anew(tmp_path: Path, kind: str) -> None:
    """Rank 1 dies in the evaluation behind an epoch: values of that epoch's last function are not
    those of the next one's first."""
    ends = []
    for name, flags in (("whole", ()), ("lost", ("--fault=kill:rank=1,step=6,phase=eval",))):
        (folder := tmp_path / name).mkdir()
        script = ("--spares=1", *flags)
        outcome = Runner(folder, 2).run(*script, script=NEW_FUNCTIONS, job=(f"--kind={kind}",))
        assert outcome.code == 0, outcome.output
        ends.append(outcome.ranks)
    assert [one["rung"] for one in outcome.summary["incidents"]] == ["replace"]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "place",
    ["draw", *(pytest.param(one, marks=pytest.mark.extended) for one in ("save", "behind"))],
)
def test_what_code_between_phases_reads_of_weights_is_right(tmp_path: Path, place: str) -> None:
    """Rank 0 dies behind a vote. Where its code had read the weights before, the job rolls back."""
    ends = []
    for name, flags in (("whole", ()), ("lost", ("--fault=kill:rank=0,step=7,phase=apply",))):
        (folder := tmp_path / name).mkdir()
        job = (f"--place={place}",)
        outcome = Runner(folder, 2).run("--spares=2", *flags, script=WEIGHT_READS, job=job)
        assert outcome.code == 0, outcome.output
        ends.append(outcome.ranks)
    assert ends[0] == ends[1]
    assert ("no rank has others" in outcome.explain()) == (place != "behind")


def test_weights_that_are_read_at_the_head_of_an_epoch_are_refused(
    runner: Runner, tmp_path: Path
) -> None:
    outcome = runner.run(script=WEIGHT_READS, job=("--place=head",))
    assert outcome.code == 1, outcome.output
    assert "code between session.epochs and its loop over batches reads" in outcome.output
