"""systemctl is-active, of all named services in one call."""

from __future__ import annotations

from outlast.health.checks.services import Services
from outlast.health.contract import AbsentError
from outlast.health.probes.asking import ToolError, said


def take(names: tuple[str, ...]) -> Services:
    """Raises AbsentError where no service is named, ToolError where systemd does not answer."""
    if not names:
        raise AbsentError("the settings name no service (services.active)")
    try:
        answer = said(["systemctl", "is-active", *names], codes=None)
    except AbsentError as error:
        raise ToolError(str(error)) from error
    states = answer.split()
    if len(states) != len(names):
        raise ToolError("systemd does not answer for each of them: does it run here?")
    return Services(states=dict(zip(names, states, strict=True)))
