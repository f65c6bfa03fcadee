"""Modules that a forked worker has from its template, invisible until the script imports one.

`sys.modules` holds them only from the first import of any of them on. That import is also where a
forked worker could differ from a spawned one: libraries read variables, processor affinity and the
search path when they load, and the template has loaded them earlier. So what they depend on is
compared there with what it was when the worker began.
"""

from __future__ import annotations

import copy
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # `outlast.init()` sets them


def top_level(name: str) -> str:
    """Return the first part of a module's name."""
    return name.partition(".")[0]


def third_party(
    loaded: Mapping[str, types.ModuleType], before: Iterable[str]
) -> dict[str, types.ModuleType]:
    """Return the modules that were loaded since `before` and are not of the standard library."""
    early = set(before)
    return {
        name: module
        for name, module in loaded.items()
        if name not in early and top_level(name) not in sys.stdlib_module_names
    }


def set_warnings_filters(filters: Sequence[Any]) -> None:
    """Replace the list of warnings filters."""
    warnings.resetwarnings()  # tells the C half that they have changed
    warnings.filters[:] = filters  # pyright: ignore[reportIndexIssue]


class Restart(Protocol):
    """Starts this worker anew, without a template."""

    def execute(self, reason: str) -> NoReturn:
        """Start it anew."""
        ...

    def close(self) -> None:
        """Take note that it is needed no more."""


class HiddenModules:
    """A finder and loader of the modules that were loaded in advance, by their top-level names.

    `variables`: those that loading has set. `filters`: the warnings filters that loading has put
    in front.
    """

    def __init__(
        self,
        modules: Mapping[str, types.ModuleType],
        variables: Mapping[str, str],
        filters: Sequence[Any],
        restart: Restart,
    ) -> None:
        self._modules = dict(modules)
        self._variables = dict(variables)
        self._filters = list(filters)
        self._restart = restart
        self._specs = {name: getattr(module, "__spec__", None) for name, module in modules.items()}
        self._environment = dict(os.environ)
        self._processors = os.sched_getaffinity(0)
        self._path = list(sys.path)
        self._warnings = list(warnings.filters)

    def hide(self) -> None:
        """Take the modules out of `sys.modules`, and be asked for them first."""
        for name in self._modules:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)

    # --- the protocol of importlib ---

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own specification with this loader; None for other modules."""
        spec = self._specs.get(name)
        if spec is None or "." in name:
            return None
        spec = copy.copy(spec)
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module that was loaded in advance, and show all the others."""
        if reason := self._difference(spec.name):
            self._restart.execute(reason)
        self._show()
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as the template has it."""
        module.__spec__ = self._specs[module.__name__]

    def _show(self) -> None:
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        os.environ.update(self._variables)
        self._restart.close()
        set_warnings_filters([*self._filters, *warnings.filters])

    def _difference(self, name: str) -> str:
        """Return what the script changed before this import; "" where it changed nothing."""
        names = set(self._environment) | set(os.environ)
        changed = sorted(
            each
            for each in names - set(RANK_VARIABLES)
            if self._environment.get(each) != os.environ.get(each)
        )
        if changed:
            return f"it changed {', '.join(changed)} before it imported {name}"
        if os.sched_getaffinity(0) != self._processors:
            return f"it changed its processor affinity before it imported {name}"
        if others := sorted(each for each in self._modules if each in sys.modules):
            return f"it put {others[0]} into sys.modules before it imported {name}"
        if any(each[0] != "ignore" for each in warnings.filters if each not in self._warnings):
            return f"it changed the warnings filters before it imported {name}"
        # The template has looked for other modules in the script's folder, the first of the path.
        is_same = self._path in (sys.path, sys.path[1:])
        return "" if is_same else self._moved()

    def _moved(self) -> str:
        """Return which module another search path would find elsewhere; "" for none."""
        for name, spec in self._specs.items():
            if spec is None or "." in name:
                continue
            found = importlib.machinery.PathFinder.find_spec(name)
            if found is None or found.origin != spec.origin:
                return f"it changed sys.path, where {name} is another one now"
        return ""
