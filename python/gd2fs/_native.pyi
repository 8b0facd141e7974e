"""The compiled part of GD2FS. Programs use `gd2fs.connect`; this is what it stands on.

Errors are those of `gd2fs.errors`. Every method of an object that was made before a fork raises ForkedError
in the child, every method of a closed client but ``reap`` and ``close`` raises ClosedError. Blocking calls
release the interpreter lock and look for signals every 50 ms.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import Buffer

VERSION: str
WIRE_VERSION: int

def error_table() -> list[tuple[int, str, int, bool, bool]]:
    """All status codes: (code, name, errno, retryable, may have changed something)."""

def crc32c(data: Buffer, initial: int = 0) -> int:
    """CRC-32C of what ``initial`` is the sum of, followed by ``data``."""

def crc32c_combine(a: int, b: int, length_b: int) -> int:
    """The sum of two ranges, one behind the other, from the sums of both and the length of the second in
    bytes."""

def header_encode(**fields: int) -> bytes:
    """A wire header of 64 bytes; fields not given are 0. Raises Invalid for an unknown field."""

def header_decode(data: bytes) -> dict[str, int]:
    """The fields of a wire header after its checks. Raises BadFrame, Version, TooLarge, BadRequest."""

class Client:
    """Moves bytes between memory and the nodes that a layout names.

    A request is submitted, gets a number, and later is a completion in a queue. Its buffers are kept alive
    until the completion is reaped, and nothing touches them after it was queued.
    """

    def __init__(
        self,
        addresses: list[str],
        cluster: str,
        token: str,
        *,
        nics: list[str] = ...,
        io_threads: int = 0,
        memory_threads: int = 0,
        streams: int = 4,
        transport: str = "auto",
        verify: bool = True,
        outstanding_bytes_max: int = ...,
    ) -> None:
        """Does not connect. ``addresses`` are ``http://HOST:PORT`` of control and may be empty where only
        layouts that travel with requests are used; ``nics`` are local IP addresses; ``streams`` counts
        connections per node and NIC; ``transport`` is "tcp", "shm" (nodes of this host only) or "auto":
        shared memory where a node is on this host, else TCP. What is submitted beyond
        ``outstanding_bytes_max`` bytes (default 1 GiB) waits."""

    def control(self, method: str, path: str, body: bytes | None, timeout_ms: int) -> tuple[int, bytes]:
        """An HTTP call to control: status and body. Blocks. Raises Unavailable, Timeout, Invalid."""

    def file(self, layout: str) -> File:
        """The file that a layout (JSON) describes. Raises BadRequest for a layout that will not do."""

    def submit_read(self, file: File, offset: int, buffers: list[Any], timeout_ms: int) -> int:
        """Starts filling ``buffers`` from byte ``offset`` on. The request's number.

        Raises BadRequest for a buffer that will not do, Overloaded beyond 65,536 requests not
        reaped."""

    def submit_write(self, file: File, offset: int, buffers: list[Any], timeout_ms: int) -> int:
        """Starts writing ``buffers`` at byte ``offset``."""

    def submit_read_at(
        self,
        file: File,
        offset: int,
        addresses: Buffer,
        lengths: Buffer,
        timeout_ms: int,
        iomem: IOMEM | None = None,
    ) -> int:
        """As ``submit_read``, into fragments given by two arrays of uint64: addresses, and lengths in bytes.
        They must lie in ``iomem``, which is kept until the request is reaped; without it nothing is checked,
        and only the caller keeps them alive."""

    def submit_write_at(
        self,
        file: File,
        offset: int,
        addresses: Buffer,
        lengths: Buffer,
        timeout_ms: int,
        iomem: IOMEM | None = None,
    ) -> int:
        """As ``submit_write``, from fragments as in ``submit_read_at``."""

    def alloc(self, length: int) -> IOMEM:
        """Memory of ``length`` bytes (zeros) that a node of this host reaches by itself, without a copy by
        the client. Raises NoSpace where the system has none. A forked child does not have it: touching it
        there is a SIGSEGV."""

    def register(self, buffer: Buffer) -> IOMEM:
        """Registers writable memory that lies in one piece; it is kept until ``close``. Raises BadRequest."""

    def register_at(self, address: int, length: int) -> IOMEM:
        """Registers ``length`` bytes at ``address``, which the caller keeps alive. Raises BadRequest."""

    def cancel(self, request: int) -> None:
        """Asks for an early end; the request still completes, as CANCELLED or with its result."""

    def fileno(self) -> int:
        """A descriptor that is readable while completions wait. It belongs to the client."""

    def reap(
        self, max: int, timeout_ms: int, into: list[tuple[int, int, int, str]] | None = None
    ) -> list[tuple[int, int, int, str]]:
        """Appends at most ``max`` completions (request, code, bytes moved, message) to ``into``, or a new
        list, and returns it.

        Waits for the first one, with a negative ``timeout_ms`` for ever. Raises ClosedError when the client
        is closed and no completion is left."""

    def lengths(self, files: list[File], timeout_ms: int) -> list[int | None]:
        """The highest acknowledged end of each file in bytes; None where a node can't be reached or has
        lost it. Blocks."""

    def flush(self, file: File, timeout_ms: int) -> None:
        """Returns when everything that was acknowledged to this client before is durable, on all nodes of the
        file. Blocks.

        Raises Unsupported where a node keeps nothing beyond its memory; Lost, once, where a node was started
        anew after it had acknowledged writes that no flush covers."""

    def warm(self, file: File, start: int, end: int, timeout_ms: int) -> tuple[int, int, int, int]:
        """Has the nodes lift bytes [start, end) into memory, without waiting for it: how many bytes were in
        memory, on NVMe and nowhere when they were asked. Blocks. Raises BadRequest for an empty range."""

    def whereabouts(self, file: File, start: int, end: int, timeout_ms: int) -> list[tuple[int, int, str]]:
        """Where bytes [start, end) are: (start, end, tier) in order, neighbours merged; tier is "dram",
        "nvme", "lost" (they were there, or may have been) or "hole" (never written). Blocks. Raises
        BadRequest for an empty range, TooLarge for more than 2^20 extents."""

    def stats(self) -> dict[str, int]:
        """Counters since the client was made, and the requests pending now."""

    def close(self) -> None:
        """Completes every request as CANCELLED and ends all threads, within about a second. Idempotent."""

class File:
    """A file by its layout, for requests of the client that made it."""

class IOMEM:
    """Memory for transfers: registered once, used by many requests, which hold it too. Library memory is a
    writable buffer (``memoryview``, ``numpy.frombuffer``) and may outlive the client."""

    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int:
        """Bytes."""

    @property
    def kind(self) -> str:
        """ "library": from `Client.alloc`; "foreign": registered."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def close(self) -> None:
        """Takes no new requests by address and no new views. Foreign memory is let go when its requests are
        done; library memory when this object, its views and its requests are gone. Idempotent."""

