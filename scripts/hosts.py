"""Hosts on one machine, to try what happens between several: network namespaces on a bridge, and a stand-in for ssh by which
mpiexec starts processes in them. Linux, as root, with iproute2.

    python scripts/hosts.py 2 --rate 1gbit -- mpiexec {} -n 2 python -m llamatrain ...

runs a command with what mpiexec is to be told in the place of {}, and removes the hosts.
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

# What ssh would be called with: options, a host's address, a command.
ENTER = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -[opl]) shift 2;; *) shift;; esac; done
host={name}${{1##*.}}; shift
exec ip netns exec "$host" unshare --uts bash -c 'hostname "$0"; eval "$1"' "$host" "$*"
"""


def why_not() -> str:
    """What this machine lacks for hosts, if it lacks something."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts take Linux, and root"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "hosts take iproute2 and util-linux"
    probe = f"lt{os.getpid() % 10_000}p"
    if ip("netns", "add", probe, check=False):
        return "no network namespaces can be made here"
    ip("netns", "del", probe)
    return ""


def ip(*words: object, check: bool = True, tool: str = "ip") -> int:
    done = subprocess.run([tool, *map(str, words)], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{tool} {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.returncode


@dataclass(frozen=True)
class Hosts:
    name: str  # that theirs begin with: they are numbered from 1 on
    count: int
    net: int  # of the addresses 10.77.NET.*
    enter: Path  # the stand-in for ssh

    @property
    def addresses(self) -> list[str]:
        return [f"10.77.{self.net}.{each}" for each in range(1, self.count + 1)]

    @property
    def options(self) -> list[str]:
        """What mpiexec is told of them. UCX, which the wheel of MPICH speaks by, would find the memory that they share."""
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
        return f"{self.name}{host}"

    def limit(self, rate: str) -> None:
        """So much goes out of each, such as 1gbit."""
        for host in range(1, self.count + 1):
            how = ("tbf", "rate", rate, "burst", BURST, "latency", "50ms")
            ip("-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root", *how, tool="tc")

    def cut(self, host: int) -> None:
        """Silently: nobody is told that it is gone."""
        ip("-n", self.namespace(host), "link", "set", "eth0", "down")

    def mend(self, host: int) -> None:
        ip("-n", self.namespace(host), "link", "set", "eth0", "up")

    def up(self) -> None:
        bridge = f"{self.name}br"
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"10.77.{self.net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host, address in enumerate(self.addresses, 1):
            there, link = self.namespace(host), f"{self.name}v{host}"
            ip("netns", "add", there)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", there)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", there, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", there, "link", "set", device, "up")

    def processes(self) -> list[int]:
        """Those that are in one of them."""
        places = set[tuple[int, int]]()
        for host in range(1, self.count + 1):
            with suppress(OSError):
                status = Path(f"/run/netns/{self.namespace(host)}").stat()
                places.add((status.st_dev, status.st_ino))
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                status = (path / "ns/net").stat()
                if (status.st_dev, status.st_ino) in places:
                    found.append(int(path.name))
        return found

    def down(self) -> None:
        """With whatever still runs there."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for host in range(1, self.count + 1):
            ip("link", "del", f"{self.name}v{host}", check=False)
            ip("netns", "del", self.namespace(host), check=False)
        ip("link", "del", f"{self.name}br", check=False)


@contextmanager
def hosts(count: int, rate: str = "") -> Iterator[Hosts]:
    """So many, which go with the block; several programs may have some at a time."""
    number = os.getpid()
    with tempfile.TemporaryDirectory() as folder:
        made = Hosts(
            name=f"lt{number % 10_000}x", count=count, net=number % 250, enter=Path(folder) / "enter"
        )
        made.enter.write_text(ENTER.format(name=made.name))
        made.enter.chmod(0o700)
        try:
            made.up()
            if rate:
                made.limit(rate)
            yield made
        finally:
            made.down()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command beside hosts on this machine.")
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--rate", default="", help="what each may send, such as 1gbit")
    parser.add_argument("command", nargs="+", help="{} stands for what mpiexec is told of them")
    said = parser.parse_args()
    if why := why_not():
        parser.error(why)
    with hosts(said.count, said.rate) as made:
        words = [word for each in said.command for word in (made.options if each == "{}" else [each])]
        sys.exit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    main()
