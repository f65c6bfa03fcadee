"""Loops inside expressions, whose results so far no replacement worker could read."""

from __future__ import annotations

import pytest
from tests.worker.script.simulated_phases import Plain, Session, play, refusal

from outlast.worker.script import reachable_values, value_paths

STEP = """
        def step(i):
            session.step()
            return i
        def losses():
            for i in session.batches(7):
                yield session.run(step, i)
"""
REFUSED = {
    "a list": ("a comprehension", "all = [session.run(step, i) for i in session.batches(7)]"),
    "a dict": ("a comprehension", "all = {i: session.run(step, i) for i in session.batches(7)}"),
    "a set": ("a comprehension", "all = {session.run(step, i) for i in session.batches(7)}"),
    "two loops": (
        "a comprehension",
        "all = [session.run(step, i + j) for i in session.batches(7) for j in (0, 1)]",
    ),
    "a sum": ("sum(...)", "total = sum(session.run(step, i) for i in session.batches(7))"),
    "a generator": ("list(...)", "all = list(losses())"),
    "a reduction": (
        "functools(...)",
        "functools.reduce(lambda a, i: a + session.run(step, i), session.batches(7), 0)",
    ),
    "unpacked": ("an expression", "first, *rest = losses()"),
}
ACCEPTED = {
    "a generator": "for loss in losses(): out.append(loss)",
    "an expression around it": "for loss in (2 * loss for loss in losses()): out.append(loss)",
    "variables with the names of iterators": """
        count, args = 7, collections.namedtuple("Args", "chain count")(0, 7)
        for i in session.batches(count + args.chain + args.count - 7):
            out.append(session.run(step, i))
        """,
    "a comprehension in its body": """
        for i in session.batches(7):
            out.append([session.run(step, each) for each in (i, i + 1)])
        """,
    "lists and sets with a star in its body": """
        for i in session.batches(7):
            each = [session.run(step, i)]
            out.append([*each, i])
            out.append({*each, i + 1})
        """,
}


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reachable_values, value_paths):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


def script(text: str) -> str:
    return STEP + (text if "\n" in text else f"        {text}\n")


@pytest.mark.parametrize("way", REFUSED)
def test_a_loop_inside_an_expression_is_refused(way: str) -> None:
    name, text = REFUSED[way]
    assert f"session.batches is inside {name}" in refusal(script(text))


@pytest.mark.parametrize(
    "iterator", ["itertools.accumulate(", "itertools.chain([1, 2], ", "itertools.zip_longest([1], "]
)
def test_an_iterator_that_keeps_what_it_has_seen_is_refused(iterator: str) -> None:
    text = f"""
        for i in {iterator}session.batches(7)):
            session.run(step, i)
        """
    assert f"goes through {iterator.split('.')[1].split('(')[0]}(...)" in refusal(script(text))


def test_a_refused_islice_names_break() -> None:
    text = """
        for i in itertools.islice(session.batches(7), 3):
            session.run(step, i)
        """
    assert "break behind the last step" in refusal(script(text))


@pytest.mark.parametrize("way", ACCEPTED)
def test_a_loop_of_statements_is_accepted(way: str) -> None:
    text = script(ACCEPTED[way])
    assert play(text, Session()) == play(text, Plain())
