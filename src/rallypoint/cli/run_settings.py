"""The settings of `rallypoint run`: their names, where each value comes from, and the `Settings` and `Job` they make.

The sources of a value, in order of precedence: the flag, `RALLYPOINT_<FLAG>`, `PET_<FLAG>` (torchrun's own names), the
scheduler (Slurm, Kubernetes, MPI), the default. The error about an invalid value names its source.
"""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import msgspec

from rallypoint.errors import SettingsError
from rallypoint.urls import DEFAULT_PORTS, parse_bool, parse_url

if TYPE_CHECKING:
    from rallypoint.launcher.supervisor import Job
    from rallypoint.settings import Settings

T = TypeVar("T")
BACKENDS = {
    "rallypoint": "tcp",
    "c10d": "tcp",
    "tcp": "tcp",
    "etcd": "etcd",
    "etcd-v2": "etcd",
    "static": "static",
    "file": "file",
}
SCHEMES = sorted({*BACKENDS})


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `name` is the flag without its dashes."""

    name: str
    help: str
    metavar: str = ""
    """Empty: the flag is a switch."""
    default: str | None = None
    short: str | None = None

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    def variables(self) -> tuple[str, str]:
        """The environment variables for this setting, in order of precedence."""
        word = "MODULE" if self.name == "module" else self.key.upper()
        return f"RALLYPOINT_{word}", f"PET_{word}"


FLAGS = (
    Flag("nnodes", "Number of nodes, or MIN:MAX for an elastic run.", "MIN[:MAX]", "1:1"),
    Flag("nproc-per-node", "Workers on this node: a number, gpu, cpu, or auto (gpu if there is one).", "N", "1"),
    Flag(
        "rdzv-backend",
        "The backend of the run: rallypoint, tcp or c10d (a server on one of the nodes, or `rallypoint serve`), etcd, "
        "file, static.",
        "NAME",
    ),
    Flag("rdzv-endpoint", "The endpoint of the backend: host[:port]; for etcd several, with commas.", "ENDPOINT"),
    Flag("rdzv-id", "The id of the run: the same on all its nodes, and different from all other runs.", "ID"),
    Flag("rdzv-conf", "Further options of the run, as in a URL: join_timeout=900,last_call_timeout=5.", "K=V,...", ""),
    Flag("url", "Backend, endpoint, id and options as a URL: tcp://head:29400/my-run?min_nodes=2&max_nodes=4.", "URL"),
    Flag("token-file", "The file with the server's token; the same as --rdzv-conf token_file=FILE.", "FILE"),
    Flag("standalone", "Run on this node only, without an endpoint and an id."),
    Flag("max-restarts", "How many restarts after failed workers the whole run has.", "N", "0"),
    Flag("monitor-interval", "Ignored: the end of a worker is noticed at once, without polling.", "SECONDS", "0.1"),
    Flag("node-rank", "The rank that this node asks for.", "N"),
    Flag("master-addr", "With --rdzv-backend static: the host of rank 0.", "HOST"),
    Flag("master-port", "With --rdzv-backend static: the port on which rank 0 serves the run.", "PORT"),
    Flag("local-addr", "The address at which other nodes reach this one; MASTER_ADDR if it is rank 0.", "ADDR"),
    Flag("name", "The name of this node. A node that comes back under its name gets its rank again.", "NAME"),
    Flag("role", "The role of this node's workers.", "NAME", "default"),
    Flag(
        "redirects",
        "Write workers' output to files only: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank 0:3,1:1.",
        "STD",
        "0",
        short="r",
    ),
    Flag("tee", "Write workers' output to the console and to files; values as for --redirects.", "STD", "0", short="t"),
    Flag("log-dir", "The directory of these files. Without --redirects and --tee, it implies --tee 3.", "DIR"),
    Flag("module", "The program is a Python module.", short="m"),
    Flag("no-python", "The program is not a Python script: run it as it is."),
    Flag("preflight", "A shell command that must succeed before this node may join.", "CMD"),
    Flag("preflight-timeout", "The time limit of the preflight command.", "SECONDS", "300"),
    Flag("grace-period", "The time between SIGTERM and SIGKILL for workers.", "SECONDS", "15"),
    Flag(
        "stall-timeout",
        "Treat a worker as failed that has called rallypoint.alive() and then does not call it for so long. The stacks "
        "of all workers are written first. Without it, no worker is judged.",
        "SECONDS",
    ),
    Flag(
        "metrics",
        "Serve this node's metrics for Prometheus on this port, at /metrics; without ADDR on loopback. Needs "
        "rallypoint[dashboard].",
        "[ADDR:]PORT",
    ),
    Flag("events", "Write every event of this node to this file, one JSON object a line. It is rotated.", "FILE"),
    Flag("exit-timeout", "How long a node that has finished waits for the others.", "SECONDS", "1800"),
    Flag(
        "finished-timeout",
        "How long a node that has finished waits for a new round, if another node was lost before it finished.",
        "SECONDS",
        "120",
    ),
)
BY_NAME = {flag.name: flag for flag in FLAGS}


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A value and its source. None: the setting has no value."""

    value: str | None
    source: str


