"""A worker's phase durations, also of very short phases, and the fate of its attempt."""

from __future__ import annotations

import threading
import time

import pytest

from outlast.errors import GroupError
from outlast.transport import messages
from outlast.transport.worker_page import KEYS, WARM_PHASES, Page, State
from outlast.worker import worker_status
from outlast.worker.worker_status import WorkerStatus

SMALL = 4096


@pytest.fixture
def page():
    made = Page.create(SMALL)
    yield made
    made.close()


@pytest.fixture
def moment(page: Page) -> WorkerStatus:
    made = WorkerStatus(page, lambda _body: None, lambda _generation: None)
    made.generation = made.opened = 1
    return made


def phase(moment: WorkerStatus, name: str, work: int = 0) -> None:
    moment.enter_attempt("running", name)
    sum(range(work))
    moment.enter_attempt("voting")
    moment.enter("applying")
    moment.completed(step=moment.step + 1, result=b"", shared=False)


def test_phases_shorter_than_the_polling_interval_are_measured(
    moment: WorkerStatus, page: Page
) -> None:
    for _ in range(WARM_PHASES):
        phase(moment, "step train", work=3_000_000)
    step = page.read().key
    assert page.paces() == {step: (WARM_PHASES, 0)}
    for _ in range(50):
        phase(moment, "step train")
    (pace,) = page.paces().values()
    assert pace.phases == WARM_PHASES + 50 and 0 < pace.slowest_ns < 10**9


def test_each_kind_of_phase_has_its_own(moment: WorkerStatus, page: Page) -> None:
    for _ in range(5):
        phase(moment, "step train")
    step = page.read().key
    moment.enter_attempt("running", "eval evaluate")
    evaluation = page.read().key
    assert evaluation != step
    before = page.paces()
    assert evaluation not in before  # the first one: the watch knows nothing yet
    phase(moment, "eval evaluate", work=1_000_000)
    assert page.paces() == {**before, evaluation: (1, 0)}
    moment.enter_attempt("checkpoint", "checkpoint")
    moment.completed(step=6, result=b"", shared=True)
    assert page.paces()[step] == before[step] and len(page.paces()) == 3


def test_a_try_that_was_put_back_is_not_measured(moment: WorkerStatus, page: Page) -> None:
    for _ in range(WARM_PHASES):
        phase(moment, "step train")
    moment.enter_attempt("running", "step train")
    sum(range(5_000_000))
    moment.enter("idle")  # refused
    phase(moment, "step train")
    begun_ns = page.read().t_ns
    sum(range(5_000_000))
    moment.enter("healing")
    waited_ns = page.read().t_ns - begun_ns
    assert 0 < page.paces()[page.read().key].slowest_ns < waited_ns / 2


def test_kinds_beyond_the_pages_room_are_never_known(moment: WorkerStatus, page: Page) -> None:
    for index in range(KEYS + 3):
        phase(moment, f"step {index}")
    assert len(page.paces()) == KEYS and page.read().key == 0
    phase(moment, "step 0")
    assert page.paces()[page.read().key].phases == 2


@pytest.mark.parametrize("state", ["healing", "setup"])
def test_a_rank_that_is_cut_around_its_first_connection_must_be_replaced(
    page: Page, state: str
) -> None:
    """Its set-up collectives fail next, and the script ends: it must not count as one to go on."""
    sent: list[messages.WorkerBody] = []
    status = WorkerStatus(page, sent.append, lambda _generation: None)
    status.generation = status.opened = 1
    status.is_before_setup = state == "healing"
    status.enter(state)
    status.close(messages.Close(generation=1, reason="rank 1 was lost"))
    (answer,) = sent
    assert isinstance(answer, messages.Status) and answer.state == "broken"


@pytest.mark.parametrize("state", ["idle", "running", "voting", "applying", "checkpoint"])
def test_only_an_attempt_before_its_vote_is_sure_to_be_refused(
    moment: WorkerStatus, state: State
) -> None:
    moment.enter_attempt("running", "step train")
    assert not moment.is_refused
    if state != "running":
        moment.enter(state)
    moment.close(messages.Close(generation=1, reason="a kill"))
    assert moment.is_refused == (state == "running")


def test_a_won_vote_waits_until_the_lease_is_renewed(moment: WorkerStatus, page: Page) -> None:
    moment.await_lease()  # without an end
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    page.put_lease(now_ns)
    waiting = threading.Thread(target=moment.await_lease)
    waiting.start()
    waiting.join(10 * worker_status.LEASE_LOOK_S)
    assert waiting.is_alive()
    page.put_lease(now_ns + (1 << 40))
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_vote_without_a_lease_is_not_applied(
    moment: WorkerStatus, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_status, "LEASE_WAIT_S", 0.02)
    page.put_lease(1)
    with pytest.raises(GroupError, match="no lease"):
        moment.await_lease()
