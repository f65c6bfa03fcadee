"""Manifests of a run of several nodes: one pod a node, each with the same `outlast run`.

docs/kubernetes.md says what they promise. No cluster has run them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from outlast.config import STATE_VARIABLE
from outlast.errors import EXIT_INTERRUPTED, UsageError
from outlast.launch.kubernetes.yaml_text import Block, Commented, documents
from outlast.launch.nodes.node_flags import PORT, RELEASE_VARIABLE

KINDS = ("jobset", "trainjob", "leaderworkerset")
RUNS = "/runs"  # where the claim is mounted
STATE_FILE = "/tmp/outlast-node.json"  # noqa: S108 - of a container of its own
RETURNS_MAX = 6  # of one pod: Kubernetes waits 10 s before the first, 320 s before the last
RESTARTS_MAX = 3  # of all pods
REAP_S = 15.0  # to end what is left behind the limit stop_s and the launcher's own grace
LABEL_MAX = 63

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_RESOURCE = re.compile(r"[a-z0-9][A-Za-z0-9./-]*")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_WORKER_INDEX = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
_HEADER = """\
# `outlast run` on {total} nodes{spares}: written by `outlast k8s render`,
# yours to read and to change. docs/kubernetes.md says what it promises. Needs, beforehand:
#   kubectl create secret generic {secret} --from-file=token=FILE   (FILE: openssl rand -hex 32)
#   a PersistentVolumeClaim {claim} that all nodes can write to (ReadWriteMany)
"""
_LWS_SCRIPT = """\
# Pods of a LeaderWorkerSet start again whenever they end. A run that can be resumed
# ends the container, which starts again in place. Behind the script's end it stays.
asked= ended= code=143 # not the environment's
stop() { # ends the run; behind its end, this script
  asked=yes
  [ -z "$ended" ] && kill -TERM "$!" 2> /dev/null || exit "$code"
}
trap stop TERM
@COMMAND@ &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2> /dev/null; do # a signal ends `wait` early
  wait "$run"
  code=$?
done
ended=yes
case "$code" in
  0 | 1) echo "outlast run has ended with exit code $code; delete this LeaderWorkerSet" ;;
  *) exit "$code" ;;
