"""Kubernetes manifests: read by a YAML parser, checked by schemas, and their words executed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.end_to_end.conftest import wait_for

from outlast.errors import UsageError
from outlast.launch import torchrun_arguments
from outlast.launch.kubernetes.pod_manifests import KINDS, PodJob, manifests
from outlast.launch.nodes.node_flags import RELEASE_VARIABLE
from outlast.launch.torchrun_arguments import RunPlan

yaml = pytest.importorskip("yaml", reason="a YAML parser: pip install pyyaml")
CRDS = os.environ.get("OUTLAST_TEST_CRDS", "")
words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
JOB = PodJob(
    kind="jobset",
    name="train",
    namespace="",
    image="example/train:1",
    command=("--nnodes", "2:3", "--nproc-per-node", "4", "train.py"),
    own_run_dir="",
    nodes=2,
    spare_nodes=1,
    ranks_per_node=4,
    claim="runs",
    secret="train-token",
    resources=("cpu=8", "nvidia.com/gpu=4"),
    stop_s=45.0,
)


def read(job: PodJob) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifests(job)))


def container(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only container of the pods."""

    def containers(value: Any) -> list[dict[str, Any]]:
        if isinstance(value, list):
            return [one for item in value for one in containers(item)]
        if not isinstance(value, dict):
            return []
        own = value.get("containers", [])
        return own + [one for key, item in value.items() for one in containers(item)]

    (one,) = containers(found)
    return one


def arguments(job: PodJob) -> list[str]:
    """Return the words of a container, as Kubernetes expands them."""
    found = read(job)
    given = found[-1]["spec"].get("trainer") or container(found)
    assert given["command"] == ["outlast"]
    return [word.replace("$$", "$") for word in given["args"]]


def plan(job: PodJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    run, *flags = arguments(job)
    assert run == "run"
    return torchrun_arguments.parse(flags)


def test_a_job_set_starts_the_run_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "2")  # of the third pod, by its index
    found = plan(JOB, tmp_path, monkeypatch)
    assert (found.world, found.spares, found.run_dir) == (8, 4, "/runs/train")
    assert (found.node.endpoint, found.node.node_rank) == ("train-node-0-0.train:29400", 2)
    assert (found.notices.signals, found.notices.after_s) == (("SIGTERM",), 45.0)
    variables = {one["name"]: one for one in container(read(JOB))["env"]}
    assert variables[RELEASE_VARIABLE]["value"] == "4", "a pod that leaves comes back"
    assert "job-completion-index" in str(variables["PET_NODE_RANK"])


def test_a_train_job_meets_where_the_trainer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}
    given |= {"PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = plan(JOB._replace(kind="trainjob"), tmp_path, monkeypatch)
    assert (found.node.nodes, found.node.spare_nodes) == (2, 1)
    assert (found.node.endpoint, found.node.node_rank) == ("train-node-0-0.train:29500", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_get_what_the_run_needs_and_no_secret(kind: str) -> None:
    text = manifests(JOB._replace(kind=kind))
    one = container(list(yaml.safe_load_all(text)))
    assert "secretKeyRef" in text and "stringData" not in text
    assert one["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "4"}
    assert one["readinessProbe"]["exec"]["command"][:3] == ["outlast", "k8s", "ready"]
    assert one["livenessProbe"]["exec"]["command"][:3] == ["outlast", "k8s", "alive"]
    assert "terminationGracePeriodSeconds: 60\n" in text
    assert "automountServiceAccountToken: false\n" in text


def test_pods_come_back_alone_and_as_many_may_stay_away_as_there_are_spare_nodes() -> None:
    (found,) = read(JOB)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["maxFailedIndexes"]) == (3, 3, 1)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimitPerIndex"] > 0
    # Kubernetes doubles its wait of 10 s; the others wait for a pod for 600 s (`hello_s`)
    assert 10 * 2 ** (job["backoffLimitPerIndex"] - 1) < 600
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1])


@given(st.lists(words, max_size=4), st.sampled_from(["jobset", "trainjob"]))
def test_every_word_arrives_as_it_was_given(arguments_given: list[str], kind: str) -> None:
    job = JOB._replace(kind=kind, command=(*JOB.command, *arguments_given))
    assert arguments(job)[-len(job.command) :] == list(job.command)


def _script(job: PodJob) -> str:
    command, script = (container(read(job))[key] for key in ("command", "args"))
    assert command == ["sh", "-c"]
    return script[0].replace("$$", "$")


