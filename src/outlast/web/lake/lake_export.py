"""Report of a lake as one document, with the histories of its bad nodes."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import parse_qsl

from outlast import __version__
from outlast.fleet.analysis.exposure import LARGE_GPUS
from outlast.fleet.report.report_sections import rate_headlines
from outlast.web.lake.lake_page import (
    TITLES,
    render_first,
    render_history,
    render_rest,
    render_section,
)
from outlast.web.lake.lake_query import NODE, lake_texts, parse_lake_query
from outlast.web.lake.lake_reading import LakeReading
from outlast.web.lake.node_history import node_history
from outlast.web.page_templates import asset, content_policy, environment

NODES_MAX = 25  # histories in a document; about 30 KB each


def exported_lake(path: Path, query: str) -> str:
    """Return the page of a selection, which needs no server. Raises LakeError, UsageError.

    `query`: as in the address of the lake's page; a node that it names has its history, too.
    """
    texts = lake_texts(parse_qsl(query, keep_blank_values=True))
    reading = LakeReading(path)
    chosen = reading.default(parse_lake_query(texts))
    found = reading.answer(chosen)
    sections = [drawn.section for drawn in reading.sections(found)]
    report = found.report
    assert report is not None
    names = [texts[NODE]] if NODE in texts else []
    names += [row["node"] for one in sections if one.key == "lemons" for row in one.rows]
    names = list(dict.fromkeys(names))
    keys = {name: f"node-{number}" for number, name in enumerate(names[:NODES_MAX], 1)}
    tables = found.facts.tables
    histories = [
        (
            key,
            name,
            render_history(
                node_history(found.facts, name, found.cluster),
                (tables.since_ns, tables.until_ns),
                f"{key}-",
            ),
        )
        for name, key in keys.items()
    ]
    heads = rate_headlines(found.facts)
    command = chosen.command("report", path) + " --out report.html"
    parts = [
        render_first(heads),
        *(
            render_section(one, lambda node: f"#{keys[node]}" if node in keys else "")
            for one in sections
        ),
        render_rest(report, report.headlines[len(heads) :], command),
    ]
    template = environment().get_template("lake/lake_export.html.j2", globals={"asset": asset})
    return template.render(
        path=str(path),
        texts=chosen.texts(),
        clusters=reading.choices(chosen).clusters,
        large_gpus=LARGE_GPUS,
        titles=TITLES,
        report="".join(parts),
        histories=histories,
        more_nodes=len(names) - len(keys),
        now_ns=time.time_ns(),
        policy=content_policy(),
        version=__version__,
    )
