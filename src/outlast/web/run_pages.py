"""Pages of one run, or of all runs in a directory."""

from __future__ import annotations

import json
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from outlast.errors import CorruptionError, OutlastError, RunDirError, UsageError
from outlast.telemetry.event_store import DIRECTORY
from outlast.text_formatting import plural
from outlast.web.comparison.comparison_page import (
    ComparedRun,
    comparison_status,
    have_ended,
    render_comparison,
    render_comparison_parts,
)
from outlast.web.comparison.run_settings import RunSettings, read_settings
from outlast.web.planner_link import measured_query
from outlast.web.rank_log import RankLog
from outlast.web.run_content import REFRESH_S, RunContent, RunReading
from outlast.web.run_page import ZOOMED, render_index, render_page, render_parts, status

T = TypeVar("T")
RUNS_MAX = 1_000
SECONDS_MAX = 1e10  # of a run
VIEWERS_MAX = 200  # streams at once
NAME_MAX = 255
PAIRS_MAX = 8  # of runs, whose pages share their parts


def find_runs(path: Path) -> dict[str, Path]:
    """Return the runs of a directory by name: the directory itself, or those inside of it.

    Raises RunDirError where there is none.
    """
    if (path / DIRECTORY).is_dir():
        return {path.resolve().name: path}
    runs = {child.name: child for child in _folders(path) if (child / DIRECTORY).is_dir()}
    if not runs:
        raise RunDirError(
            f"{path} is no run directory and holds none; give the directory that `outlast run`"
            " printed at its start, or one above it"
        )
    return dict(sorted(runs.items())[:RUNS_MAX])


def _folders(path: Path) -> list[Path]:
    try:
        return [child for child in path.iterdir() if child.is_dir()]
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror or error}") from error


class LiveParts(NamedTuple):
    """Parts of a page as of now. `end`: last status, where nothing follows; "": more does."""

    parts: Mapping[str, str]
    status: str
    end: str