class NodeLink:
    """Control's line to the nodes: SEAL, DELETE, STAT, PIN, UNPIN, LIST and SCRUB. Connections are kept, one
    per address, at most 256."""

    def __init__(self, cluster: str, token: str, timeout_ms: int) -> None: ...
    def call(self, address: str, opcode: int, payload: bytes) -> tuple[int, int, bytes]:
        """One operation on the node at ``tcp://IP[:PORT]``: (code, incarnation, payload of the reply).
        Blocks.

        A failure of any kind is a code other than 0, with its message (UTF-8) as the payload; only an
        argument that is wrong in itself raises (Invalid)."""

class Node:
    """A storage node in this process, with threads of its own. Stopped when the object goes."""

    def __init__(self, config_json: str) -> None:
        """Starts serving. ``config_json`` is an object with ``cluster``, ``node``, ``incarnation`` (above
        every earlier one of this node), ``keys`` (as GD2FS_CLUSTER_KEYS, "" for the development key),
        ``listen`` (a list of ``tcp://IP[:PORT]``), ``memory_bytes``, ``data_dir``, ``connections_max``,
        ``shm`` ("auto", "off" or the path of a socket: for clients of this host) and ``io_threads`` (0: one
        for each core, at most 16), ``memory_threads`` (spare threads that take over while one copies much)
        and ``now`` (unix seconds, as control said with the incarnation; none: the machine's clock counts).

        Raises Invalid naming the field, or what in the data directory does not fit; Unavailable where an
        address cannot be listened on."""

    @staticmethod
    def check(config_json: str) -> None:
        """Raises Invalid for a configuration that a start would refuse, as far as that can be said without
        touching the machine."""

    def addresses(self) -> list[str]:
        """Where it listens, with the ports that were given for port 0."""

    def stats(self) -> str:
        """Counters as a JSON object; after ``stop`` those of the end."""

    def report(self, limit: int) -> str:
        """At most ``limit`` columns whose valid prefix has changed, those that changed first, as JSON:
        ``{"sequence", "items": [{"file", "column", "valid", "sealed", "epoch", "length"}]}``. ``valid`` is
        the first byte below length or seal, as a file offset, that is not there; null: all are. The same
        again until `reported`."""

    def reported(self, sequence: int) -> None:
        """Control has taken every report up to this ``sequence``."""

    def hear_time(self, now: float) -> None:
        """Control says that it is ``now`` (unix seconds): capabilities and tombstones expire by that."""

    def stop(self, grace_ms: int) -> None:
        """Accepts nothing more, refuses new requests as SHUTTING_DOWN and lets running ones finish within
        ``grace_ms``. Its memory and its data directory are free when this returns. Blocks. Idempotent.

        Raises, once it has stopped all the same, Internal, Timeout or NoSpace naming each log that did not
        get everything, with the bytes that are lost and the reason."""

    def wait(self, timeout_ms: int) -> bool:
        """Whether the node has ended, after waiting for it at most ``timeout_ms``."""

