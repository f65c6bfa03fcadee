"""Suites of tests of a backend, as classes whose ranks are forked where torch spawns them.

| suite       | tests                                                     | they lie in          |
|-------------|-----------------------------------------------------------|----------------------|
| distributed | collectives, point to point, DDP, objects                 | torch's wheel        |
| parallel    | FSDP2, tensor parallel, DTensor, meshes, functional ones  | `parallel_tests.py`  |
| source      | collectives, point to point, groups, fault tolerance      | PyTorch's repository |

A suite maps the name of each test to its class. `torch.testing._internal` needs `expecttest`.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from outlast.worker.groups.backend_registration import answer, answered_names, open_group

Suite = dict[str, type[unittest.TestCase]]

RANKS = 3  # of the suite "distributed"; others say so themselves
TEST_S = 120  # torch's own limit is 300 s
SOURCES = ("test_c10d_collectives", "test_c10d_p2p", "test_c10d_process_group")
FAULT_TOLERANCE = "test_c10d_fault_tolerance"  # its tests make groups by themselves


def prepare(folder: str, named: str) -> None:
    """Set up this process for torch's tests of the backend `named`, with files in `folder`."""
    os.environ.update(
        BACKEND=named,
        WORLD_SIZE=str(RANKS),
        TEMP_DIR=folder,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_S),
        TORCHINDUCTOR_COMPILE_THREADS="1",  # more are processes, which a forked rank does not have
    )
    for part in ("barrier", "test_dir", "init_dir"):
        Path(folder, part).mkdir()
    sys.argv[1:] = []  # torch parses them when its helpers are imported
    torch.set_num_threads(1)


def load(suite: str, backend: str, named: str, source: Path | None) -> Suite:
    """Return a suite whose groups are opened on `backend`, which the tests know as `named`."""
    if backend != named:
        _open_in_place(backend, named)
    match suite:
        case "distributed":
            return _distributed(named)
        case "parallel":
            from parallel_tests import ParallelTests

            return _of(_forked(ParallelTests, backend_name=named))
        case "source" if source is not None:
            return _from_source(source, named)
    raise SystemExit(f"no suite {suite!r} here; source needs --torch-source DIR")


def _of(tests: type[unittest.TestCase], prefix: str = "") -> Suite:
    names = unittest.TestLoader().getTestCaseNames(tests)
    return dict.fromkeys((prefix + name for name in names), tests)


def _forked(tests: Any, **attributes: Any) -> type[unittest.TestCase]:
    """Return `tests` with forked ranks: they have torch already, which saves most of the time."""

    def fork(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return type(tests.__name__, (tests,), {"_spawn_processes": fork, **attributes})


def _distributed(named: str) -> Suite:
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as own

    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(named)
    bases: Any = (own.TestDistBackend, own.DistributedTest._DistTestBase)

    class ForkedRanks(*bases):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return _of(ForkedRanks)


def _open_in_place(backend: str, named: str) -> None:
    """Open groups on `backend` where the tests ask for `named`."""
    if named in answered_names():
        answer(named, partial(open_group, backend=named))
    else:
        _translate_names(backend, named)


def _translate_names(backend: str, named: str) -> None:
    """Open groups on `backend` where the tests ask for `named`, and answer with that name: torch
    before 2.14 does not look its own backends up."""
    from torch.distributed import distributed_c10d as c10d

    open_one: Any = c10d._new_process_group_helper

    def translated(size: int, rank: int, ranks: Any, asked: Any, *rest: Any, **more: Any) -> Any:
        if str(asked) != named:
            return open_one(size, rank, ranks, asked, *rest, **more)
        opened = open_one(size, rank, ranks, dist.Backend(backend), *rest, **more)
        if (known := c10d._world.pg_map.get(opened[0])) is not None:
            c10d._world.pg_map[opened[0]] = (asked, *known[1:])
        return opened

    c10d._new_process_group_helper = translated


def _from_source(source: Path, named: str) -> Suite:
    """Return torch's tests of gloo on `named`. A checkout without some of the files is older."""
    folder = source / "test" / "distributed"
    sys.path.insert(0, str(folder))
    found: Suite = {}
    for name in (*SOURCES, FAULT_TOLERANCE):
        if not (folder / f"{name}.py").exists():
            print(f"{folder} has no {name}.py", file=sys.stderr)
            continue
        for tests in list(vars(importlib.import_module(name)).values()):
            if getattr(tests, "backend_name", "") == "gloo" and issubclass(
                tests, unittest.TestCase
            ):
                label = f"{name.removeprefix('test_c10d_')}."
                found |= _of(_forked(tests, backend_name=named), label)
    if not found:
        raise SystemExit(f"{folder} has no tests of gloo that could be executed")
    return found
