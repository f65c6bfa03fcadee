"""Text for faults, durations and sizes, the same in every view."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Collection

from outlast.events import SENTINELS, Fault, Scheduled, Warned

SHORT_MAX = 120
_TEXT = {
    "hung": "hung",
    "stopped": "was stopped by the kernel (SIGSTOP or a debugger)",
    "transport": "lost its connection to a peer",
    "unsettled": "reached a function's first step since it joined",
    "torn": "was torn: it could neither complete nor undo its phase",
    "diverged": "differed from its replicas",
    "nonfinite": "computed a gradient that is not finite",
    "oom": "ran out of memory",
    "unknown": "needed a result that was lost with its worker",
    "mismatch": "does not match the job",
    "transfer": "received a copy of state late or damaged",
    "storage": "could not write to its disk",
    "internal": "hit an internal error of Outlast",
    "agent_lost": "was on a host whose agent stopped responding",
    "controller_lost": "lost its controller, and another node took over",
    "requested": "was requested to end",
    "save": "was requested to save",
    "regrow": "was absent, and another worker can take it",
}


def duration(seconds: float) -> str:
    """Format seconds with two to three digits: `812 ms`, `12.3 s`, `4 min 12 s`, `3 h 05 min`."""
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(size_bytes: int) -> str:
    """Format bytes by powers of 1024, as `ls -h`: `104 MiB`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def percentage(part: float) -> str:
    """Format a share as per cent with one decimal: `12.5 %`."""
    return f"{100 * part:.1f} %"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def intervals(schedule: Scheduled) -> str:
    """Describe a save schedule: `copies in memory every step, checkpoints every 240 steps`."""
    parts = [
        f"{what} every {plural(steps, 'step') if steps > 1 else 'step'}"
        for what, steps in (("copies in memory", schedule.memory), ("checkpoints", schedule.disk))
        if steps
    ]
    return ", ".join(parts)


def source(one: Warned, notices: Collection[str]) -> str:
    """Return the kind of source of a finding; `notices`: checks that are notices."""
    if one.check in SENTINELS:
        return "sentinel"
    return "notice" if one.check in notices else "node check"


def warning(one: Warned) -> str:
    """Describe a node check's warning: `drain: gpu: gpu-memory on GPU 2 (node-7): ...`."""
    return f"{one.severity}: {one.finding} ({one.host}): {short_error(one.detail)}"


def rank_and_host(fault: Fault) -> str:
    """Describe the subject of a fault: `rank 2`, `spare w1-4`, `the run`."""
    if fault.seat >= 0:
        return f"rank {fault.seat}"
    return f"spare {fault.worker}" if fault.worker else "the run"


def fault_text(fault: Fault) -> str:
    """Describe a fault in a clause that follows `rank_and_host`."""
    if fault.kind == "killed":
        return f"was killed by {signal_name(fault.signal)}" if fault.signal else "was killed"
    if fault.kind == "exited":
        why = f": {error_line(fault)}" if fault.traceback.strip() else ""
        return f"exited with code {fault.exit_code} before the run was over{why}"
    if fault.kind in ("raised", "contract"):
        return f"raised {error_line(fault)}"
    if fault.kind == "requested" and fault.seat >= 0:
        return "was retired on purpose"
    return _TEXT.get(fault.kind, fault.kind)


def detail_beyond(fault: Fault) -> str:
    """Return a fault's detail on one line; "" where `fault_text` already contains it."""
    detail = " ".join(fault.detail.split())
    known = (
        f"ended by itself with exit code {fault.exit_code}",
        f"killed by {signal_name(fault.signal)}",
    )
    return "" if detail in known or detail in fault_text(fault) else detail


def error_line(fault: Fault) -> str:
    """Return the line that names the exception: a traceback's last one, else the detail."""
    lines = [line.strip() for line in fault.traceback.splitlines() if line.strip()]
    return short_error(lines[-1] if lines else fault.detail or "an exception")


def error_name(fault: Fault) -> str:
    """Return the exception's class, without module and message."""
    name = error_line(fault).partition(":")[0].rpartition(".")[2].strip()
    return name if name.isidentifier() else "an exception"


def short_error(text: str) -> str:
    """Shorten a text to one line of at most SHORT_MAX characters."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT_MAX else line[: SHORT_MAX - 3] + "..."


def signal_name(number: int) -> str:
    """Return the name of a signal, or `signal N` for an unknown one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def resume_hint(run_dir: str) -> str:
    """Return the command that resumes a run; without its directory a new run would start."""
    return f"resume with: outlast run --resume {shlex.quote(run_dir)}"


def frame_cause(outcome: str, fault: Fault | None, decision: str = "") -> str:
    """Return the framed root cause of a run's end; "" for a completed run."""
    if outcome == "done" or fault is None:
        return ""
    where = [f"rank {fault.seat}"] if fault.seat >= 0 else []
    where += [f"worker {fault.worker}"] if fault.worker else []
    where += [f"host {fault.host}"] if fault.host else []
    where += [f"step {fault.step}"] if fault.step >= 0 else []
    lines = [f"{outcome.replace('_', ' ')}: {fault.kind}: {fault.detail}", ", ".join(where)]
    lines += fault.traceback.rstrip().splitlines()
    lines += [f"decision: {decision}"] if decision else []
    rule = "-" * 72
    return "\n".join([rule, *filter(None, lines), rule])
