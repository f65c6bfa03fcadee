"""Routes of the planner: its page, and the parts of it that a slider's move replaces."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qsl

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from outlast.errors import UsageError
from outlast.web.planner_answer import planner_answer
from outlast.web.planner_curves import planner_curves
from outlast.web.planner_page import render_answer, render_curves, render_planner
from outlast.web.planner_query import PlannerQuery, given_texts, parse_query

Pairs = list[tuple[str, str]]


def planner_routes() -> list[Route]:
    """Return the routes of the planner."""
    pages = {
        "/plan": page_response,
        "/plan/answer": answer_response,
        "/plan/curves": curves_response,
    }
    return [Route(path, _endpoint(respond)) for path, respond in pages.items()]


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
