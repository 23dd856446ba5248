"""Creates several hosts on one machine: network namespaces on a bridge, with a stand-in for ssh.

    python scripts/hosts.py 2 --rate 1gbit -- mpiexec {} -n 2 python -m llamatrain ...

runs a command, with the options for mpiexec in place of {}, and removes the hosts. Needs Linux, root and
iproute2.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BURST = 1 << 20  # bytes that a link lets through at once

# The stand-in is called like ssh: with options, a host's address and a command.
ENTER = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -[opl]) shift 2;; *) shift;; esac; done
host={name}${{1##*.}}; shift
exec ip netns exec "$host" unshare --uts bash -c 'hostname "$0"; eval "$1"' "$host" "$*"
"""


def find_obstacle() -> str:
    """Return why this machine cannot create hosts; empty if it can."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts need Linux and root"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "hosts need iproute2 and util-linux"
    probe = f"lt{os.getpid() % 10_000}p"
    if run_ip("netns", "add", probe, check=False):
        return "network namespaces cannot be created here"
    run_ip("netns", "del", probe)
    return ""


def run_ip(*words: object, check: bool = True, tool: str = "ip") -> int:
    """Run ip, or another tool of iproute2, and return its exit code."""
    done = subprocess.run([tool, *map(str, words)], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{tool} {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.returncode


@dataclass(frozen=True)
class Hosts:
    """Hosts that can reach each other."""

    name: str  # prefix of their names; the numbers start with 1
    count: int
    net: int  # their addresses are 10.77.NET.*
    enter: Path  # the stand-in for ssh

    @property
    def addresses(self) -> list[str]:
        """The addresses of the hosts."""
        return [f"10.77.{self.net}.{host}" for host in range(1, self.count + 1)]

    @property
    def options(self) -> list[str]:
        """The options for mpiexec.

        UCX, which the wheel of MPICH uses, must not find the memory that the hosts share.
        """
        launcher = ["-launcher", "ssh", "-launcher-exec", str(self.enter)]
        return [
            *launcher,
            "-iface",
            f"{self.name}br",
            "-hosts",
            ",".join(self.addresses),
            "-genv",
            "UCX_TLS",
            "tcp,self",
        ]

    def namespace(self, host: int) -> str:
        """Return the name of a host and of its namespace."""
        return f"{self.name}{host}"

    def limit(self, rate: str) -> None:
        """Limit what each host may send, such as 1gbit."""
        for host in range(1, self.count + 1):
            how = ("tbf", "rate", rate, "burst", BURST, "latency", "50ms")
            run_ip("-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root", *how, tool="tc")

    def cut(self, host: int) -> None:
        """Cut a host off silently, without closing its connections."""
        run_ip("-n", self.namespace(host), "link", "set", "eth0", "down")

    def mend(self, host: int) -> None:
        """Connect a host again."""
        run_ip("-n", self.namespace(host), "link", "set", "eth0", "up")

    def create(self) -> None:
        """Create the namespaces and their links."""
        bridge = f"{self.name}br"
        run_ip("link", "add", bridge, "type", "bridge")
        run_ip("addr", "add", f"10.77.{self.net}.254/24", "dev", bridge)
        run_ip("link", "set", bridge, "up")
        for host, address in enumerate(self.addresses, 1):
            namespace = self.namespace(host)
            link = f"{self.name}v{host}"
            run_ip("netns", "add", namespace)
            run_ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            run_ip("link", "set", link, "master", bridge, "up")
            run_ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run_ip("-n", namespace, "link", "set", device, "up")

    def processes(self) -> list[int]:
        """Return the ids of processes that run on one of the hosts."""
        namespaces = set[tuple[int, int]]()
        for host in range(1, self.count + 1):
            with suppress(OSError):
                status = Path(f"/run/netns/{self.namespace(host)}").stat()
                namespaces.add((status.st_dev, status.st_ino))
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                status = (path / "ns/net").stat()
                if (status.st_dev, status.st_ino) in namespaces:
                    pids.append(int(path.name))
        return pids

    def remove(self) -> None:
        """Remove the hosts and kill the processes that still run on them."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for host in range(1, self.count + 1):
            run_ip("link", "del", f"{self.name}v{host}", check=False)
            run_ip("netns", "del", self.namespace(host), check=False)
        run_ip("link", "del", f"{self.name}br", check=False)


@contextmanager
def create_hosts(count: int, rate: str = "") -> Iterator[Hosts]:
    """Create hosts and remove them at the end of the block; several programs may have hosts at a time."""
    number = os.getpid()
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(
            name=f"lt{number % 10_000}x", count=count, net=number % 250, enter=Path(folder) / "enter"
        )
        hosts.enter.write_text(ENTER.format(name=hosts.name))
        hosts.enter.chmod(0o700)
        try:
            hosts.create()
            if rate:
                hosts.limit(rate)
            yield hosts
        finally:
            hosts.remove()


def main() -> None:
    """Run a command on hosts."""
    parser = argparse.ArgumentParser(description="Run a command on several hosts of this machine.")
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--rate", default="", help="limit of what each sends, such as 1gbit")
    parser.add_argument("command", nargs="+", help="{} stands for the options of mpiexec")
    args = parser.parse_args()
    if obstacle := find_obstacle():
        parser.error(obstacle)
    with create_hosts(args.count, args.rate) as hosts:
        words = [option for word in args.command for option in (hosts.options if word == "{}" else [word])]
        sys.exit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    main()
