"""The server of pages: read-only, with its headers and its token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outlast.web.page_templates import content_policy

COOKIE = "outlast_view"


def application(routes: Sequence[Route], hosts: list[str], token: str = "") -> ASGIApp:
    """Return the application. `hosts`: allowed in a request's Host header; `token`: "": none is
    needed."""
    middleware = [
        Middleware(SecurityHeaders),  # the outermost one: refusals have them as well
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
    ]
    if token:
        middleware.append(Middleware(TokenCheck, token=token))
    return Starlette(routes=routes, middleware=middleware)


class SecurityHeaders:
    """Middleware that forbids other origins, frames and guesses of types."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to each response."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ())]  # type: ignore[misc]
                headers += [
                    (
                        b"content-security-policy",
                        f"{content_policy()}; frame-ancestors 'none'".encode(),
                    ),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-store"),
                ]
                message = {**message, "headers": headers}
            await send(message)

        with suppress(asyncio.CancelledError):  # Ctrl-C in the middle of a page ends the server
            await self.app(scope, receive, with_headers)  # type: ignore[arg-type]


class TokenCheck:
    """Middleware that lets in who has the token: by the printed link once, then by a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request without the token with 403."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        response: Response
        if self._matches(request.query_params.get("token", "")):
            response = RedirectResponse(request.url.path, 303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        elif self._matches(request.cookies.get(COOKIE, "")):
            await self.app(scope, receive, send)
            return
        else:
            response = PlainTextResponse(
                "this page needs the link that `outlast view` has printed", 403
            )
        await response(scope, receive, send)

    def _matches(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())