@dataclass(slots=True)
class Values:
    """The values of all settings, as text."""

    found: dict[str, SettingValue] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        return self.found[name].value

    def source(self, name: str) -> str:
        """The setting with its value and source, for errors: `nnodes='0' (from flag)`."""
        setting = self.found[name]
        return f"{name}={setting.value!r} (from {setting.source})"

    def is_on(self, name: str) -> bool:
        value = self.text(name)
        return value is not None and self._read(name, lambda text: parse_bool(name, text))

    def integer(self, name: str, least: int) -> int:
        return self._read(name, lambda text: _integer(text, least))

    def seconds(self, name: str) -> float:
        return self._read(name, _seconds)

    def positive_seconds(self, name: str) -> float:
        return self._read(name, lambda text: _seconds(text, least=0.001))

    def _read(self, name: str, parse: Callable[[str], T]) -> T:
        text = self.text(name)
        assert text is not None
        try:
            return parse(text)
        except ValueError as error:
            raise SettingsError(f"{self.source(name)}: {error}", option=name, value=text) from None


def collect(
    given: Mapping[str, str | None], environ: Mapping[str, str], detected: Mapping[str, SettingValue]
) -> Values:
    """The value of each setting from its first source. `given`: flags by name; `detected`: from the scheduler."""
    values = Values()
    for flag in FLAGS:
        flag_value = given.get(flag.name)
        variables = [name for name in flag.variables() if environ.get(name)]
        if flag_value is not None:
            values.found[flag.name] = SettingValue(flag_value, "flag")
        elif variables:
            values.found[flag.name] = SettingValue(environ[variables[0]], variables[0])
        elif flag.name in detected:
            values.found[flag.name] = detected[flag.name]
        else:
            values.found[flag.name] = SettingValue(flag.default, "default")
    return values


def needs_detection(values: Values) -> bool:
    """Whether a setting is missing that a scheduler may provide. If none is, the scheduler is not asked."""
    if values.is_on("standalone") or values.text("url") is not None:
        return False
    return any(values.found[name].source == "default" for name in ("nnodes", "rdzv-endpoint", "rdzv-id"))


# --- the run and the job ----------------------------------------------------------------------------------------------


def settings_of(values: Values) -> Settings:
    """The settings of the run and of this node in it. SettingsError if values are missing or contradict each other."""
    from rallypoint.settings import Settings

    options = _options(values)
    if values.is_on("standalone"):
        return _standalone(values, options)
    url = values.text("url")
    flags = [name for name in ("rdzv-backend", "rdzv-endpoint", "rdzv-id") if values.found[name].source == "flag"]
    if flags and values.found["url"].source != "flag":
        url = None  # RALLYPOINT_URL is for all commands, and flags are more than variables
    if url is not None:
        parts = parse_url(url)
        for name in flags:
            raise SettingsError(f"--url and --{name} exclude each other: omit one of them", option=name)
        _set_sizes(values, options, given_by_url="min_nodes" in parts.query or "min_workers" in parts.query)
        if "token_file" not in parts.query or values.found["token-file"].source == "flag":
            _set_token(values, options, parts.scheme)
        return Settings.from_url(url, **options)
    _set_sizes(values, options)
    scheme, endpoint = _scheme_and_endpoint(values, options)
    if scheme == "memory":
        return _standalone(values, options)
    _set_token(values, options, scheme)
    run_id = values.text("rdzv-id")
    if run_id is None:
        if scheme != "static":
            raise SettingsError(
                "--rdzv-id is missing: give the run an id that all its nodes share and no other run has, or use "
                "--standalone to run on this node only",
                option="rdzv-id",
            )
        run_id = "static"
    return Settings.build(scheme=scheme, endpoints=endpoint, run_id=run_id, **options)


def _options(values: Values) -> dict[str, object]:
    """The options from `--rdzv-conf` and from the flags about this node."""
    options: dict[str, object] = {}
    for part in (values.text("rdzv-conf") or "").split(","):
        name, equals, value = part.strip().partition("=")
        if name and not equals:
            raise SettingsError(f"{values.source('rdzv-conf')}: {part!r} is not of the form option=value")
        if name:
            options[name] = value
    for name in ("local-addr", "name"):
        if values.text(name):
            options[name.replace("-", "_")] = values.text(name)
    if values.text("node-rank") is not None:
        options["node_rank"] = values.integer("node-rank", 0)
        options.setdefault("ranks", "node_rank")
    return options


def _set_token(values: Values, options: dict[str, object], scheme: str) -> None:
    """`--token-file`. The variable is for all runs of this user: it is ignored where there is no token."""
    source = values.found["token-file"].source
    if source == "flag" or (source != "default" and scheme in ("tcp", "static") and "token_file" not in options):
        options["token_file"] = values.text("token-file")


