"""Preloaded modules of a forked worker, hidden until the script imports them.

The template loads two groups of modules for each of its imports: the dependencies (such as NumPy)
and the rest. A group enters `sys.modules` at the first import of any of its modules. Libraries
read environment variables, processor affinity and the search path at import, so a forked worker
could differ from a spawned one. That import therefore compares these with their values at the
start of the worker. The groups' loggers are hidden too, so that logging configured before the
import (`disable_existing_loggers`, for example) changes only the script's own loggers.

| group                  | compared                                                        |
|------------------------|-----------------------------------------------------------------|
| torch and its          | all variables: reads by C libraries cannot be recorded;         |
| dependencies           | affinity, search path, warnings filters, loggers                |
| later groups           | variables that loading of any group still hidden has read       |

After a change the worker restarts from its command, as a spawned worker.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from outlast import config

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # `outlast.init()` sets them


class ModuleGroup(NamedTuple):
    """Modules loaded by one import, and the side effects of that import.

    `variables`: environment variables set; `read`: names of environment variables read;
    `filters`: warnings filters prepended; `loggers`: loggers created, by name.
    """

    modules: dict[str, types.ModuleType]
    variables: dict[str, str]
    read: set[str]
    filters: list[Any]
    loggers: dict[str, Any]
    is_dependency: bool = False  # contains only dependencies of the imported package

    def reads(self, names: Sequence[str]) -> str:
        """Return why each worker must import the package itself: it reads variables of `names`,
        which differ by worker; else ""."""
        found = "" if self.is_dependency else ", ".join(sorted(self.read.intersection(names)))
        return found and (
            f"the import of {top_level(next(iter(self.modules), 'a module'))} reads {found}, and"
            " RANK and others differ by worker: each worker imports it itself, with the same"
            " results; a new one starts more slowly, except for spares (--spares), which import in"
            " advance"
        )

    def split(self, name: str) -> tuple[ModuleGroup, ...]:
        """Return the dependencies of the named package, if any, and the package's own modules.

        A script may import NumPy, then set variables, then import torch.
        """
        package = top_level(name)
        others = {each: self.modules[each] for each in self.modules if top_level(each) != package}
        if not others:
            return (self,)
        filters = [each for each in self.filters if package not in repr(each)]
        loggers = {each: self.loggers[each] for each in self.loggers if top_level(each) in others}
        own = ModuleGroup(
            {each: self.modules[each] for each in self.modules if each not in others},
            self.variables,
            self.read,
            [each for each in self.filters if each not in filters],
            {each: self.loggers[each] for each in self.loggers if each not in loggers},
        )
        return ModuleGroup(others, {}, self.read, filters, loggers, is_dependency=True), own


def top_level(name: str) -> str:
    """Return the first part of a module's name."""
    return name.partition(".")[0]


def is_third_party(name: str) -> bool:
    """Return whether a module is neither in the standard library nor the script itself."""
    return top_level(name) not in sys.stdlib_module_names and name != "__mp_main__"


def set_warnings_filters(filters: Sequence[Any]) -> None:
    """Replace the list of warnings filters."""
    warnings.resetwarnings()  # invalidates the cache of the C implementation
    warnings.filters[:] = filters  # pyright: ignore[reportIndexIssue]


def loggers() -> dict[str, Any]:
    """Return all loggers, and placeholders for parents without a logger, by name."""
    return logging.root.manager.loggerDict


def _show_loggers(hidden: dict[str, Any]) -> None:
    """Register loggers with `logging`; keep the state of loggers that the script created."""
    manager: Any = logging.root.manager  # linking loggers has no public API
    for name, logger in hidden.items():
        present = loggers().get(name)
        if isinstance(present, logging.Logger) and isinstance(logger, logging.Logger):
            logger.__dict__ = present.__dict__  # both share their state from here on
        elif isinstance(logger, logging.Logger):
            loggers()[name] = logger
            if present is not None:
                manager._fixupChildren(present, logger)  # noqa: SLF001
            manager._fixupParents(logger)  # noqa: SLF001
    manager._clear_cache()  # noqa: SLF001


def _logger_state(name: str) -> tuple[Any, ...]:
    logger = loggers().get(name)
    if not isinstance(logger, logging.Logger):
        return ()
    places = (tuple(logger.handlers), tuple(logger.filters))
    return (logger.disabled, logger.level, logger.propagate, *places)


class Restart(Protocol):
    """Restart of this worker without a template."""

    def execute(self, reason: str) -> NoReturn:
        """Restart the worker. Raises ConfigError if that is not possible any more."""
        ...

    def close(self) -> None:
        """Release resources: no restart can follow."""


