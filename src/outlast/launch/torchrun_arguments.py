"""Command line of torchrun, read by torch's parser, with Outlast's flags, as a RunPlan.

torch itself is imported only for `--nproc-per-node` other than a number: the template imports it.
"""

from __future__ import annotations

import re
import signal
import time
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from outlast import config
from outlast.atomic_files import replace_file
from outlast.checkpoint.upkeep.durable_targets import DurableRule
from outlast.checkpoint.upkeep.retention_policy import Keep
from outlast.controller import fault_spec
from outlast.controller.controller_state import MigrateOn
from outlast.controller.recovery.recovery_policy import DEFAULT, RecoveryPolicy
from outlast.errors import ConfigError, RunDirError, UsageError
from outlast.launch import outlast_flags
from outlast.launch.nodes import node_flags
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.launch.notices import notice_flags
from outlast.launch.notices.notice_flags import NoticeFlags
from outlast.launch.outlast_flags import MetricsFlags
from outlast.launch.policies.policy_needs import JobShape, check_policy
from outlast.launch.run_directory import RunDir
from outlast.launch.torch_definitions import TorchDefinitions
from outlast.launch.torchrun.store_address import read_store_address
from outlast.launch.torchrun.worker_commands import may_be_unmodified, worker_command
from outlast.launch.torchrun.worker_streams import WorkerStreams

# Unsupported torchrun flags, each with its default value.
_REFUSED: dict[str, object] = {
    "event_log_handler": "null",
    "logs_specs": None,
    "numa_binding": None,
    "virtual_local_rank": False,
    "duplicate_stdout_filters": [],
    "duplicate_stderr_filters": [],
}


_RUN = "torch.distributed.run"
_torch = TorchDefinitions()


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Validated command of one `outlast run`."""

    world: int
    spares: int
    node: NodeFlags = NodeFlags()
    notices: NoticeFlags = NoticeFlags()
    metrics: MetricsFlags = MetricsFlags()
    notify: tuple[str, ...] = ()  # targets of notifications, without their secrets
    run_dir: str
    script: str
    args: tuple[str, ...]
    command: tuple[str, ...]  # command of a worker
    run_id: str  # TORCHELASTIC_RUN_ID
    role: str
    max_restarts: int  # for scripts that never call init()
    master_addr: str
    master_port: int | None  # None: any free port
    agent_store: bool = False  # the launcher has the store of MASTER_PORT, not rank 0
    log_dir: str | None
    streams: dict[int, int]  # displayed streams by seat: 1 stdout, 2 stderr, 3 both
    teed: dict[int, int] = {}  # those among them whose lines have the prefix
    line_prefix: str = ""
    stop_signals: tuple[str, ...]
    checkpoint_every: int  # steps; config.AUTO: by the schedule
    snapshot_every: int  # steps between copies in memory; config.AUTO: by the schedule
    copies: int  # keepers that hold each rank's save
    peer_rate_bytes_per_s: int | None = None  # total rate limit of traffic between keepers
    parity: int = 0  # ranks of a parity group; 0: copies
    until_step: int = 0  # last step, followed by a checkpoint; 0: until the script ends
    keep: Keep
    durable: tuple[DurableRule, ...]
    on_save_failure: Literal["warn", "stop"]
    on_unrepeatable: Literal["stop", "warn"] = "stop"
    nan: str = ""  # "": the default
    check_every_s: float = 0.0  # period of node checks; 0: none
    check_settings: str = ""
    migrate_on: MigrateOn = ""
    policy: RecoveryPolicy = DEFAULT
    audit_every: int = outlast_flags.AUDIT_EVERY  # steps between audits of a part of the state
    replay_every: int = 0  # committed steps between replays on another rank; 0: none
    faults: tuple[str, ...]
    fault_seed: int
    limits: config.Limits
    template: bool = True  # fork workers from a template process
    json: bool
    plain: bool

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks of each node that has ranks at the start."""
        return self.world // self.node.nodes

    @property
    def keeps_copies(self) -> bool:
        """Return whether copies in memory were asked for, beside those of checkpoints."""
        return self.copies > 1 or self.parity > 0 or self.snapshot_every != 0

    @property
    def ranks_per_host(self) -> int:
        """Return the number of ranks that each host starts with."""
        return self.world if self.node.on_one_host else self.ranks_per_node


