"""Reader of code blocks: files, exit codes, console output and missing lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.documentation.code_blocks import missing_lines, read_blocks, split_console

DOCUMENT = """\
Text.

`check.toml`:

```toml
own = []
```

<!-- exit codes: 0 3 -->
```console
$ outlast check \\
    --json
node: healthy
```
"""


def test_a_block_has_its_file_or_its_exit_codes(tmp_path: Path) -> None:
    document = tmp_path / "guide.md"
    document.write_text(DOCUMENT)
    settings, command = read_blocks(document)
    assert (settings.file, settings.text, settings.line) == ("check.toml", "own = []\n", 6)
    assert (command.file, command.exit_codes) == ("", {0, 3})
    assert split_console(command.text) == (
        "outlast check \\\n    --json\n",
        ["node: healthy"],
    )


def test_a_fence_that_is_not_closed_is_an_error(tmp_path: Path) -> None:
    document = tmp_path / "guide.md"
    document.write_text(DOCUMENT + "```sh\nls\n")
    with pytest.raises(AssertionError, match="not closed"):
        read_blocks(document)


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (["epoch 1: loss 0.9718", "...", "digest 0123456789abcdef"], []),
        (["epoch 7: loss 1.5"], []),
        (["epoch 1: accuracy 3 %"], ["epoch 1: accuracy 3 %"]),
        (["digest 0123456789abcdef", "epoch 1: loss 0.97"], ["epoch 1: loss 0.97"]),
    ],
)
def test_shown_lines_must_be_printed_in_order(shown: list[str], missing: list[str]) -> None:
    printed = "│ epoch 2: loss 0.8739   │\nother line\ndigest fedcba9876543210\n"
    assert missing_lines(shown, printed) == missing