def _set_sizes(values: Values, options: dict[str, object], given_by_url: bool = False) -> None:
    if given_by_url and values.found["nnodes"].source in ("default", "url"):
        return
    text = values.text("nnodes") or ""
    least, _, most = text.partition(":")
    try:
        options["min_nodes"] = _integer(least, 1)
        options["max_nodes"] = _integer(most or least, 1)
    except ValueError as error:
        raise SettingsError(f"{values.source('nnodes')}: {error}; give a number, or MIN:MAX", option="nnodes") from None


def _scheme_and_endpoint(values: Values, options: dict[str, object]) -> tuple[str, str]:
    backend, endpoint, master = (values.text(name) for name in ("rdzv-backend", "rdzv-endpoint", "master-addr"))
    if backend is None:
        backend = "static" if endpoint is None and master is not None else "rallypoint"
    if backend not in BACKENDS:
        raise SettingsError(
            f"{values.source('rdzv-backend')}: there is no such backend; choose one of {', '.join(SCHEMES)}",
            option="rdzv-backend",
        )
    scheme = BACKENDS[backend]
    if scheme == "static":
        options.pop("ranks", None)
        if options.get("max_nodes") == 1:
            options.setdefault("node_rank", 0)
        if endpoint is None:
            endpoint = f"{master or 'localhost'}:{values.text('master-port') or DEFAULT_PORTS['static']}"
    elif endpoint is None:
        if options.get("max_nodes") == 1 and scheme == "tcp":
            return "memory", ""
        raise SettingsError(
            "--rdzv-endpoint is missing: give host:port of one of the nodes, which then hosts the server, or of "
            "`rallypoint serve`",
            option="rdzv-endpoint",
        )
    return scheme, endpoint


def _standalone(values: Values, options: dict[str, object]) -> Settings:
    """The settings of a run within this process: no port, no address, and a unique id."""
    from rallypoint.settings import Settings

    _set_token(values, options, "memory")
    nnodes = values.text("nnodes")
    if nnodes not in ("1", "1:1"):
        raise SettingsError(f"{values.source('nnodes')}: --standalone runs on one node only", option="nnodes")
    options |= {"min_nodes": 1, "max_nodes": 1}
    options.setdefault("local_addr", "127.0.0.1")
    run_id = values.text("rdzv-id") or f"standalone-{uuid.uuid4().hex[:12]}"
    return Settings.build(scheme="memory", endpoints=f"standalone-{os.getpid()}", run_id=run_id, **options)


def job_of(values: Values, argv: tuple[str, ...]) -> Job:
    """The program to run on this node, and how. SettingsError if a value is not valid."""
    from rallypoint.launcher.logs import Std, StreamChoice
    from rallypoint.launcher.supervisor import Job

    redirects = StreamChoice.parse("redirects", values.text("redirects") or "0")
    tee = StreamChoice.parse("tee", values.text("tee") or "0")
    log_dir = values.text("log-dir")
    if log_dir is not None and not redirects.is_any and not tee.is_any:
        tee = StreamChoice(Std.ALL)
    if log_dir is None and (redirects.is_any or tee.is_any):
        raise SettingsError("--redirects and --tee write files: give their directory, --log-dir", option="log-dir")
    values.seconds("monitor-interval")
    return Job(
        argv=argv,
        workers=worker_count(values),
        max_restarts=values.integer("max-restarts", 0),
        role=values.text("role") or "default",
        grace_s=values.seconds("grace-period"),
        exit_timeout_s=values.seconds("exit-timeout"),
        finished_timeout_s=values.seconds("finished-timeout"),
        stall_timeout_s=None if values.text("stall-timeout") is None else values.positive_seconds("stall-timeout"),
        preflight=values.text("preflight"),
        preflight_timeout_s=values.seconds("preflight-timeout"),
        log_dir=None if log_dir is None else Path(log_dir),
        redirects=redirects,
        tee=tee,
    )


def with_logs_label(settings: Settings, job: Job) -> Settings:
    """With the label `logs`, unless it is given: where this node's log files are, for who looks at the run."""
    if job.log_dir is None or "logs" in settings.labels:
        return settings
    logs = str(job.log_dir.absolute() / quote(settings.run_id, safe=""))
    return msgspec.structs.replace(settings, labels={**settings.labels, "logs": logs})


def worker_count(values: Values) -> int:
    """The number of workers on this node."""
    text = (values.text("nproc-per-node") or "1").lower()
    if text in ("cpu", "gpu", "auto"):
        gpus = count_gpus() if text != "cpu" else 0
        if text == "gpu" and not gpus:
            raise SettingsError(f"{values.source('nproc-per-node')}: this machine has no visible NVIDIA GPU")
        return gpus or len(os.sched_getaffinity(0))
    return values.integer("nproc-per-node", 1)


def count_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """The number of GPUs that workers see: those in CUDA_VISIBLE_DEVICES if it is set, else those of the driver."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if re.fullmatch(r"\d+|(GPU|MIG)-.+", part.strip())])
    try:
        return len(list(devices.iterdir()))
    except OSError:
        return 0


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if number < least:
        raise ValueError(f"{number} is less than {least}")
    return number


def _seconds(text: str, least: float = 0.0) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number < 1e9:
        raise ValueError(f"{text!r} is not a number of seconds" + (" above 0" if least else ""))
    return number
