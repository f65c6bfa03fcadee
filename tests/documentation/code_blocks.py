"""Fenced code blocks of a document, and the action of a test for each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`:\n\n)?"  # a block below "`NAME`:" is the content of that file
    r"(?:^<!-- exit codes: (?P<codes>[\d ]+) -->\n)?"
    r"^```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_AMOUNT = re.compile(
    r"[-+]?\$?\d[\d.,:]*(?:e-?\d+)?[kM]?(?: (?:%|ms|min|s|h|d|days|KiB|MiB|GiB)\b)?"
)
_DIGEST = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b")
_FRAME = re.compile(r"[─│╭╮╰╯█▏▎▍▌▋▊▉━]+")

SHOWN_ONLY = {"text", "diff"}  # other tests compare what they can of these


class Block(NamedTuple):
    """One fenced code block. `line` is the number of its first line in the document."""

    line: int
    language: str
    text: str
    file: str
    exit_codes: frozenset[int]


def read_blocks(document: Path) -> list[Block]:
    text = document.read_text()
    blocks = [
        Block(
            line=text.count("\n", 0, found.start("text")) + 1,
            language=found["language"],
            text=found["text"],
            file=found["file"] or "",
            exit_codes=frozenset(map(int, (found["codes"] or "0").split())),
        )
        for found in _FENCE.finditer(text)
    ]
    assert 2 * len(blocks) == len(re.findall(r"^```", text, re.MULTILINE)), (
        f"{document}: a fence is not closed, or is indented"
    )
    return blocks


def split_console(text: str) -> tuple[str, list[str]]:
    """Return the commands of a console block as one script, and the lines that they print."""
    commands: list[str] = []
    output: list[str] = []
    continued = False
    for line in text.splitlines():
        if line.startswith("$ ") or continued:
            commands.append(line.removeprefix("$ "))
            continued = line.endswith("\\")
        else:
            output.append(line)
    return "\n".join(commands) + "\n", output


def missing_lines(shown: list[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed in this order.

    Numbers, digests, frames and spaces are not compared; `...` stands for anything.
    """
    found = iter([_normalised(line) for line in printed.splitlines()])
    return [
        line
        for line in shown
        if _normalised(line) not in {"", "..."} and _normalised(line) not in found
    ]


def _normalised(line: str) -> str:
    for pattern, word in ((_DIGEST, "#"), (_AMOUNT, "#"), (_FRAME, " ")):
        line = pattern.sub(word, line)
    return " ".join(line.split())
