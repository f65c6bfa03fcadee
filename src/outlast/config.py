"""All settings, validated once, and TOML files of users. Only this reads environment variables."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from outlast.errors import ConfigError

WORKER_VARIABLE = "OUTLAST_WORKER"
TOKEN_VARIABLE = "OUTLAST_TOKEN"  # noqa: S105 - the name of a variable
STATE_VARIABLE = "OUTLAST_NODE_STATE"
TOP_VARIABLE = "OUTLAST_REPEATS_TOP"  # of spares and workers that join a running job
TEMPLATE_VARIABLE = "OUTLAST_TEMPLATE"
NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
NAN_CHECK_VARIABLE = "TORCH_DIST_NAN_CHECK"
TORCH_MIN = (2, 11)
AUTO = -1  # an interval that the run finds for itself
TOML_BYTES_MAX = 1_000_000
LIMIT_MAX = 1e9  # seconds: 31 years, and every clock and timer can still count them


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines, budgets and thresholds of one run. Seconds unless the name says otherwise."""

    hello_s: float = 600.0  # spawn -> init()
    status_s: float = 30.0  # Close -> the last answer; then the silent are fenced
    join_s: float = 600.0  # seat -> ready (build, compile, dry steps)
    connect_s: float = 30.0  # groups of a generation
    transfer_s: float = 300.0  # state copies of a generation
    stop_s: float = 30.0  # a drain; then everything is killed
    save_s: float = 1800.0  # a checkpoint, from its copy until it is durable
    kill_s: float = 30.0  # SIGKILL -> reaped; after twice this the run ends
    lease_s: float = 10.0  # an agent that cannot renew kills its workers before this
    shared_s: float = 60.0  # without an answer, a request for a shared value is sent again
    stopped_s: float = 2.5  # SIGSTOP -> the worker is given up
    hang_floor_s: float = 10.0
    hang_ceiling_s: float = 600.0
    hang_factor: float = 8.0  # times the slowest recent phase
    straggler_wait_s: float = 30.0  # of all ranks for a slow one, before that one moves
    attempts_max: int = 3  # generations that the same fault ends without a phase completed between
    respawns_max: int = 100  # workers started beyond the first ones without a phase between

    @property
    def operation_s(self) -> float:
        """Deadline of one collective, far above the hang monitor's, for a run without one."""
        return 2 * self.hang_ceiling_s

    @property
    def hang_report_s(self) -> float:
        """Time without progress until a host samples and reports a rank, and the period of that."""
        return self.hang_floor_s / 4

    @property
    def ready_s(self) -> float:
        """Deadline from Decide until a survivor's Ready, wherever its script is."""
        return max(self.join_s, self.hang_ceiling_s)

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < (value := getattr(self, name)) <= LIMIT_MAX:  # nan is neither
                raise ConfigError(
                    f"limit {name} must be above zero and at most {LIMIT_MAX:g}, not {value}"
                )
        if self.hang_ceiling_s < self.hang_floor_s:
            raise ConfigError(
                f"hang_ceiling_s={self.hang_ceiling_s} is below hang_floor_s={self.hang_floor_s}"
            )


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker process, passed by the launcher in one environment variable."""

    run: str
    token: str  # hex
    term: int
    agent: str
    incarnation: int
    worker: str
    seat: int  # the seat it is meant for; -1: a spare
    joins: bool = False  # the job runs already
    world: int
    ranks_per_node: int  # GROUP_RANK is the quotient of rank and this
    control_fd: int
    page_fd: int
    run_dir: str
    checkpoints: str = ""  # their directory; "": in the run directory
    checkpoint_every: int  # committed steps; 0: only when draining; AUTO
    snapshot_every: int  # committed steps between copies in memory; 0: a checkpoint's own; AUTO
    audit_every: int  # committed steps between audits of a part of the state; 0: after recoveries
    replay_every: int = 0  # committed steps between replays on another rank; 0: none
    until_step: int  # after it a checkpoint, and the script ends; 0: no limit
    keepers: str  # where the keepers of the seats listen: this, and the seat's number
    shares_keepers: bool = False  # keepers of all hosts are reached by their doors
    on_unrepeatable: Literal["stop", "warn"] = "stop"
    nan: str = ""  # as nonfinite_rule.py reads it
    may_shrink: bool = False  # the policy has that rung
    notice_signals: tuple[str, ...] = ()  # that are reported in place of ending the worker
    faults: tuple[str, ...]  # as controller/fault_spec.py reads them
    fault_seed: int
    clock_anchor_ns: int  # Unix time less CLOCK_MONOTONIC, as the launcher has it
    limits: Limits


def check_torch() -> None:
    """Raise ConfigError where torch is missing or too old. Does not import it."""
    from importlib import metadata, util  # torch needs them as well; most commands do not

    needed = ".".join(map(str, TORCH_MIN))
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        if util.find_spec("torch"):
            return  # a build without metadata: what it lacks will show
        raise ConfigError(
            "torch is not installed here; nothing was started; add it with:"
            " pip install 'outlast[run]'"
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < TORCH_MIN:
        raise ConfigError(
            f"torch {version} is installed, and stable groups need {needed} or newer; nothing was"
            " started; update it with: pip install 'outlast[run]'"
        )


def worker_settings(environment: Mapping[str, str] = os.environ) -> WorkerSettings | None:
    """Return the launcher's settings, or None when this process was started by hand.

    Raises ConfigError when the variable is damaged.
    """
    text = environment.get(WORKER_VARIABLE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=WorkerSettings)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{WORKER_VARIABLE} is damaged: {error}") from error


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the index of this process's device on its host; 0 without a launcher."""
    return int(environment.get("LOCAL_RANK", "0"))


