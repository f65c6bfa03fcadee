"""The reference of the command line, written from the parsers as one Markdown page a command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from outlast.cli import main
from outlast.launch import torchrun_arguments

_SECTION = re.compile(r"^## (?=outlast )", re.MULTILINE)
_SUBSECTION = re.compile(r"^###? (outlast .*)$", re.MULTILINE)
_FENCE = "```console\n"  # usage lines are no commands that could be executed


def write_command_pages(folder: Path) -> None:
    """Write `run.md`, `check.md`, ... into `folder`. Only what changed is written."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {**_pages_of_cyclopts(), "run": _page_of_run()}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()


def _pages_of_cyclopts() -> dict[str, str]:
    commands = [name for group in main.GROUPS.values() for name in group.COMMANDS]
    application = main.application([*main.COMMANDS, *main.GROUPS, *commands])
    whole = application.generate_docs(output_format="markdown")
    _, *sections = _SECTION.split(whole.replace(_FENCE, "```text\n"))
    pages = {}
    for section in sections:
        heading, _, body = section.partition("\n")
        if heading.split()[1].startswith("-"):  # a flag, such as --install-completion
            continue
        body = _SUBSECTION.sub(r"## `\1`", body).rstrip()
        pages[heading.split()[1]] = f"# `{heading.strip()}`\n{body}\n"
    return pages


def _page_of_run() -> str:
    parser = torchrun_arguments.run_parser()
    lines = ["# `outlast run`", "", parser.description or "", ""]
    lines += ["```text", "outlast run [OPTIONS] SCRIPT [SCRIPT OPTIONS]", "```", ""]
    groups = [group for group in parser._action_groups if group._group_actions]  # noqa: SLF001
    ours = [group for group in groups if group.title == "outlast"]
    for title, section in (
        ("Flags of Outlast", ours),
        ("Flags of torchrun", [group for group in groups if group not in ours]),
    ):
        lines += [f"## {title}", ""]
        for group in section:
            lines += _flags(group._group_actions)  # noqa: SLF001
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _flags(actions: list[argparse.Action]) -> Iterator[str]:
    for action in actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):  # noqa: SLF001
            continue
        # torchrun has each flag with dashes and with underscores.
        names = [name for name in action.option_strings if "_" not in name]
        value = "" if action.nargs == 0 else f" {action.metavar or (action.dest.upper())}"
        flags = ", ".join(f"`{name}{value}`" for name in names or action.option_strings[:1])
        text = " ".join((action.help or "").split()).replace("<", r"\<")
        yield f"* {flags}: {text}"
