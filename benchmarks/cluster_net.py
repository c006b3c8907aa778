"""Hosts on one machine: network namespaces on a bridge, each behind a link of a given rate. Linux, root, iproute2.

    with cluster(2) as hosts:
        run_ranks(["python", "worker.py"], [hosts[0], hosts[1]], timeout=60)

A host has the interface `DEVICE` and, inside it, processes that call `limit` to set the rate of its link.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

DEVICE = "e0"
_made = itertools.count()
QUEUE_MS = 400  # how long a packet may wait for the link before it is dropped


def sh(command: str) -> None:
    """Runs a command of words without spaces; raises with what it says if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


def why_not() -> str:
    """What this machine lacks for a cluster; empty if nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    try:
        with cluster(1) as (host,):
            sh(f"ip netns exec {host} tc qdisc replace dev {DEVICE} root tbf rate 1gbit burst 128kb latency 1ms")
    except OSError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def cluster(hosts: int) -> Iterator[list[str]]:
    """Names of namespaces with addresses 10.77.0.1, ...; gone afterwards, whatever happened."""
    mark = f"fm{os.getpid()}{chr(97 + next(_made) % 26)}"  # interface names have 15 letters; old ones go slowly
    names = [f"{mark}h{i}" for i in range(hosts)]
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        sh(f"ip link add name {mark}b type bridge")
        sh(f"ip link set dev {mark}b up")
        for i, name in enumerate(names):
            sh(f"ip netns add {name}")
            sh(f"ip link add {mark}p{i} type veth peer name {DEVICE} netns {name}")
            sh(f"ip link set {mark}p{i} master {mark}b up")
            sh(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev {DEVICE}")
            sh(f"ip -n {name} link set {DEVICE} up")
            sh(f"ip -n {name} link set lo up")
        yield names
    finally:
        for command in [*(f"ip netns del {name}" for name in names), f"ip link del {mark}b"]:
            with contextlib.suppress(OSError):
                sh(command)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def limit(mbit: float, packet_bytes: int = 0) -> None:
    """Sets the rate at which this process's host sends; each packet counts as `packet_bytes` more than it has."""
    burst = max(128 * 1024, 2 * packet_bytes, int(mbit * 1e6 / 8 / 100))
    sized = f"stab overhead {packet_bytes} " if packet_bytes else ""
    rate = f"rate {round(mbit * 1000)}kbit burst {burst} latency {QUEUE_MS}ms"
    sh(f"tc qdisc replace dev {DEVICE} root {sized}tbf {rate}")


def run_ranks(command: Sequence[str], hosts: Sequence[str], timeout: float) -> None:
    """Runs ``command rank`` on the host of each rank until all are done; ends all when one fails.

    Raises:
        RuntimeError: if a rank fails, or they take longer than `timeout` seconds.
    """
    env = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command, str(rank)],
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        end = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks):
            failed = [i for i, rank in enumerate(ranks) if rank.returncode not in (None, 0)]
            if failed or time.monotonic() > end:
                raise RuntimeError(f"rank {failed[0]} failed" if failed else f"not done after {timeout} s")
            time.sleep(0.05)
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to one that is done
        for rank in ranks:
            rank.wait()
