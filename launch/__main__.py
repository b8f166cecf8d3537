"""``python -m crossdock.launch``: the same program as the ``crossdock`` command."""

from crossdock.launch.cli import main

if __name__ == "__main__":
    main()
