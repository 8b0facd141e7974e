"""Signed text: tokens (who somebody is), capabilities (what may be done with one file) and plan tokens.

``gd2fs1.<key id>.<base64url payload>.<base64url HMAC-SHA256>``, the same as ``gd2fs_wire::signing``; golden
vectors of both are in tests/vectors/signing.json. A field that is not known here is refused: a restriction
must never be ignored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args

from gd2fs import errors

Role = Literal["client", "node", "control", "admin"]
Right = Literal["read", "write"]
FileClass = Literal["cache", "durable"]

DEVELOPMENT_KEY_ID = 0
"""The built-in key protects nothing; servers accept it on loopback addresses alone."""

_PREFIX = "gd2fs1"
_KEY_BYTES_MIN = 16
_TEXT_BYTES_MAX = 60_000
"""A capability of a file with 1,000 columns stays well below this."""
_U8_MAX, _U32_MAX, _U64_MAX = 2**8 - 1, 2**32 - 1, 2**64 - 1
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
_FILE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Token:
    """Who somebody is. `expiry` is in unix seconds, here and below."""

    tenant: str
    role: Role
    expiry: int
    typ: ClassVar[str] = "token"

    def payload(self) -> dict[str, Any]:
        return {"typ": self.typ, "tenant": self.tenant, "role": self.role, "expiry": self.expiry}

    @classmethod
    def read(cls, fields: _Fields) -> Token:
        return cls(fields.text("tenant"), fields.one_of("role", get_args(Role)), fields.whole("expiry"))


@dataclass(frozen=True, slots=True)
class Capability:
    """What the holder may do with one file.

    `ranges` are bytes `[start, end)`, end -1 is open, none at all means everything. `columns` holds (epoch,
    born) of each column, `nodes` the names of the nodes that hold it. A `bearer` capability counts for
    whoever presents it, whatever its tenant: it travelled with a request. A full node gives up files of a
    higher `priority` (0 to 255) later.
    """

    tenant: str
    file: str
    file_class: FileClass
    stripe_unit: int
    width: int
    rights: Sequence[Right]
    ranges: Sequence[tuple[int, int]]
    grant: int
    columns: Sequence[tuple[int, int]]
    nodes: Sequence[Sequence[str]]
    expiry: int
    bearer: bool = False
    priority: int = 0
    typ: ClassVar[str] = "cap"

    def payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "typ": self.typ,
            "tenant": self.tenant,
            "file": self.file,
            "class": self.file_class,
            "stripe_unit": self.stripe_unit,
            "width": self.width,
            "rights": list(self.rights),
            "ranges": [list(pair) for pair in self.ranges],
            "grant": self.grant,
            "columns": [list(pair) for pair in self.columns],
            "nodes": [list(replicas) for replicas in self.nodes],
            "expiry": self.expiry,
        }
        if self.bearer:
            payload["bearer"] = True
        if self.priority:
            payload["priority"] = self.priority
        return payload

    @classmethod
    def read(cls, fields: _Fields) -> Capability:
        rights = fields.array("rights")
        if not all(right in get_args(Right) for right in rights):
            raise fields.refuse("rights", "may hold 'read' and 'write'")
        file = fields.text("file")
        if not _FILE_ID.fullmatch(file):
            raise fields.refuse("file", "must be 32 hex digits")
        return cls(
            tenant=fields.text("tenant"),
            file=file,
            file_class=fields.one_of("class", get_args(FileClass)),
            stripe_unit=fields.whole("stripe_unit", _U32_MAX),
            width=fields.whole("width", _U32_MAX),
            rights=tuple(rights),
            ranges=tuple(fields.pairs("ranges", (0, _U64_MAX), (-1, 2**63 - 1))),
            grant=fields.whole("grant"),
            columns=tuple(fields.pairs("columns", (0, _U32_MAX), (0, _U32_MAX))),
            nodes=tuple(fields.lists_of_text("nodes")),
            expiry=fields.whole("expiry"),
            bearer=fields.flag("bearer"),
            priority=fields.whole("priority", _U8_MAX, absent=0),
        )


@dataclass(frozen=True, slots=True)
class PlanToken:
    """The right to commit or abort one plan."""

    plan: str
    session: str
    tenant: str
    expiry: int
    typ: ClassVar[str] = "plan"

    def payload(self) -> dict[str, Any]:
        return {
            "typ": self.typ,
            "plan": self.plan,
            "session": self.session,
            "tenant": self.tenant,
            "expiry": self.expiry,
        }

    @classmethod
    def read(cls, fields: _Fields) -> PlanToken:
        return cls(fields.text("plan"), fields.text("session"), fields.text("tenant"), fields.whole("expiry"))


Signed = TypeVar("Signed", Token, Capability, PlanToken)


class Keys:
    """The cluster's keys: the first signs, all verify, so that keys rotate without a stop."""

    def __init__(self, keys: Sequence[tuple[int, bytes]]) -> None:
        self._keys = dict(keys)
        self._first = keys[0][0]

    @classmethod
    def development(cls) -> Keys:
        return cls([(DEVELOPMENT_KEY_ID, hashlib.sha256(b"gd2fs development key: loopback only").digest())])

    @classmethod
    def parse(cls, text: str | None) -> Keys:
        """Reads `GD2FS_CLUSTER_KEYS` (``ID:HEX[,ID:HEX…]``); none means the development key. Raises
        Invalid."""
        if text is None or not text.strip():
            return cls.development()
        keys: list[tuple[int, bytes]] = []
        for number, item in enumerate(text.split(","), start=1):
            key_id, colon, hexadecimal = item.strip().partition(":")
            if not colon:
                raise _bad_keys(f"item {number} has no ':'")
            if not re.fullmatch(r"[0-9]{1,3}", key_id) or not 1 <= int(key_id) <= 255:
                raise _bad_keys(f"the id of item {number} is not a number in 1..255")
            if any(int(key_id) == other for other, _ in keys):
                raise _bad_keys(f"id {key_id} comes twice")
            if not re.fullmatch(r"([0-9a-fA-F]{2})+", hexadecimal) or len(hexadecimal) < 2 * _KEY_BYTES_MIN:
                raise _bad_keys(f"key {key_id} is not hex of {_KEY_BYTES_MIN} bytes or more")
            keys.append((int(key_id), bytes.fromhex(hexadecimal)))
        return cls(keys)

    @property
    def is_development(self) -> bool:
        return self._first == DEVELOPMENT_KEY_ID

    def to_text(self) -> str:
        """What `parse` reads back; empty for the development key. Secret: for handing on to the native node
        only."""
        if self.is_development:
            return ""
        return ",".join(f"{key_id}:{key.hex()}" for key_id, key in self._keys.items())

    def __repr__(self) -> str:
        return f"Keys(ids={list(self._keys)})"

    def sign(self, thing: Token | Capability | PlanToken) -> str:
        payload = json.dumps(thing.payload(), separators=(",", ":"), ensure_ascii=False).encode()
        body = f"{_PREFIX}.{self._first}.{_encode(payload)}"
        return f"{body}.{_encode(_mac(self._keys[self._first], body))}"

    def verify(self, text: str, kind: type[Signed], *, now: float | None = None) -> Signed:
        """Checks signature and form, and the expiry against `now` (unix seconds; None: this machine's clock).

        Raises BadSignature or Expired.
        """
        signed = self.verify_ever(text, kind)
        if signed.expiry <= (time.time() if now is None else now):
            raise errors.Expired(
                f"the {_WHAT[kind]} expired at {signed.expiry} (unix seconds); ask for a new one"
            )
        return signed

    def verify_ever(self, text: str, kind: type[Signed]) -> Signed:
        """`verify` without the expiry, for what carries an expiry of its own in the database (plans)."""
        if len(text) > _TEXT_BYTES_MAX:
            raise errors.BadSignature("the signed text is too long")
        parts = text.split(".")
        if len(parts) != 4 or parts[0] != _PREFIX or not re.fullmatch(r"[0-9]{1,3}", parts[1]):
            raise errors.BadSignature("not a signed text (gd2fs1.KEY.PAYLOAD.SIGNATURE)")
        key = self._keys.get(int(parts[1]))
        if key is None:
            raise errors.BadSignature("signed with a key that is not in GD2FS_CLUSTER_KEYS here")
        expected = _mac(key, text[: text.rindex(".")])
        if not hmac.compare_digest(expected, _decode(parts[3])):
            raise errors.BadSignature("the signature does not match")
        return kind.read(_Fields(_decode(parts[2]), kind.typ))


