"""Rules for collectives of scripts: inside a phase, and not after its vote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outlast.errors import PhaseError


class CollectiveRules:
    """Rules of the current phase, checked before every collective."""

    def __init__(self) -> None:
        self._started = False
        self._inside = False
        self._sealed = False

    def start(self) -> None:
        """Restrict collectives to phases from now on."""
        self._started = True

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Allow collectives until the phase's vote."""
        if self._inside:
            raise PhaseError("a phase was begun inside a phase; session.run does not nest")
        self._inside, self._sealed = True, False
        try:
            yield
        finally:
            self._inside = self._sealed = False

    def seal(self) -> None:
        """Refuse further collectives of this phase."""
        self._sealed = self._inside

    def check(self, op: str) -> None:
        """Check that `op` is allowed here. Raises PhaseError."""
        if self._sealed:
            raise PhaseError(
                f"{op} after the vote of this phase (after optimizer.step): a rank that is lost now"
                " would leave the others waiting in it; move it before the step or into the next"
                " session.run. Where two optimizers step in turn, with a backward between them (a"
                " GAN), each is a phase: session.run(train_discriminator, batch), then"
                " session.run(train_generator, batch), or both are one, by"
                " session.run_with_undo(train_step, batch), which copies the state first"
            )
        if self._started and not self._inside:
            raise PhaseError(
                f"{op} outside a phase: only what runs inside session.run can be redone when a"
                " worker is lost; call it through session.run(...)"
            )
