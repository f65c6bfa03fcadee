"""What a log without `--duplicates` hides: all records of a job but the last."""

from __future__ import annotations

import polars as pl

AGAIN = ("NODE_FAIL", "PREEMPTED", "REQUEUED")  # ends that a requeued job has had before
ENOUGH = 1000  # jobs after which it would be strange that none was requeued


class Hidden:
    """Watches the records of a log go by. Keeps those alone that tell of a requeue."""

    def __init__(self) -> None:
        self.jobs = 0
        self._twice = False
        self._counts = False
        self._kept: list[pl.DataFrame] = []

    def see(self, jobs: pl.DataFrame, restarts_known: bool) -> None:
        self.jobs += jobs.height
        self._counts |= restarts_known
        self._twice = self._twice or bool((jobs["attempt"] > 0).any())
        told = (pl.col("restarts") > 0) | pl.col("state").cast(pl.String).is_in(AGAIN)
        job = pl.struct("cluster", "job").hash().alias("job")
        self._kept.append(jobs.lazy().filter(told).select(job, "restarts").collect())

    def notes(self) -> list[str]:
        """What is hidden, in words; nothing if nothing shows that something is."""
        if not self._kept:
            return []
        seen = (
            pl.concat(self._kept).group_by("job").agg(pl.len().alias("n"), pl.col("restarts").max())
        )
        missing = (
            seen.filter(pl.col("restarts") > 0)
            .select((pl.col("restarts") + 1 - pl.col("n")).clip(lower_bound=0).sum())
            .item()
        )
        if missing and not self._twice:
            return [
                f"sacct ran without --duplicates: {missing:,} earlier attempts of jobs that were"
                " requeued are hidden, and with them every NODE_FAIL that was requeued"
            ]
        if missing:
            return [
                f"{missing:,} earlier attempts of jobs that were requeued are not in this log"
                " (Restarts counts them): they ended before it begins, or it was cut"
            ]
        if self.jobs >= ENOUGH and not self._twice and not self._counts:
            return [
                f"none of {self.jobs:,} jobs has two records: sacct ran without --duplicates, it"
                " seems, and then every NODE_FAIL that was requeued is hidden"
            ]
        return []
