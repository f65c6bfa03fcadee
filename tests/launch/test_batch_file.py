"""Batch files for Slurm, executed by bash with an `srun` that shows its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.end_to_end.conftest import wait_for

from outlast.errors import UsageError
from outlast.launch.batch_file import BatchJob, batch_file
from outlast.launch.nodes.node_flags import RELEASE_VARIABLE

SRUN = f"""#!{sys.executable}
import json, os, sys
path = os.environ["SHOWN"]
with open(path + "-partial", "w") as file:
    json.dump(sys.argv[1:], file)
os.rename(path + "-partial", path)
sys.exit(int(os.environ.get("CODE", "0")))
"""
FIRST = "n1"
LAUNCHER = ("python", "-m", "outlast", "run")
words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)


def execute(text: str, folder: Path, code: int = 0, **more: str) -> tuple[int, list[str], str]:
    """Return the exit code, what srun was given, and what scontrol was given."""
    (folder / "srun").write_text(SRUN)
    scontrol = f'[ "$1" = show ] && {{ echo {FIRST}; exit; }}; echo "$@" > {folder}/asked; exit 1'
    (folder / "scontrol").write_text(f"#!/bin/bash\n{scontrol}\n")
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    (folder / "asked").write_text("")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SHOWN": str(folder / "shown"), **more}
    environment |= {"SLURM_JOB_ID": "7", "CODE": str(code)}
    done = subprocess.run(["bash"], input=text, text=True, env=environment, timeout=60, check=False)
    wait_for((folder / "shown").exists, "srun, which may be in the background")
    return (
        done.returncode,
        json.loads((folder / "shown").read_text()),
        (folder / "asked").read_text(),
    )


def test_the_launcher_gets_a_run_directory_of_its_job(tmp_path: Path) -> None:
    job = BatchJob(name="train", command=(*LAUNCHER, "train.py", "--lr", "3e-4"), own_run_dir=False)
    code, shown, asked = execute(batch_file(job), tmp_path)
    assert shown == ["--ntasks=1", *LAUNCHER, "--run-dir", "runs/slurm-7", *job.command[4:]]
    assert (code, asked) == (0, "")
    named = job._replace(own_run_dir=True)
    _, shown, _ = execute(batch_file(named), tmp_path, SLURM_CPUS_PER_TASK="6")
    assert shown == ["--ntasks=1", "--cpus-per-task=6", *job.command]


@pytest.mark.parametrize(("code", "asked"), [(4, "requeue 7\n"), (1, ""), (2, ""), (3, "")])
def test_only_an_interrupted_run_is_requeued(tmp_path: Path, code: int, asked: str) -> None:
    text = batch_file(BatchJob(name="train", command=(*LAUNCHER, "a.py"), own_run_dir=True))
    found = execute(text, tmp_path, code)
    assert (found[0], found[2]) == (code, asked)


@given(st.lists(words, max_size=4))
def test_bash_reads_every_word_as_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    job = BatchJob(name="train", command=(*LAUNCHER, *arguments), own_run_dir=True)
    _, shown, _ = execute(batch_file(job), tmp_path_factory.mktemp("words"))
    assert shown == ["--ntasks=1", *job.command]


def test_nodes_meet_at_the_first_one_and_share_a_secret(tmp_path: Path) -> None:
    (tmp_path / "launch").write_text(SRUN.replace("SHOWN", "LAUNCHED"))
    (tmp_path / "launch").chmod(0o755)
    words = ("-m", "outlast", "run", "--nnodes", "2:3", "@COMMAND@", "it's")
    job = BatchJob(name="train", command=("launch", *words), own_run_dir=False, nodes=3)
    token = tmp_path / "secret" / "token"
    more = {"LAUNCHED": str(tmp_path / "launched"), "OUTLAST_TOKEN_FILE": str(token)}
    code, shown, asked = execute(batch_file(job), tmp_path, 4, **more)
    launched = json.loads((tmp_path / "launched").read_text())
    endpoint = ["--rdzv-endpoint", f"{FIRST}:29400"]
    assert launched == [*words[:3], *endpoint, "--run-dir", "runs/slurm-7", *words[3:]]
    flags = ["--nodes=2", "--ntasks=2", "--relative=1", "--no-kill"]
    assert shown == [*flags, "--kill-on-bad-exit=0", "launch", *launched]
    assert (code, asked) == (4, "requeue 7\n"), "the first node's code"
    assert len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("code", "asked"), [(0, ""), (4, "requeue 7\n"), (1, "")])
def test_where_the_first_node_leaves_the_run_the_others_say_how_it_ended(
    tmp_path: Path, code: int, asked: str
) -> None:
    (tmp_path / "launch").write_text(f"#!/bin/bash\nexit ${RELEASE_VARIABLE}\n")
    (tmp_path / "launch").chmod(0o755)
    words = ("launch", "-m", "outlast", "run", "--nnodes", "2")
    job = BatchJob(name="train", command=words, own_run_dir=True, nodes=2)
    more = {"OUTLAST_TOKEN_FILE": str(tmp_path / "token")}
    found = execute(batch_file(job), tmp_path, code, **more)
    assert (found[0], found[2]) == (code, asked)


def test_options_of_sbatch_are_directives() -> None:
    options = ("--partition=gpu", "--gres=gpu:8", '--comment=a "b" c', "--exclusive")
    job = BatchJob(
        name="train", command=LAUNCHER, own_run_dir=True, time_limit="1-0:30", options=options
    )
    lines = [each for each in batch_file(job).splitlines() if each.startswith("#SBATCH ")]
    assert lines[-4:] == [
        "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:8",
        '#SBATCH --comment="a \\"b\\" c"',
        "#SBATCH --exclusive",
    ]
    assert "#SBATCH --time=1-0:30" in lines and "#SBATCH --requeue" in lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a b"}, "--name 'a b'"),
        ({"name": "x\n#SBATCH --uid=0"}, "--name"),
        ({"time_limit": "tomorrow"}, "is no time of Slurm's"),
        ({"time_limit": "1:00\n"}, "is no time of Slurm's"),
        ({"notice_s": 0}, "--notice 0"),
        ({"options": ("gpu",)}, "is no option of sbatch's"),
        ({"options": ("--comment=a\nrm -rf /",)}, "is no option of sbatch's"),
        ({"command": ("a\0b",)}, "NUL byte"),
    ],
)
def test_what_sbatch_or_bash_would_read_otherwise_is_refused(
    change: dict[str, object], message: str
) -> None:
    job = BatchJob(name="train", command=LAUNCHER, own_run_dir=True)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        batch_file(job._replace(**change))  # type: ignore[arg-type]
