"""``gd2fs://HOST:PORT[,HOST:PORT…]/path?cluster=ID``: where control is, and what is meant there."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from gd2fs import errors

CONTROL_PORT = 7527


@dataclass(frozen=True, slots=True)
class ControlUri:
    """``addresses`` are HTTP base addresses of control, ``path`` begins with ``/``, ``cluster`` is None
    when not given."""

    addresses: tuple[str, ...]
    path: str
    cluster: str | None


def parse(uri: str) -> ControlUri:
    """Reads a URI that names control by its addresses. Raises Invalid."""
    scheme, separator, rest = uri.partition("://")
    if scheme != "gd2fs" or not separator:
        raise errors.Invalid(f"uri: {uri!r} does not begin with gd2fs://")
    rest, _, query = rest.partition("?")
    hosts, slash, path = rest.partition("/")
    options = parse_qs(query, keep_blank_values=True)
    unknown = sorted(set(options) - {"cluster"})
    if unknown:
        raise errors.Invalid(f"uri: {uri!r} has the unknown option {unknown[0]!r}; only cluster=ID is known")
    addresses = tuple(_address(host, uri) for host in hosts.split(","))
    cluster = options["cluster"][0] if "cluster" in options else None
    return ControlUri(addresses, unquote(slash + path) or "/", cluster or None)


def _address(host: str, uri: str) -> str:
    name, port = host, ""
    # An IPv6 address stands in brackets, since it has colons of its own.
    if host.startswith("["):
        name, bracket, tail = host.partition("]")
        name += bracket
        port = tail.removeprefix(":") if tail.startswith(":") else tail
    elif ":" in host:
        name, _, port = host.partition(":")
    port = port or str(CONTROL_PORT)
    if not name.strip("[]") or not port.isdigit() or not 0 < int(port) < 65536:
        raise errors.Invalid(f"uri: {host!r} in {uri!r} is not HOST[:PORT]")
    return f"http://{name}:{port}"
