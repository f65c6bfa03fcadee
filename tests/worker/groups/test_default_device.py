"""Independence of the script's default device and dtype."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from outlast.checkpoint import Checkpointer
from outlast.checkpoint.format import codec
from outlast.checkpoint.format.value_encoder import STAGED_BYTES_MIN, TensorSpec
from outlast.data.epoch_order import draw_seed
from outlast.worker.compute_environment import fingerprint
from outlast.worker.phases import worker_recovery
from outlast.worker.state import generator_states

CPU = torch.device("cpu")


@pytest.fixture
def defaults() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def _state() -> dict[str, Any]:
    """Several chunks, one of them of many tensors."""
    large = torch.arange(5 << 20, dtype=torch.float32, device="cpu")
    return {"large": large, "step": torch.tensor(3.0, device="cpu"), "n": [1, "x"]}


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return codec.encode(a) == codec.encode(b)


@pytest.mark.usefixtures("defaults")
def test_values_come_back_on_the_cpu() -> None:
    state = _state()
    assert _equal(codec.decode(codec.encode(state)), state)


@pytest.mark.usefixtures("defaults")
def test_checkpoints_come_back_on_the_cpu(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as saves:
        saves.save(1, {"state": _state()})
        saves.wait()
        target: dict[str, Any] = {"state": {}}
        assert saves.load(target)
    assert _equal(target["state"], _state())


def test_the_fingerprint_is_the_same(request: pytest.FixtureRequest) -> None:
    before = fingerprint(CPU)
    request.getfixturevalue("defaults")
    assert fingerprint(CPU) == before


def test_a_precision_set_the_new_way_is_a_fact_and_no_error() -> None:
    script = (  # in its own process: what an earlier test set for a backend would outrank it
        "import torch; from outlast.worker.compute_environment import settings_of;"
        "cpu = torch.device('cpu'); print(settings_of(cpu)['tf32']);"
        "torch.backends.fp32_precision = 'tf32'; print(settings_of(cpu)['tf32'])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    before, after = shown.stdout.splitlines()
    assert before != after


def test_a_loaders_seed_is_drawn_as_ever(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(5)
    before = draw_seed(None)
    request.getfixturevalue("defaults")
    torch.default_generator.manual_seed(5)
    assert draw_seed(None) == before


def _moves_state(member: Any) -> list[Any]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    member.init()
    groups = member.groups
    assert groups.vote("yes")
    assert groups.gather_bytes(b"x" * member.rank) == [b"", b"x"]
    if member.rank == 0:
        digest, size, _ = worker_recovery.send_state(groups, 1, _state(), lambda: None)
    else:
        received, (digest, size, _) = worker_recovery.receive_state(groups, 0, lambda: None)
        assert _equal(received, _state())
    return [digest, size]


@pytest.mark.process
def test_votes_gathers_and_copies_use_the_cpu(cluster: Any) -> None:
    sent, received = cluster.run(2, _moves_state)
    assert sent == received


class _Copies(TorchFunctionMode):
    """The sizes of the tensors that are asked for on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            self.sizes.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def test_a_donor_copies_from_its_device_what_it_sends_next_and_no_more() -> None:
    _, tensors = codec.flatten(_state())
    with _Copies() as copies:
        chunks = list(worker_recovery._chunks(tensors))
    assert sum(copies.sizes) == sum(c.numel() for c in chunks) == (5 << 22) + 4
    assert max(copies.sizes) == worker_recovery.CHUNK_BYTES


def test_small_tensors_go_home_and_large_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for an accelerator: nothing here has another."""
    small = TensorSpec((), torch.float32, "meta")
    large = TensorSpec((STAGED_BYTES_MIN,), torch.float32, "meta")
    assert small.home() == large.home() == CPU
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: torch.device("meta", 0)
    )
    assert small.staged(small.allocate()).device.type == "meta"
    assert large.staged(large.allocate()).device == CPU
    assert TensorSpec((), torch.float32, "cpu").home() == CPU
    assert TensorSpec((), torch.float32, "cuda").home() == CPU


def test_a_spare_takes_over_the_generator_of_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two devices' generators, as CUDA keeps them; this worker computes on the second."""
    devices = [torch.Generator().manual_seed(n).get_state() for n in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: devices[device])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: devices.__setitem__(device, state)
    )
    untouched = devices[1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    captured = generator_states.capture({})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    generator_states.restore(codec.decode(codec.encode(captured)), {})
    assert torch.equal(devices[1], devices[0])
    assert not torch.equal(devices[1], untouched)
