"""Routes of the planner: its page, and the parts of it that a slider's move replaces."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qsl

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from outlast.errors import UsageError
from outlast.text_formatting import plural
from outlast.web.planner_answer import planner_answer
from outlast.web.planner_band import PlannerBand, SimulatedGoodput, simulated_goodput
from outlast.web.planner_curves import curve_places, planner_curves
from outlast.web.planner_page import render_answer, render_curves, render_planner
from outlast.web.planner_query import PlannerQuery, given_texts, parse_query

BAND_S = 5.0  # of a band; a place takes up to 1 s
Pairs = list[tuple[str, str]]


def planner_routes() -> list[Route]:
    """Return the routes of the planner."""
    pages = {
        "/plan": page_response,
        "/plan/answer": answer_response,
        "/plan/curves": curves_response,
    }
    routes = [Route(path, _endpoint(respond)) for path, respond in pages.items()]
    return [*routes, Route("/plan/band", SimulatedBands().band)]


class SimulatedBands:
    """Route of the curves with their simulated band, which is computed for one page at a time.

    Each place is simulated on a thread, without Python's lock. Who has left is not computed for.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def band(self, request: Request) -> Response:
        """Return the curves with a band; status 204 where the page asks no more."""
        try:
            query = parse_query(given_texts(request.query_params.multi_items()))
        except UsageError as error:
            return HTMLResponse(render_answer(None, str(error)), 400)
        places = [place for place in curve_places(query) if place.scenario is not None]
        simulated: dict[str, SimulatedGoodput] = {}
        note = ""
        missing = 0
        async with self._turn:
            due_s = math.inf  # the first one may load the simulator
            for place in places:
                if await request.is_disconnected():
                    return Response(status_code=204)
                if time.monotonic() > due_s:
                    missing += 1
                    continue
                simulate = partial(simulated_goodput, place.scenario, query.strategy)
                try:
                    found = await anyio.to_thread.run_sync(simulate)
                except ModuleNotFoundError as error:
                    note = f"no simulated band: it needs {error.name}; pip install 'outlast[plan]'"
                    break
                due_s = min(due_s, time.monotonic() + BAND_S)
                if found is not None:
                    simulated[place.text] = found
        if missing:
            note = f"{plural(missing, 'place')} not simulated: {BAND_S:g} s have passed"
        band = PlannerBand(query.strategy, simulated) if simulated else None
        render = partial(_with_band, query, band, note)
        return HTMLResponse(await anyio.to_thread.run_sync(render))


def _with_band(query: PlannerQuery, band: PlannerBand | None, note: str) -> str:
    return render_curves(planner_curves(query), band, note)


def exported_planner(query: str) -> str:
    """Return the page of a query as one document, without controls. Raises UsageError."""
    texts = given_texts(parse_qsl(query, keep_blank_values=True))
    parsed = parse_query(texts)
    answer, curves = planner_answer(parsed), planner_curves(parsed)
    return render_planner(texts, answer, curves, "", is_exported=True)


def planner_home() -> Route:
    """Return the first page of a server that shows the planner alone."""

    async def home(_request: Request) -> Response:
        return RedirectResponse("/plan", 303)

    return Route("/", home)


def _endpoint(respond: Callable[[Pairs], Response]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        return await anyio.to_thread.run_sync(respond, request.query_params.multi_items())

    return endpoint


def page_response(pairs: Pairs) -> Response:
    """Return the page of a query; with a refusal, and status 400, where it is invalid."""
    texts: dict[str, str] = {}
    try:
        texts = given_texts(pairs)
        query = parse_query(texts)
        html = render_planner(texts, planner_answer(query), planner_curves(query), "")
    except UsageError as error:
        return HTMLResponse(render_planner(texts, None, None, str(error)), 400)
    return HTMLResponse(html)


def answer_response(pairs: Pairs) -> Response:
    """Return the answer alone, as `page_response`."""
    return _part(pairs, lambda query: render_answer(planner_answer(query), ""))


def curves_response(pairs: Pairs) -> Response:
    """Return the curves alone, as `page_response`."""
    return _part(pairs, lambda query: render_curves(planner_curves(query)))


def _part(pairs: Pairs, render: Callable[[PlannerQuery], str]) -> Response:
    try:
        return HTMLResponse(render(parse_query(given_texts(pairs))))
    except UsageError as error:
        return HTMLResponse(render_answer(None, str(error)), 400)
