"""Profiles of checks: prolog, periodic, epilog, preflight.

Slurm delays a job's start until its prolog ends. It kills a HealthCheckProgram after 60 s, which
include the wait for the state directory and the calls to Slurm for a drain.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple

from outlast.errors import ConfigError
from outlast.health.check_contract import AnyCheck, Check
from outlast.health.check_settings import CheckSettings, Profile
from outlast.health.checks import (
    clock_check,
    compute_check,
    disk_check,
    gpu_check,
    kernel_log_check,
    link_check,
    memory_check,
    mount_check,
    neighbour_check,
    service_check,
)

SHIPPED: tuple[AnyCheck, ...] = (
    kernel_log_check.CHECK,
    mount_check.CHECK,
    disk_check.CHECK,
    disk_check.SMART,
    memory_check.CHECK,
    link_check.CHECK,
    clock_check.CHECK,
    service_check.CHECK,
    gpu_check.CHECK,
    gpu_check.LEFTOVER,
    compute_check.CHECK,
    neighbour_check.CHECK,
)


class ProfilePlan(NamedTuple):
    """Checks of a profile, besides the site's own.

    `within_s`: time limit of all checks together.
    """

    checks: tuple[str, ...]
    within_s: float


QUICK = ("kernel", "mount", "memory", "link", "gpu")
PROFILES: dict[Profile, ProfilePlan] = {
    "prolog": ProfilePlan(QUICK, 10.0),
    "periodic": ProfilePlan((*QUICK, "disk", "smart", "clock", "service"), 30.0),
    "epilog": ProfilePlan((*QUICK, "leftover"), 20.0),
    "preflight": ProfilePlan(
        (*QUICK, "disk", "smart", "clock", "service", "leftover", "matmul", "neighbour"), 300.0
    ),
}


def all_checks(settings: CheckSettings) -> dict[str, AnyCheck]:
    """Return the shipped checks and the site's own by name. Raises ConfigError."""
    found = {check.name: check for check in SHIPPED}
    for where in settings.own:
        for check in _own(where):
            if check.name in found:
                raise ConfigError(f"own: {where}: there is a check {check.name!r} already")
            found[check.name] = check
    return found


def checks_of_profile(
    profile: Profile, settings: CheckSettings, checks: dict[str, AnyCheck], only: Iterable[str] = ()
) -> list[AnyCheck]:
    """Return the checks of a profile, or those named in `only`.

    Raises ConfigError for an unknown name.
    """
    names = tuple(only) or getattr(settings.profiles, profile)
    if names is None:
        shipped = {check.name for check in SHIPPED}
        names = (*PROFILES[profile].checks, *(name for name in checks if name not in shipped))
    for name in names:
        if name not in checks:
            close = difflib.get_close_matches(name, checks, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(checks)}"
            raise ConfigError(f"there is no check {name!r}: {hint}; nothing was checked")
    return [checks[name] for name in dict.fromkeys(names)]


def _own(where: str) -> tuple[AnyCheck, ...]:
    module, _, name = where.partition(":")
    try:
        found = getattr(import_module(module), name or "CHECKS")
    except Exception as error:  # a module of one's own may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"own: {where}: {reason}; nothing was checked") from error
    found = found if isinstance(found, tuple | list) and not isinstance(found, Check) else (found,)
    if not all(isinstance(check, Check) for check in found):
        raise ConfigError(f"own: {where} is no outlast.health.check_contract.Check, nor several")
    return tuple(found)
