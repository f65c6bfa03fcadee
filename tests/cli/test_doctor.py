"""`outlast doctor`: lines of scripts that a port changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.cli.doctor.doctor import doctor
from outlast.cli.doctor.phase_findings import ScriptFinding
from outlast.cli.doctor.port_findings import read_script
from outlast.cli.main import main
from outlast.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAINER = """
import torch
import torch.multiprocessing as mp
class Trainer:
    def __init__(self, model, data):
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.data = data
        self.seen = []
    def run_batch(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(batch).sum()
        loss.backward()
        self.seen.append(loss.item())
        open("losses", "a").write(str(loss))
        self.optimizer.step()
    def train(self, epochs):
        for epoch in range(1, epochs):
            for batch in self.data:
                self.run_batch(batch)
def main(rank):
    torch.distributed.init_process_group("nccl")
    Trainer(torch.nn.Linear(1, 1), []).train(3)
mp.spawn(main, args=(), nprocs=2)
"""


def findings(source: str) -> list[ScriptFinding]:
    return read_script(source)[1]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("ddp", {"session.protect(model=model, optimizer=optimizer)"}),
        (
            "gpt",
            {"for _ in session.batches(None, until=STEPS):", "session.run(train_step)"},
        ),
        ("classifier", set[str]()),
    ],
)
def test_the_changes_are_those_of_the_ported_script(name: str, others: set[str]) -> None:
    """`others`: a number that only the script's author knows, a result, a loader beside."""
    plain, ported = (EXAMPLES / f"{kind}_{name}.py" for kind in ("plain", "ported"))
    changes = [one.after for one in findings(plain.read_text()) if one.kind == "change"]
    lines = {line.strip() for line in ported.read_text().splitlines()}
    assert {after for after in changes if after not in lines} == others
    assert findings(ported.read_text()) == [
        one for one in findings(ported.read_text()) if one.kind != "change"
    ]


TWO_OPTIMIZERS = """
import torch
model, optimizers = build()
first, second = optimizers
def step(batch):
    loss = model(batch).sum()
    loss.backward()
    opt_first.step()
    {between}
    opt_second.step()
for number, batch in enumerate(islice(loader, 10)):
    step(batch)
"""


STAGES = """
import torch, torch.distributed as dist
class Net(torch.nn.Module):
    def __init__(self):
        self.head = torch.nn.Linear(1, 1)
class Trainer:
    def __init__(self):
        self.net = Net()
        self.adam = torch.optim.Adam(self.net.parameters())
    def step(self, batch):
        o = self.adam
        o.zero_grad()
        self.net(batch).backward()
        o.step()
        self.count += 1
    def fit(self, epochs):
        for epoch in range(epochs):
            for batch in loader:
                self.step(batch)
            dist.broadcast(stop, src=0)
def main():
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.fit(1)
    trainer.fit(2)
"""


def test_stages_names_of_other_classes_and_writes_behind_the_step() -> None:
    found = findings(STAGES)
    afters = [one.after for one in found if one.kind == "change"]
    assert "session.protect(net=self.net, adam=self.adam)" in afters
    assert "global session" in afters
    assert "session.run(dist.broadcast, stop, src=0)" in afters
    unsafe = {one.line: one.reason for one in found if one.kind == "unsafe"}
    assert list(unsafe) == [15, 25]
    assert "self.count behind o.step()" in unsafe[15]
    assert "another one follows" in unsafe[25]


HELPERS = """
import torch.distributed as dist
from torch import nn
class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler()
    def __call__(self, loss, optimizer):
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
    def state_dict(self):
        return self._scaler.state_dict()
    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)
class CenteredLoss(nn.Module):
    def __init__(self):
        self.register_buffer("center", torch.zeros(1))
def main():
    dist.init_process_group("gloo")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loss_scaler = NativeScaler()
    centered = CenteredLoss()
    for epoch in range(2):
        for batch in loader:
            loss = centered(model(batch))
            loss_scaler(loss, optimizer)
"""


def test_a_helper_that_gets_the_loss_is_a_part_of_the_step() -> None:
    afters = {one.line: one.after for one in findings(HELPERS) if one.kind == "change"}
    assert afters[25] == "session.run(train_step)"  # the lines of both, not the helper alone
    given = "model=model, centered=centered, optimizer=optimizer, loss_scaler=loss_scaler"
    assert f"session.protect({given})" in {one.after for one in findings(HELPERS)}


PORTED_STAGES = """
import outlast
session = outlast.init()
session.protect(a=a)
if quick:
    for batch in session.batches(loader, epochs=1):
        session.run(step, batch)
else:
    for epoch in session.epochs(2):
        for batch in session.batches(loader):
            session.run(step, batch)
{rest}
"""


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("", []),
        ("for e in session.epochs(2): pass", ["another one follows"]),
        ("session.protect(b=b)", ["is called once, above the loop"]),
    ],
)
def test_a_second_stage_of_a_ported_script_is_named(rest: str, words: list[str]) -> None:
    unsafe = [one.reason for one in findings(PORTED_STAGES.format(rest=rest))]
    assert len(unsafe) == len(words)
    assert all(word in reason for word, reason in zip(words, unsafe, strict=True))


