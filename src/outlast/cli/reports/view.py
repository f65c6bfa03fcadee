"""`outlast view`: the page of a run, live or after its end."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.atomic_files import write_new
from outlast.cli.newest_run import chosen_run
from outlast.cli.output_stream import echo
from outlast.errors import EXIT_DONE, RunDirError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import Route

PORT = 8470
LAKE = "lake.json"  # the file that makes a directory a lake
_PORT_MAX = 65535
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def view(
    path: Path | None = None,
    *,
    plan: bool = False,
    port: int = PORT,
    host: str = "127.0.0.1",
    export: Path | None = None,
    query: str = "",
    price_per_hour: float = 0.0,
) -> int:
    """Show a run, all runs of a directory, or a lake, on a page of this machine.

    The page follows a running job, and shows a run that ended as it was.
    Ctrl-C ends the server.

    Parameters
    ----------
    path
        Run directory, a directory of run directories, or a lake of `outlast fleet ingest`
        (default: the newest run).
    plan
        Show the planner alone, without PATH. With a PATH, its pages have a link to the planner.
    port
        Port of the server; 0: any free one.
    host
        Address to listen on. Another one than loopback needs the token of the printed link.
    export
        Write the page of a run, a lake or the planner into this new file, and start no server.
    query
        Selection of an exported lake or planner, as in the address of its page (`gpus=4096`).
    price_per_hour
        Dollars an hour of the whole job, for its cost.
    """
    from outlast.web.planner_pages import exported_planner, planner_home, planner_routes

    if not 0 <= port <= _PORT_MAX:
        raise UsageError(f"--port {port} is not in 0 to {_PORT_MAX}")
    if price_per_hour < 0:
        raise UsageError(f"--price-per-hour {price_per_hour:g} is negative")
    query = query.rpartition("?")[2]  # of a whole address as well
    if query and export is None:
        raise UsageError("--query is of --export; a served page has its query in its address")
    if plan:
        if path is not None:
            raise UsageError("--plan takes no PATH: the pages of one have a link to the planner")
        if price_per_hour:
            raise UsageError("--price-per-hour is of a run, and --plan shows none")
        if export is not None:
            return _write(export, exported_planner(query), "planner")
        return _serve([planner_home(), *planner_routes()], "planner", host, port)
    path = chosen_run(path)
    if (path / LAKE).is_file():
        if price_per_hour:
            raise UsageError(f"{path} is a lake: --price-per-hour is of a run")
        if export is not None:
            from outlast.web.lake.lake_export import exported_lake

            return _write(export, exported_lake(path, query), str(path))
        from outlast.web.lake.lake_pages import LakePages

        return _serve([*LakePages(path).routes(), *planner_routes()], path, host, port)
    if query:
        raise UsageError("--query is of a lake and of --plan: the page of a run is always whole")
    from outlast.web.run_pages import RunPages, find_runs

    runs = find_runs(path)
    if export is not None:
        return _export(path, runs, export, price_per_hour)
    return _serve([*RunPages(path, price_per_hour).routes(), *planner_routes()], path, host, port)


def _export(path: Path, runs: dict[str, Path], export: Path, price_per_hour: float) -> int:
    """Write the page of the only run into a new file."""
    if len(runs) > 1:
        raise UsageError(f"--export writes the page of one run, and {path} holds {len(runs)}")
    ((name, run_dir),) = runs.items()
    return _write(export, exported_page(run_dir, name, price_per_hour), name)


def _write(export: Path, page: str, name: str) -> int:
    write_new(export, page, "--export")
    echo(f"{export}: the page of {name}, as of now")
    return EXIT_DONE


def exported_page(run_dir: Path, name: str, price_per_hour: float) -> str:
    """Return the page of a run as one document. Raises RunDirError for a run without events."""
    from outlast.web.run_content import RunReading
    from outlast.web.run_page import render_page

    content = RunReading(run_dir, price_per_hour).finest()
    if content is None:
        raise RunDirError(f"{run_dir} has written no events yet")
    return render_page(content, name)


def _serve(routes: Sequence[Route], name: Path | str, host: str, port: int) -> int:
    """Serve until Ctrl-C. `name`: of the content, for the printed line."""
    import uvicorn

    from outlast.web.page_server import application

    is_local = host in _LOOPBACK
    token = "" if is_local else secrets.token_urlsafe(24)
    with _listen(host, port) as listener:
        number = listener.getsockname()[1]
        address = f"[{host}]" if ":" in host else host
        link = f"http://{address}:{number}/" + (f"?token={token}" if token else "")
        echo(f"{name}: {link}  (Ctrl-C ends this server, and no run)")
        hosts = [*_LOOPBACK, "[::1]"] if is_local else ["*"]  # elsewhere the token decides
        config = uvicorn.Config(
            application(routes, hosts, token),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        uvicorn.Server(config).run(sockets=[listener])
    return EXIT_DONE


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError where the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error}; --port 0 takes any free one"
        ) from error
