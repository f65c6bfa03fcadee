"""Commands of workers, as torchrun builds them of its flags."""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import sys
from argparse import Namespace
from itertools import takewhile
from pathlib import Path
from string import Template

from outlast import config
from outlast.errors import UsageError
from outlast.launch.template.script_imports import module_file

_TEXT_BYTES_MAX = 1 << 20
# torchrun's --run-path: the script has no folder of its own on sys.path, and its exception is
# recorded as by @record.
_RUN_PATH = (
    "import runpy, sys; from torch.distributed.elastic.multiprocessing.errors import record;"
    " sys.argv = sys.argv[1:]; record(runpy.run_path)(sys.argv[0], run_name='__main__')"
)


def worker_command(given: Namespace, spares: int) -> tuple[str, ...]:
    """Return the command of a worker, for `with_local_rank`. Raises UsageError if it cannot be
    executed, or names the local rank and there are spares."""
    command = _command(given)
    if spares and with_local_rank(command, 0) != with_local_rank(command, 1):
        raise UsageError(
            "${local_rank} in the script's arguments cannot be replaced for spares, which take any"
            " rank; let the script read LOCAL_RANK, or leave --spares out"
        )
    return command


def _command(given: Namespace) -> tuple[str, ...]:
    script, args = given.training_script, given.training_script_args
    if given.module and given.no_python and not given.run_path:
        raise UsageError("--no-python and --module exclude each other; leave one out")
    if given.no_python and not given.run_path:
        if shutil.which(script) is None:
            raise UsageError(f"cannot execute {script}: no such program; check its path")
        return (script, *args)
    python = config.python_executable()
    if given.module and not given.run_path:
        top = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"cannot find module {script}; check its name and PYTHONPATH")
        return (python, "-u", "-m", script, *args)
    if not Path(script).is_file():
        raise UsageError(f"cannot find training script {script}; check its path")
    if given.run_path:
        return (python, "-u", "-c", _RUN_PATH, script, *args)
    return (python, "-u", script, *args)


def with_local_rank(command: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Return the command of one worker: torchrun replaces ${local_rank} in arguments, and $$."""
    program, *args = command
    return (program, *(Template(arg).safe_substitute(local_rank=local_rank) for arg in args))


def source_files(command: tuple[str, ...]) -> list[Path]:
    """Return the files of a worker's command that tell whether it calls ``outlast.init()``; none
    of them is imported.

    | command      | files                                                                       |
    |--------------|-----------------------------------------------------------------------------|
    | a script     | the script                                                                  |
    | `-m MODULE`  | those that ``python -m`` executes: module, and packages around it           |
    | a program    | scripts among its words (`.py`, `.sh`, or `#!`), and Python files that they |
    |              | name                                                                        |
    """
    match command:
        case (_, "-u", "-m", module, *_):
            file = module_file(module, [str(Path.cwd()), *sys.path])
            folders = file.parents if file else ()
            return [*([file] if file else ()), *takewhile(Path.is_file, map(_package, folders))]
        case (_, "-u", "-c", _, script, *_) | (_, "-u", script, *_):
            return [Path(script)]
        case (program, *args):
            words = (shutil.which(program) or program, *args)
            scripts = [path for word in words if _is_script(path := Path(word))]
            named = re.findall(rb"[\w./-]+\.py\b", b" ".join(map(_text, scripts)))
            return [*scripts, *filter(Path.is_file, (Path(os.fsdecode(name)) for name in named))]
        case _:
            return []


def _package(folder: Path) -> Path:
    return folder / "__init__.py"


def _is_script(path: Path) -> bool:
    try:
        is_named = path.suffix in (".py", ".sh")
        return path.is_file() and (is_named or _text(path, bytes_max=2) == b"#!")
    except (OSError, ValueError):  # an argument that cannot be a path
        return False


def _text(path: Path, bytes_max: int = _TEXT_BYTES_MAX) -> bytes:
    with path.open("rb") as file:
        return file.read(bytes_max)


def names_outlast(command: tuple[str, ...]) -> bool | None:
    """Return whether the text of a worker's command contains "outlast"; None for a module or a
    script that is not read."""
    try:
        files = source_files(command)
        if not files and command[1:3] == ("-u", "-m"):
            return None
        return any(b"outlast" in _text(file) for file in files)
    except OSError:
        return None


def is_unmodified(command: tuple[str, ...]) -> bool:
    """Return whether the text of a worker's command does not name Outlast. Several nodes start it
    as a group, and what is not read as a script that calls ``outlast.init()``."""
    return names_outlast(command) is False


def may_be_unmodified(command: tuple[str, ...], nodes: int) -> bool:
    """Return whether a script may turn out not to call ``outlast.init()``."""
    return is_unmodified(command) if nodes > 1 else not names_outlast(command)


def can_be_forked(command: tuple[str, ...]) -> bool:
    """Return whether all workers run one Python file or module by the same command."""
    is_python = command[1:2] == ("-u",) and command[2] != "-c"
    return is_python and with_local_rank(command, 0) == command
