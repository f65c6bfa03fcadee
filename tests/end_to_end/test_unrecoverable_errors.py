"""Unrecoverable errors: the run ends with one stated cause, without retries."""

from __future__ import annotations

import pytest
from tests.end_to_end.conftest import Runner

pytestmark = pytest.mark.process

BUGS = {
    "import": (1, "flux_capacitor"),
    "protect twice": (1, "twice"),
    "typo": (1, "moedl"),
    "model": (1, "model"),
    "collective outside": (1, "outside"),
    "collective after": (1, "after"),
    "random after": (1, "random"),
    "exit early": (1, "exit"),
    "crash at the end": (1, "cannot write the final model"),
}

OF_TWO = {"model", "exit early", "crash at the end"}  # what one rank does and the other does not


QUICK = {"model"}


@pytest.mark.parametrize(
    ("bug", "expected"),
    [
        pytest.param(*item, id=item[0], marks=[] if item[0] in QUICK else [pytest.mark.extended])
        for item in BUGS.items()
    ],
)
def test_a_bug_stops_the_run_with_its_cause(
    runner: Runner, bug: str, expected: tuple[int, str]
) -> None:
    ranks = 2 if bug in OF_TWO else 1
    outcome = runner.run(f"--nproc-per-node={ranks}", job=("--bug", bug))
    code, words = expected
    assert outcome.code == code, outcome.output
    framed = outcome.output[max(0, outcome.output.rindex("-" * 40) - 6000) :]
    assert words in framed
    assert outcome.summary["outcome"] == "user_error"
