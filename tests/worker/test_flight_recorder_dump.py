"""NCCL's records in a dump, from a handler of torch that this process may be unable to ask."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.worker import flight_recorder_dump


def handler(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this torch a handler for NCCL's records, which answers with an error."""

    def answer(_question: Any, _answer: Any) -> None:
        raise RuntimeError(error)

    replaced: dict[str, Any] = {
        "_get_handler_names": lambda: [flight_recorder_dump.NCCL],
        "_get_handler": lambda _name: answer,
        "_dump_nccl_trace_json": lambda: b"records",
    }
    for name, function in replaced.items():
        monkeypatch.setattr(flight_recorder_dump.c10d, name, function, raising=False)


def test_a_torch_that_accepts_no_request_is_asked_by_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler("Unable to cast Python instance of type <class 'dict'> to C++ type '?'", monkeypatch)
    assert flight_recorder_dump._of_nccl() == [b"records"]


def test_other_errors_of_the_handler_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    handler("the device does not respond", monkeypatch)
    with pytest.raises(RuntimeError, match="does not respond"):
        flight_recorder_dump._of_nccl()
