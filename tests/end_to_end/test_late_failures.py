"""Loss of a rank after destroy_process_group."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner, faults_told

from outlast import events

pytestmark = pytest.mark.process
TAIL = Path(__file__).with_name("jobs") / "destroyed_groups_job.py"


@pytest.mark.long
def test_a_rank_lost_behind_destroy_process_group_is_replaced(runner: Runner) -> None:
    outcome = runner.run("--spares=1", script=TAIL)
    assert outcome.code == 0, outcome.output
    assert faults_told(outcome) == {("killed", 2)}
    # Healed at the first attempt: nobody waited for addresses that nobody published.
    opened = [e.generation for e in outcome.events if isinstance(e, events.GenerationOpened)]
    assert opened == [1, 2]
    first, *others = outcome.ranks
    assert others == [first] * 3
