"""Bodies of the REST API. Every field is bounded, unknown fields are refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gd2fs.kv import KvFormat

I64_MAX = 2**63 - 1
TOKEN_IDS_MAX = 1_048_576
BODY_BYTES_MAX = 16 * 2**20
"""1,048,576 ids of ten digits with their commas are 11.5 MB."""

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
Identity = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=I64_MAX)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
FileId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
TtlS = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Priority = Annotated[int, Field(ge=0, le=255)]
SessionId = Annotated[str, Field(min_length=1, max_length=64)]
Address = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-z]+://\S+$")]
SignedText = Annotated[str, Field(min_length=1, max_length=60_000)]
FileClass = Literal["cache", "durable"]
StripeUnit = Annotated[int, Field(ge=32 * 1024, le=64 * 2**20)]
"""32 KiB (one checksummed piece) to 64 MiB (one payload)."""


STATS_BYTES_MAX = 64 * 1024
"""A node's counters are 2 KB; they are written with every heartbeat."""


def _plain(stats: dict[str, Any]) -> dict[str, Any]:
    # Shown to others as JSON: one NaN or half a surrogate pair would make the list of nodes unreadable.
    if len(json.dumps(stats, allow_nan=False, ensure_ascii=False).encode()) > STATS_BYTES_MAX:
        raise ValueError(f"must be at most {STATS_BYTES_MAX} bytes as JSON")
    return stats


Stats = Annotated[dict[str, Any], AfterValidator(_plain)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Register(_Body):
    node: Name
    addresses: Annotated[list[Address], Field(max_length=64)] = []
    http: Annotated[str, Field(max_length=256)] = ""
    memory_bytes: Count
    incarnation_floor: U32 = 0
    config_hash: Annotated[str, Field(max_length=128)] = ""
    has_log: bool = False


class Heartbeat(_Body):
    incarnation: U32
    addresses: Annotated[list[Address], Field(max_length=64)]
    http: Annotated[str, Field(max_length=256)] = ""
    used_bytes: Count
    capacity_bytes: Count
    evictable_bytes: Count = 0
    log_trouble: bool = False
    files: Count = 0
    stats: Stats = {}


RANGES_MAX = 4096
"""Columns of one report: a transaction of some ten milliseconds."""


class Range(_Body):
    """One column of a node: what it knows of it, and the first byte below its end that is missing."""

    file: FileId
    column: U32
    epoch: U32
    sealed: Count
    length: Count
    valid: Count | None

    def valid_below(self, sealed: int) -> int | None:
        """The valid prefix for who believes that the file is sealed up to `sealed`: beyond its own end the
        node has nothing."""
        end = max(self.length, self.sealed)
        return end if self.valid is None and end < sealed else self.valid


class Ranges(_Body):
    incarnation: U32
    items: Annotated[list[Range], Field(max_length=RANGES_MAX)]


class Place(_Body):
    """A column, as a place to go on from."""

    file: FileId
    column: U32


class Fsck(_Body):
    node: Name
    repair: bool = False
    after: Place | None = None
    limit: Annotated[int, Field(ge=1, le=RANGES_MAX)] = 1024


class Mkdir(_Body):
    path: Path
    file_class: Annotated[FileClass | None, Field(alias="class")] = None
    parents: bool = True


class Create(_Body):
    path: Path
    stripe_unit: StripeUnit | None = None
    width: Annotated[int, Field(ge=1, le=256)] | None = None
    kv_identity: Identity | None = None


class Rename(_Body):
    source: Annotated[Path, Field(alias="from")]
    target: Annotated[Path, Field(alias="to")]


class Format(_Body):
    name: Name
    bytes_per_token: Annotated[int, Field(ge=1, le=2**40)]
    granule: Annotated[int, Field(ge=1, le=2**20)] = 1

    def value(self) -> KvFormat:
        return KvFormat(self.name, self.bytes_per_token, self.granule)


class Fork(_Body):
    """What another session begins with: its first `tokens` tokens, in whole granules; all if it is null."""

    session: SessionId
    tokens: Count | None = None


class CreateSession(_Body):
    """`kv_identity` and `kv_format` are needed unless it is a fork, which has its parent's; so does a fork
    have its parent's other properties unless they are given."""

    kv_identity: Identity | None = None
    kv_format: Format | None = None
    fork: Fork | None = None
    model: Annotated[str, Field(max_length=256)] | None = None
    ttl_s: TtlS | None = None
    priority: Priority = 0


class Extend(_Body):
    """What changes; `ttl_s` null: it does not expire. Its time to live begins anew in any case."""

    ttl_s: TtlS | None = None
    priority: Priority | None = None


class Estimate(_Body):
    token_ids: Annotated[list[U32], Field(min_length=1, max_length=TOKEN_IDS_MAX)]
    max_tokens: Annotated[int, Field(ge=0, le=TOKEN_IDS_MAX)]
    kv_identity: Identity


class Plan(Estimate):
    request_id: Annotated[str, Field(min_length=1, max_length=256)]
    # Only for a session that moves to another identity, whose tokens may take other bytes.
    kv_format: Format | None = None


class FreshSegment(_Body):
    kv_uri: Annotated[str, Field(min_length=1, max_length=2048)]
    token_start: Count
    token_length: Annotated[int, Field(ge=1, le=2 * TOKEN_IDS_MAX)]
    kv_start: Count
    kv_length: Annotated[int, Field(ge=1, le=I64_MAX)]


class Ack(_Body):
    column: U32
    epoch: U32
    incarnation: U32


class Commit(_Body):
    plan_token: SignedText
    # One: a plan has one fresh file.
    fresh: Annotated[list[FreshSegment], Field(min_length=1, max_length=1)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    acks: Annotated[list[Ack], Field(min_length=1, max_length=1024)]


class Abort(_Body):
    plan_token: SignedText
