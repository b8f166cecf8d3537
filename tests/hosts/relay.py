"""A slow wire: hands frames from one tap device to another, those of the first after a while.

``relay.py NAMESPACE DEVICE NAMESPACE DEVICE SECONDS``; makes the devices, then says ``ready``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_MAX_FRAME = 65536
_MAX_WAITING = 1 << 16


def open_tap(namespace: str, device: str) -> int:
    """Enter a network namespace and make a tap device there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP_NO_PI))
    return tap


def relay(late: int, prompt: int, delay_s: float) -> None:
    """Frames that ``late`` sends wait; those of ``prompt`` do not."""
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        limit = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([late, prompt], [], [], limit)[0]
        if late in ready:
            frame = os.read(late, _MAX_FRAME)
            if len(waiting) < _MAX_WAITING:
                waiting.append((time.monotonic() + delay_s, frame))
        if prompt in ready:
            _send(late, os.read(prompt, _MAX_FRAME))
        while waiting and waiting[0][0] <= time.monotonic():
            _send(prompt, waiting.popleft()[1])


def _send(tap: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a device that is down: a wire loses it
        os.write(tap, frame)


if __name__ == "__main__":
    taps = [open_tap(*sys.argv[i : i + 2]) for i in (1, 3)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(taps[0], taps[1], float(sys.argv[5]))
