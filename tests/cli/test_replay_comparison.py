"""Comparison of two replays: differences, their rank, and the report."""

from __future__ import annotations

import math

import msgspec
import pytest

from outlast.checkpoint.load.checkpoint_diff import TensorDifference
from outlast.cli.output_stream import Printer
from outlast.cli.replay_comparison import (
    DifferingValue,
    FirstDifference,
    NumberDifference,
    Original,
    ReplayReport,
    RunPair,
    StateComparison,
    Verdict,
    headline,
    hints,
    judge,
    origin_differences,
    parting,
    show,
)

SAME = RunPair(
    numbers=4, parting=None, states=StateComparison(compared=3, ranks=2, tensors=[], values=[])
)
APART = FirstDifference(6, [NumberDifference(1, "loss", 0.5, 0.25)])
ODD = RunPair(
    numbers=4,
    parting=APART,
    states=StateComparison(
        compared=3,
        ranks=2,
        tensors=[TensorDifference("model.weight", "float32 2", "float32 2", 2, 1, 0.125)],
        values=[DifferingValue(1, "random.torch", "9 differ of 5056", "9 differ of 5056")],
    ),
)
NOTHING = RunPair(numbers=0, parting=None, states=None)


def original(sides: RunPair = SAME, **changed: tuple[str, str]) -> Original:
    return Original(sides=sides, unlike=changed)


@pytest.mark.parametrize(
    ("replays", "run", "verdict"),
    [
        (SAME, original(), "identical"),
        (SAME, original(NOTHING), "identical"),
        (SAME, original(ODD, cpu=("AVX2", "AVX512")), "identical"),
        (SAME, original(ODD), "unlike the run"),
        (ODD, original(), "different"),
        (NOTHING, original(NOTHING), "nothing compared"),
    ],
)
def test_verdicts(replays: RunPair, run: Original, verdict: Verdict) -> None:
    assert judge(replays, run) == verdict


def test_numbers_part_at_the_first_step_and_by_their_bits() -> None:
    one = {(0, 1, "loss"): 0.5, (0, 2, "loss"): math.nan, (1, 2, "loss"): 0.0, (0, 3, "x"): 1.0}
    assert parting(one, dict(one)) is None
    two = {**one, (1, 2, "loss"): -0.0, (0, 3, "x"): 2.0}
    found = parting(one, two)
    assert found == FirstDifference(2, [NumberDifference(1, "loss", 0.0, -0.0)])
    del two[1, 2, "loss"]
    found = parting(one, two)
    assert found == FirstDifference(2, [NumberDifference(1, "loss", 0.0, None)])


def test_json_distinguishes_nan_from_a_missing_number() -> None:
    key = (0, 1, "loss")
    for value, told in ((math.nan, "nan"), (-math.inf, "-inf"), (None, None)):
        found = parting({key: 0.5}, {} if value is None else {key: value})
        assert found
        assert msgspec.json.decode(msgspec.json.encode(found))["numbers"][0]["b"] == told


def test_where_the_script_lay_changes_no_bit() -> None:
    then = {"script": "/a", "cpu": "AVX2", "host": "a"}
    assert origin_differences(then, {"script": "/b", "cpu": "AVX512", "host": "a"}) == {
        "cpu": ("AVX2", "AVX512")
    }
    assert origin_differences({}, {"cpu": "AVX512"}) == {"cpu": ("", "AVX512")}, (
        "not known is not equal"
    )


def test_hints_name_what_was_seen() -> None:
    said = hints(ODD, ({"device": "cpu", "threads": "8"}, {"device": "cpu", "threads": "8"}))
    assert said[0].startswith("random generators of rank 1 differ")
    assert any("begins on rank 1 alone" in hint for hint in said)
    assert any("8 threads" in hint for hint in said)
    on_gpu = {"device": "cuda", "cudnn_benchmark": "True", "deterministic": "False", "hash": "1"}
    said = hints(SAME, (on_gpu, {**on_gpu, "hash": "2"}))
    assert [word in " ".join(said) for word in ("PYTHONHASHSEED", "benchmark", "CUBLAS")] == [
        True
    ] * 3


def report(verdict: Verdict, replays: RunPair, run: Original) -> ReplayReport:
    return ReplayReport(
        verdict=verdict, run_dir="r", from_step=4, until_step=8, replays=replays, original=run,
        hints=["a hint"], notes=[], kept=("r/first",), wall_s=2.0,
    )  # fmt: skip


def said(report: ReplayReport, capsys: pytest.CaptureFixture[str]) -> str:
    show(report, Printer())
    return capsys.readouterr().out


def test_the_report_lists_numbers_tensors_and_hints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = said(report("different", ODD, original()), capsys)
    assert "not deterministic: first at step 6, rank 1: loss 0.5 and 0.25" in text
    assert "after step 8, 1 of 3 tensors" in text and "0.125" in text
    assert "rank 1: random.torch: 9 differ of 5056" in text and "a hint" in text
    text = said(report("identical", SAME, original(ODD, cpu=("AVX2", "AVX512"))), capsys)
    assert "bit-identical: 4 steps twice, in 2.00 s" in text
    assert "the environment changed (then -> now): cpu AVX2 -> AVX512" in text
    text = said(report("unlike the run", SAME, original(ODD)), capsys)
    assert "state that its checkpoint does not hold" in text and "model.weight" in text


def test_equal_numbers_do_not_hide_another_state() -> None:
    quiet = RunPair(numbers=4, parting=None, states=ODD.states)
    assert not quiet.equal
    assert "4 reported numbers of 4 steps equal" in headline(report("different", quiet, original()))