@pytest.mark.parametrize(("between", "count"), [("pass", 0), ("model(batch).sum().backward()", 1)])
def test_two_optimizers_share_a_phase_if_no_backward_lies_between(between: str, count: int) -> None:
    found = findings(TWO_OPTIMIZERS.format(between=between))
    assert sum("second optimizer" in one.reason for one in found) == count
    afters = {one.after for one in found}
    assert "session.protect(model=..., optimizer=...)" in afters  # `build` does not show them
    assert not any("islice" in after for after in afters)  # it would be refused


def test_a_trainer_class_is_followed_through_its_methods() -> None:
    found = findings(TRAINER)
    assert {one.after for one in found if one.kind == "change"} == {
        "import outlast",
        "global session",
        "session = outlast.init()",
        "session.protect(model=self.model, optimizer=self.optimizer)",
        "for epoch in session.epochs(range(1, epochs)):",
        "for batch in session.batches(self.data):",
        "session.run(self.run_batch, batch)",
    }
    unsafe = [one.reason for one in found if one.kind == "unsafe"]
    assert any("a file is written inside the step" in reason for reason in unsafe)
    assert any("starts the ranks" in reason for reason in unsafe)
    assert any("changes self.seen" in one.reason for one in found if one.kind == "check")


def test_no_script_of_the_project_is_too_odd() -> None:
    scripts = [*(ROOT / "tests" / "scripts").rglob("*.py"), *EXAMPLES.glob("*.py")]
    assert sum(read_script(script.read_text())[0] for script in scripts) > 50


def test_json_names_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(EXAMPLES / "plain_ddp.py"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = (EXAMPLES / "plain_ddp.py").read_text().splitlines()
    assert answer["has_step"]
    for one in answer["findings"]:
        assert not one["before"] or one["before"] == text[one["line"] - 1].strip()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"x = (", "never closed"), (b"\x90", "no Python script"), (None, "No such file")],
)
def test_what_is_no_script_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        doctor(script)


def test_a_file_without_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script := tmp_path / "model.py").write_text("import torch\n")
    assert doctor(script) == 0
    assert "no optimizer steps in this file" in capsys.readouterr().out


ENGINE = """
def train_one_epoch(model, criterion, optimizer, loader):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DISTRIBUTED = """
import os, torch
def init_distributed():
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("nccl")
"""
SPLIT = """
import torch
from torch.utils.data import DataLoader
import tools.dist as utils
from engine import train_one_epoch
def main():
    utils.init_distributed()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([])
    for epoch in range(3):
        train_one_epoch(model, torch.nn.MSELoss(), optimizer, loader)
main()
"""


def test_a_step_in_another_file_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "dist.py").write_text(DISTRIBUTED)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "broken.py").write_text("def (")
    (script := tmp_path / "train.py").write_text(
        SPLIT.replace("import torch", "import torch, broken", 1)
    )
    assert doctor(script) == 0
    lines = capsys.readouterr().out.splitlines()
    places = {line.split(" ")[0] for line in lines if ": change" in line}
    engine = f"{tmp_path / 'engine.py'}:"
    expected = {f"{script}:{number}:" for number in (5, 7, 11)}
    assert places == expected | {f"{engine}3:", f"{engine}4:"}
    assert "    + for epoch in session.epochs(3):" in lines
    assert "    + for x, y in session.batches(loader):" in lines
    assert any("engine.py:1: check: this file has no session" in line for line in lines)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def step():\n    x = next(it)\n    optimizer.step()\nfor _ in range(9):\n    step()",
            "the step",
        ),
        (
            "for _ in range(9):\n    x = next(it)\n    loss.backward()\n    optimizer.step()",
            "the loop",
        ),
    ],
)
def test_what_draws_its_own_batches_is_named(source: str, words: str) -> None:
    (found,) = [one for one in findings(source) if one.kind == "unsafe"]
    assert found.line == 2 and found.reason.startswith(f"{words} draws")
