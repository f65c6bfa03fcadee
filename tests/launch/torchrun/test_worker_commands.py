"""Files that tell whether a worker's command calls ``outlast.init()``, found without an import."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.launch.torchrun.worker_commands import is_unmodified, names_outlast, source_files

INIT = "import outlast\noutlast.init()\n"
BOOM = "raise AssertionError('it is imported')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "pkg/__init__.py": BOOM,
        "pkg/plain.py": BOOM,
        "pkg/ours.py": BOOM + INIT,
        "pkg/app/__init__.py": BOOM,
        "pkg/app/__main__.py": BOOM + INIT,
        "ours/__init__.py": INIT,
        "ours/plain.py": BOOM,
        "space/plain.py": BOOM,
        "train.py": BOOM,
        "train": BOOM,
        "ours.sh": "exec python ours/__init__.py",
        "plain.sh": "exec python train.py missing.py",
        "binary": "\0\0 outlast",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("python -u train.py", False),
        ("python -u train", False),
        ("python -u ours/__init__.py", True),
        ("python -u missing.py", None),
        ("python -u -c code train.py --lr=1", False),
        ("python -u -m pkg.plain", False),
        ("python -u -m pkg.ours", True),
        ("python -u -m pkg.app", True),
        ("python -u -m ours.plain", True),  # its package is executed, too
        ("python -u -m space.plain", False),
        ("python -u -m pkg", None),  # not found: it has no __main__
        ("python -u -m pkg.missing", None),
        ("python -u -m .plain", None),
        ("python -u -m ", None),
        ("/bin/sh", False),
        ("/bin/sh plain.sh", False),
        ("/bin/sh -e ours.sh", True),
        ("/bin/sh train.py binary", False),
        ("env A=1 python ours/__init__.py", True),
        ("python -u", False),
        ("missing", False),
    ],
)
def test_the_text_decides(command: str, names: bool | None) -> None:
    words = tuple(command.split(" "))
    assert names_outlast(words) is names
    assert is_unmodified(words) == (names is False)


def test_arguments_that_are_no_paths() -> None:
    assert source_files(("/bin/sh", "\0", "a" * 5000, "/dev/zero", ".", "")) == []