def parse(argv: list[str]) -> RunPlan:
    """Read the command line (and torchrun's PET_* variables).

    Raises UsageError or ConfigError with a one-line remedy; `--help` exits.
    """
    given = read_flags(argv)
    node = node_flags.read(
        given,
        config.file_default("TOKEN_FILE"),
        tuple(config.file_default(f"TLS_{name}") for name in ("CERT", "KEY", "CA")),
    )
    ranks = _world(given.nproc_per_node)
    world = node.nodes * ranks
    for name in ("spares", "max_restarts"):
        if getattr(given, name) < 0:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must not be negative, not {getattr(given, name)}")
    script = given.training_script
    spares = given.spares + node.spare_nodes * ranks
    copies, parity = outlast_flags.copies(given.copies, world)
    on_disk, in_memory = given.checkpoint_every != 0, given.snapshot_every != 0
    check_policy(given.policy, JobShape(world, spares, on_disk or in_memory, on_disk))
    command, streams = worker_command(given, spares), WorkerStreams.read(given, ranks, world)
    store = read_store_address(given, node.endpoint)
    return RunPlan(
        world=world,
        spares=spares,
        node=node,
        notices=notice_flags.read(given),
        metrics=outlast_flags.metrics(given),
        notify=tuple(given.notify),
        run_dir=given.run_dir or _fresh_run_dir(script),
        script=f"-m {script}" if given.module else _absolute(script),
        args=tuple(given.training_script_args),
        command=command,
        run_id=store.run_id,
        role=given.role,
        max_restarts=given.max_restarts,
        master_addr=store.address,
        master_port=store.port,
        agent_store=store.is_agents and may_be_unmodified(command, node.total),
        log_dir=given.log_dir,
        **streams._asdict(),
        stop_signals=_signals(given.signals_to_handle),
        checkpoint_every=given.checkpoint_every,
        snapshot_every=given.snapshot_every,
        copies=copies,
        peer_rate_bytes_per_s=given.peer_rate,
        parity=parity,
        keep=given.keep,
        durable=tuple(given.durable),
        on_save_failure=given.on_save_failure,
        on_unrepeatable=given.on_unrepeatable,
        nan=given.nan,
        check_every_s=given.check_every,
        check_settings=given.check_settings,
        migrate_on=given.migrate_on,
        policy=given.policy,
        audit_every=given.audit_every,
        replay_every=given.replay_every,
        faults=_faults(given, world, spares),
        fault_seed=given.fault_seed,
        limits=outlast_flags.limits(given),
        template=not given.no_template,
        json=given.json,
        plain=given.plain,
    )


def read_flags(argv: list[str]) -> Namespace:
    """Read and check the flags, but not what depends on the node: its devices and files.

    Raises as `parse` does.
    """
    config.check_torch()
    given = run_parser().parse_args(argv)
    _refuse(given)
    outlast_flags.refuse_check_flags(given)
    return given


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = "no training script was given" if "training_script" in message else message
        if found := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            close = get_close_matches(found[1], self._option_string_actions, n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"{message}; try: outlast run --nproc-per-node 4 script.py (or --help)")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) == 1 else []  # else 3.11 refuses those of a script


def run_parser() -> ArgumentParser:
    """Return the parser of torchrun's and Outlast's flags. Raises UsageError for PET_* flags."""
    try:
        parents = [_torch.get(_RUN, "get_args_parser")()]
    except ValueError as error:
        raise UsageError(f"a PET_* variable is not 0 or 1: {error}; correct or unset it") from error
    parser = _Parser(
        prog="outlast run",
        description="Launch as with torchrun, with every flag of it. Continue a run with its own"
        " script and flags: outlast run --resume [RUN_DIR|last]",
        parents=parents,
        add_help=False,
    )
    add = parser.add_argument_group("outlast").add_argument
    parser._action_groups.insert(0, parser._action_groups.pop())  # noqa: SLF001 - ours come first
    add(
        "--spares",
        type=int,
        default=0,
        help="Number of spare worker processes, which take over the ranks of failed ones"
        " (default 0).",
    )
    add(
        "--run-dir",
        "--run_dir",
        help="Directory for events, logs and checkpoints; an existing run is resumed (default: a"
        " new one under runs/).",
    )
    outlast_flags.add_save_flags(add)
    outlast_flags.add_check_flags(add)
    add(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="Inject a failure, for tests: kill:rank=2,step=10,phase=backward, or in any script"
        " kill:rank=1,after=30 (seconds). Repeatable; see docs/howto/break_a_run.md.",
    )
    add(
        "--fault-seed",
        "--fault_seed",
        type=int,
        default=0,
        help="Random seed of faults with random= (default 0).",
    )
    add(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Set a deadline (names in _s, seconds), factor or budget, for example hang_floor_s=10."
        " Repeatable. Names: " + ", ".join(config.Limits.__struct_fields__),
    )
    add(
        "--no-template",
        "--no_template",
        action="store_true",
        help="Start each worker as a new interpreter. By default workers are forked from one"
        " process per host that has imported torch (docs/template.md).",
    )
    node_flags.add_node_flags(add)
    outlast_flags.add_metrics_flags(add)
    if not config.torchrun_variable("PET_NODE_RANK"):  # torch's default is rank 0
        parser.set_defaults(node_rank=node_flags.ANY_RANK)
    add("--json", action="store_true", help="Print the summary as JSON on stdout at the end.")
    add("--plain", action="store_true", help="Print progress lines instead of the live view.")
    return parser


