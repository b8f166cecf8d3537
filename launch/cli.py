"""The command line: ``crossdock`` and ``python -m crossdock.launch``."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, Optional

import typer

from crossdock.launch import trace_cli
from crossdock.launch.failures import EXIT_CONFIG, EXIT_FAILED, make_errors_dir
from crossdock.launch.render import KubernetesKind, Rendezvous
from crossdock.scratch.errors import ConfigError, CrossdockError

if TYPE_CHECKING:
    from crossdock.launch.worker import Work

__all__ = ["app", "main"]

app = typer.Typer(
    name="crossdock",
    help="Mixture-of-experts dispatch and combine that counts first.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(trace_cli.app, name="trace")

Target = Literal["torchrun", "mpirun", "slurm", "kubernetes"]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, as in configs/.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates it
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace those of the file."),
]
JsonPath = Annotated[Optional[Path], typer.Option("--json", help="Write the results there.")]  # noqa: UP045


ErrorsDir = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Where failing ranks leave their tracebacks; default: a temporary one."),
]


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    json_path: JsonPath = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare every step with the oracle.")
    ] = True,
    errors_dir: ErrorsDir = None,
) -> None:
    """Run the layer over the configured tokens; start the ranks if no launcher did."""
    from crossdock.launch.worker import run_work

    arguments = ["run", str(config), *(overrides or [])]
    arguments += [] if check else ["--no-check"]
    _run_or_start(config, overrides, arguments, run_work(json_path, check), json_path, errors_dir)


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Validate a configuration; show the rank grid, the experts' owners and what a run needs."""
    from crossdock.launch.check import show_check
    from crossdock.launch.config import load_job
    from crossdock.launch.screen import make_console

    show_check(load_job(config, overrides or []), make_console())


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Recorded routing to plan with, instead of run.routing."),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show what a run would move and hold, from its routing, without starting ranks."""
    from crossdock.launch.config import load_job
    from crossdock.launch.plan.plan import make_plan
    from crossdock.launch.plan.show import show_plan
    from crossdock.launch.screen import make_console, write_json

    routing = (
        [] if trace is None else [f"run.routing={{trace: {json.dumps(str(trace.resolve()))}}}"]
    )
    found = make_plan(load_job(config, [*(overrides or []), *routing]))
    if json_path is not None:
        write_json(found.as_json(), json_path)
    show_plan(found, make_console())


@app.command()
def render(
    config: ConfigPath,
    overrides: Overrides = None,
    target: Annotated[Target, typer.Option("--for", help="What starts the job.")] = "torchrun",
    rendezvous: Annotated[Rendezvous, typer.Option(help="How torchrun's nodes meet.")] = "static",
    kind: Annotated[KubernetesKind, typer.Option(help="Of Kubernetes object.")] = "jobset",
    image: Annotated[str, typer.Option(help="Container with crossdock.")] = "crossdock:latest",
    hosts: Annotated[str, typer.Option(help="Of mpirun's hostfile: a,b,...")] = "",
) -> None:
    """Print the command, script or manifest that starts a configuration on its cluster."""
    from crossdock.launch import render as renderers
    from crossdock.launch.config import load_job

    job = load_job(config, overrides or [])
    if target == "torchrun":
        text = renderers.torchrun(job, rendezvous)
    elif target == "mpirun":
        text = renderers.mpirun(job, hosts.split(",") if hosts else [])
    elif target == "slurm":
        text = renderers.slurm(job)
    else:
        text = renderers.kubernetes(job, kind, image)
    typer.echo(text, nl=False)


@app.command()
def bench(
    subject: Annotated[
        str, typer.Argument(metavar="CONFIG|permute|experts", help="What to measure.")
    ],
    overrides: Overrides = None,
    json_path: JsonPath = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, of a CONFIG.")] = 20,
    beside: Annotated[
        str, typer.Option(help="Compare a CONFIG's transport with others of one machine: a,b,...")
    ] = "",
    memory: Annotated[
        bool, typer.Option("--memory", help="Count a CONFIG's bytes, ranks as threads, instead.")
    ] = False,
    errors_dir: ErrorsDir = None,
) -> None:
    """Measure dispatch and combine of a configuration, or one part of the layer on this machine."""
    from crossdock.launch.bench.parts import PARTS, bench_part
    from crossdock.launch.worker import bench_work

    if subject in PARTS:
        bench_part(subject, json_path)
    elif memory:
        _bench_memory(Path(subject), overrides or [], json_path)
    else:
        arguments = ["bench", subject, *(overrides or []), "--rounds", str(rounds)]
        arguments += ["--beside", beside] if beside else []
        work = bench_work(json_path, rounds, beside.split(",") if beside else [])
        _run_or_start(Path(subject), overrides, arguments, work, json_path, errors_dir)


@app.command()
def doctor() -> None:
    """Show what this machine has, what each transport lacks, and how to get it."""
    from crossdock.launch.doctor import show_doctor
    from crossdock.launch.screen import make_console

    show_doctor(make_console())


@app.command()
def schema() -> None:
    """Print the JSON schema of configuration files, for editors."""
    from crossdock.launch.schema import schema_text

    typer.echo(schema_text(), nl=False)


def _bench_memory(config: Path, overrides: list[str], json_path: Path | None) -> None:
    from crossdock.launch.bench.memory import bench_memory, show_memory
    from crossdock.launch.config import load_job
    from crossdock.launch.screen import make_console, write_json

    result = bench_memory(load_job(config, overrides))
    if json_path is not None:
        write_json(result, json_path)
    show_memory(result, make_console())


def _run_or_start(
    config: Path,
    overrides: list[str] | None,
    arguments: list[str],
    work: Work,
    json_path: Path | None,
    errors_dir: Path | None,
) -> NoReturn:
    """Do a rank's work if a launcher started this process, else start all ranks with arguments."""
    from crossdock.launch.config import load_job
    from crossdock.launch.join import find_seat
    from crossdock.launch.screen import require_parent
    from crossdock.launch.start import start_ranks
    from crossdock.launch.worker import run_as_rank

    if errors_dir is not None:
        make_errors_dir(errors_dir)
    seat = find_seat()
    if seat is not None:
        run_as_rank(seat, config, overrides or [], work, errors_dir=errors_dir)
    job = load_job(config, overrides or [])
    if json_path is not None:
        require_parent(json_path)
        arguments += ["--json", str(json_path)]
    raise typer.Exit(start_ranks(job.config.cluster, arguments, errors_dir))


def main() -> None:
    """Run the command line; errors of users are one message, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except ConfigError as error:
        print(f"crossdock: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except CrossdockError as error:
        print(f"crossdock: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
