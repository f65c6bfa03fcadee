"""Error files of workers, in torch's formats and others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launch.host.worker_environment import ERROR_FILE_NAME, read_error_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ERROR_FILE_NAME


def test_what_record_writes(path: Path) -> None:
    extra = {"py_callstack": "Traceback\nKeyError: 'x'", "timestamp": "1795376926"}
    path.write_text(json.dumps({"message": {"message": "KeyError: 'x'", "extraInfo": extra}}))
    found = read_error_file(path)
    assert found == ("KeyError: 'x'", extra["py_callstack"], 1795376926 * 10**9)


def test_a_plain_message(path: Path) -> None:
    path.write_text(json.dumps({"message": "CUDA error", "timestamp": 7}))
    assert read_error_file(path) == ("CUDA error", "", 7 * 10**9)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"message": 7}', '{"message": {}}', '{"message": {"message": []}}',
     "[" * 100_000, '"' + "x" * (1 << 20) + '"'],
)  # fmt: skip
def test_anything_else_is_ignored(path: Path, text: str) -> None:
    path.write_text(text)
    assert read_error_file(path) is None


def test_no_file(path: Path) -> None:
    assert read_error_file(path) is None and read_error_file(path.parent) is None


_VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(message=_VALUES, extra=_VALUES, timestamp=_VALUES)
def test_hostile_contents_raise_nothing(
    tmp_path_factory: pytest.TempPathFactory, message: object, extra: object, timestamp: object
) -> None:
    path = tmp_path_factory.getbasetemp() / ERROR_FILE_NAME
    content = {"message": {"message": message, "extraInfo": extra}, "timestamp": timestamp}
    path.write_text(json.dumps(content))
    found = read_error_file(path)
    assert found is None or isinstance(found.message, str)