esac
[ -n "$asked" ] && exit "$code"
sleep infinity &
wait
"""


class PodJob(NamedTuple):
    """A run. `command`: the words behind `outlast run`, without run directory and endpoint."""

    kind: str
    name: str
    namespace: str
    image: str
    command: Sequence[str]
    own_run_dir: str  # of the command, "" without one
    nodes: int
    spare_nodes: int
    ranks_per_node: int
    claim: str
    secret: str
    resources: Sequence[str]  # NAME=QUANTITY
    stop_s: float  # from SIGTERM until the launcher has ended
    takes_notice: bool = True  # SIGTERM is a notice; False: the command says what it is

    @property
    def total(self) -> int:
        """Return the number of pods."""
        return self.nodes + self.spare_nodes


def manifests(job: PodJob) -> str:
    """Return the manifests. Raises UsageError for what a cluster would refuse or read otherwise."""
    _check(job)
    kinds = {"jobset": _job_set, "trainjob": _train_job, "leaderworkerset": _leader_worker_set}
    spares = f", {job.spare_nodes} of them spare" if job.spare_nodes else ""
    header = _HEADER.format(total=job.total, spares=spares, secret=job.secret, claim=job.claim)
    return header + documents(kinds[job.kind](job))


def _check(job: PodJob) -> None:
    if job.kind not in KINDS:
        raise UsageError(f"--kind {job.kind}: give {', '.join(KINDS)}")
    last = f"-0-{job.total - 1}" if job.kind == "leaderworkerset" else f"-node-0-{job.total - 1}"
    if not _LABEL.fullmatch(job.name) or len(job.name + last) > LABEL_MAX:
        raise UsageError(
            f"--name {job.name!r}: pods are named NAME{last}, which must be a DNS label: give a"
            f" lower-case letter, then lower-case letters, digits and -, at most"
            f" {LABEL_MAX - len(last)} in all"
        )
    if job.namespace and not (_LABEL.fullmatch(job.namespace) and len(job.namespace) <= LABEL_MAX):
        raise UsageError(f"--namespace {job.namespace!r} is no DNS label")
    for flag, name in (("--claim", job.claim), ("--token-secret", job.secret)):
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
            raise UsageError(f"{flag} {name!r}: give the name of an object in the namespace")
    if not _IMAGE.fullmatch(job.image):
        raise UsageError(f"--image {job.image!r}: give REPOSITORY/NAME:TAG")
    if job.total < 2:
        raise UsageError(
            "--nnodes 1: these manifests are for several nodes; start one node as a plain Job"
        )
    if job.own_run_dir and not job.own_run_dir.startswith(f"{RUNS}/"):
        raise UsageError(
            f"--run-dir {job.own_run_dir}: the claim is mounted at {RUNS}; give {RUNS}/NAME, or"
            " leave it out"
        )
    for text in job.resources:
        name, _, quantity = text.partition("=")
        if not _RESOURCE.fullmatch(name) or not _QUANTITY.fullmatch(quantity):
            raise UsageError(f"--resource {text!r}: give NAME=QUANTITY, as in memory=64Gi")


def _metadata(job: PodJob) -> dict[str, object]:
    return {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}


def _words(job: PodJob, endpoint: str) -> list[str]:
    """Return the words behind `outlast`, as Kubernetes reads them: `$$` is a dollar sign."""
    own = [] if job.own_run_dir else ["--run-dir", f"{RUNS}/{job.name}"]
    at = ["--rdzv-endpoint", endpoint] if endpoint else []
    if job.takes_notice:
        own += ["--notice-signal=TERM", f"--notice-time={job.stop_s:g}s"]
    return ["run", *at, *own, *(word.replace("$", "$$") for word in job.command)]


def _pod(job: PodJob, rank_field: str, start: dict[str, object]) -> dict[str, object]:
    """Return a pod. `rank_field`: where a pod finds its own index; "": it is set already."""
    limits = dict(text.split("=", 1) for text in job.resources)
    secret = {"secretKeyRef": {"name": job.secret, "key": "token"}}
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": rank_field}}}
    probe = {"periodSeconds": 10, "timeoutSeconds": 10}
    container: dict[str, object] = {
        "name": "node",
        "image": job.image,
        **start,
        "env": [
            *([rank] if rank_field else []),
            {"name": "OUTLAST_TOKEN", "valueFrom": secret},
            {"name": STATE_VARIABLE, "value": STATE_FILE},
            {
                "name": RELEASE_VARIABLE,
                "value": Commented(
                    "A node that leaves for maintenance (`outlast roll`) comes back as a new pod.",
                    str(EXIT_INTERRUPTED),
                ),
            },
        ],
        **({"resources": {"limits": limits}} if limits else {}),
        "readinessProbe": Commented(
            "Ready: the node takes part in a run, and its lease is in force.",
            {"exec": {"command": ["outlast", "k8s", "ready", STATE_FILE]}, **probe},
        ),
        "livenessProbe": Commented(
            "Alive: the launcher is not stuck. It is killed after two minutes of that.",
            {
                "exec": {"command": ["outlast", "k8s", "alive", STATE_FILE]},
                **probe,
                "periodSeconds": 30,
                "failureThreshold": 4,
            },
        ),
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    return {
        "automountServiceAccountToken": Commented("The run asks the API server nothing.", False),
        "terminationGracePeriodSeconds": Commented(
            "For one step and one checkpoint: follows --limit stop_s=SECONDS.",
            ceil(job.stop_s + REAP_S),
        ),
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _node_job(job: PodJob, pod: dict[str, object], *, sized: bool) -> dict[str, object]:
    """Return the specification of an Indexed Job: it outlasts as many pods as there are spares."""
    size: dict[str, object] = {"parallelism": job.total, "completions": job.total}
    error = {"containerName": "node", "operator": "In", "values": [1]}
    return {
        **(size if sized else {}),
        "completionMode": "Indexed",
        "backoffLimitPerIndex": Commented(
            "A pod that ends comes back: it joins the run, or meets the others if all have ended\n"
            "(an eviction, exit code 4; a run that gave up, 3). If more pods than there are spare\n"
            "nodes have come back this often, the whole set starts again.",
            RETURNS_MAX,
        ),
        "maxFailedIndexes": job.spare_nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": Commented(
            "An error of the script ends the set.",
            {"rules": [{"action": "FailJob", "onExitCodes": error}]},
        ),
        "successPolicy": Commented(
            "All nodes of a run that is done end with 0: without those that were lost, these.",
            {"rules": [{"succeededCount": job.nodes}]},
        ),
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }


def _set(template: dict[str, object]) -> dict[str, object]:
    """Return the specification of a JobSet."""
    return {
        "network": Commented(
            "The set makes the headless service that gives pods their names.",
            {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        ),
        "failurePolicy": Commented(
            "All pods start again, and the run resumes from its newest checkpoint: after too many\n"
            "returns of single pods.",
            {
                "maxRestarts": RESTARTS_MAX,
                "rules": [
                    {
                        "name": "scriptError",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
        ),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }


def _job_set(job: PodJob) -> list[dict[str, object]]:
    words = _words(job, f"{job.name}-node-0-0.{job.name}:{PORT}")
    pod = _pod(job, _INDEX, {"command": ["outlast"], "args": list(words)})
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job),
            "spec": _set({"spec": _node_job(job, pod, sized=True)}),
        }
    ]


def _train_job(job: PodJob) -> list[dict[str, object]]:
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": _node_job(job, _pod(job, "", {}), sized=False),
    }
    runtime: dict[str, object] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job),
        "spec": {
            "mlPolicy": Commented(
                "The Trainer sets PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.",
                {"numNodes": job.total, "torch": {}},
            ),
            "template": {"spec": _set(template)},
        },
    }
    train_job: dict[str, object] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": {
                "image": job.image,
                "numNodes": job.total,
                "numProcPerNode": job.ranks_per_node,
                "command": ["outlast"],
                "args": list(_words(job, "")),
            },
        },
    }
    return [runtime, train_job]


def _leader_worker_set(job: PodJob) -> list[dict[str, object]]:
    run, at, _, *words = _words(job, "LEADER")
    command = f'outlast {run} {at} "$LWS_LEADER_ADDRESS:{PORT}" ' + " ".join(
        map(shlex.quote, words)
    )
    script = Block(_LWS_SCRIPT.replace("@COMMAND@", command))
    pod = _pod(job, _WORKER_INDEX, {"command": ["sh", "-c"], "args": [script]})
    return [
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": _metadata(job),
            "spec": {
                "replicas": 1,
                "leaderWorkerTemplate": {
                    "size": job.total,
                    "restartPolicy": Commented(
                        "A lost pod comes back alone, and joins the run.",
                        "None",
                    ),
                    "workerTemplate": {"spec": pod},
                },
            },
        }
    ]
