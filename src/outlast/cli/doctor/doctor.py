"""`outlast doctor`: lines of a script that a port changes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.cli.doctor.phase_findings import ScriptFinding
from outlast.cli.doctor.port_findings import read_script
from outlast.cli.doctor.training_script import imported_files
from outlast.cli.output_stream import echo, print_json
from outlast.errors import EXIT_DONE, ConfigError

_BYTES_MAX = 1 << 20


class ScriptFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    version: int = 1
    script: str
    has_step: bool
    findings: list[ScriptFinding]


def doctor(script: Path, *, json: bool = False) -> int:
    """List the lines of a training script that a port to Outlast changes.

    The script is read, not run, and with it the files of its folder that it
    imports. The first steps of a run find what a look at the source cannot.

    Parameters
    ----------
    script
        Training script, as torchrun starts it.
    json
        Print one JSON object.
    """
    try:
        with script.open("rb") as file:
            data = file.read(_BYTES_MAX + 1)
        if len(data) > _BYTES_MAX:
            raise ConfigError(f"{script} is larger than {_BYTES_MAX:,} bytes; nothing was read")
        source = data.decode()
        has_step, findings = read_script(source, imported_files(script, source))
    except OSError as error:
        raise ConfigError(f"{script}: {error.strerror or error}") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{script} is no Python script: {error}") from error
    if json:
        print_json(ScriptFindings(script=str(script), has_step=has_step, findings=findings))
        return EXIT_DONE
    for one in findings:
        place = script.parent / one.file if one.file else script
        echo(f"{place}:{one.line}: {one.kind}: {one.reason}")
        for mark, text in (("-", one.before), ("+", one.after)):
            if text:
                echo(f"    {mark} {text}")
    if not has_step:
        echo(
            f"{script}: no optimizer steps in this file, or in files of its folder that it imports"
        )
    elif not any(one.kind == "change" for one in findings):
        echo(f"{script}: no line to change was found")
    return EXIT_DONE
