"""TLS between nodes, over loopback, with real certificates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch.nodes.certificates import Authority
from tests.launch.nodes.test_node_meeting import Hall, in_a_loop, join

from outlast.controller import inputs
from outlast.errors import ConfigError
from outlast.launch.agent_listener import AgentListener, NodeListener
from outlast.launch.host.agent_link import AgentLink
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.launch.nodes.node_meeting import NodeMeeting
from outlast.launch.terms.run_identity import RunningJob
from outlast.transport import channel, messages
from outlast.transport.tls import NodeTls, PeerTls, TlsFiles, check_name

TOKEN = b"k" * 32


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def good(authority: Authority) -> TlsFiles:
    return authority.issue("good", "IP:127.0.0.1", "DNS:second")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("other") / "ca").issue("foreign", "IP:127.0.0.1")


class SecureHall(Hall):
    """A meeting whose own node uses these files; None: it uses no TLS."""

    def __init__(self, folder: Path, files: TlsFiles | None) -> None:
        super().__init__(folder)
        own = with_tls(self.identity("first", 0), files)
        self.meeting = NodeMeeting(own, folder, NodeFlags(nodes=2), self.notes.append)

    async def try_to_join(self, files: TlsFiles | None) -> str:
        """Return why a second node was refused, on that node."""
        identity = with_tls(self.identity("second"), files)
        with pytest.raises(ConfigError) as caught:
            await join(identity, self.folder, 10, self.notes.append)
        return str(caught.value)


def with_tls(identity: NodeIdentity, files: TlsFiles | None) -> NodeIdentity:
    return identity._replace(tls=NodeTls(files) if files else None)


@in_a_loop
async def test_nodes_with_certificates_of_one_authority_meet(
    tmp_path: Path, good: TlsFiles
) -> None:
    hall = SecureHall(tmp_path, good)
    second = join(with_tls(hall.identity("second"), good), tmp_path, 10, hall.notes.append)
    ((address, place),) = await hall.together(second)
    assert (address, place.hosts) == ("127.0.0.1", ("first", "second"))
    assert hall.meeting.listener.strangers.refused == 0


@pytest.mark.parametrize(
    ("server", "client", "here", "there"),
    [
        ("good", None, "this run uses TLS, and this node does not", "this node does not"),
        (None, "good", "it does not speak TLS", "starts with b'\\x16\\x03"),
        ("good", "foreign", "self-signed certificate in certificate chain", "unknown ca"),
        ("good", "mixed", "it refuses this node's certificate (unknown ca)", "unable to get"),
        ("good", "expired", "(certificate expired)", "certificate has expired"),
        ("misnamed", "good", "is for elsewhere, and not for 127.0.0.1", "ended without a message"),
    ],
)
@in_a_loop
async def test_a_node_that_does_not_fit_learns_why(
    tmp_path: Path,
    authority: Authority,
    good: TlsFiles,
    foreign: TlsFiles,
    server: str | None,
    client: str | None,
    here: str,
    there: str,
) -> None:
    """`here`: what that node says; `there`: what the controller's node notes."""
    files: dict[str | None, TlsFiles | None] = {
        None: None,
        "good": good,
        "foreign": foreign,
        "mixed": foreign._replace(authority=good.authority),
        "expired": authority.issue("expired", "IP:127.0.0.1", days=-1),
        "misnamed": authority.issue("misnamed", "DNS:elsewhere"),
    }
    hall = SecureHall(tmp_path, files[server])
    gathering = asyncio.create_task(hall.meeting.gather(20))
    reason = await hall.try_to_join(files[client])
    assert here in reason
    assert reason.startswith("second") and "nothing was started" in reason
    async with asyncio.timeout(10):
        while not hall.meeting.listener.strangers.refused:  # noqa: ASYNC110 - ends in a few turns
            await asyncio.sleep(0)
    assert any(there in note for note in hall.notes), hall.notes
    gathering.cancel()
    await hall.meeting.refuse_all("over")


def check(files: TlsFiles) -> tuple[str, ...]:
    return NodeTls(files).own_names()


def test_a_node_checks_its_own_files_before_the_meeting(
    tmp_path: Path, authority: Authority, good: TlsFiles, foreign: TlsFiles
) -> None:
    assert check(good) == ("127.0.0.1", "second")
    cases: dict[str, TlsFiles] = {
        "has expired": authority.issue("late", "DNS:a", days=-1),
        "unable to get local issuer": foreign._replace(authority=good.authority),
        "are no certificate and its key": good._replace(key=foreign.key),
        "cannot be read: No such file": good._replace(key=str(tmp_path / "none")),
        "has no certificate in PEM": good._replace(authority=good.key),
    }
    for says, files in cases.items():
        with pytest.raises(ConfigError, match=says):
            check(files)


def test_a_key_with_a_password_is_refused_and_not_asked_for(tmp_path: Path, good: TlsFiles) -> None:
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-in", good.key, "-aes128", "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    with pytest.raises(ConfigError, match="is encrypted"):
        NodeTls(good._replace(key=locked))


def test_names_of_certificates() -> None:
    check_name(("N1", "10.0.0.1"), ("n1",))
    check_name(("10.0.0.1",), ("n9", "10.0.0.1"))
    check_name(("*.pods.example",), ("w-0.pods.example",))
    for found in ((), ("n2",), ("*.pods.example",), ("*",)):
        with pytest.raises(ssl.CertificateError, match=r"and not for a\.b\.pods\.example"):
            check_name(found, ("a.b.pods.example",))


