"""Nodes of this job that Slurm is told to drain while the run goes on.

The controller's node alone asks, for all nodes at once, each LOOK_S: two thousand nodes that ask
would be a load for slurmctld.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable

from outlast import config
from outlast.events import Warned

CHECK = "slurm"
SYMPTOM = "node-drain"
LOOK_S = 30.0
PAUSE_MAX_S = 600.0  # after failures in a row
ANSWER_S = 10.0
REASON_MAX = 500  # characters
_REASON = re.compile(r" Reason=(.*?)(?: \[(\S+@\d{4}-\d\d-\d\dT[\d:]+)\]|$)")
_FIELD = re.compile(r"(\S+?)=(.*?)(?= \S+=|$)")


async def watch(tell: Callable[[tuple[Warned, ...]], None], note: Callable[[str], None]) -> None:
    """Report the draining nodes of this job after each look, until cancelled. Without Slurm, or
    outside of a job, do nothing. A failure is noted once, and later looks are rarer."""
    nodes = config.slurm_variable("JOB_NODELIST")
    if not nodes or shutil.which("scontrol") is None:
        return
    failures = 0
    while True:
        answer = await _ask("scontrol", "--oneliner", "show", "node", nodes)
        if answer is None:
            failures += 1
            if failures == 1:
                note("scontrol gives no answer: nodes that are set to drain are not noticed")
        else:
            failures = 0
            tell(draining_nodes(answer))
        await asyncio.sleep(min(PAUSE_MAX_S, LOOK_S * 2**failures))


def draining_nodes(answer: str) -> tuple[Warned, ...]:
    """Return a finding for each node that `scontrol --oneliner show node` shows as set to drain."""
    found: list[Warned] = []
    for line in answer.split("\n"):
        # The reason and what follows it are free text, which may look like fields.
        fields = dict(_FIELD.findall(line.strip().partition(" Reason=")[0]))
        if "DRAIN" not in re.split(r"[+*~#!%$@^-]", fields.get("State", "").upper()):
            continue
        name, state = fields.get("NodeName", ""), fields["State"]
        match = _REASON.search(line)
        reason, who = match.groups("") if match else ("no reason given", "")
        reason = "".join(each if each.isprintable() else " " for each in reason[:REASON_MAX])
        found.append(
            Warned(
                t_ns=0,
                host=fields.get("NodeHostName", name),
                check=CHECK,
                symptom=SYMPTOM,
                severity="drain",
                code=who,
                device="",
                detail=f"Slurm drains {name} (State={state}): {reason}{f' [{who}]' if who else ''}",
            )
        )
    return tuple(found)


async def _ask(*words: str) -> str | None:
    """Return what a command prints; None if it fails, or takes longer than ANSWER_S."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode("utf-8", "replace") if process.returncode == 0 else None
