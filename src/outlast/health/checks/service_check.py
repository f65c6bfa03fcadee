"""Check of systemd services that the settings name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from outlast.health.check_contract import (
    AbsentError,
    Check,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    ToolError,
    run_tool,
)
from outlast.health.check_settings import CheckSettings

STARTING = {"activating", "reloading", "deactivating"}


class ServicesSample(Sample, frozen=True):
    """State of each service, in systemd's terms."""

    states: dict[str, str]


def judge(sample: ServicesSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge whether all configured services are active."""
    well = 0
    for name in about.settings.services.active:
        state = sample.states.get(name, "")
        if state == "active":
            well += 1
        elif state in STARTING:
            yield Observation("warn", f"is {state}", name)
        else:
            yield Observation(
                "drain" if state else "unknown", f"is {state or 'not reported'}", name
            )
    if well == len(about.settings.services.active):
        yield Observation("healthy", f"{well} are active")


def _probes(settings: CheckSettings) -> Iterable[Probe[ServicesSample]]:

    yield Probe("", partial(take, settings.services.active))


CHECK = Check("service", "services", ServicesSample, _probes, judge)


def take(names: tuple[str, ...]) -> ServicesSample:
    """Query systemd.

    Raises AbsentError if no service is configured, ToolError if systemd does not answer.
    """
    if not names:
        raise AbsentError("the settings name no service (services.active)")
    try:
        answer = run_tool(["systemctl", "is-active", *names], codes=None)
    except AbsentError as error:
        raise ToolError(str(error)) from error
    states = answer.split()
    if len(states) != len(names):
        raise ToolError("systemd did not report all services; it may not run here")
    return ServicesSample(states=dict(zip(names, states, strict=True)))