class Heard:
    """Part of a controller that notes what it hears."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[messages.MessageEnvelope] = asyncio.Queue()
        self.lost: list[str] = []
        self.notes: list[str] = []

    def on_frame(self, frame: messages.MessageEnvelope) -> None:
        self.frames.put_nowait(frame)

    def on_agent_lost(self, agent: str, incarnation: int) -> None:
        self.lost.append(f"{agent} {incarnation}")

    def note(self, text: str) -> None:
        self.notes.append(text)


def job() -> RunningJob:
    return RunningJob(version=1, run="r", script="s", args=(), world=1, created_ns=0, term=1)


def listener(heard: Heard, files: TlsFiles) -> AgentListener:
    tls = PeerTls(NodeTls(files), ("127.0.0.1",))
    found = AgentListener(job(), NodeListener(hosts=("second",), tls=tls), TOKEN, heard)
    found.listen()
    return found


def frame(body: messages.AnyBody, seq: int) -> messages.MessageEnvelope:
    return messages.MessageEnvelope(
        run="r", term=1, agent="second", incarnation=1, seq=seq, body=body
    )


HELLO = messages.AgentHello(host="second", address="", capacity=1, lease_s=5)


@in_a_loop
async def test_frames_of_any_size_pass_both_ways(good: TlsFiles) -> None:
    """A turn of the loop reads many records of TLS, and a write may have to be continued."""
    heard = Heard()
    controller = listener(heard, good)
    answers: asyncio.Queue[messages.MessageEnvelope] = asyncio.Queue()
    link = AgentLink(
        controller.address,
        TOKEN,
        answers.put_nowait,
        lambda: link.send(frame(HELLO, 1)),
        PeerTls(NodeTls(good), ("second",)),
    )
    keeping = asyncio.create_task(link.keep())
    async with asyncio.timeout(30):
        assert (await heard.frames.get()).body == HELLO
        sizes = [1, 1 << 14, (1 << 14) + 1, 30 << 20]
        for seq, size in enumerate(sizes, 2):
            data = os.urandom(size)
            slots = messages.PartnerSlots(n=1, since=1, slots={0: {"before:1": (1, data)}})
            link.send(frame(slots, seq))
            assert (await heard.frames.get()).body == slots
            reply = messages.SharedValueReply(name="v", value=data)
            controller.send(inputs.Send(agent="second", workers=("w",), body=reply))
            assert (await answers.get()).body == reply
    keeping.cancel()
    controller.close()


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (channel.encode_frame(frame(HELLO, 1), TOKEN), "it does not speak TLS"),
        (b"\x16\x03\x01" + os.urandom(200), "refused"),
        (b"", "no message for"),
    ],
    ids=["a plain agent", "garbage", "silence"],
)
@in_a_loop
async def test_strangers_at_the_controller_are_counted_from_accept_on(
    good: TlsFiles, first: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.launch.agent_listener.STRANGER_S", 0.5)
    heard = Heard()
    controller = listener(heard, good)
    reader, writer = await asyncio.open_connection(*controller.address)
    writer.write(first)
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        while not heard.notes:  # noqa: ASYNC110 - ends in a few turns
            await asyncio.sleep(0)
    assert says in heard.notes[0] and heard.frames.empty()
    controller.close()


@in_a_loop
async def test_a_controller_with_another_name_is_refused_and_noted(good: TlsFiles) -> None:
    heard, told = Heard(), asyncio.Event()
    controller = listener(heard, good)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        told.set()

    tls = PeerTls(NodeTls(good), ("third",))
    link = AgentLink(controller.address, TOKEN, lambda _: None, lambda: None, tls, note)
    keeping = asyncio.create_task(link.keep())
    async with asyncio.timeout(10):
        await told.wait()
    assert "is for 127.0.0.1, second, and not for third" in notes[0]
    assert not link.connected and heard.frames.empty()
    keeping.cancel()
    controller.close()


@pytest.mark.process
@pytest.mark.parametrize("broken", [False, True])
def test_two_nodes_run_with_tls(tmp_path: Path, good: TlsFiles, broken: bool) -> None:
    """Both nodes have this machine's name, so that the second one is refused for that, after TLS;
    `broken`: for its files, before."""
    host = socket.gethostname()
    environment = {**os.environ, "OUTLAST_TOKEN": "a secret of these tests"}
    words = ["--nnodes=2", "--nproc-per-node=1", f"--run-dir={tmp_path / 'run'}", "--plain"]
    words += ["--rdzv-endpoint=127.0.0.1:1", f"--tls-cert={good.certificate}"]
    words += [f"--tls-key={good.key}", f"--tls-ca={'/dev/null' if broken else good.authority}"]
    script = Path(__file__).parents[2] / "cluster" / "steady_job.py"
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-m", "outlast", "run", *words, "--limit=hello_s=1", "--node-rank=1",
         str(script), str(tmp_path / "out"), "3"],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    says = f"{host}: /dev/null has no certificate" if broken else "gave no answer within 1 s"
    assert done.returncode != 0 and says in done.stderr, done.stderr
