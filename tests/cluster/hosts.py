"""Hosts on one machine: each has its own name, network, processes, clocks, IPC and shared memory.

```
host n1 ──eth0 10.78.0.1── port n1 ┐
host n2 ──eth0 10.78.0.2── port n2 ┴ bridge br0 10.78.0.254, in a network namespace of its own
```

Addresses exist inside the namespaces only. Files are shared, except /dev/shm and /etc/hosts; what
is mounted later is mounted on one host only. CLOCK_MONOTONIC and CLOCK_BOOTTIME differ by
`CLOCKS_APART_S` or more, on one host and between hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType

TOOLS = ("ip", "tc", "nft", "bridge", "nsenter", "unshare", "mount", "hostname")
CLOCKS_APART_S = 100_000
_NETWORK = "10.78.0"
_BOOT = (
    'hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" /etc/hosts'
    " && echo up && exec sleep infinity"
)


def missing_requirement() -> str:
    """Return why hosts cannot be made here, or "" if they can."""
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"hosts need {', '.join(missing)} (iproute2, util-linux)" if missing else ""


class Hosts:
    """Hosts n1 to nCOUNT, up inside a `with` block; all their processes die at its end."""

    def __init__(self, folder: Path, count: int) -> None:
        self._prefix = f"outlast{os.getpid()}"
        self.switch = f"{self._prefix}-switch"  # network namespace
        self.switch_address = f"{_NETWORK}.254"
        self._names_file = folder / "hosts"
        self._first: dict[str, subprocess.Popen[str]] = {}
        self.names = [f"n{number}" for number in range(1, count + 1)]

    def __enter__(self) -> Hosts:
        lines = [f"{self.address(name)} {name}" for name in self.names]
        self._names_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "addr", "add", f"{self.switch_address}/24", "dev", "br0")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            _ip("-n", self.switch, "link", "set", "lo", "up")
            for name in self.names:
                self._boot(name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def address(self, name: str) -> str:
        """Return the IPv4 address of a host."""
        return f"{_NETWORK}.{name.removeprefix('n')}"

    def command(self, name: str, *argv: str) -> list[str]:
        """Return the command line that runs `argv` on a host, in this working directory."""
        pid = _child(self._first[name].pid)
        namespaces = ["-n", "-u", "-p", "-m", "-i", "-T", f"--wdns={Path.cwd()}"]
        return ["nsenter", "-t", str(pid), *namespaces, "--", *argv]

    def run(self, name: str, *argv: str, within_s: float = 30.0) -> str:
        """Run a command on a host and return its output; raises CalledProcessError."""
        command = self.command(name, *argv)
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=within_s
        ).stdout

    def on_switch(self, *argv: str) -> list[str]:
        """Return the command line that runs `argv` in the switch's network."""
        return ["ip", "netns", "exec", self.switch, *argv]

    def set_link(self, name: str, *, up: bool) -> None:
        """Plug a host's cable in, or pull it out: its processes run on."""
        _ip("-n", self.switch, "link", "set", name, "up" if up else "down")

    def set_silent(self, name: str, *, silent: bool) -> None:
        """Drop all that a host sends and should receive. Its kernel sees no change of the link."""
        state = "disabled" if silent else "forwarding"
        words = self.on_switch("bridge", "link", "set", "dev", name, "state", state)
        subprocess.run(words, check=True)

    def set_mute(self, name: str, *, mute: bool) -> None:
        """Drop all that a host sends; it receives as before."""
        _drop_sent(f"{self._prefix}-{name}", "eth0", mute)

    def set_deaf(self, name: str, *, deaf: bool) -> None:
        """Drop all that a host should receive; it sends as before."""
        _drop_sent(self.switch, name, deaf)

    def set_cut(
        self, name: str, other: str, *, cut: bool, one_way: bool = False, spared: str = ""
    ) -> None:
        """Drop all that two hosts send each other; with `one_way`, what `name` sends to `other`.
        `spared`: TCP ports of `other`, as "1, 2", whose connections stay."""
        ends = [(name, other, "dport")] + [(other, name, "sport")] * (not one_way)
        for source, target, port in ends:
            table = f"from_{source}"
            if not cut:
                self._in_network(target, "nft", "delete", "table", "ip", table)
                continue
            kept = f"tcp {port} != {{ {spared} }} " if spared else ""
            words = (
                f"add table ip {table}",
                f"add chain ip {table} input {{ type filter hook input priority 0; }}",
                f"add rule ip {table} input ip saddr {self.address(source)} {kept}drop",
            )
            self._in_network(target, "nft", "; ".join(words))

    def _in_network(self, name: str, *argv: str) -> None:
        words = ["ip", "netns", "exec", f"{self._prefix}-{name}", *argv]
        subprocess.run(words, check=True)

    def slow_down(self, name: str, rate: str) -> None:
        """Limit the rate of what a host receives; "": as fast as before."""
        qdisc = ("tc", "-n", self.switch, "qdisc")
        bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "100ms")
        words = ("replace", "dev", name, "root", *bucket) if rate else ("del", "dev", name, "root")
        subprocess.run([*qdisc, *words], check=True)

    def received_bytes(self, name: str) -> int:
        """Return how many bytes a host's port has passed on to it."""
        words = ("ip", "-n", self.switch, "-s", "-j", "link", "show", "dev", name)
        shown = subprocess.run(words, check=True, capture_output=True).stdout
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def stop(self, name: str) -> None:
        """Stop all processes of a host; its kernel still acknowledges what it receives."""
        self.run(name, "sh", "-c", "kill -STOP -1")

    def resume(self, name: str) -> None:
        """Let all processes of a host run on."""
        self.run(name, "sh", "-c", "kill -CONT -1")
        for pid in _children():
            os.kill(pid, signal.SIGCONT)  # nsenter stops with the process that it waits for

    def processes(self, name: str) -> list[str]:
        """Return the command lines of a host's live processes, without the first one's and ps."""
        found = self.run(name, "ps", "-e", "-o", "pid=,stat=,args=").splitlines()
        lines = [line.split(maxsplit=2) for line in found]
        return [
            " ".join(arguments)
            for pid, state, *arguments in lines
            if pid != "1" and state[0] not in "ZX" and arguments[0].split()[0] != "ps"
        ]

    @property
    def up(self) -> list[str]:
        """Return the hosts that have power."""
        return [name for name in self.names if self._first[name].poll() is None]

    def crash(self, name: str) -> None:
        """Kill all processes of a host; its kernel lives and closes their connections."""
        self._kill(name)

    def power_off(self, name: str) -> None:
        """End a host as a loss of power does: peers get neither FIN nor RST."""
        self.set_link(name, up=False)
        self._kill(name)

    def boot(self, name: str) -> None:
        """Start a host that has lost its power or crashed: no process and no memory is left."""
        _ip("-n", self.switch, "link", "del", name)
        _ip("netns", "del", f"{self._prefix}-{name}")
        self._first[name].communicate()  # closes the pipes
        self._boot(name)

    def _boot(self, name: str) -> None:
        network = f"{self._prefix}-{name}"
        _ip("netns", "add", network)
        _ip("-n", network, "link", "set", "lo", "up")
        ends = ("eth0", "netns", network, "type", "veth", "peer", "name", name)
        _ip("link", "add", *ends, "netns", self.switch)
        _ip("-n", self.switch, "link", "set", name, "master", "br0", "up")
        _ip("-n", network, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", network, "link", "set", "eth0", "up")
        apart = ("--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child")
        ahead_s = CLOCKS_APART_S * int(name.removeprefix("n"))
        clocks = ("--time", "--monotonic", str(ahead_s), "--boottime", str(2 * ahead_s))
        first = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{network}", "unshare", *apart, *clocks),
                *("sh", "-c", _BOOT, "sh", name, str(self._names_file)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._first[name] = first
        assert first.stdout is not None
        if first.stdout.readline() != "up\n":
            raise RuntimeError(f"host {name} did not start: {first.communicate()[1]}")

    def _kill(self, name: str) -> None:
        """Kill a host's first process, and with it all others of its PID namespace."""
        first = self._first[name]
        if first.poll() is None:
            init = _child(first.pid)
            entered = [pid for pid in _children() if _enters(pid, init)]
            os.kill(init, signal.SIGKILL)
            for pid in entered:  # a host ends when their ended processes are collected
                os.kill(pid, signal.SIGCONT)
        first.wait(10)

    def _remove(self) -> None:
        for name, first in self._first.items():
            self._kill(name)
            first.communicate()  # closes the pipes
        for network in (*(f"{self._prefix}-{name}" for name in self.names), self.switch):
            if Path("/run/netns", network).exists():
                _ip("netns", "del", network)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _drop_sent(network: str, device: str, drop: bool) -> None:
    """Drop all that a device sends: packets exceed a bucket of one byte."""
    qdisc = ("tc", "-n", network, "qdisc")
    bucket = ("tbf", "rate", "8bit", "burst", "1", "limit", "1")
    words = ("replace", "dev", device, "root", *bucket) if drop else ("del", "dev", device, "root")
    subprocess.run([*qdisc, *words], check=True)


def _children(pid: int | None = None) -> list[int]:
    """Return the children of a process, or of this one, that its first thread has started."""
    parent = pid or os.getpid()
    return [int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _child(pid: int) -> int:
    """Return the only child of a process: `unshare --fork` waits for the host's first process."""
    return _children(pid)[0]


def _enters(pid: int, init: int) -> bool:
    """Return whether a process, an `nsenter`, has a child on the host of that first process."""
    space = Path(f"/proc/{init}/ns/pid").readlink()
    try:
        return any(Path(f"/proc/{one}/ns/pid").readlink() == space for one in _children(pid))
    except OSError:  # it ends
        return False
