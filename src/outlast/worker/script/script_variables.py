"""Detection of script variables that one worker must carry or refuse."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from outlast.worker.script.carried_variables import CarriedVariables
from outlast.worker.script.loop_headers import refuse_header
from outlast.worker.script.phase_files import PhaseFiles, top_saves_by_path
from outlast.worker.script.process_modes import ENVIRONMENT, TORCH_MODES
from outlast.worker.script.reachable_values import ReachableValues, ValueSpot
from outlast.worker.script.repetitions import (
    DRAWS,
    MadeObjects,
    Refusals,
    RepetitionDifference,
    Unrepeatable,
    WriteNote,
    is_first_bound,
)
from outlast.worker.script.training_loop import (
    GROWING,
    LastingLoaders,
    RebindWatch,
    TrainingLoop,
    candidates,
    large_containers,
    newest_items,
)
from outlast.worker.script.unversioned_writes import can_write_unversioned
from outlast.worker.script.value_caches import LateChanges, WatchedCaches
from outlast.worker.script.value_encoding import written
from outlast.worker.script.value_fingerprints import ITEMS_MAX, QUEUES, is_opaque
from outlast.worker.script.value_paths import (
    Path,
    PathGone,
    PathRoots,
    described,
    is_own_class,
    own_frames,
    text,
    unwrapped,
)
from outlast.worker.state.optimizer_state import GROUPS

if TYPE_CHECKING:
    from outlast.worker.state.protected_modules import ProtectedModules

LISTED_MAX = 20
LOOKS_AT_LOOP = 3  # step boundaries at which all values are compared
_CHANGED_TWICE = 2
CHECKPOINT = "outlast.checkpoint"  # key of the phases that save


class ScriptVariables(Refusals):
    """Detector of unprotected values that phases, or the code between them, change.

    Plain values are carried: a redo restores them, and a successor receives them with the rank's
    own state. Values that cannot be carried exactly are refused or reported (`on_unrepeatable`).
    """

    def __init__(
        self, protected: Callable[[], set[int]], on_unrepeatable: Unrepeatable, note: WriteNote
    ) -> None:
        super().__init__(on_unrepeatable, note)
        self._protected = protected
        self._roots = PathRoots()
        self.carried = CarriedVariables(self._roots)
        self._phases: dict[str, dict[Path, ValueSpot]] = {}  # by key: the values before it
        self._changed: dict[str, dict[Path, int]] = {}  # ... and how often each was left changed
        self._objects = MadeObjects(self)
        self._loops: list[TrainingLoop] | None = None
        self._heads: dict[types.CodeType, int] = {}  # places in code where an epoch begins
        self._has_listed = False
        self._lasting = LastingLoaders(self.refuse)
        self._watch = RebindWatch(self._roots, self.carried)
        self._modes: dict[str, dict[str, Any]] = {}  # of the process, before the first step
        self._constants: set[str] = set()  # strings in the script's code
        self._unversioned: dict[str, bool] = {}  # by key
        self._expected: set[str] = set()  # keys of functions whose late names are carried
        self._containers: dict[str, Path] = {}  # paths of those watched as caches
        self._lengths: dict[str, int] = {}  # of these, at the top of the last round
        self.caches = WatchedCaches(
            self.refuse, lambda value: written(value) is not None, self._follow_growth
        )
        self._late = LateChanges()
        self.files = PhaseFiles(self.refuse, self._tell_once)
        self.dry: Callable[[], AbstractContextManager[None]] = nullcontext  # around dry steps
        self.check_header: Callable[..., None] = refuse_header  # a framework's loop has none

    def at_protect(self) -> None:
        """Report files that the script's top may have given to C++, which a successor's start would
        overwrite unseen; called when the job's first worker protects its state."""
        if top_saves_by_path():
            self._tell_once(
                "code above session.protect calls torch.save: given a path, a replacement worker"
                " would overwrite the job's file; give it an open file"
                ' (with open(PATH, "wb") as file), which is restored'
            )

    # --- phases ---

    def begin_phase(self, key: str, function: Callable[..., Any] | None) -> None:
        """Begin a phase of `function`, or of the session itself (None)."""
        if function is None:
            self.caches.settle()
            if key == CHECKPOINT:
                self._carry_late(self._late.all())
            return
        if not self._alone:
            self.files.end_between()
            self._lasting.check("the script, between phases,")
            self._carry_modes()
            self.caches.begin()
            self._carry_late(self._late.in_turn())
        known = key in self._roots.functions
        self._roots.begin_phase(key, function)
        if self._alone:
            return
        if known:
            if key not in self._expected:
                self._expected.add(key)
                reach = self._reach_of(key)
                self._expect(reach.late_names())
                if self._has_listed or not self._loops:
                    self._watch_late(reach)
            return
        reach = self._reach_of(key)
        for path, in_place in candidates(reach):
            self.carried.add(path, in_place=in_place)
        self._phases[key], self._changed[key] = reach.spots, {}
        self.carried.restore_pending(key)

    def complete_phase(self, key: str) -> None:
        """Record a complete phase of `key`; refuse loaders whose processes it left running."""
        if not self._alone:
            if key in self._roots.functions:  # else the files are those of the code between phases
                self.files.end_attempt(key.partition(":")[0])
            self._lasting.check(key.partition(":")[0])
            self.caches.end()

    def remove_cache_entries(self) -> None:
        """Remove the cache entries of a refused attempt that is not compared with others."""
        for name in self.caches.remove_entries():
            path = self._containers[name]
            with suppress(PathGone):
                if written(self._roots.read(path)) is not None:
                    self.carried.add(path, in_place=True)
                    self.caches.forget(name)

    def check_reopened(self) -> None:
        """Refuse values that changed late, since another process may be at a rank in the generation
        that was opened."""
        for path, value in self._uncarried(self._late.all()):
            self.refuse(f"the script has changed {described(path, value)}, after its first steps")

    def _watch_late(self, reach: ReachableValues) -> None:
        watched = [
            (path, spot)
            for path, spot in reach.spots.items()
            if len(path) > 1 and not spot.is_protected and path not in self.carried
        ]
        self._late.add(watched, self._protected(), {*self._containers.values()})

    def _carry_late(self, changed: Iterable[tuple[Path, Any]]) -> None:
        """Carry values that have changed for the first time, or refuse them."""
        for path, value in self._uncarried(changed):
            if written(value) is None:
                self.refuse(f"the script changes {described(path, value)}, after its first steps")
            else:
                self.carried.add(path, in_place=True)

    def _uncarried(self, values: Iterable[tuple[Path, Any]]) -> Iterator[tuple[Path, Any]]:
        """Leave out what is carried by another path, and what is no longer at its own."""
        for path, value in values:
            if not any(value is carried for carried in self.carried.values()):
                with suppress(PathGone):
                    if self._roots.read(path) is value:
                        yield path, value

    def _expect(self, paths: Iterable[Path]) -> None:
        """Carry names that are still unbound, from when they are bound."""
        for path in paths:
            if path not in self.carried:
                self.carried.expect(path)

    def end_rehearsal(self, key: str) -> bool:
        """Carry the unprotected values that a refused and undone attempt has changed; return
        whether any were added. Raises PhaseError for one that changed twice and cannot be."""
        before = self._phases.get(key)
        if before is None:
            return False
        self.files.end_attempt(key.partition(":")[0])
        more = self.caches.renew()
        now = (reach := self._reach_of(key)).spots
        self._objects.check(key, before, now)
        for path, old in before.items():
            new = now.get(path)
            if new is None or new.look == old.look or path in self.carried:
                continue
            if old.is_plain and new.is_plain:
                self.carried.add(path, in_place=old.value is new.value)
                self.carried.put(path, old.saved)
                now[path], more = old, True
                continue
            self._changed[key][path] = self._changed[key].get(path, 0) + 1
            if self._changed[key][path] == _CHANGED_TWICE:
                self.refuse(f"{key.partition(':')[0]} changes {described(path, old.value)}")
        for path in [path for path in now if is_first_bound(path, before, now)]:
            if path not in self.carried:
                self.carried.unbind(path)
                del now[path]
                more = True
        self._check_opaque(reach, f"{key.partition(':')[0]} can take values from")
        self._phases[key] = now
        return more

    def _reach_of(self, key: str) -> ReachableValues:
        reach = ReachableValues(self._protected())
        reach.add((("phase", key),), self._roots.functions[key])
        reach.walk()
        self._watch_caches(reach)
        return reach

    def _watch_caches(self, reach: ReachableValues) -> None:
        self._constants |= reach.constants
        if not self._alone:
            self.files.watch(reach.codes)
        self.caches.add(reach.caches.items())
        for path, container in large_containers(reach):
            if path not in self.carried:
                self._containers[text(path)] = path
                self._lengths.setdefault(text(path), len(container))
                self.caches.add([(text(path), container)])

    def _check_opaque(self, reach: ReachableValues, what: str) -> None:
        taken_from = reach.taken_from()
        for path, spot in reach.spots.items():
            is_source = isinstance(spot.value, QUEUES) and path[-1][1] in taken_from
            if (is_source or is_opaque(spot.value)) and len(path) > 1:
                kind = type(spot.value).__name__
                place = f"{text(path)}, a {kind} whose position cannot be read"
                self.refuse(f"{what} {place}", DRAWS)

    # --- the loop ---

    def at_epoch(self) -> None:
        """Check the loop over epochs before its first one."""
        if not self._alone:
            self.check_header(self.refuse, "epochs")
            self._heads = {frame.f_code: frame.f_lasti for frame in own_frames()}

    def at_top(self) -> None:
        """Check the loop's values before its body begins with a new batch."""
        if self._alone:
            return
        if self._loops is None:
            self._lasting.accept()
            self._loops = [TrainingLoop(frame, self._heads) for frame in own_frames()]
            self.check_header(self.refuse, "batches")
        self._carry_modes()
        for path, new in self._watch.changes(self._protected):
            self.refuse(f"the training loop binds {text(path)} to another {type(new).__name__}")
        for loop in (each for each in self._loops if each.looks < LOOKS_AT_LOOP):
            self._look_at(loop)
        self._follow_growth()
        if self._loops and self._loops[0].looks == LOOKS_AT_LOOP and not self._has_listed:
            self._has_listed = True
            if names := sorted(text(path) for path in self.carried.paths):
                listed = ", ".join(names[:LISTED_MAX]) + (", ..." if names[LISTED_MAX:] else "")
                self._note(f"carried variables of the script: {listed}", warning=False)

    def _follow_growth(self) -> None:
        """Carry plain values that dicts of other values have got since the last round, and the
        attributes of objects that a `defaultdict` has made, as a successor's. Refuse others."""
        for name, path in self._containers.items():
            container = None
            with suppress(PathGone):
                container = self._roots.read(path)
            if path in self.carried or not isinstance(container, GROWING):
                continue
            before, self._lengths[name] = self._lengths[name], len(container)
            has_factory = bool(getattr(container, "default_factory", None))
            grown = len(container) - before
            is_mixed = grown > 0 and len(container) <= ITEMS_MAX and written(container) is None
            for key, value in newest_items(container, grown):
                place: Path = (*path, ("key", key))
                is_named = isinstance(container, dict) and isinstance(key, (str, int))
                is_plain = is_mixed and written(value) is not None  # else it may be a cache
                if is_plain and is_named:
                    self.carried.add(place, in_place=False)
                    continue
                is_own = is_own_class(type(value)) and id(value) not in self._protected()
                if is_plain or (is_own and not (has_factory and is_named)):
                    self.refuse(f"the script adds {text(place)} ({type(value).__name__})")
                elif is_own:
                    reach = ReachableValues(self._protected())
                    reach.add(place, value)
                    reach.walk()
                    for inner, spot in reach.spots.items():
                        is_inner = inner[:-1] == place and inner[-1][1] != "__class__"
                        if is_inner and spot.is_carriable:
                            self.carried.add(inner, in_place=False)

    def _look_at(self, loop: TrainingLoop) -> None:
        reach = loop.reach(self._protected())
        self._watch_caches(reach)
        for path, in_place in [*candidates(reach), *loop.rebound(reach)]:
            self.carried.add(path, in_place=in_place)
        if any("add_param_group" in each.names.attributes for each in reach.codes):
            self._tell_once(
                f"the training loop can call add_param_group, and the run will end there: {GROUPS}"
            )
        for path, old, new in loop.changes(reach.spots):
            if path in self.carried:
                continue
            if old.is_carriable and new.is_carriable:
                self.carried.add(path, in_place=old.value is new.value)
            elif loop.count(path) == _CHANGED_TWICE:
                self.refuse(f"the training loop changes {described(path, old.value)}")
        self._check_opaque(reach, "the training loop can take values from")
        if loop.looks == LOOKS_AT_LOOP:
            self._watch.add(reach, loop)
            self._expect(reach.late_names() | loop.late_names())
            self._watch_late(reach)
        is_last = loop in (self._loops or ())[:1] and loop.looks == LOOKS_AT_LOOP
        if is_last and (name := loop.reads_gradients(self._phase_codes())):
            self.refuse(
                f"between phases {name} reads .grad, which a replacement worker does not have",
                "read gradients in the phase that computes them, and return or report the result",
            )

    def _carry_modes(self) -> None:
        """Carry the process modes that the script has changed since its first step."""
        modes = {"torch": TORCH_MODES.snapshot(), "environment": ENVIRONMENT.snapshot()}
        self._modes = self._modes or modes
        for kind, before in self._modes.items():
            if modes[kind] == before:
                continue
            for name in before.keys() | modes[kind].keys():
                path: Path = (("process", kind), ("key", name))
                is_same = modes[kind].get(name) == before.get(name)
                is_named = kind == "torch" or name in self._constants
                if is_named and not is_same and path not in self.carried:
                    self.carried.add(path, in_place=False)

    def _phase_codes(self) -> set[types.CodeType]:
        functions = map(unwrapped, self._roots.functions.values())
        return {each.__code__ for each in functions if isinstance(each, types.FunctionType)}

    def codes_of(self, key: str) -> list[types.CodeType]:
        """Return the script's code that a phase of `key` can run."""
        return [each.code for each in self._reach_of(key).codes]

    def writes_unversioned(self, key: str, tree: ProtectedModules) -> bool:
        """Return whether a phase of `key` can write weights past torch's version counters.

        Computed once, after the function's first run, when all names that it uses are bound.
        """
        if key not in self._unversioned and not self._alone and key in self._roots.functions:
            self._unversioned[key] = can_write_unversioned(self._reach_of(key), tree.parts)
        return self._unversioned.get(key, False)

    # --- differences and refusals ---

    def differs(self, key: str, found: RepetitionDifference, *, zeroed: bool = False) -> None:
        """Refuse or report a difference between two attempts from the same state. `zeroed`: only
        gradients of earlier phases differed, which were zero in the second attempt."""
        changed = [*self.caches.grown(), *map(text, self._changed.get(key, ()))]
        name, others = key.partition(":")[0], "".join(f", {each}" for each in changed)
        if found.is_rounding:
            self._tell_once(
                f"{name} {found.what} in a second attempt from the same state, within rounding: its"
                " kernels are not deterministic, and no two runs are bit-identical"
                " (torch.use_deterministic_algorithms(True) names them)"
            )
            return
        if zeroed:
            self.refuse(
                f"{name} {found.what} when gradients left by an earlier phase were zero, as in a"
                " second attempt",
                "keep what a later phase needs of them in session.state or in a buffer, and clear"
                " gradients before the function computes others (optimizer.zero_grad())",
            )
            return
        self.refuse(
            f"{name} {found.what} in a second attempt from the same state, on this rank or on one"
            " that it reduces with: it reads or writes unprotected state (a clock, a file, a"
            f" generator of its own{others}), or an operation is not deterministic"
            " (torch.use_deterministic_algorithms(True) names it)",
            "pass everything that the step reads through session.protect(...), session.state or"
            " its arguments",
        )