def show_messages(level: str) -> bool:
    """Writes what the native parts say, from ``level`` on (error, warn, info, debug, trace), to standard
    error, a line each. For a process of GD2FS's own: a library stays silent. The first call counts for the
    whole process; False: it was not this one. Raises Invalid for another level."""

# The measuring loops of gd2fs.bench, which prepares the memory. Ranges are (address, length in bytes); arrays
# of addresses and lengths are of uint64. All memory must be mapped and used by nobody else during the call.

def bench_copy(streaming: bool, sources: Buffer, targets: Buffer, lengths: Buffer, threads: int) -> float:
    """Copies fragments, each thread its contiguous share of the bytes; seconds. ``streaming``: with stores
    around the caches instead of memcpy."""

def bench_requests(
    client: Client,
    write: bool,
    layout: str,
    offsets: list[int],
    addresses: Buffer,
    lengths: Buffer,
    outstanding: int,
    timeout_ms: int,
) -> tuple[float, list[float]]:
    """One request for each of ``offsets``, ``outstanding`` of them under way: seconds in all and of each.

    The fragments are shared out evenly, in order. Nobody else may have requests under way on ``client``.
    Raises what the first failed request failed with, after all have ended."""

def raw_tcp_serve(listener: int, memory: tuple[int, int]) -> None:
    """Serves ``memory`` to `RawTcp` on a listening socket, which is handed over, until the process ends.
    Raises OSError."""

class RawTcp:
    """Bare connections to a `raw_tcp_serve` on this machine: the ceiling of TCP transports."""

    def __init__(self, port: int, streams: int, buffer_bytes: int) -> None:
        """``buffer_bytes``: of the kernel's socket buffers; 0 leaves them to the kernel. Raises OSError."""

    def run(self, write: bool, offset: int, memory: tuple[int, int], part_bytes: int, ahead: int) -> float:
        """Moves ``memory`` from or to ``offset`` of the server's, ``ahead`` parts asked ahead on each stream;
        seconds. Raises OSError."""

class RedisReader:
    """Compiled connections to a Redis on this machine."""

    def __init__(self, port: int, connections: int) -> None: ...
    def get(self, keys: list[bytes], value_bytes: int, memory: tuple[int, int], depth: int) -> float:
        """Gets values of a known size, one behind the other, with ``depth`` GETs unanswered on each
        connection; seconds. Raises OSError, after which the connections are of no use."""
