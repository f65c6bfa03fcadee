"""Workers forked from a template are equal to spawned ones, or are spawned."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest

from outlast.launch.host import worker_template
from outlast.launch.host.reaper import is_marked, read_process_stat
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerHandle, WorkerOutcome, WorkerPool, WorkerPost
from outlast.launch.run_display import DisplayRecord
from outlast.launch.template import script_imports

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

pytestmark = pytest.mark.process
SECONDS = 120.0  # two of a slow machine's loads

# What a process can see of itself, before it imports torch and afterwards, as one line of JSON.
PORTRAIT = """
import atexit, ctypes, gc, hashlib, inspect, json, locale, random, resource, threading, warnings

def state():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    bound = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(bound), 0, 0, 0)
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    folders = [os.readlink(link) for link in links if os.path.lexists(link)]
    mask = os.umask(0)
    os.umask(mask)
    cut = lambda text: text.partition(":[")[0].replace("w1-0", "W").replace("w1-1", "W")
    own = {"OUTLAST_WORKER", "OUTLAST_FAMILY", "TORCHELASTIC_ERROR_FILE"}
    return {
        "environment": {k: v for k, v in os.environ.items() if k not in own},
        "getenv": ctypes.string_at(GETENV(b"MINE")).decode(),
        "argv": [sys.argv, sys.orig_argv, sys.executable, sys.flags, sys.path],
        "command": open("/proc/self/cmdline").read().split("\\0"),
        "directory": [os.getcwd(), oct(mask)],
        "main": sorted(set(globals()) - {"__annotations__"}),
        "frames": len(inspect.stack()),
        "importers": [repr(type(one)) for one in sys.meta_path],
        "modules": sorted(
            {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
            - {"__mp_main__"}
        ),
        "filters": [repr(one) for one in warnings.filters],
        "gc": [gc.get_threshold(), gc.isenabled()],
        "signals": [
            hex(int(status[name], 16) & ~(3 << 31))  # 32 and 33 are libc's own
            for name in ("SigBlk", "SigIgn", "SigCgt")
        ],
        "ids": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getppid()],
        "bound": bound.value,
        "limits": [resource.getrlimit(n) for n in range(16)],
        "descriptors": sorted(set(map(cut, folders))),
        "inheritable": sorted(fd for fd in SETTINGS if os.get_inheritable(fd)) == sorted(SETTINGS),
        "streams": [[s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.seekable()]
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": [t.name for t in threading.enumerate()],
        "hash": hash("outlast"),
        "interpreter": [sys.getrecursionlimit(), repr(sys.excepthook)],
        "locale": locale.setlocale(locale.LC_ALL),
    }

GETENV = ctypes.CDLL(None).getenv
GETENV.restype = ctypes.c_void_p
settings = json.loads(os.environ["OUTLAST_WORKER"])
SETTINGS = (settings["control_fd"], settings["page_fd"])
before = state()
import torch, numpy
after = state()
draws = [torch.rand(1).item(), numpy.random.rand(), random.random()]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.GELU(), torch.nn.Linear(300, 1))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(200, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
product = numpy.linalg.inv(numpy.random.RandomState(1).rand(300, 300))
raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + product.tobytes()
numbers = [torch.get_num_threads(), torch.get_num_interop_threads(),
    torch.__config__.parallel_info(), torch.backends.cpu.get_cpu_capability(),
    len(os.listdir("/proc/self/task")), hashlib.sha256(raw).hexdigest()]
print(json.dumps({"before": before, "after": after, "numbers": numbers, "draws": draws}))
atexit.register(print, "the end")
sys.exit(3)
"""


def play(
    stage: Stage, script: Path, act: Callable[[WorkerPool], Awaitable[Any]], *flags: str
) -> None:
    """Run `act` with a crew whose template, if it has one, has loaded or been given up."""

    async def scene(crew: WorkerPool, _record: DisplayRecord) -> None:
        settled = asyncio.Event()
        if crew.template.awaits(settled.set):
            await settled.wait()
        await act(crew)

    become_subreaper()
    stage.play(stage.plan(script, *flags), scene, SECONDS)


async def start(crew: WorkerPool, name: str) -> WorkerHandle:
    """Start a worker as the agent does."""
    return await crew.template.when_settled(lambda: crew.start(WorkerPost(name, 0, "here", 1, 0)))


async def live(crew: WorkerPool, name: str) -> tuple[WorkerHandle, WorkerOutcome, str]:
    """Start a worker and bury it when it has ended; the third is its stdout."""
    died = asyncio.Event()
    worker = await start(crew, name)
    worker.on_exit = lambda _worker: died.set()
    await died.wait()
    outcome = await crew.reap(worker)
    return worker, outcome, (worker.process.log_dir / "stdout.log").read_text()


def portraits(stage: Stage, script: Path, *flags: str) -> list[dict[str, Any]]:
    """Return what two workers saw of themselves."""
    found: list[dict[str, Any]] = []

    async def act(crew: WorkerPool) -> None:
        assert (crew.template.fds is None) == ("--no-template" in flags), stage.notes
        for name in ("w1-0", "w1-1"):
            _, outcome, out = await live(crew, name)
            line, _, rest = out.partition("\n")
            assert (outcome.exit_code, outcome.stderr_tail, rest) == (3, "", "the end\n")
            found.append(json.loads(line))

    play(stage, script, act, *flags)
    return found


@pytest.mark.extended
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_forked_worker_sees_what_a_spawned_one_sees(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("MINE", "kept = ä")
    script = stage.script(PORTRAIT)
    flags = ("--nproc-per-node", "2", "--master-port", "29999")
    forked = portraits(stage, script, *flags)
    (stage.root / "run").rename(stage.root / "first")
    spawned = portraits(stage, script, *flags, "--no-template")
    for kind in ("before", "after"):  # until the script imports all that the template has
        assert "HiddenModules" in forked[0][kind]["importers"].pop(0)
    different = {
        (kind, name): (forked[0][kind][name], seen)
        for kind in ("before", "after")
        for name, seen in spawned[0][kind].items()
        if forked[0][kind][name] != seen
    }
    assert different == {}
    assert forked[0]["numbers"] == spawned[0]["numbers"] == forked[1]["numbers"]
    assert forked[0]["numbers"][0] == int(threads)
    for kind, draw in enumerate(forked[0]["draws"]):
        assert draw not in (forked[1]["draws"][kind], spawned[0]["draws"][kind])


def test_the_launcher_kills_watches_and_reaps_forked_workers(stage: Stage) -> None:
    """A forked worker is its child in every way, and so is its family."""
    text = 'import torch\nin_child("child")\ndaemon("daemon")\ntell("worker")\nsignal.pause()'

    async def act(crew: WorkerPool) -> None:
        died = asyncio.Event()
        worker = await start(crew, "w1-0")
        worker.on_exit = lambda _worker: died.set()
        names = ("worker", "child", "daemon")
        await stage.eventually_async(lambda: all(map(stage.pid_in, names)), "they run")
        pids = [stage.pid_in(name) for name in names]
        assert pids[0] == worker.process.pid
        seen = read_process_stat(pids[0])
        assert seen and (seen.parent, seen.session) == (os.getpid(), pids[0])
        assert all(is_marked(pid, worker.process.mark) for pid in pids)
        os.kill(pids[0], signal.SIGKILL)
        await died.wait()  # by its pidfd
        assert worker.process.killed_by == signal.SIGKILL
        outcome = await crew.reap(worker)
        assert outcome.exit_code == -signal.SIGKILL
        assert not any(map(stage.alive, pids))

    play(stage, stage.script(text), act)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.extended), signal.SIGSTOP]
)
def test_a_template_that_dies_or_stops_is_replaced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Workers are spawned meanwhile, and forked afterwards; none is lost.

    A stopped template does not block the launcher's event loop.
    """
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while not stage.notes:
            turns += 1
            await asyncio.sleep(0.01)

    monkeypatch.setattr(worker_template, "FORK_S", 1.0)

    async def act(crew: WorkerPool) -> None:
        first = crew.template.pid
        os.kill(first, number)
        if number == signal.SIGKILL:
            await stage.eventually_async(lambda: crew.template.fds is None, "it is noticed")
        counting = asyncio.create_task(count_turns())
        _, outcome, out = await live(crew, "w1-0")  # spawned
        await counting
        assert (turns > 1) == (number == signal.SIGSTOP)
        assert (outcome.exit_code, out) == (0, "torch\n")
        assert len(stage.notes) == 1 and "spawned while another one loads" in stage.notes[0]
        await stage.eventually_async(lambda: crew.template.fds, "another one has loaded")
        assert crew.template.pid != first and not stage.alive(first)
        _, outcome, out = await live(crew, "w1-1")
        assert (outcome.exit_code, out) == (0, "torch\n")

    text = "import torch\nprint(torch.zeros(1).__class__.__module__)"
    play(stage, stage.script(text), act)


def test_a_script_that_sets_variables_before_torch_is_spawned(stage: Stage) -> None:
    """The template's torch has read another value, so the worker executes its own command."""

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds
        for name in ("w1-0", "w1-1"):
            worker, outcome, out = await live(crew, name)
            assert (outcome.exit_code, outcome.stderr_tail) == (0, "")
            assert out.splitlines()[-1] == f"DEFAULT {worker.process.pid}"
            assert out.count("begins") == (2 if name == "w1-0" else 1)
        assert crew.template.fds is None
        assert ["ATEN_CPU_CAPABILITY" in note for note in stage.notes] == [True]

    text = """
print("begins")
variables = os.environ  # not seen in the text: it would be spawned from the start
variables["ATEN_CPU_CAPABILITY"] = "default"
import torch
print(torch.backends.cpu.get_cpu_capability(), os.getpid())
"""
    play(stage, stage.script(text), act)


def test_a_file_that_changes_on_the_disk_is_loaded_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a worker that is spawned: the old module is not handed on."""
    (stage.root / "site").mkdir()
    module = stage.root / "site" / "usercustomize_probe.py"
    module.write_text("value = 1")
    monkeypatch.setenv("PYTHONPATH", str(stage.root / "site"))
    monkeypatch.setattr(script_imports, "TORCH", "usercustomize_probe")
    monkeypatch.setattr(script_imports, "COMPILER", "json")

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds, stage.notes
        assert (await live(crew, "w1-0"))[2] == "1\n"
        module.write_text("value = 'two'")
        assert (await live(crew, "w1-1"))[2] == "two\n"
        assert len(stage.notes) == 1 and "has changed since it was loaded" in stage.notes[0]
        await stage.eventually_async(lambda: crew.template.fds, "another one has loaded")
        assert (await live(crew, "w1-2"))[2] == "two\n"

    text = "import usercustomize_probe\nprint(usercustomize_probe.value)"
    play(stage, stage.script(text), act)


LOG = """
import gc, typing
def mine(): pass
class Log:
    def __init__(self): self.itself, self.file = self, open(f"{ROOT}/log", "w")
log = Log()
log.file.write("kept")
"""
REGISTERED = LOG + "probe_module.Known.registered.append(mine); typing.Optional[Log]\n"
FINALIZED = LOG + "Log.__del__ = lambda self, note=log.file.write: note(' and closed')\n"


@pytest.mark.parametrize(
    ("text", "content"),
    [(LOG, "kept"), (REGISTERED, "kept"), (FINALIZED, "kept and closed")],
    ids=["own cycle", "held by the template", "finalizer"],
)
def test_objects_of_the_script_end_as_in_a_spawned_worker(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, text: str, content: str
) -> None:
    """Those of the template are frozen, because they would take most of a worker's exit."""
    (stage.root / "site").mkdir()
    known = "class Known: registered = []\nknown = [Known]\nKnown.itself = known"
    (stage.root / "site" / "probe_module.py").write_text(known)
    monkeypatch.setenv("PYTHONPATH", str(stage.root / "site"))
    monkeypatch.setattr(script_imports, "TORCH", "probe_module")
    monkeypatch.setattr(script_imports, "COMPILER", "json")
    counted = """
ids = {id(each) for each in gc.get_objects()}
print(id(globals()) in ids, id(probe_module.known) in ids)
"""
    script = stage.script(f"import probe_module\n{text}{counted}")
    plain = subprocess.run([sys.executable, str(script)], timeout=60, check=True, stdout=PIPE)
    assert (stage.root / "log").read_text() == content, plain
    (stage.root / "log").unlink()

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds, stage.notes
        _, outcome, out = await live(crew, "w1-0")
        assert (outcome.exit_code, outcome.stderr_tail, out) == (0, "", "True False\n")
        assert (stage.root / "log").read_text() == content

    play(stage, script, act)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("print('hello')", "wrote to stdout or stderr"),
        ("import os; os.environ.get('LOCAL_RANK')", "reads LOCAL_RANK"),
        ("import os; dict(os.environ)", "reads the whole environment"),
        ("import threading; threading.Thread(target=threading.Event().wait).start()", "threads"),
        ("import sys; sys.setrecursionlimit(999)", "changed the recursion limit"),
        ("import signal; signal.signal(10, print)", "changed signal handlers"),
        ("raise ValueError('no')", "template process has ended"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_what_a_fork_cannot_hand_on_is_spawned_and_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    (stage.root / "site").mkdir()
    (stage.root / "site" / "probe_module.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(stage.root / "site"))
    monkeypatch.setattr(script_imports, "TORCH", "probe_module")
    monkeypatch.setattr(script_imports, "COMPILER", "json")

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds is None
        assert len(stage.notes) == 1 and reason in " ".join(stage.notes[0].split())
        _, outcome, out = await live(crew, "w1-0")
        assert (outcome.exit_code, out) == (0, "done\n")

    play(stage, stage.script("if 0:\n    import probe_module\nprint('done')"), act)


def test_a_module_of_the_script_is_not_the_templates(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a script's folder a file may have the name of a library that torch needs."""
    monkeypatch.setattr(script_imports, "TORCH", "colorsys")
    (stage.root / "colorsys.py").write_text("print('mine')")

    async def act(crew: WorkerPool) -> None:
        assert crew.template.fds is None
        assert "colorsys is another module" in stage.notes[0]
        assert (await live(crew, "w1-0"))[2] == "mine\n"

    monkeypatch.setattr(script_imports, "template_modules", lambda *_: ("colorsys",))
    play(stage, stage.script("import colorsys"), act)
