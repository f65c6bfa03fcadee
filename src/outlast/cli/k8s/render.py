"""`outlast k8s render`: a run as Kubernetes manifests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outlast.cli.output_stream import write
from outlast.errors import EXIT_DONE, UsageError
from outlast.launch import outlast_flags, torchrun_arguments
from outlast.launch.kubernetes.pod_manifests import PodJob, manifests
from outlast.launch.launcher import GRACE_S
from outlast.launch.nodes import node_flags

# Flags of `outlast run` that the manifests set, each with its value if it was not given.
_OURS: dict[str, object] = {
    "rdzv_endpoint": "",
    "master_addr": "127.0.0.1",
    "node_rank": node_flags.ANY_RANK,
    "token_file": "",
    "local_addr": None,
}


def render(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    kind: str,
    image: str,
    claim: str,
    name: str = "",
    namespace: str = "",
    token_secret: str = "",
    resource: Annotated[tuple[str, ...], Parameter(negative=())] = (),
) -> int:
    """Print manifests that run `outlast run` on several pods.

    Parameters
    ----------
    command
        Behind --: the command line of `outlast run`, without `outlast run`.
    kind
        jobset, trainjob (with its TrainingRuntime) or leaderworkerset.
    image
        Container image with Outlast, torch and the script.
    claim
        Existing PersistentVolumeClaim for run directories, writable by all nodes.
    name
        Name of the objects (default: that of the script).
    namespace
        Namespace of the objects (default: that of kubectl).
    token_secret
        Existing Secret whose key `token` all nodes share (default: NAME-token).
    resource
        Limit of each pod, such as cpu=16 or memory=64Gi. Repeatable.
    """
    given = torchrun_arguments.read_flags(list(command))
    for flag, default in _OURS.items():
        if getattr(given, flag) != default:
            raise UsageError(
                f"--{flag.replace('_', '-')} is set by the manifests; leave it out (also as a"
                " variable PET_*)"
            )
    own_run_dir = given.run_dir or ""
    given.run_dir, given.rdzv_endpoint = own_run_dir or "runs", f"first:{node_flags.PORT}"
    nodes = node_flags.read(given, "")
    stem = re.sub(r"[^a-z0-9]+", "-", Path(given.training_script).stem.lower()).strip("-")
    name = name or stem
    write(
        manifests(
            PodJob(
                kind=kind,
                name=name,
                namespace=namespace,
                image=image,
                command=command,
                own_run_dir=own_run_dir,
                nodes=nodes.nodes,
                spare_nodes=nodes.spare_nodes,
                ranks_per_node=int(given.nproc_per_node) if nodes.total > 1 else 1,
                claim=claim,
                secret=token_secret or f"{name}-token",
                resources=resource,
                stop_s=outlast_flags.limits(given).stop_s + GRACE_S,
                takes_notice=not given.notice_signal,
            )
        )
    )
    return EXIT_DONE
