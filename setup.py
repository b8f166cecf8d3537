"""On an editable install, also write the links by which type checkers follow ``crossdock.*``.

The package table maps ``crossdock.dispatch`` to ``dispatch/`` and so on. An editable install makes
that work at run time through an import hook, which mypy and pyright do not run; a directory of
links, git-ignored, gives them the same names.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWheelWithTypingLinks(editable_wheel):
    """Write ``build/typing/crossdock/<package>`` links beside the editable install."""

    def run(self) -> None:
        root = Path(__file__).resolve().parent
        links = root / "build" / "typing" / "crossdock"
        links.mkdir(parents=True, exist_ok=True)
        for package in ("dispatch", "experts", "launch", "scratch"):
            link = links / package
            if not link.is_symlink():
                link.symlink_to(Path("../../..") / package, target_is_directory=True)
        super().run()


setup(cmdclass={"editable_wheel": EditableWheelWithTypingLinks})
