"""Policies from TOML files and presets, with errors that name the line."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable
from datetime import date, datetime
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from outlast.config import LIMIT_MAX, read_toml
from outlast.controller.recovery.recovery_policy import (
    DEFAULT,
    FAILURES,
    FROM_A_COPY,
    PLANNED,
    REPEATS_MAX,
    RUNGS,
    RecoveryPolicy,
    Rung,
    RungRule,
)
from outlast.errors import ConfigError, UsageError

PRESETS = (
    *("default", "exact", "fastest", "cheapest"),
    *("elastic", "torchft-like", "checkpoint-restart", "memory-restart"),
)
VERSION = 1
BUDGET_MAX = 1_000_000
EXIT_CODE_MAX = 255
RULES_MAX = 64
_TOP = (
    *("version", "price_usd_per_rank_hour", "deadline", "repeats_max"),
    *("budgets", "exit_codes", "default"),
)
_CLASS_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_CONDITIONS = tuple(name for name in RungRule.__struct_fields__ if name != "rung")
_UNDONE = "nothing was started"


def preset_text(name: str) -> str:
    """Return the file of a preset."""
    return (resources.files("outlast.launch.policies") / f"{name}.toml").read_text(encoding="utf-8")


def read_policy(text: str) -> RecoveryPolicy:
    """Return the policy of `--policy`: a preset's name, or a TOML file.

    Raises UsageError for a name that is neither, and ConfigError for a file that is no policy.
    """
    if text == DEFAULT.name:
        return DEFAULT
    if text in PRESETS:
        return _parse(preset_text(text), text, f"preset {text}")
    path = Path(text)
    if not text or (not path.exists() and path.suffix != ".toml" and "/" not in text):
        close = difflib.get_close_matches(text, PRESETS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"--policy {text!r} is no preset{meant} (presets: {', '.join(PRESETS)}; or the path of"
            f" a TOML file); {_UNDONE}"
        )
    data = read_toml(path, "policy", _UNDONE)
    lines = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_file():  # a pipe cannot be read twice: its errors have no line
            lines = path.read_text(encoding="utf-8")
    return _PolicyFile(data, lines, str(path)).policy(path.stem or str(path))


def _parse(text: str, name: str, where: str) -> RecoveryPolicy:
    import tomllib  # few commands read a file, and it takes milliseconds

    return _PolicyFile(tomllib.loads(text), text, where).policy(name)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of TOML is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class _PolicyFile:
    """A policy's file: its data, and its text for the lines of errors."""

    def __init__(self, data: dict[str, Any], text: str, where: str) -> None:
        self._data, self._where = data, where
        self._lines = text.splitlines()

    def policy(self, name: str) -> RecoveryPolicy:
        data = self._data
        codes = self._exit_codes()
        known = RecoveryPolicy(name=name, default=(), exit_codes=codes).failures
        self._check_keys(data, (*_TOP, *known), "")
        version = data.get("version", VERSION)
        if version != VERSION or isinstance(version, bool):
            raise self._error(
                f"version {version!r}: this Outlast reads version {VERSION}", "version"
            )
        if "default" not in data:
            listed = "retry, replace, respawn, restart, stop"
            raise self._error(
                "there is no table [default], which orders the rungs of all classes of failure"
                f" without a table; add, for example: [default] rungs = [{listed}], each in quotes"
            )
        policy = RecoveryPolicy(
            name=name,
            default=self._rules("default"),
            classes={each: self._rules(each) for each in known if each in data},
            budgets=self._budgets(),
            failures_max=self._failures_max(("default", *known)),
            repeats_max=self._budget(
                data.get("repeats_max", REPEATS_MAX),
                *("repeats_max", "", 'to never replace a failed worker, give rungs = ["stop"]'),
            ),
            exit_codes=codes,
            price_usd_per_rank_hour=self._price(),
            deadline_s=self._deadline(),
        )
        self._check_whole(policy)
        return policy

    # --- tables ---

    def _rules(self, table: str) -> tuple[RungRule, ...]:
        found = self._data[table]
        if not isinstance(found, dict):
            raise self._error(f"{table} is not a table; write [{table}] and rungs = [...]", table)
        self._check_keys(found, ("rungs", "budget"), table)
        rungs = found.get("rungs")
        if not isinstance(rungs, list) or not rungs:
            raise self._error(
                f"[{table}] has no rungs; give a list, the last one of which is stop", table
            )
        if len(rungs) > RULES_MAX:
            raise self._error(
                f"[{table}] has {len(rungs)} rungs, and the limit is {RULES_MAX}", table
            )
        rules = tuple(self._rule(table, number, one) for number, one in enumerate(rungs, 1))
        self._check_order(table, rules)
        return rules

    def _rule(self, table: str, number: int, given: object) -> RungRule:
        place = f"[{table}] rung {number}"
        if isinstance(given, str):
            return RungRule(rung=self._rung(table, place, given))
        if not isinstance(given, dict):
            raise self._error(
                f'{place} is {given!r}; give "replace", or {{ rung = "replace", ... }}', table
            )
        self._check_keys(given, ("rung", *_CONDITIONS), table)
        rung = self._rung(table, place, given.get("rung"))
        for name in _CONDITIONS:
            self._check_condition(table, place, rung, name, given.get(name))
        return msgspec.convert({**given, "rung": rung}, RungRule)

    def _rung(self, table: str, place: str, given: object) -> Rung:
        for rung in RUNGS:
            if given == rung:
                return rung
        close = difflib.get_close_matches(str(given), RUNGS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise self._error(
            f"{place}: {given!r} is no rung{meant} (rungs: {', '.join(RUNGS)})", given, table
        )

    def _check_condition(
        self, table: str, place: str, rung: Rung, name: str, value: object
    ) -> None:
        if value is None:
            return
        whole = not name.endswith(("_usd", "_s"))
        least = 1 if name in ("spares_min", "lost_max") else 0
        if not is_number(value) or (whole and not isinstance(value, int)):
            kind = "a whole number" if whole else "a number"
            raise self._error(f"{place}: {name} is {value!r}, and must be {kind}", name, table)
        if not least <= value <= LIMIT_MAX:  # nan is neither
            wanted = f"from {least} to {LIMIT_MAX:g}"
            raise self._error(f"{place}: {name} is {value!r}, and must be {wanted}", name, table)
        if name in ("steps_lost_max", "cost_max_usd") and rung not in FROM_A_COPY:
            raise self._error(
                f"{place}: {name} is for {' and '.join(FROM_A_COPY)}, which make all ranks redo"
                f" steps; {rung} makes none redo a committed step; remove it",
                *(name, table),
            )
        if rung == "stop":
            raise self._error(f"{place}: stop has no conditions; remove {name}", name, table)
        if name == "cost_max_usd" and "price_usd_per_rank_hour" not in self._data:
            raise self._error(
                f"{place}: {name} needs price_usd_per_rank_hour at the top", name, table
            )
        if name == "remaining_min_s" and "deadline" not in self._data:
            raise self._error(f"{place}: {name} needs deadline at the top of the file", name, table)

    def _budgets(self) -> dict[Rung, int]:
        found = self._data.get("budgets", {})
        if not isinstance(found, dict):
            raise self._error("budgets is not a table; write [budgets]", "budgets")
        self._check_keys(found, [rung for rung in RUNGS if rung != "stop"], "budgets")
        budgets: dict[Rung, int] = {}
        for rung in RUNGS:
            if rung in found:
                other = f"to never take {rung}, leave it out of the rungs"
                budgets[rung] = self._budget(found[rung], rung, "budgets", other)
        return budgets

    def _failures_max(self, tables: Iterable[str]) -> dict[str, int]:
        """Return how often an hour each class with a budget is recovered from."""
        budgets: dict[str, int] = {}
        for table in tables:
            if "budget" not in self._data.get(table, {}):
                continue
            if table in PLANNED:
                raise self._error(
                    "planned moves have no budget, since they are no failures; bound them by"
                    " [budgets] migrate",
                    *("budget", table),
                )
            other = 'to never recover, give rungs = ["stop"]'
            value = self._data[table]["budget"]
            budgets[table] = self._budget(value, "budget", table, other)
        return budgets

    def _budget(self, value: object, name: str, table: str, other: str) -> int:
        place = f"[{table}] {name}" if table else name
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(f"{place} is {value!r}: give times an hour", name, table)
        if not 1 <= value <= BUDGET_MAX:
            wanted = f"from 1 to {BUDGET_MAX:,}"
            raise self._error(f"{place} is {value}, and must be {wanted}; {other}", name, table)
        return value

    def _exit_codes(self) -> dict[int, str]:
        """Return the classes that the file gives to exit codes."""
        table = "exit_codes"
        found = self._data.get(table, {})
        if not isinstance(found, dict):
            raise self._error(f'{table} is not a table; write [{table}] and 42 = "name"', table)
        for code, name in found.items():
            if not re.fullmatch(r"[1-9][0-9]{0,2}", code) or int(code) > EXIT_CODE_MAX:
                raise self._error(
                    f"[{table}] {code!r} is no exit code of a failure (1 to {EXIT_CODE_MAX})",
                    *(code, table),
                )
            if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
                raise self._error(
                    f"[{table}] {code} is {name!r}: give the name of a class of failure, in small"
                    " letters, digits and _",
                    *(code, table),
                )
            if name in (*_TOP, *FAILURES):
                raise self._error(
                    f"[{table}] {code}: {name} has another meaning in a policy; choose another"
                    " name",
                    *(code, table),
                )
        return {int(code): name for code, name in found.items()}

    def _price(self) -> float:
        name = "price_usd_per_rank_hour"
        value = self._data.get(name, 0.0)
        if not is_number(value) or not (0 < value <= LIMIT_MAX or name not in self._data):
            raise self._error(f"{name} is {value!r}, and must be above zero", name)
        return float(value)

    def _deadline(self) -> float:
        value = self._data.get("deadline")
        if value is None:
            return 0.0
        if not isinstance(value, datetime) or value.tzinfo is None:
            what = "a date without time" if type(value) is date else repr(value)
            raise self._error(
                f"deadline is {what}; give a time with its zone, without quotes, as in"
                " deadline = 2026-12-24T08:00:00Z",
                "deadline",
            )
        return value.timestamp()

    # --- consistency ---

    def _check_order(self, table: str, rules: tuple[RungRule, ...]) -> None:
        """Refuse a list that has no last rung, or rungs that nothing reaches."""
        if rules[-1].rung != "stop":
            raise self._error(
                f"[{table}] ends in {rules[-1].rung}, which cannot always be taken; end the list"
                ' in "stop"',
                table,
            )
        for number, rule in enumerate(rules, 1):
            if before := next(filter(rule.is_behind, rules[: number - 1]), None):
                how = "under wider conditions" if before.is_conditional else "without conditions"
                raise self._error(
                    f"[{table}] rung {number}: {rule.rung} stands before it {how}, so that this"
                    " one is never reached; remove one of them",
                    *(rule.rung, table),
                )
            if rule.rung == "stop" and number < len(rules):
                after = rules[number].rung
                raise self._error(
                    f"[{table}] rung {number} is stop, so that {after} behind it is never reached;"
                    " remove one of them",
                    *(rule.rung, table),
                )

    def _check_whole(self, policy: RecoveryPolicy) -> None:
        """Refuse budgets that no class of failure spends."""
        tables = ("default", *policy.classes)
        named = {rule.rung for table in tables for rule in policy.rules(table)}
        for rung in policy.budgets:
            if rung not in named:
                raise self._error(
                    f"[budgets] {rung}: no class of failure has this rung", rung, "budgets"
                )

    def _check_keys(self, given: dict[str, Any], known: Iterable[str], table: str) -> None:
        listed = tuple(known)
        for key in given:
            if key in listed:
                continue
            of = f" in [{table}]" if table else ""
            if key == "contract" and not table:
                raise self._error(
                    "a broken contract of a phase has no rungs: the run stops, since a retry would"
                    " fail the same way; remove [contract]",
                    key,
                )
            close = difflib.get_close_matches(key, listed, n=1, cutoff=0.5)
            meant = f"; did you mean {close[0]}?" if close else f" (known: {', '.join(listed)})"
            raise self._error(f"unknown key {key!r}{of}{meant}", key, table)

    def _error(self, wrong: str, token: object = "", table: str = "") -> ConfigError:
        line = self._line(str(token), table)
        where = f"{self._where}{f', line {line}' if line else ''}"
        return ConfigError(f"{where}: {wrong}; {_UNDONE}")

    def _line(self, token: str, table: str) -> int:
        """Return the number of the first line with a word in its table; 0: none has it."""
        header = re.compile(rf"\s*\[\s*[\"']?{re.escape(table)}[\"']?\s*\]")
        starts = [at for at, line in enumerate(self._lines) if table and header.match(line)]
        first = starts[0] if starts else 0
        word = re.compile(rf"(?<![\w-]){re.escape(token)}(?![\w-])")
        for at in range(first, len(self._lines)):
            if token and word.search(self._lines[at].partition("#")[0]):
                return at + 1
        return first + 1 if starts else 0
