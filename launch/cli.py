"""The command line: ``crossdock`` and ``python -m crossdock.launch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from crossdock.launch import trace_cli
from crossdock.launch.failures import EXIT_CONFIG, EXIT_FAILED
from crossdock.scratch.errors import ConfigError, CrossdockError

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

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, as in configs/.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates it
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace those of the file."),
]
JsonPath = Annotated[Optional[Path], typer.Option("--json", help="Write the results there.")]  # noqa: UP045


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    json_path: JsonPath = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare every step with the oracle.")
    ] = True,
    errors_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where failing ranks leave their tracebacks; default: a temporary one."),
    ] = None,
) -> None:
    """Run the layer over the configured tokens; start the ranks if no launcher did."""
    from crossdock.launch.config import load_job
    from crossdock.launch.join import find_seat
    from crossdock.launch.start import start_ranks
    from crossdock.launch.worker import run_as_rank

    seat = find_seat()
    if seat is not None:
        run_as_rank(
            seat,
            config,
            overrides or [],
            json_path=json_path,
            check=check,
            errors_dir=errors_dir,
        )
    job = load_job(config, overrides or [])
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json {json_path}: there is no directory {json_path.parent}")
    arguments = ["run", str(config), *(overrides or [])]
    if json_path is not None:
        arguments += ["--json", str(json_path)]
    if not check:
        arguments.append("--no-check")
    raise typer.Exit(start_ranks(job.config.cluster, arguments, errors_dir))


def main() -> None:
    """Run the command line; errors of users are one message, without a traceback."""
    try:
        app()
    except ConfigError as error:
        print(f"crossdock: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except CrossdockError as error:
        print(f"crossdock: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
