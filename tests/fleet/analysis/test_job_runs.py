"""Job runs: waiting time, node time and cause of the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.job_attempts import attempt, failed, of

from outlast.errors import UsageError
from outlast.fleet.analysis.job_runs import attempts_of_runs, job_runs, node_fails, size_bucket


def test_attempts_of_one_id_are_one_run() -> None:
    broken = of(
        attempt("7", 2, 10, eligible_h=1, state="NODE_FAIL"),
        attempt("7", 11, 30, eligible_h=10, attempt=1),
        attempt("8", 0, 5),
    )
    first, second = job_runs(broken, node_fails(broken)).sort("job").iter_rows(named=True)
    assert (first["attempts"], first["interruptions"], first["infra"]) == (2, 1, 1)
    assert (first["wait_s"], first["scheduled_s"]) == (2 * 3600, 27 * 3600)
    assert (second["attempts"], second["interruptions"], second["infra"]) == (1, 0, 0)


def test_queue_wait_begins_at_the_end_of_the_previous_attempt() -> None:
    """A scheduler that keeps the first eligible time does not count running as waiting."""
    kept = of(
        attempt("7", 0, 10, eligible_h=0, state="NODE_FAIL"),
        attempt("7", 11, 30, eligible_h=0, attempt=1),
    )
    assert job_runs(kept, node_fails(kept))["wait_s"].to_list() == [3600]


def test_a_job_that_never_started_waited_until_its_cancellation() -> None:
    given_up = of(attempt("7", None, 4, eligible_h=1, state="CANCELLED"))
    (run,) = job_runs(given_up, failed()).iter_rows(named=True)
    assert (run["scheduled_s"], run["wait_s"]) == (0, 3 * 3600)


def test_an_end_before_the_start_is_no_time() -> None:
    strange = of(attempt("7", 5, 3), attempt("8", 3, 4, eligible_h=6))
    found = job_runs(strange, failed()).sort("job")
    assert found["scheduled_s"].to_list() == [0, 3600]
    assert found["wait_s"].to_list() == [0, 0]


def test_hidden_attempts_are_counted() -> None:
    """Without --duplicates only the last record of a requeued job is there."""
    hidden = of(attempt("7", 0, 5, restarts=3), attempt("8", 0, 5), attempt("8", 6, 9, attempt=1,
                restarts=1))  # fmt: skip
    assert job_runs(hidden, failed()).sort("job")["hidden"].to_list() == [3, 0]


def test_another_id_goes_on_where_infrastructure_ended_the_first() -> None:
    again = of(
        attempt("7", 0, 10, state="NODE_FAIL"),
        attempt("8", 10.5, 20, eligible_h=10.25, state="FAILED"),
        attempt("9", 20.1, 30),  # after a failure of its own: another run
        attempt("10", 10.6, 12, eligible_h=10.3),  # 7 is gone on with already
        attempt("11", 10.6, 12, eligible_h=10.1, user="other"),
        attempt("12", 10.6, 12, eligible_h=10.1, gpus=16),
    )
    apart = job_runs(again, node_fails(again))
    joined = attempts_of_runs(again, node_fails(again), across_s=3600)
    assert len(apart) == 6
    together = [
        sorted(each["job"].to_list()) for _, each in joined.group_by("run") if len(each) > 1
    ]
    assert together == [["7", "8"]]
    assert joined["run"].n_unique() == 5


def test_chains_of_ids_are_one_run() -> None:
    links = 9
    chain = of(*(attempt(str(n), n, n + 0.9, state="NODE_FAIL") for n in range(links)))
    (run,) = job_runs(chain, node_fails(chain), across_s=3600).iter_rows(named=True)
    assert (run["job"], run["attempts"], run["interruptions"]) == ("0", links, links - 1)


def test_too_late_is_another_run() -> None:
    late = of(attempt("7", 0, 10, state="NODE_FAIL"), attempt("8", 12, 20))
    assert len(job_runs(late, node_fails(late), across_s=3600)) == 2
    assert len(job_runs(late, node_fails(late), across_s=2 * 3600)) == 1


def test_clusters_have_ids_of_their_own() -> None:
    two = of(attempt("7", 0, 1), attempt("7", 2, 3, cluster="d"))
    assert len(job_runs(two, failed())) == 2


def test_nothing_gives_nothing() -> None:
    empty = of()
    assert len(job_runs(empty, node_fails(empty))) == 0
    assert len(job_runs(empty, node_fails(empty), across_s=60)) == 0


def test_impossible_gaps_are_refused() -> None:
    with pytest.raises(UsageError, match="across_s"):
        job_runs(of(), failed(), across_s=float("nan"))


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["1", "2", "3"]), st.integers(0, 9), st.integers(-1, 9), st.booleans()
        ),
        max_size=12,
    ),
    st.sampled_from([None, 0.0, 3600.0]),
)
def test_every_attempt_is_in_one_run(
    rows: list[tuple[str, int, int, bool]], across_s: float | None
) -> None:
    """Whatever the times: nothing is lost, nothing twice, and no time is negative."""
    made, numbers = [], dict.fromkeys("123", 0)
    for job, start, took, broke in rows:
        state = "NODE_FAIL" if broke else "COMPLETED"
        made.append(attempt(job, start, start + took, attempt=numbers[job], state=state))
        numbers[job] += 1
    some = of(*made)
    found = attempts_of_runs(some, node_fails(some), across_s=across_s)
    assert sorted(found.select("job", "attempt").iter_rows()) == sorted(
        (one.job, one.attempt) for one in made
    )
    assert (found["wait_s"] >= 0).all() and (found["runtime_s"] >= 0).all()
    runs = job_runs(some, node_fails(some), across_s=across_s)
    assert runs["attempts"].sum() == len(made)
    assert (runs["interruptions"] == runs["attempts"] - 1).all()
    assert len(runs) <= len({one.job for one in made})
    assert found["last"].sum() == len(runs)


def test_buckets_are_powers_of_two() -> None:
    sizes = [0, 1, 2, 3, 8, 9, 1024, 1025, 2**20]
    jobs = of(*(attempt(str(n), 0, 1, gpus=n) for n in sizes)).jobs
    found = jobs.select(size_bucket()).collect()["bucket"].to_list()
    assert found == [0, 1, 2, 4, 8, 16, 1024, 2048, 2**20]