def slurm_variable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return SLURM_NAME, as Slurm sets it for a job or a script of its own, or ""."""
    return environment.get(f"SLURM_{name}", "")


def visible_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Return CUDA_VISIBLE_DEVICES, or None where all devices are visible."""
    text = environment.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(each.strip() for each in text.split(",")) if text.strip() else None


def set_rank(seat: int, world: int, local_rank: int, group_rank: int) -> None:
    """Set torchrun's variables, and torchft's, to this worker's seat, for code that reads them."""
    os.environ.update(
        RANK=str(seat),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(group_rank),
        REPLICA_GROUP_ID=str(seat),
        NUM_REPLICA_GROUPS=str(world),
    )


# Schedulers send these to all processes of a job; the launcher answers them for all.
JOB_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)


def child_environment(
    extra: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a child's environment: this process's over `defaults`, `extra` over both."""
    return {**(defaults or {}), **os.environ, **extra}


def python_executable(environment: Mapping[str, str] = os.environ) -> str:
    """Return PYTHON_EXEC, as torchrun does, or this interpreter."""
    return environment.get("PYTHON_EXEC", sys.executable)


def torchrun_variable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return one of torchrun's variables, or ""."""
    return environment.get(name, "")


def gloo_interface(environment: Mapping[str, str] = os.environ) -> str:
    """Return GLOO_SOCKET_IFNAME, or "" (then loopback)."""
    return environment.get("GLOO_SOCKET_IFNAME", "")


def users_token(environment: Mapping[str, str] = os.environ) -> str:
    """Return OUTLAST_TOKEN, or ""."""
    return environment.get(TOKEN_VARIABLE, "").strip()


def file_default(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return OUTLAST_NAME, the default of a flag for a file, or ""."""
    return environment.get(f"OUTLAST_{name}", "")


def wants_nccl2(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch's variable for the choice of its NCCL backend names nccl2."""
    return environment.get(NCCL2_VARIABLE, "0") == "1"


def checks_nan(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch's variable asks for a check of all inputs of collectives for NaN."""
    return environment.get(NAN_CHECK_VARIABLE, "0") == "1"


def run_dir_default() -> Path:
    """Return the default parent of run directories, `runs`."""
    return Path("runs")


class TemplateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the template process, passed by the launcher in one environment variable."""

    launcher: int  # its pid
    run_dir: str
    socket_fd: int
    entry: str  # the folder that is in front of `python_path`
    python_path: str | None  # PYTHONPATH of workers
    script_dir: str | None  # where the script's own modules are; None: nowhere
    command: tuple[str, ...]  # of a worker
    modules: tuple[str, ...]  # to import


def take_template_settings() -> TemplateSettings:
    """Return the launcher's settings, and take the workers' environment. Raises ConfigError."""
    try:
        settings = msgspec.json.decode(os.environ.pop(TEMPLATE_VARIABLE, ""), type=TemplateSettings)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{TEMPLATE_VARIABLE} is damaged: {error}") from error
    os.environ.pop("PYTHONPATH", None)
    if settings.python_path is not None:
        os.environ["PYTHONPATH"] = settings.python_path
    return settings


def set_environment(environment: Mapping[str, str]) -> None:
    """Make this process's environment equal to `environment`."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables of this process's environment."""
    os.environ.update(variables)


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


WHOLE_ENVIRONMENT = "the whole environment"


def _variables() -> dict[bytes, bytes]:
    environ: Any = os.environ  # where it keeps them is private, and only there all reads are seen
    return vars(environ)["_data"]


def _keep_variables_in(variables: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):  # two views of the same variables
        vars(environ)["_data"] = variables


@contextlib.contextmanager
def recorded_environment() -> Iterator[set[str]]:
    """Record which variables are read meanwhile, WHOLE_ENVIRONMENT for a look at all of them."""
    read: set[str] = set()

    class Recording(dict[bytes, bytes]):
        def __iter__(self) -> Iterator[bytes]:
            read.add(WHOLE_ENVIRONMENT)
            return super().__iter__()

        def __getitem__(self, key: bytes) -> bytes:
            read.add(os.fsdecode(key))
            return super().__getitem__(key)

    plain = _variables()
    recording = Recording(plain)
    _keep_variables_in(recording)
    try:
        yield read
    finally:
        _keep_variables_in(plain)
        plain.clear()
        plain.update({name: recording.get(name, b"") for name in dict.keys(recording)})


def watch_environment(names: frozenset[str], on_read: Callable[[str], None]) -> Callable[[], None]:
    """Call `on_read` before one of `names` is read, with WHOLE_ENVIRONMENT before all variables
    are. Return a function that ends this; `on_read` may call it."""
    plain = _variables()
    watched = {os.fsencode(name): name for name in names}
    ended: list[bool] = []

    class Watching(dict[bytes, bytes]):
        def __iter__(self) -> Iterator[bytes]:
            if not ended:
                on_read(WHOLE_ENVIRONMENT)
            return iter(plain.copy()) if ended else super().__iter__()

        def __getitem__(self, key: bytes) -> bytes:
            if key in watched and not ended:
                reader = sys._getframe(2).f_code  # noqa: SLF001 - behind os.environ's own method
                is_item = reader.co_name == "__iter__" and "_collections_abc" in reader.co_filename
                on_read(WHOLE_ENVIRONMENT if is_item else watched[key])  # items(), values()
            return plain[key] if ended else super().__getitem__(key)

    watching = Watching(plain)
    _keep_variables_in(watching)

    def end() -> None:
        ended.append(True)
        _keep_variables_in(plain)
        plain.clear()
        plain.update({name: watching.get(name, b"") for name in dict.keys(watching)})

    return end


def set_world(world: int) -> None:
    """Set torchrun's variable of the world size, for libraries that read it."""
    os.environ["WORLD_SIZE"] = str(world)


class ProcessEnvironment:
    """The environment's variables as a mapping; None where a variable is not set."""

    def __init__(self) -> None:
        self._raw: dict[bytes, bytes] = {}
        self._decoded: dict[str, str] = {}

    def __getitem__(self, name: str) -> str | None:
        """Return a variable."""
        return os.environ.get(name)

    def __setitem__(self, name: str, value: str | None) -> None:
        """Set a variable, or delete it."""
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def snapshot(self) -> dict[str, str]:
        """Return all variables that are set."""
        raw = _variables()
        if raw != self._raw:  # to decode a hundred variables takes longer than to compare them
            self._raw, self._decoded = dict(raw), dict(os.environ)
        return self._decoded


def read_toml(path: Path, what: str, undone: str = "") -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError, which names the file and the field.

    `what`: the kind of file, as in "scenario"; `undone`: the consequence of a failure, as in
    "nothing was checked".
    """
    import tomllib  # few commands read a file, and it takes milliseconds

    try:
        with path.open("rb") as file:  # a pipe has no size to ask for
            data = file.read(TOML_BYTES_MAX + 1)
        if len(data) <= TOML_BYTES_MAX:
            return tomllib.loads(data.decode())
        wrong, cause = f"larger than {TOML_BYTES_MAX:,} bytes; that is no {what}", None
    except OSError as error:
        wrong, cause = error.strerror or str(error), error
    except RecursionError as error:
        wrong, cause = f"nested too deeply; that is no {what}", error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        wrong, cause = str(error), error
    raise ConfigError(f"{path}: {wrong}" + (f"; {undone}" if undone else "")) from cause