class HiddenModules(importlib.abc.Loader):
    """Finder and loader of preloaded modules."""

    def __init__(
        self, groups: Sequence[ModuleGroup], restart: Restart, first: Sequence[ModuleGroup]
    ) -> None:
        self._groups = list(groups)  # hidden groups, in the order of loading
        self._attributes: dict[str, tuple[types.ModuleType, str]] = {}  # of packages, by module
        self._first = list(first)  # hidden groups of the first import
        self._lock = threading.RLock()  # threads may import concurrently
        self._restart = restart
        self._specs = {
            name: getattr(module, "__spec__", None)
            for group in groups
            for name, module in group.modules.items()
        }
        self._environment = config.process_environment()
        self._processors = os.sched_getaffinity(0)
        self._path = list(sys.path)
        self._warnings = list(warnings.filters)
        hidden = set[str]().union(*(group.loggers for group in groups))
        self._loggers = {name: _logger_state(name) for name in loggers() if name not in hidden}
        self._logger_class = logging.getLoggerClass()
        self._standard = sorted({name for name in sys.modules if name in sys.stdlib_module_names})

    def hide(self) -> None:
        """Remove the modules from `sys.modules` and their packages; install this finder first."""
        for group in self._groups:
            for name, module in group.modules.items():
                sys.modules.pop(name, None)
                package, attribute = self._place(name, group)
                if package is not None and vars(package).get(attribute) is module:
                    self._attributes[name] = (package, attribute)
                    delattr(package, attribute)
            for name in group.loggers:
                loggers().pop(name, None)
        sys.meta_path.insert(0, self)

    def _place(self, name: str, group: ModuleGroup) -> tuple[types.ModuleType | None, str]:
        """Return the package of an earlier group that holds this module, and the attribute name."""
        parent, _, attribute = name.rpartition(".")
        if parent in group.modules:
            return None, attribute
        packages = (each.modules[parent] for each in self._groups if parent in each.modules)
        return next(packages, None), attribute

    # --- importlib protocol ---

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a hidden module with this loader, or None for other modules."""
        if not any(name in group.modules for group in self._groups):
            return None
        spec = copy.copy(self._specs[name] or importlib.machinery.ModuleSpec(name, None))
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the preloaded module; show its group and earlier groups."""
        with self._lock:
            for group in self._groups_until(spec.name):
                self._compare(spec.name)
                self._show(group)
        return sys.modules[spec.name]  # possibly shown by another thread

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the module's original spec; its code has already run in the template."""
        module.__spec__ = self._specs[module.__name__]

    def _groups_until(self, name: str) -> list[ModuleGroup]:
        """Return the groups to show for an import; a dependency needs only dependencies."""
        for count, group in enumerate(self._groups, start=1):
            if name in group.modules:
                until = self._groups[:count]
                return [one for one in until if one.is_dependency or not group.is_dependency]
        return []

    def _show(self, group: ModuleGroup) -> None:
        self._groups.remove(group)
        if group in self._first:
            self._first.remove(group)
        for name in group.modules:
            if name in self._attributes:
                setattr(*self._attributes[name], group.modules[name])
        sys.modules.update(group.modules)
        config.add_to_environment(group.variables)
        self._environment.update(group.variables)
        set_warnings_filters([*group.filters, *warnings.filters])
        self._warnings += group.filters
        _show_loggers(group.loggers)
        if not self._groups:
            sys.meta_path.remove(self)
            self._restart.close()

    def _compare(self, name: str) -> None:
        if reason := self._difference() if self._first else self._later_difference():
            self._restart.execute(f"it {reason} before it imported {name}")

    def _later_difference(self) -> str:
        """Return the changed variables that a hidden group has read, as text; "" if none.

        Groups that come after the imported one count: until `outlast.init()` a restart is possible.
        """
        read = set[str]().union(*(group.read for group in self._groups))
        changed = sorted(read.intersection(self._changed()))
        return f"changed {', '.join(changed)}" if changed else ""

    def _changed(self) -> list[str]:
        """Return the environment variables that the script has changed."""
        now = config.process_environment()
        names = (set(self._environment) | set(now)) - set(RANK_VARIABLES)
        return sorted(name for name in names if self._environment.get(name) != now.get(name))

    def _difference(self) -> str:
        """Return a change by the script that could affect loading, as text; "" if none."""
        if changed := self._changed():
            return f"changed {', '.join(changed)}"
        if os.sched_getaffinity(0) != self._processors:
            return "changed its processor affinity"
        if others := sorted(name for name in self._hidden() if name in sys.modules):
            return f"put {others[0]} into sys.modules"
        if any(each[0] != "ignore" for each in warnings.filters if each not in self._warnings):
            return "changed the warnings filters"
        if reason := self._logging_difference():
            return reason
        # The template already checked the script's folder, the first entry of the path.
        return "" if self._path in (sys.path, sys.path[1:]) else self._moved()

    def _hidden(self) -> list[str]:
        return [name for group in self._groups for name in group.modules]

    def _logging_difference(self) -> str:
        if logging.getLoggerClass() is not self._logger_class:
            return "changed the class of loggers"
        for group in self._groups:
            for name in group.loggers:
                if isinstance(loggers().get(name), logging.Logger):
                    return f"made the logger {name}"
        for name, state in self._loggers.items():
            if _logger_state(name) != state:
                return f"changed the logger {name}"
        return ""

    def _moved(self) -> str:
        """Return the first module that the changed search path resolves differently, or ""."""
        find = importlib.machinery.PathFinder.find_spec
        for name in (*self._hidden(), *self._standard):
            if "." in name:
                continue
            before, now = find(name, self._path), find(name)
            if (before and before.origin) != (now and now.origin):
                return f"changed sys.path, where {name} is another module,"
        return ""
