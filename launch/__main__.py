"""``python -m crossdock.launch``, and what the ``crossdock`` command calls."""

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C during the seconds of its imports leaves no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from crossdock.launch import cli

    cli.main()


if __name__ == "__main__":
    main()
