"""Hosts made of namespaces: each has a network, a name, processes and shared memory of its own.

    host0 (eth0) --- port0 |        |
    host1 (eth0) --- port1 | bridge |  in a namespace of its own
    ...                    |        |

A link is a veth pair, or, where frames are to be late, two tap devices with a process between them
that hands frames on after a while (many kernels come without netem). Nothing is made outside of the
namespaces, and nothing reaches the machine's own network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Host", "Network", "make_network", "why_no_hosts"]

_PREFIX = "crossdock-test"
_MTU = 1500
_RELAY = Path(__file__).with_name("relay.py")

# Enters a host: $1 is its namespace, $2 its name, $3 has files for /etc, the rest is the command.
# The shell stays as process 1, so that everything on the host ends with it.
_ENTER = """\
#!/bin/sh
namespace=$1 name=$2 etc=$3
shift 3
own="--mount --uts --ipc --pid --mount-proc"
exec ip netns exec "$namespace" unshare $own --fork --kill-child sh -c '
    echo "$0" > /proc/sys/kernel/hostname
    mount --bind "$1/hosts" /etc/hosts
    mount --bind "$1/resolv.conf" /etc/resolv.conf
    mount -t tmpfs tmpfs /dev/shm
    shift
    "$@"
    exit $?
' "$name" "$etc" "$@"
"""


def why_no_hosts() -> str | None:
    """The reason why this machine cannot make hosts; None if it can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"no {tool}: install iproute2 and util-linux"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    veth = ("type", "veth", "peer", "name", "end1")
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", name, "link", "add", "end0", *veth)
        _run("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "true")
    except AssertionError as refused:
        return f"namespaces are not allowed here: {refused}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


@dataclass(frozen=True)
class Host:
    """One host of a network.

    Attributes:
        name: Its host name, known to all of them.
        address: Its address, on interface ``eth0``.
        namespace: Its network namespace.
        switch: The namespace of the bridge.
        port: The other end of its link there.
        folder: For files of the network.
    """

    name: str
    address: str
    namespace: str
    switch: str
    port: str
    folder: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """Arguments that run ``command`` on this host, with all its processes."""
        enter = (str(self.folder / "enter"), self.namespace, self.name, str(self.folder))
        return [*enter, *command]

    def limit(self, mbit_s: int) -> None:
        """Limit the rate of its link in both directions."""
        rate = ("root", "tbf", "rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "100ms")
        for namespace, device in ((self.namespace, "eth0"), (self.switch, self.port)):
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *rate)

    def lose(self, fraction: float) -> None:
        """Drop a fraction of the packets that come in."""
        if shutil.which("iptables") is None:
            pytest.skip("no iptables: apt-get install iptables")
        match = ("-m", "statistic", "--mode", "random", "--probability", str(fraction))
        rule = ("iptables", "-A", "INPUT", "-i", "eth0", *match, "-j", "DROP")
        _run("ip", "netns", "exec", self.namespace, *rule)

    def cut_off(self) -> None:
        """Take its link down at the bridge; it notices nothing itself."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def bytes_sent(self) -> int:
        """Bytes that left its interface."""
        shown = _run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other and nobody else."""

    hosts: list[Host]
    folder: Path

    @property
    def launch_agent(self) -> Path:
        """A program that mpirun can call instead of ssh: ``agent HOST COMMAND``."""
        return self.folder / "agent"


@contextlib.contextmanager
def make_network(
    num_hosts: int = 0, *, names: Sequence[str] = (), delay_s: float = 0.0
) -> Iterator[Network]:
    """Hosts; everything of them is gone afterwards.

    Args:
        num_hosts: How many, if they have no ``names``: ``host0``, ``host1``, ...
        names: Of the hosts.
        delay_s: Each frame is that long on its way.
    """
    if delay_s and not Path("/dev/net/tun").exists():
        pytest.skip("no tap devices: /dev/net/tun is missing")
    _remove_leftovers()
    base = f"{_PREFIX}-{os.getpid()}"
    switch, relays = f"{base}-switch", []
    folder = Path(tempfile.mkdtemp(prefix=f"{base}-"))
    hosts = [
        Host(
            name=name,
            address=f"10.0.0.{i + 1}",
            namespace=f"{base}-{name}",
            switch=switch,
            port=f"port{i}",
            folder=folder,
        )
        for i, name in enumerate(names or [f"host{i}" for i in range(num_hosts)])
    ]
    try:
        _write_files(folder, hosts)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            for family in ("all", "default"):
                key = f"net.ipv6.conf.{family}.disable_ipv6=1"
                _run("ip", "netns", "exec", host.namespace, "sysctl", "-q", "-w", key)
            if delay_s:
                relays.append(_start_relay(host, delay_s))
            else:
                ends = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
                _run("ip", "-n", switch, "link", "add", host.port, *ends)
            _connect(host)
        yield Network(hosts, folder)
    finally:
        for relay in relays:
            relay.kill()
            relay.wait()
        _remove_namespaces(base)
        shutil.rmtree(folder)


def _connect(host: Host) -> None:
    _run("ip", "-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", host.namespace, "link", "set", "eth0", "up", "mtu", str(_MTU))
    _run("ip", "-n", host.namespace, "link", "set", "lo", "up")


def _start_relay(host: Host, delay_s: float) -> subprocess.Popen[str]:
    ends = (host.namespace, "eth0", host.switch, host.port)
    relay = subprocess.Popen(
        [sys.executable, str(_RELAY), *ends, str(delay_s)], stdout=subprocess.PIPE, text=True
    )
    assert relay.stdout is not None
    assert relay.stdout.readline() == "ready\n"
    return relay


def _write_files(folder: Path, hosts: Sequence[Host]) -> None:
    names = [f"{host.address} {host.name}\n" for host in hosts]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # who is nobody: says no at once
    enter, agent = folder / "enter", folder / "agent"
    enter.write_text(_ENTER)
    base = hosts[0].namespace.removesuffix(hosts[0].name)
    # Called as ssh is: options, host, command for a shell.
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=$1\n"
        "shift\n"
        f'exec {enter} "{base}$host" "$host" {folder} sh -c "$*"\n'
    )
    enter.chmod(0o755)
    agent.chmod(0o755)


def _remove_leftovers() -> None:
    """Of test runs that were killed."""
    for name in _namespaces():
        if name.startswith(_PREFIX):
            pid = name.removeprefix(f"{_PREFIX}-").partition("-")[0]
            if not Path(f"/proc/{pid}").exists():
                _run("ip", "netns", "del", name)


def _remove_namespaces(base: str) -> None:
    for name in _namespaces():
        if name.startswith(f"{base}-"):
            _run("ip", "netns", "del", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr.strip()}"
    return result.stdout
