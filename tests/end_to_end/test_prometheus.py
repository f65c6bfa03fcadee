"""A real Prometheus, and a node exporter, beside runs that are broken on purpose: alert rules and
dashboards."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Runner, wait_for
from tests.fleet.job_attempts import attempt, of, put

from outlast.cli.main import main

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("prometheus-node-exporter")),
        reason="Prometheus, or its node exporter, is not installed",
    ),
]
MONITORING = Path(__file__).parents[2] / "examples/monitoring"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Prometheus:
    """A server that scrapes two launchers and the textfiles of a node once a second, with our
    alert rules."""

    def __init__(self, folder: Path) -> None:
        self.port, *self.targets, node = ports = free_ports(4)
        self.textfiles = folder / "textfiles"
        self.textfiles.mkdir()
        shutil.copy(MONITORING / "outlast_alerts.yml", folder)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [outlast_alerts.yml]\n"
            "scrape_configs:\n- job_name: outlast\n  static_configs:\n"
            f"  - targets: {[f'127.0.0.1:{port}' for port in ports[1:]]}\n"
        )
        address = "--web.listen-address=127.0.0.1:"
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        command.append("--enable-feature=exemplar-storage")
        exporter = ["prometheus-node-exporter", "--collector.disable-defaults"]
        exporter += ["--collector.textfile", f"--collector.textfile.directory={self.textfiles}"]
        with (folder / "prometheus.txt").open("w") as log:
            self.processes = [
                subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
                for words in ([*command, f"{address}{self.port}"], [*exporter, f"{address}{node}"])
            ]

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the result of an instant query."""
        return self._ask("query", {"query": text})["result"]

    def exemplars(self, text: str) -> list[dict[str, str]]:
        """Return the labels of exemplars of the last hour."""
        hour = {"start": str(time.time() - 3600), "end": str(time.time())}
        series = self._ask("query_exemplars", {"query": text, **hour})
        return [one["labels"] for each in series for one in each["exemplars"]]

    def _ask(self, kind: str, parameters: dict[str, str]) -> Any:
        where = f"http://127.0.0.1:{self.port}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(where, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def is_ready(self) -> bool:
        try:
            return self.query("vector(1)") != []
        except OSError:
            return False

    def alerts(self, state: str) -> set[str]:
        """Return the alerts that were in a state within the last five minutes."""
        found = self.query(f'last_over_time(ALERTS{{alertstate="{state}"}}[5m])')
        return {one["metric"]["alertname"] for one in found}


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    server = Prometheus(folder)
    try:
        wait_for(server.is_ready, "Prometheus answers")
        yield server
    finally:
        for process in server.processes:
            process.kill()
            process.wait(30)


def expressions() -> list[tuple[str, str]]:
    """Return titles and queries of all panels."""
    return [
        (panel["title"], target["expr"].replace("$instance", ".*"))
        for path in sorted(MONITORING.glob("*_dashboard.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


def write_textfiles(folder: Path, textfiles: Path) -> None:
    """Write metrics of a node's check, whose state is unknown, and of a fleet with a lemon."""
    settings = folder / "check.toml"
    settings.write_text('[services]\nactive = ["no-such-service"]\n')
    flags = ["--only", "service", "--settings", str(settings)]
    main(["check", *flags, "--metrics-file", str(textfiles / "check.prom")])
    put(
        folder / "lake",
        of(
            *(
                attempt(f"{node}-{day}", 24 * day, 24 * day + 23, hosts=f"n{node}",
                        state="NODE_FAIL" if node == 7 and day % 3 == 0 else "COMPLETED")
                for node in range(60) for day in range(28)
            ),
            *(
                attempt(f"large-{day}", 24 * day, 24 * day + 47, hosts="n[60-83]", nodes=24,
                        gpus=192, state="NODE_FAIL" if day == 4 else "COMPLETED")
                for day in range(0, 28, 2)
            ),
        ),
    )  # fmt: skip
    file = str(textfiles / "fleet.prom")
    assert main(["fleet", "report", str(folder / "lake"), "--metrics-file", file]) == 0


class PanelQueries:
    """Queries of panels that have given no data yet."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.pending = expressions()

    def have_data(self) -> bool:
        self.pending = [one for one in self.pending if not self._prometheus.query(one[1])]
        return not self.pending


@pytest.mark.long
def test_alerts_and_dashboards_of_broken_runs(runner: Runner, prometheus: Prometheus) -> None:
    first, second = prometheus.targets
    write_textfiles(runner.folder, prometheus.textfiles)
    kills = [f"--fault=kill:rank=1,step={step}" for step in range(1, 7)]
    flags = ("--checkpoint-every=2", f"--metrics-port={first}", *kills)
    ended = runner.run(*flags, job=("--bug", "typo"))
    assert ended.code == 1, ended.output
    assert "for the last scrape of metrics" in ended.output
    wait_for(lambda: "OutlastRunFailed" in prometheus.alerts("firing"), "an alert of the end")
    firing = prometheus.alerts("firing") - {"OutlastNodeCheckFailed"}  # where systemd answers
    assert firing == {"OutlastRunFailed", "OutlastCrashLoop", "OutlastLemon"}
    assert [one["value"][1] for one in prometheus.query("node_textfile_scrape_error")] == ["0"]

    found = prometheus.exemplars("outlast_incidents_total")
    assert {"1", "10"} & {one["incident"] for one in found}
    assert all(len(one["trace_id"]) == 32 for one in found)

    hold = ("--hold", str(runner.folder / "hold"))
    flip = "--fault=flip:rank=1,step=5,phase=reduced,bit=30,times=2"  # a finding: drain the node
    flags = ("--spares=1", "--checkpoint-every=2", flip, f"--metrics-port={second}")
    lost = runner.start(*flags, job=hold, name="lost")
    wait_for(lambda: prometheus.query("outlast_step >= 7"), "a run that trains")
    panels = PanelQueries(prometheus)
    wait_for(panels.have_data, "data for all panels")
    lost.send_signal(signal.SIGKILL)
    wait_for(lambda: "OutlastLauncherLost" in prometheus.alerts("pending"), "a lost launcher")
    assert "OutlastLauncherLost" not in prometheus.alerts("firing")
