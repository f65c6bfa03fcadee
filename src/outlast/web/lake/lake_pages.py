"""Routes of a lake: its report with controls, its nodes, and its rates for the planner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import anyio
import polars as pl
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from outlast.errors import LakeError, OutlastError, UsageError
from outlast.fleet.analysis.fitted_rates import FittedRates, fit_rates
from outlast.fleet.report.report_sections import rate_headlines
from outlast.web.lake.lake_page import (
    render_first,
    render_lake,
    render_node,
    render_refusal,
    render_rest,
    render_section,
)
from outlast.web.lake.lake_query import NODE, LakeQuery, lake_texts, parse_lake_query
from outlast.web.lake.lake_reading import LakeAnswer, LakeReading
from outlast.web.lake.node_history import node_history
from outlast.web.planner_query import GPUS

Pairs = list[tuple[str, str]]
FAILURES = (OutlastError, OSError, pl.exceptions.PolarsError)  # of a lake that changes meanwhile


class LakePages:
    """Pages of a lake. A form holds the state of each, and the address holds the form's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reading = LakeReading(path)

    def routes(self) -> list[Route]:
        """Return the routes of the pages, and begin to read the lake."""
        threading.Thread(target=self._prepare, daemon=True).start()
        pages = {
            "/": self.page,
            "/report": self.report,
            "/node": self.node,
            "/rates": self.rates,
        }
        return [Route(path, _endpoint(respond)) for path, respond in pages.items()]

    def _prepare(self) -> None:
        with suppress(*FAILURES):  # the page names it
            self._reading.answer(self._reading.default(LakeQuery()))

    def page(self, pairs: Pairs) -> Response:
        """Serve the report with its form; refusals in it have status 400, 404 or 503."""
        texts: dict[str, str] = {}
        query = LakeQuery()
        try:
            texts = lake_texts(pairs)
            query = parse_lake_query(texts)
            chosen = self._reading.default(query)
            if chosen != query:
                return RedirectResponse(f"/?{chosen.encoded()}", 303)
            found = self._reading.answer(query)
        except FAILURES as error:
            before, after = render_lake(self.path, texts, query, self._reading.choices(query))
            return HTMLResponse(before + render_refusal(self._why(error)) + after, _status(error))
        before, after = render_lake(self.path, texts, query, self._reading.choices(query))

        def parts() -> Iterator[str]:
            yield before
            yield from self._parts(query, found)
            yield after

        return StreamingResponse(parts(), media_type="text/html")

    def report(self, pairs: Pairs) -> Response:
        """Serve the report alone, in parts as they are ready."""
        try:
            query = parse_lake_query(lake_texts(pairs))
            found = self._reading.answer(query)
        except FAILURES as error:
            return HTMLResponse(render_refusal(self._why(error)), _status(error))
        return StreamingResponse(self._parts(query, found), media_type="text/html")

    def _parts(self, query: LakeQuery, found: LakeAnswer) -> Iterator[str]:
        try:
            with self._reading.lock:
                heads = rate_headlines(found.facts)
            yield render_first(heads)
            for drawn in self._reading.sections(found):
                yield render_section(drawn.section, query.node_link)
            report = found.report
            assert report is not None
            command = query.command("report", self.path) + " --out report.html"
            yield render_rest(report, report.headlines[len(heads) :], command)
        except FAILURES as error:
            yield render_refusal(self._why(error))

    def node(self, pairs: Pairs) -> Response:
        """Serve the page of a node."""
        name, query = "", LakeQuery()
        try:
            texts = lake_texts(pairs)
            name = texts.get(NODE, "")
            query = parse_lake_query(texts)
            if not name:
                raise UsageError("the address has no node; give its name")
            found = self._reading.answer(query)
            with self._reading.lock:
                history = node_history(found.facts, name, found.cluster)
        except FAILURES as error:
            html = render_node(self.path, name, query, None, (0, 0), self._why(error))
            return HTMLResponse(html, _status(error))
        tables = found.facts.tables
        window_ns = (tables.since_ns, tables.until_ns)
        return HTMLResponse(render_node(self.path, name, query, history, window_ns))

    def rates(self, pairs: Pairs) -> Response:
        """Lead to the planner with the rates of the lake, as `outlast fleet fit` measures them."""
        try:
            query = parse_lake_query(lake_texts(pairs))
            found = self._reading.answer(query)
            with self._reading.lock:
                rates = fit_rates(found.facts.tables, above_gpus=query.above_gpus)
        except FAILURES as error:
            return self._refused(pairs, error)
        return RedirectResponse(f"/plan?{planner_query(rates)}", 303)

    def _refused(self, pairs: Pairs, error: Exception) -> Response:
        texts: dict[str, str] = {}
        with suppress(UsageError):
            texts = lake_texts(pairs)
        query = LakeQuery()
        before, after = render_lake(self.path, texts, query, self._reading.choices(query))
        return HTMLResponse(before + render_refusal(self._why(error)) + after, _status(error))

    def _why(self, error: Exception) -> str:
        if isinstance(error, OutlastError):
            return str(error)
        return f"{self.path} cannot be read: {error}; restore it, or read the logs again"


def _endpoint(respond: Callable[[Pairs], Response]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        pairs = request.query_params.multi_items()
        return await anyio.to_thread.run_sync(partial(respond, pairs))

    return endpoint


def _status(error: Exception) -> int:
    if isinstance(error, UsageError):
        return 400
    return 404 if isinstance(error, LakeError) else 503


def planner_query(rates: FittedRates) -> str:
    """Return the query of a planner's page with everything that a lake measured."""
    texts = {
        "gpus": str(int(GPUS) // rates.node_gpus * rates.node_gpus or rates.node_gpus),
        "failures": f"{1 / rates.rate.per_gpu_second:.6f}s",
        "failures-seen": f"{rates.rate.weight_failures!r}",
        **{key: str(value) for key, value in rates.scenario.items()},
    }
    return urlencode(texts)
