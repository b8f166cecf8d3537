"""The library's exceptions, under the name by which users of ``crossdock.dispatch`` know them."""

from crossdock.scratch.errors import *  # noqa: F403
from crossdock.scratch.errors import __all__ as __all__
