"""State that differs by rank: found by votes, and carried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from outlast.checkpoint.format import codec
from outlast.errors import PhaseError
from outlast.transport.worker_page import Page
from outlast.worker.state import rank_local_state
from outlast.worker.state.audited_state import collect, digest_names
from outlast.worker.state.protected_state import ProtectedState

PLACE = "1 step train"


def built(rate: float = 1e-3) -> ProtectedState:
    """A model, and a module whose buffer has changed behind the first vote."""
    torch.manual_seed(0)
    model, metric = nn.Linear(4, 2), nn.Module()
    metric.register_buffer("total", torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    held = ProtectedState(
        {"model": model, "metric": metric, "optimizer": optimizer, "scheduler": scheduler}, {}
    )
    model(torch.ones(1, 4)).sum().backward()
    held.buffers.mark_vote()
    optimizer.step()
    total(held).add_(1)
    held.completed("train")
    held.local.completed("train", has_changed_buffers=False)
    return held


def total(held: ProtectedState) -> torch.Tensor:
    return held.buffers.named()["metric.total"]


def ballots(ranks: list[ProtectedState]) -> list[str]:
    for held in ranks:
        held.own_state(held.own_choices())
    return [held.local.ballot() for held in ranks]


def dispute(ranks: list[ProtectedState], sets: list[bytes] | None = None) -> list[str]:
    """All ranks find out at once why their ballots differ. What each tells."""
    meeting, answers = threading.Barrier(len(ranks), timeout=20), [b""] * len(ranks)
    told = [""] * len(ranks)

    def one(rank: int) -> None:
        def exchange(mine: bytes) -> list[bytes]:
            answers[rank] = mine
            meeting.wait()
            return list(answers)

        replicas = sets[rank] if sets else b"all"
        told_here: list[str] = []
        ranks[rank].local.dispute(PLACE, replicas, exchange, told_here.append)
        told[rank] = " ".join(told_here)

    with ThreadPoolExecutor(len(ranks)) as threads:
        for done in [threads.submit(one, rank) for rank in range(len(ranks))]:
            done.result()
    return told


def test_equal_ranks_have_equal_ballots_and_write_their_slots_before_votes() -> None:
    ranks = [built(), built()]
    assert len(set(ballots(ranks))) == 1
    assert all(held.local.must_wait("train") for held in ranks)  # nobody has compared it
    for held in ranks:
        held.local.note_open_state("closed")
        held.local.completed("closed", has_changed_buffers=False)
        held.local.won()
    assert not any(held.local.must_wait("closed") for held in ranks)
    assert all(held.local.must_wait("another") for held in ranks)


def add_to_total(held: ProtectedState) -> None:
    total(held).add_(1)


def step_on_metric(held: ProtectedState) -> None:
    held.schedules["scheduler"].step(0.1)  # type: ignore[attr-defined]


def step_on_count(held: ProtectedState) -> None:
    held.schedules["cosine"].step()  # type: ignore[attr-defined]


def count_average(held: ProtectedState) -> None:
    held.modules["average"].update_parameters(held.modules["model"])  # type: ignore[operator]


def set_rate(held: ProtectedState) -> None:
    held.optimizers["free"].param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("change", "is_open"),
    [
        (add_to_total, True),
        (step_on_metric, True),
        (set_rate, True),
        (step_on_count, False),
        (count_average, False),
    ],
)
def test_a_function_waits_where_ranks_may_begin_to_differ_after_its_vote(
    change: Callable[[ProtectedState], None], *, is_open: bool
) -> None:
    first = built()
    model = first.modules["model"]
    free = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    extra = nn.ParameterList(free.param_groups[0]["params"])
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(first.optimizers["optimizer"], T_max=9)
    average = torch.optim.swa_utils.AveragedModel(model)
    named = {**first.modules, **first.optimizers, **first.schedules}
    named |= {"extra": extra, "free": free, "cosine": cosine, "average": average}
    held = ProtectedState(named, {})
    free.step()
    first.optimizers["optimizer"].step()
    for phase in range(2):
        held.local.note_open_state("train")
        held.buffers.mark_vote()
        if phase:
            change(held)
        held.completed("train")
        held.own_state(held.own_choices())
        held.local.completed("train", has_changed_buffers=False)
        held.local.won()
        assert held.local.must_wait("train") == (is_open and phase == 1)
    successor = ProtectedState(named, {})
    successor.local.restore(codec.decode(held.own_state(held.own_choices()))["local"], keep=False)
    assert successor.local.must_wait("train") == is_open


def test_a_buffer_that_differs_behind_the_vote_is_each_ranks_own() -> None:
    ranks = [built(), built()]
    total(ranks[1]).add_(5)
    assert len(set(ballots(ranks))) == 2
    assert all("buffers that change after optimizer.step" in told for told in dispute(ranks))
    assert len(set(ballots(ranks))) == 1
    for held in ranks:
        held.local.won()
        assert held.local.differing == {"buffers"}
        assert held.local.must_wait("train")


def test_a_successor_has_the_lost_ranks_buffers_and_schedulers_and_not_a_donors() -> None:
    donor, lost, successor = built(), built(), built()
    total(lost).add_(5)
    lost.schedules["scheduler"].best = 0.25  # type: ignore[attr-defined]
    ballots([donor, lost])
    dispute([donor, lost])
    slot = lost.own_state(lost.own_choices())
    given = codec.decode(codec.encode(donor.replicated()))
    successor.adopt(given)
    successor.restore_own(slot, keep=True)
    successor.adopt(given)  # once more, when the walk is over
    assert torch.equal(total(successor), total(lost))
    assert successor.schedules["scheduler"].best == 0.25  # type: ignore[attr-defined]
    assert successor.local.differing == {"buffers", "schedulers"}
    assert successor.local.has_replicas


def test_a_slot_from_before_the_vote_leaves_equal_state_to_the_donor() -> None:
    donor, lost, successor = built(), built(), built()
    slot = lost.own_state(lost.own_choices(), whole=False)
    total(donor).add_(1)  # the phase went on there
    successor.adopt(codec.decode(codec.encode(donor.replicated())))
    successor.restore_own(slot, keep=True)
    assert torch.equal(total(successor), total(donor))


def test_where_rates_differ_a_rank_carries_all_of_its_state() -> None:
    donor, lost, successor = built(), built(rate=5e-4), built()
    ballots([donor, lost])
    assert all("all weights" in told for told in dispute([donor, lost]))
    with torch.no_grad():
        next(lost.modules["model"].parameters()).add_(1)
    slot = lost.own_state(lost.own_choices())
    given = codec.decode(codec.encode(donor.replicated()))
    successor.restore_own(slot, keep=True)
    successor.adopt(given)
    assert codec.encode(successor.replicated()) == codec.encode(lost.replicated())
    names = digest_names(collect(successor))
    assert names["parameters"] == names["optimizers"] == {}  # no rank is another's replica


def test_weights_that_differ_and_do_not_fit_a_slot_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_local_state, "EVERYTHING_BYTES_MAX", 100)
    ranks = [built(), built(rate=5e-4)]
    ballots(ranks)
    with pytest.raises(PhaseError, match=r"learning rates.*does not fit its slot of 100"):
        dispute(ranks)


def test_where_stages_of_a_pipeline_differ_audits_compare_what_votes_cannot() -> None:
    """Each of two stages has two replicas, and a learning rate of its own."""
    ranks = [built(), built(), built(rate=2e-3), built(rate=2e-3)]
    assert len(set(ballots(ranks))) == 2
    assert dispute(ranks, [b"first", b"first", b"last", b"last"]) == [""] * 4
    assert len(set(ballots(ranks))) == 1
    assert not any(held.local.differing for held in ranks)
    ranks[3].optimizers["optimizer"].param_groups[0]["lr"] = 3e-3
    a, b = (digest_names(collect(held))["optimizers"] for held in ranks[2:])
    assert [name for name in a if a[name] != b[name]] == ["optimizer.param_groups.0.lr"]


def test_a_successor_that_knows_less_learns_it_at_its_first_vote() -> None:
    ranks = [built(), built()]
    total(ranks[1]).add_(5)
    ballots(ranks)
    dispute(ranks)
    ranks[0] = built()
    assert len(set(ballots(ranks))) == 2
    dispute(ranks)
    assert len(set(ballots(ranks))) == 1
    assert ranks[0].local.differing == {"buffers"}


def test_a_slot_that_will_not_come_true_is_taken_away() -> None:
    page = Page.create(slot_bytes=4096)
    for n in (1, 2, 2):
        page.put("after", n, b"x")
    page.put("before", 2, b"y")
    page.drop("after", 2)
    assert page.slots() == {"after:1": b"x", "before:2": b"y"}
    page.put("after", 2, b"z")
    assert page.slots()["after:2"] == b"z"
    page.close()
