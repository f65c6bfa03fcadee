"""Services that the settings name: active, by systemd's word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from outlast.health.contract import About, Check, Probe, Said, Sample
from outlast.health.settings import Settings

STARTING = {"activating", "reloading", "deactivating"}


class Services(Sample, frozen=True):
    """The state of each, in systemd's word."""

    states: dict[str, str]


def judge(sample: Services, about: About) -> Iterator[Said]:
    well = 0
    for name in about.settings.services.active:
        state = sample.states.get(name, "")
        if state == "active":
            well += 1
        elif state in STARTING:
            yield Said("warn", f"is {state}", name)
        else:
            yield Said("drain" if state else "unknown", f"is {state or 'not in the answer'}", name)
    if well == len(about.settings.services.active):
        yield Said("healthy", f"{well} are active")


def _probes(settings: Settings) -> Iterable[Probe[Services]]:
    from outlast.health.probes.services import take

    yield Probe("", partial(take, settings.services.active))


CHECK = Check("service", "services", Services, _probes, judge)