class RunPages:
    """Pages of one run, or of all runs in a directory, with an index of them."""

    def __init__(self, path: Path, price_per_hour: float = 0.0) -> None:
        self.path = path
        self._price_per_hour = price_per_hour
        self._runs = find_runs(path)
        self._is_single = (path / DIRECTORY).is_dir()
        self._readings: dict[str, RunReading] = {}
        self._rendered: dict[str, tuple[RunContent, Mapping[str, str]]] = {}
        self._compared: dict[tuple[str, ...], tuple[Sequence[object], Mapping[str, str]]] = {}
        self._viewers = 0

    def routes(self) -> list[Route]:
        """Return the routes of the pages."""
        return [
            Route("/", self.first),
            Route("/runs/{name}", self.page),
            Route("/runs/{name}/stream", self.stream),
            Route("/runs/{name}/window", self.window),
            Route("/runs/{name}/logs/{rank:int}", self.log),
            Route("/runs/{name}/logs/{rank:int}/follow", self.log),
            Route("/runs/{name}/predicted", self.predicted),
            Route("/runs/{name}/plan", self.plan),
            Route("/compare", self.compare),
            Route("/compare/stream", self.compare_stream),
        ]

    async def first(self, _request: Request) -> Response:
        """Serve the page of the only run, or the index."""
        if self._is_single:
            return await self._run(next(iter(self._runs)), "")
        self._runs = await anyio.to_thread.run_sync(find_runs, self.path)
        overviews = {}
        for name in self._runs:
            overviews[name] = await self._computed(name, RunReading.overview)
        return HTMLResponse(render_index(overviews, str(self.path)))

    async def page(self, request: Request) -> Response:
        """Serve the page of a run."""
        return await self._run(request.path_params["name"], "" if self._is_single else "/")

    async def _run(self, name: str, index: str) -> Response:
        if name not in self._runs:
            return PlainTextResponse("no such run", 404)
        content = await self._content(name)
        if isinstance(content, str):
            return PlainTextResponse(content, 503)
        where = f"/runs/{quote(name, safe='')}"
        stream = f"{where}/stream" if content.summary.exit_code is None else ""
        logs = f"{where}/logs/"
        plan = f"{where}/plan"
        html = render_page(
            content,
            name,
            stream=stream,
            index=index,
            logs=logs,
            plan=plan,
            where=where,
        )
        return HTMLResponse(html)

    async def window(self, request: Request) -> Response:
        """Serve the figures of a part of a run's time, as JSON of their parts of the page."""
        name = request.path_params["name"]
        if name not in self._runs:
            return PlainTextResponse("no such run", 404)
        begin_s, end_s = (_seconds(request.query_params.get(key, "")) for key in ("from", "to"))
        if begin_s is None or end_s is None:
            return PlainTextResponse("`from` and `to` are seconds since the run's begin", 400)

        def between(reading: RunReading) -> RunContent | None:
            return reading.window(begin_s, end_s)

        content = await self._computed(name, between)
        if isinstance(content, str):
            return PlainTextResponse(content, 503)
        return JSONResponse(render_parts(content, names=ZOOMED))

    async def plan(self, request: Request) -> Response:
        """Lead to the planner with the rates of a run."""
        name = request.path_params["name"]
        if name not in self._runs:
            return PlainTextResponse("no such run", 404)
        measure = partial(measured_query, self._runs[name], self._price_per_hour)
        try:
            query = await anyio.to_thread.run_sync(measure)
        except OutlastError as error:
            return PlainTextResponse(str(error), 503)
        return RedirectResponse(f"/plan?{query}", 303)

    async def compare(self, request: Request) -> Response:
        """Serve two runs side by side; a refusal has status 400 or 404."""
        try:
            names = await self._pair(request)
        except OutlastError as error:
            code = 404 if isinstance(error, RunDirError) else 400
            return HTMLResponse(render_comparison(self.path, [], str(error)), code)
        runs = []
        for name in names:
            content = await self._content(name)
            settings = await anyio.to_thread.run_sync(read_settings, self._runs[name])
            runs.append(ComparedRun(name, content, settings))
        stream = "" if have_ended(runs) else f"/compare/stream?{request.query_params}"
        render = partial(render_comparison, self.path, runs, stream=stream)
        is_unknown = all(isinstance(run.content, str) for run in runs)
        return HTMLResponse(await anyio.to_thread.run_sync(render), 503 if is_unknown else 200)

    async def _pair(self, request: Request) -> list[str]:
        """Return the names of two runs. Raises UsageError, RunDirError for an unknown one."""
        self._runs = await anyio.to_thread.run_sync(find_runs, self.path)
        _check_pair(request.query_params.multi_items())
        names = request.query_params.getlist("run")
        if unknown := [name for name in names if name not in self._runs]:
            raise RunDirError(f"there is no run {', '.join(unknown)} in {self.path}")
        return names

    async def compare_stream(self, request: Request) -> Response:
        """Send the parts of the page of two runs that have changed, until both have ended."""
        try:
            names = await self._pair(request)
        except OutlastError as error:
            return PlainTextResponse(str(error), 400)
        return self._streamed(partial(self._compared_parts, names))

    async def _compared_parts(self, names: Sequence[str]) -> LiveParts:
        contents = [await self._content(name) for name in names]
        unchanged = RunSettings({}, {}, ())  # of the newest launch: as of the page's loading
        runs = [ComparedRun(*pair, unchanged) for pair in zip(names, contents, strict=True)]
        known, parts = self._compared.get(tuple(names), ([], {}))
        if len(known) != len(contents) or any(map(operator.is_not, known, contents)):
            parts = await anyio.to_thread.run_sync(render_comparison_parts, runs)
            if len(self._compared) >= PAIRS_MAX:
                self._compared.clear()
            self._compared[tuple(names)] = contents, parts
        return LiveParts(parts, comparison_status(runs), "both have ended" * have_ended(runs))

    async def _content(self, name: str) -> RunContent | str:
        return await self._computed(name, RunReading.refresh)

    async def _computed(self, name: str, compute: Callable[[RunReading], T | None]) -> T | str:
        """Return the content or the overview of a run, or why there is none."""
        reading = self._readings.setdefault(
            name, RunReading(self._runs[name], self._price_per_hour)
        )
        try:
            found = await anyio.to_thread.run_sync(compute, reading)
        except OutlastError as error:
            return str(error)
        return found or f"{name} has written no events yet"

    async def stream(self, request: Request) -> Response:
        """Send the parts of a page that have changed, until the run has ended."""
        name = request.path_params["name"]
        if name not in self._runs:
            return PlainTextResponse("no such run", 404)
        return self._streamed(partial(self._run_parts, name))

    async def _run_parts(self, name: str) -> LiveParts:
        content = await self._content(name)
        if isinstance(content, str):
            return LiveParts({}, content, "")
        has_ended = content.summary.exit_code is not None
        end = f"ended, {content.events:,} events" if has_ended else ""
        return LiveParts(self._parts(name, content), status(content), end)

    def _streamed(self, look: Callable[[], Awaitable[LiveParts]]) -> Response:
        if self._viewers >= VIEWERS_MAX:
            return PlainTextResponse(f"{VIEWERS_MAX} pages are open already", 503)
        return StreamingResponse(self._changes(look), media_type="text/event-stream")

    async def _changes(self, look: Callable[[], Awaitable[LiveParts]]) -> AsyncIterator[str]:
        sent: Mapping[str, str] = {}
        self._viewers += 1
        try:
            while True:
                parts, text, end = await look()
                changed = {key: part for key, part in parts.items() if sent.get(key) != part}
                sent = parts or sent
                yield _message({"parts": changed, "status": text})
                if end:
                    yield f"event: end\ndata: {end}\n\n"
                    return
                await anyio.sleep(REFRESH_S)
        finally:
            self._viewers -= 1

    def _parts(self, name: str, content: RunContent) -> Mapping[str, str]:
        """Return the parts of a page, which all viewers of one content share."""
        known, parts = self._rendered.get(name, (None, {}))
        if known is not content:
            parts = render_parts(content, f"/runs/{quote(name, safe='')}/logs/")
            self._rendered[name] = (content, parts)
        return parts

    async def log(self, request: Request) -> Response:
        """Serve the last lines of a rank's log."""
        name, rank = request.path_params["name"], request.path_params["rank"]
        if name not in self._runs or isinstance(await self._content(name), str):
            return PlainTextResponse("no such run", 404)
        log = RankLog(self._runs[name], rank)
        try:
            text = await anyio.to_thread.run_sync(log.read_on)
        except (OSError, CorruptionError) as error:
            return PlainTextResponse(f"the log of rank {rank} cannot be read: {error}", 404)
        text = text or f"rank {rank} has written nothing\n"
        if not request.url.path.endswith("/follow"):
            return PlainTextResponse(text)
        if self._viewers >= VIEWERS_MAX:
            return PlainTextResponse(f"{VIEWERS_MAX} pages are open already", 503)
        return StreamingResponse(self._followed(name, log, text), media_type="text/plain")

    async def _followed(self, name: str, log: RankLog, text: str) -> AsyncIterator[str]:
        """Yield what a rank writes, until its run has ended."""
        self._viewers += 1
        try:
            while True:
                yield text
                content = await self._content(name)
                has_ended = not isinstance(content, str) and content.summary.exit_code is not None
                await anyio.sleep(REFRESH_S)
                text = await anyio.to_thread.run_sync(log.read_on)
                if has_ended and not text:
                    return
        except (OSError, CorruptionError) as error:
            yield f"the log cannot be read: {error}\n"
        finally:
            self._viewers -= 1

    async def predicted(self, request: Request) -> Response:
        """Serve the answers of a run's page, with what the planner predicts for it."""
        name = request.path_params["name"]
        if name not in self._runs:
            return PlainTextResponse("no such run", 404)
        predicted = await self._computed(name, RunReading.predict)
        content = await self._content(name)
        if isinstance(content, str):
            return PlainTextResponse(content, 503)
        return JSONResponse(render_parts(content, names=("answers",)) if predicted else {})


def _seconds(text: str) -> float | None:
    """Return a number of seconds that a request gives; None where it is none."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if abs(seconds) < SECONDS_MAX else None


def _check_pair(pairs: list[tuple[str, str]]) -> None:
    """Raise UsageError for an address that does not name two runs."""
    if len(pairs) != 2 or any(key != "run" for key, _ in pairs):
        raise UsageError(f"choose two runs; the address has {plural(len(pairs), 'value')}")
    if pairs[0] == pairs[1]:
        raise UsageError("the two runs are the same one; choose two that differ")
    if longest := [name for _, name in pairs if len(name) > NAME_MAX]:
        raise UsageError(f"a name has {len(longest[0]):,} characters; at most {NAME_MAX}")


def _message(what: Mapping[str, object]) -> str:
    return f"data: {json.dumps(what)}\n\n"