_WHAT: dict[type, str] = {Token: "token", Capability: "capability", PlanToken: "plan token"}


class _Fields:
    """The payload's fields, each taken once and checked; `typ` first, unknown ones refused at once."""

    _KNOWN: ClassVar[dict[str, frozenset[str]]] = {
        "token": frozenset({"tenant", "role", "expiry"}),
        "cap": frozenset(
            {"tenant", "file", "class", "stripe_unit", "width", "rights", "ranges", "grant", "columns"}
            | {"nodes", "expiry", "bearer", "priority"}
        ),
        "plan": frozenset({"plan", "session", "tenant", "expiry"}),
    }

    def __init__(self, data: bytes, typ: str) -> None:
        self._typ = typ
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise errors.BadSignature(f"signed, but not JSON: {error}") from error
        if not isinstance(fields, Mapping) or fields.get("typ") != typ:
            raise errors.BadSignature(f"signed, but not a {typ!r}")
        unknown = sorted(set(fields) - self._KNOWN[typ] - {"typ"})
        if unknown:
            raise self.refuse(unknown[0], "is not known here")
        self._fields = fields

    def refuse(self, name: str, problem: str) -> errors.BadSignature:
        return errors.BadSignature(f"signed, but the field {name!r} of the {self._typ!r} {problem}")

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise self.refuse(name, "must be a string")
        return value

    def whole(self, name: str, maximum: int = _U64_MAX, *, absent: int | None = None) -> int:
        return self._whole(name, self._fields.get(name, absent), 0, maximum)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name, False)
        if not isinstance(value, bool):
            raise self.refuse(name, "must be true or false")
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> Any:
        value = self.text(name)
        if value not in choices:
            raise self.refuse(name, f"must be one of {', '.join(choices)}")
        return value

    def array(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        if not isinstance(value, list):
            raise self.refuse(name, "must be a list")
        return value

    def pairs(self, name: str, first: tuple[int, int], second: tuple[int, int]) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        for item in self.array(name):
            if not isinstance(item, list) or len(item) != 2:
                raise self.refuse(name, "must be a list of pairs")
            pairs.append((self._whole(name, item[0], *first), self._whole(name, item[1], *second)))
        return pairs

    def lists_of_text(self, name: str) -> list[tuple[str, ...]]:
        lists = self.array(name)
        for item in lists:
            if not isinstance(item, list) or not all(isinstance(text, str) for text in item):
                raise self.refuse(name, "must be a list of lists of strings")
        return [tuple(item) for item in lists]

    def _whole(self, name: str, value: object, minimum: int, maximum: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.refuse(name, f"must be a whole number in {minimum}..{maximum}")
        return value


def _bad_keys(problem: str) -> errors.Invalid:
    # The key itself never gets into a message.
    return errors.Invalid(
        f"GD2FS_CLUSTER_KEYS: {problem}; write it as ID:HEX[,ID:HEX…] with ids 1..255 and keys of"
        f" {_KEY_BYTES_MIN} bytes or more"
    )


def _mac(key: bytes, body: str) -> bytes:
    return hmac.digest(key, body.encode(), "sha256")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    # Strict, as in Rust: one text for one payload, no padding, no stray characters or bits.
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)) if _BASE64URL.fullmatch(text) else None
    except binascii.Error:
        data = None
    if data is None or _encode(data) != text:
        raise errors.BadSignature("not base64url without padding")
    return data
