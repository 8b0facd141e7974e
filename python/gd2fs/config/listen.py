"""Addresses that servers listen on, and the rule that nothing leaves loopback without authentication."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

# Pending connections a listener keeps before the kernel refuses more; the servers behind it accept at once.
BACKLOG = 512


class Listen(NamedTuple):
    """One `HOST:PORT` to listen on. Port 0 lets the kernel choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Listen:
        """Reads "HOST:PORT", "[V6]:PORT" or "tcp://HOST:PORT"; the port may be left out if there is a
        default.

        Raises ValueError naming the text.
        """
        rest = text.removeprefix("tcp://").removeprefix("http://")
        if default_port is not None and (rest.endswith("]") or ":" not in rest):
            rest = f"{rest}:{default_port}"
        host, separator, port = rest.rpartition(":")
        if not separator or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(
                f"{text!r} is not an address to listen on; write HOST:PORT, for example 127.0.0.1:7527"
            )
        return cls(host.strip("[]"), int(port))

    @property
    def loopback(self) -> bool:
        """True when only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def wildcard(self) -> bool:
        """True for 0.0.0.0 and ::, which can be listened on but not connected to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """The http URL of this address; meaningful once the port is not 0."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def bind(listen: Listen) -> socket.socket:
    """A bound, listening socket. Raises OSError that names the address and the remedy."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # The protocol is named because asyncio looks at it: accepted sockets get TCP_NODELAY only if it says TCP.
    # Without, an answer in two writes waits 40 ms for the delayed acknowledgement of the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A restarted server takes its port back although connections of its predecessor linger in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen.host, listen.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"cannot listen on {listen.host}:{listen.port}: {reason}; choose another port, or 0 for any",
        ) from error
    listener.setblocking(False)
    return listener


def bound(listener: socket.socket) -> Listen:
    """Where a listener really listens (the port the kernel chose)."""
    host, port = listener.getsockname()[:2]
    return Listen(host, port)


def require_authentication(part: str, listens: Iterable[Listen], secret: str, remedy: str) -> None:
    """Raises PermissionError if `part` would listen beyond loopback without `secret`; `remedy` says how to
    set one.
    """
    for listen in listens:
        if not listen.loopback and not secret:
            raise PermissionError(
                f"{part} will not listen on {listen.host}:{listen.port}, which other machines can reach, "
                f"without authentication; {remedy}, or listen on 127.0.0.1"
            )