LAUNCHER = """#!/bin/sh
trap 'echo terminated; exit 4' TERM
for word in "$@"; do printf '%s\\0' "$word" >> shown; done
echo started
[ "$CODE" = wait ] && while :; do sleep 0.1; done
exit "$CODE"
"""


def _start(script: str, folder: Path, code: str) -> subprocess.Popen[str]:
    (folder / "outlast").write_text(LAUNCHER)
    (folder / "outlast").chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "CODE": code, "LWS_LEADER_ADDRESS": "first"}
    environment |= {"asked": "yes", "ended": "yes", "code": "5"}  # names of the script's variables
    return subprocess.Popen(
        ["sh", "-c", script], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.process
@pytest.mark.parametrize(("code", "ends"), [("0", 0), ("1", 1), ("2", 2), ("3", 3), ("4", 4)])
def test_a_leader_worker_set_starts_again_what_can_be_resumed(
    tmp_path: Path, code: str, ends: int
) -> None:
    odd = "it's $HOME $(id)\n"
    job = JOB._replace(kind="leaderworkerset", command=(*JOB.command, odd))
    with _start(_script(job), tmp_path, code) as started:
        assert started.stdout is not None and started.stdout.readline() == "started\n"
        if ends in (0, 1):
            assert "has ended with exit code" in started.stdout.readline()
            assert started.poll() is None, "it stays: an ended container starts again"
            started.terminate()
        assert started.wait(20) == ends
    shown = (tmp_path / "shown").read_text().split("\0")[:-1]
    assert shown[:3] == ["run", "--rdzv-endpoint", "first:29400"] and shown[-1] == odd


@pytest.mark.process
def test_a_leader_worker_set_passes_a_request_to_stop_on(tmp_path: Path) -> None:
    with _start(_script(JOB._replace(kind="leaderworkerset")), tmp_path, "wait") as started:
        assert started.stdout is not None and started.stdout.readline() == "started\n"
        wait_for((tmp_path / "shown").exists, "the launcher")
        started.terminate()
        assert started.stdout.readline() == "terminated\n"
        assert started.wait(20) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "job"}, "--kind job: give jobset"),
        ({"name": "Train"}, "must be a DNS label"),
        ({"name": "1train"}, "must be a DNS label"),
        ({"name": "a" * 55}, "at most 54 in all"),
        ({"name": "a\n"}, "must be a DNS label"),
        ({"namespace": "a.b"}, "--namespace"),
        ({"image": ""}, "--image ''"),
        ({"image": "a b"}, "--image 'a b'"),
        ({"claim": ""}, "--claim ''"),
        ({"secret": "a_b"}, "--token-secret 'a_b'"),
        ({"own_run_dir": "runs/a"}, "the claim is mounted at /runs"),
        ({"nodes": 1, "spare_nodes": 0}, "--nnodes 1"),
        ({"resources": ("cpu",)}, "give NAME=QUANTITY"),
        ({"resources": ("memory=lots",)}, "give NAME=QUANTITY"),
        ({"command": ("\udc80",)}, "is no Unicode"),
    ],
)
def test_what_a_cluster_would_refuse_or_read_otherwise_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        manifests(JOB._replace(**change))  # type: ignore[arg-type]
    assert message in str(caught.value)


# --- schemas of the kinds, in a directory of CRDs that OUTLAST_TEST_CRDS names ----------------


def _strict(schema: Any) -> Any:
    """Return an OpenAPI schema as JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {
        key: _strict(item)
        for key, item in schema.items()
        if key not in ("description", "format") and not key.startswith("x-")
    }
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and "additionalProperties" not in schema and not is_open:
        kept["additionalProperties"] = False
    return kept


def _schemas() -> dict[tuple[str, str], Any]:
    found = {}
    for path in Path(CRDS).glob("*.yaml"):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            name = f"{spec['group']}/{version['name']}"
            found[name, spec["names"]["kind"]] = schema
    return found


@pytest.mark.skipif(not CRDS, reason="OUTLAST_TEST_CRDS names no directory of CRDs")
def test_manifests_fit_the_schemas_of_their_kinds() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    schemas = _schemas()
    for kind in KINDS:
        for document in read(JOB._replace(kind=kind, namespace="team")):
            schema = schemas[document["apiVersion"], document["kind"]]
            jsonschema.Draft7Validator(schema).validate(document)
            document["spec"]["misspelt"] = 1
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.Draft7Validator(schema).validate(document)