def _refuse(given: Namespace) -> None:
    for name, default in _REFUSED.items():
        if getattr(given, name, default) != default:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} is torchrun's and not supported by outlast run; leave it out"
            )
    if config.torchrun_variable("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        raise UsageError(
            "TORCHELASTIC_ENABLE_FILE_TIMER=1: torchrun's timers are not supported by outlast run;"
            " unset it, and set a deadline with --limit hang_ceiling_s=SECONDS"
        )


def _world(nproc: str) -> int:
    try:
        world = int(nproc) if re.fullmatch(r"-?[0-9]{1,9}", nproc) else _local_world_size(nproc)
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {nproc}: {error}; give a number, auto, cpu or gpu"
        ) from error
    if world < 1:
        raise UsageError(f"--nproc-per-node {nproc}: at least one worker is needed")
    return world


def _local_world_size(nproc: str) -> int:
    from torch.distributed.run import determine_local_world_size  # it asks for the devices

    return determine_local_world_size(nproc)


def _absolute(script: str) -> str:
    path = Path(script)
    return str(path.absolute()) if path.exists() else script


def _fresh_run_dir(script: str) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = config.run_dir_default() / f"{Path(script).stem}-{stamp}"
    candidate, count = base, 1
    while candidate.exists():
        count += 1
        candidate = base.with_name(f"{base.name}-{count}")
    return str(candidate)


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise UsageError(f"--signals-to-handle: {name} is no signal that can be handled")
    return names


def _faults(given: Namespace, world: int, spares: int) -> tuple[str, ...]:
    """Return the text of every fault, with random= faults expanded."""
    found: list[str] = []
    for text in given.fault:
        specs = fault_spec.expand(fault_spec.parse(text), world, spares, given.fault_seed)
        found += [spec.text for spec in specs]
    if twice := [text for text in dict.fromkeys(found) if found.count(text) > 1]:
        raise ConfigError(
            f"--fault {twice[0]!r} is given twice, and a fault strikes once; give times=2, or"
            " another place (or another --fault-seed)"
        )
    return tuple(found)


PLAN_VERSION = 1
_PLAN_NAME = "plan.json"


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """Launcher's plan and the working directory of its workers."""

    version: int = PLAN_VERSION
    cwd: str
    plan: RunPlan


class _PlanVersion(msgspec.Struct):
    version: int


def store_plan(run_dir: RunDir, plan: RunPlan) -> None:
    """Write the plan to the run directory; raises RunDirError on failure."""
    data = msgspec.json.encode(PlanFile(cwd=str(Path.cwd()), plan=plan))
    try:
        replace_file(run_dir.room(_PLAN_NAME), msgspec.json.format(data, indent=2))
    except OSError as error:
        raise RunDirError(
            f"{run_dir.room(_PLAN_NAME)} cannot be written: {error.strerror}; nothing was started"
        ) from error


def read_plan(run_dir: Path) -> PlanFile:
    """Return the plan stored in `run_dir`; raises RunDirError if it is missing or unreadable."""
    path = run_dir / _PLAN_NAME
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_PlanVersion).version
        if version != PLAN_VERSION:
            raise RunDirError(
                f"{path} is of version {version}, and this Outlast reads {PLAN_VERSION}"
            )
        return msgspec.json.decode(data, type=PlanFile)
    except OSError as error:
        raise RunDirError(
            f"{path} cannot be read ({error.strerror}): the command of this run is unknown; give"
            " the directory that `outlast run` printed at its start"
        ) from error
    except msgspec.DecodeError as error:
        raise RunDirError(f"{path} is damaged or of another version ({error})") from error
