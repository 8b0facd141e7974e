"""Clients in processes of their own, to be stopped, killed or counted in hundreds.

``python -m tests.contract.data_peer TRANSPORT WORK …`` prints a line when it has begun, and ends with its
standard input.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from gd2fs import errors
from tests.contract.data_plane import BY_NAME, Transport

Peer = subprocess.Popen[str]

ROOT = Path(__file__).parents[2]
#: What each client of a crowd writes and reads.
SAMPLE_BYTES = 100


def start_peer(transport: Transport, work: str, layout: dict[str, Any], *numbers: int) -> Peer:
    """Starts a process that does ``work`` over and over; returns when the first transfer has begun."""
    command = [sys.executable, "-m", "tests.contract.data_peer", transport.name, work]
    command += [str(number) for number in numbers]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
    pipe = subprocess.PIPE
    peer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert peer.stdin and peer.stdout
    peer.stdin.write(json.dumps(layout) + "\n")
    peer.stdin.flush()
    line = peer.stdout.readline()
    assert line == "begun\n", f"the peer says {line!r}"
    return peer


def end_peer(peer: Peer, patience_s: float = 20) -> str:
    """Ends its standard input; what it printed since. Raises AssertionError if it fails."""
    said, _ = peer.communicate(timeout=patience_s)
    assert peer.returncode == 0, f"the peer ended with {peer.returncode}: {said}"
    return said


def _is_wanted() -> bool:
    """Whether standard input is still open."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return not ready


def _transfer(transport: Transport, work: str, layout: dict[str, Any], length: int) -> None:
    """Reads or writes the range over and over; each write puts one byte value everywhere."""
    with transport.client(timeout_s=60) as client:
        file = client.open_layout(layout)
        memory = transport.allocate(client, length)
        turns = 0
        while turns == 0 or _is_wanted():
            memory[:] = turns % 256
            submit = file.submit_read if work == "read" else file.submit_write
            request = submit(0, memory)
            if turns == 0:
                print("begun", flush=True)
            assert request.wait() == length
            turns += 1
    print(f"{turns} turns", flush=True)


def _crowd(transport: Transport, layout: dict[str, Any], first: int, count: int) -> None:
    """``count`` clients at once, each from an address of its own and with a stripe unit of its own."""
    clients, files = [], []
    try:
        for number in range(first, first + count):
            address = f"127.0.{1 + number // 250}.{1 + number % 250}"
            client = transport.client(io_threads=1, streams=1, nics=[address])
            clients.append(client)
            files.append(client.open_layout(layout))
        _write_and_read(transport, clients, files, first, layout["stripe_unit"])
        print("begun", flush=True)
        sys.stdin.readline()
        # All of them are still connected, and read again.
        _write_and_read(transport, clients, files, first, layout["stripe_unit"])
    finally:
        for client in clients:
            client.close()
    print(f"{count} clients", flush=True)


def _write_and_read(
    transport: Transport, clients: list[Any], files: list[Any], first: int, unit: int
) -> None:
    memory = [transport.allocate(client, SAMPLE_BYTES) for client in clients]
    for number, one in enumerate(memory):
        one[:] = (first + number) % 251
    writes = [file.submit_write((first + i) * unit, memory[i]) for i, file in enumerate(files)]
    assert all(request.wait() == SAMPLE_BYTES for request in writes)
    for one in memory:
        one[:] = 255
    reads = [file.submit_read((first + i) * unit, memory[i]) for i, file in enumerate(files)]
    assert all(request.wait() == SAMPLE_BYTES for request in reads)
    assert all((one == (first + number) % 251).all() for number, one in enumerate(memory))


def main() -> None:
    transport, work, *numbers = sys.argv[1:]
    layout = json.loads(sys.stdin.readline())
    try:
        if work == "crowd":
            _crowd(BY_NAME[transport], layout, *map(int, numbers))
        else:
            _transfer(BY_NAME[transport], work, layout, *map(int, numbers))
    except errors.Gd2fsError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
