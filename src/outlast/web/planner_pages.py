"""Routes of the planner: its page, and the parts of it that a slider's move replaces."""

from __future__ import annotations

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from outlast.errors import UsageError
from outlast.web.planner_answer import PlannerAnswer, planner_answer
from outlast.web.planner_page import render_answer, render_planner
from outlast.web.planner_query import given_texts, parse_query


def planner_routes() -> list[Route]:
    """Return the routes of the planner."""
    return [Route("/plan", _page), Route("/plan/answer", _answer)]


async def _page(request: Request) -> Response:
    return await anyio.to_thread.run_sync(planner_response, request.query_params.multi_items())


async def _answer(request: Request) -> Response:
    return await anyio.to_thread.run_sync(answer_response, request.query_params.multi_items())


def planner_response(pairs: list[tuple[str, str]]) -> Response:
    """Return the page of a query; with a refusal, and status 400, where it is invalid."""
    texts, found, refusal = _found(pairs)
    return HTMLResponse(render_planner(texts, found, refusal), 400 if refusal else 200)


def answer_response(pairs: list[tuple[str, str]]) -> Response:
    """Return the answer alone, as `planner_response`."""
    _, found, refusal = _found(pairs)
    return HTMLResponse(render_answer(found, refusal), 400 if refusal else 200)


def _found(pairs: list[tuple[str, str]]) -> tuple[dict[str, str], PlannerAnswer | None, str]:
    """Return what a query gives, and its answer or why it has none."""
    texts: dict[str, str] = {}
    try:
        texts = given_texts(pairs)
        return texts, planner_answer(parse_query(texts)), ""
    except UsageError as error:
        return texts, None, str(error)
