"""Commit: fresh segments become stored, after their bytes are proven on the node.

Three steps, none holding a transaction while a node is asked: check the plan and note the seal that is
coming; seal on the node; compare-and-swap the session's version. A repeated commit of the same plan gets the
same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, delete, select, update

from gd2fs import errors
from gd2fs.control import requests, sessions
from gd2fs.control import schema as t
from gd2fs.control.database import Database
from gd2fs.control.files import FileView
from gd2fs.control.node_link import NodeLink
from gd2fs.control.pins import Pins
from gd2fs.control.sessions import StoredSegment, format_of, uri_of
from gd2fs.kv import ID_BYTES, KvFormat, Segment, append, cut, segment_to_json
from gd2fs.signing import PlanToken

# Built once, as in sessions.
_PLAN = select(t.plans).where(t.plans.c.plan == bindparam("plan"))
_END_PLAN = delete(t.plans).where(t.plans.c.plan == bindparam("id"))
_BEGIN = update(t.plans).where(t.plans.c.plan == bindparam("id")).values(commit_began_at=bindparam("now"))
_RAISE_SEAL = (
    update(t.files)
    .where(t.files.c.file == bindparam("id"), t.files.c.sealed < bindparam("seal"))
    .values(sealed=bindparam("seal"))
)


@dataclass(frozen=True, slots=True)
class _Seal:
    """What is to be sealed: `.tokens` and KV file, up to these bytes, under the plan's grant."""

    tokens: FileView
    kv: FileView
    tokens_length: int
    kv_length: int
    grant: int

    def items(self) -> dict[str, list[dict[str, Any]]]:
        """SEAL items by node, the ids before the KV cache that they describe."""
        by_node: dict[str, list[dict[str, Any]]] = {}
        for view, length in ((self.tokens, self.tokens_length), (self.kv, self.kv_length)):
            for ordinal, column in enumerate(view.columns):
                by_node.setdefault(column.node, []).append(
                    {
                        "file": view.file,
                        "column": ordinal,
                        "epoch": column.epoch,
                        "born": column.born,
                        "grant": self.grant,
                        "stripe_unit": view.stripe_unit,
                        "width": view.width,
                        "length": length,
                    }
                )
        return by_node


class Committer:
    def __init__(self, database: Database, link: NodeLink, pins: Pins, cluster: str) -> None:
        self._database = database
        self._link = link
        self._pins = pins
        self._cluster = cluster

    def commit(self, token: PlanToken, body: requests.Commit) -> dict[str, Any]:
        """Stores the plan's fresh segment: {"session", "version", "stored_kv_cache"}.

        Raises PlanSuperseded (a retry took the grant over, or the plan was aborted), PlanExpired, Conflict
        (the session moved on), Lost (an acknowledgement is not of the node's current incarnation), Hole
        (bytes are missing), StaleWriter (the node knows a higher grant), Invalid, and Disconnected or Timeout
        while the node is away (then try again).
        """
        seal = self._database.write(lambda connection: self._prepare(connection, token, body))
        if seal is not None:
            self._seal(seal)
        stored, read = self._database.write(lambda connection: self._store(connection, token, body))
        if read:
            self._pins.drop([token.plan], read)
        return stored

    def _prepare(self, connection: Connection, token: PlanToken, body: requests.Commit) -> _Seal | None:
        """Checks everything that can be checked without the node; None if this plan is stored already."""
        session = sessions.lock(connection, token.tenant, token.session)
        now = self._database.time.now()
        plan = _live_plan(connection, session, token, now)
        if plan is None:
            return None
        kv, tokens = _planned_files(sessions.files_of(connection, now, token.session), plan)
        fresh = _checked(plan, body.fresh[0], uri_of(self._cluster, kv.path))
        _check_acks(kv, body.acks)
        tokens_end = fresh.kv_end // plan["bytes_per_token"] * ID_BYTES
        # Noted before the node is asked: if this commit ends half-way, no plan goes on writing below the
        # seal.
        connection.execute(
            _RAISE_SEAL,
            [{"id": kv.file, "seal": fresh.kv_end}, {"id": tokens.file, "seal": tokens_end}],
        )
        connection.execute(_BEGIN, {"id": token.plan, "now": now})
        return _Seal(tokens, kv, tokens_end, fresh.kv_end, plan["write_grant"])

    def _seal(self, seal: _Seal) -> None:
        columns = {column.node: column for view in (seal.tokens, seal.kv) for column in view.columns}
        for node, items in seal.items().items():
            incarnation, replies = self._link.seal(columns[node].addresses, items)
            if incarnation != columns[node].incarnation:
                raise errors.Lost(f"{seal.kv.path}: node {node} was restarted since it took these bytes")
            for reply in replies:
                if reply["status"] != 0:
                    raise errors.from_code(reply["status"], f"{seal.kv.path}: {reply['message']}")

    def _store(
        self, connection: Connection, token: PlanToken, body: requests.Commit
    ) -> tuple[dict[str, Any], list[FileView]]:
        """The answer, and the files of which this plan had pinned something."""
        session = sessions.lock(connection, token.tenant, token.session)
        now = self._database.time.now()
        by_id = sessions.files_of(connection, now, token.session)
        stored = sessions.load_segments(connection, token.session, self._cluster, by_id)
        plan = _live_plan(connection, session, token, now)
        if plan is None:
            return _answer(token.session, session["version"], [item.segment for item in stored]), []
        kv, _ = _planned_files(by_id, plan)
        # Again: the node may have been registered anew while it sealed.
        _check_acks(kv, body.acks)
        kv_format = format_of(plan)
        fresh = _checked(plan, body.fresh[0], uri_of(self._cluster, kv.path))
        kept = cut([item.segment for item in stored], plan["cached_tokens"], kv_format)
        segments = append(kept, [fresh], kv_format)
        digests = {item.segment.token_end: item.digest for item in stored}
        digests |= {plan["cached_tokens"]: plan["cached_digest"], fresh.token_end: body.digest}
        ids = {uri_of(self._cluster, view.path): view.file for view in by_id.values()}
        after = [StoredSegment(item, ids[item.kv_uri], digests[item.token_end]) for item in segments]
        _write_segments(connection, token.session, stored, after)
        _advance(connection, session, plan, now, segments)
        connection.execute(_END_PLAN, {"id": token.plan})
        # A file and its ids for each that a segment names: more means that something may have become unused.
        if len(by_id) > 2 * len({item.file for item in after}):
            sessions.release_unused(connection, now, token.session)
        read = [by_id[item.file] for item, _ in zip(stored, kept, strict=False)]
        return _answer(token.session, session["version"] + 1, segments), read


def _live_plan(
    connection: Connection, session: RowMapping, token: PlanToken, now: float
) -> RowMapping | None:
    """The plan's row, or None if it was the session's last commit. Raises PlanSuperseded, PlanExpired,
    Conflict."""
    plan = connection.execute(_PLAN, {"plan": token.plan}).mappings().one_or_none()
    if plan is None and session["last_plan"] == token.plan:
        return None
    if (token.expiry if plan is None else plan["expires_at"]) <= now:
        raise errors.PlanExpired(f"plan {token.plan}: over its time; plan again")
    if plan is None:
        raise errors.PlanSuperseded(
            f"plan {token.plan}: a retry of the request took its grant over, or it was aborted; it stores"
            " nothing any more"
        )
    if plan["version"] != session["version"]:
        raise errors.Conflict(
            f"session {token.session} is at version {session['version']}, the plan was made at"
            f" {plan['version']}; plan again"
        )
    return plan


def _planned_files(by_id: Mapping[str, FileView], plan: RowMapping) -> tuple[FileView, FileView]:
    """The plan's KV file and the `.tokens` beside it."""
    if plan["file"] is None:
        raise errors.Invalid("fresh: no node had room for this plan's fresh file; there is nothing to commit")
    kv = by_id[plan["file"]]
    return kv, sessions.tokens_of_file(by_id, kv.file)


def _checked(plan: RowMapping, fresh: requests.FreshSegment, kv_uri: str) -> Segment:
    """The fresh segment, if it is what was planned. Raises Invalid naming the field."""
    kv_format: KvFormat = format_of(plan)
    planned = {"kv_uri": kv_uri, "token_start": plan["cached_tokens"], "kv_start": plan["kv_start"]}
    for name, value in planned.items():
        if getattr(fresh, name) != value:
            raise errors.Invalid(f"fresh[0].{name}: is {getattr(fresh, name)}, but {value} was planned")
    end = fresh.token_start + fresh.token_length
    longest = plan["prompt_tokens"] + plan["max_tokens"]
    if end > longest:
        raise errors.Invalid(
            f"fresh[0].token_length: ends at token {end}, beyond prompt and max_tokens ({longest})"
        )
    if end % kv_format.granule:
        raise errors.Invalid(
            f"fresh[0].token_length: ends at token {end}, not at a granule of {kv_format.granule};"
            " commit whole granules"
        )
    if fresh.kv_length != kv_format.bytes_of(fresh.token_length):
        raise errors.Invalid(
            f"fresh[0].kv_length: {fresh.token_length} tokens of this kv_format take"
            f" {kv_format.bytes_of(fresh.token_length)} bytes, not {fresh.kv_length}"
        )
    return Segment(fresh.token_start, fresh.token_length, kv_uri, fresh.kv_start, fresh.kv_length)


def _check_acks(kv: FileView, acks: list[requests.Ack]) -> None:
    """Every column acknowledged, by the incarnation that is its node's current one. Raises Lost, Invalid."""
    acknowledged = {ack.column: ack for ack in acks}
    for ordinal, column in enumerate(kv.columns):
        ack = acknowledged.get(ordinal)
        if ack is None:
            raise errors.Invalid(f"acks: column {ordinal} of {kv.path} is missing")
        if ack.epoch != column.epoch:
            raise errors.StaleLayout(f"{kv.path}: column {ordinal} has epoch {column.epoch}, not {ack.epoch}")
        if not column.proven or ack.incarnation != column.incarnation:
            raise errors.Lost(
                f"{kv.path}: column {ordinal} was acknowledged by incarnation {ack.incarnation} of node"
                f" {column.node}, which is at {column.incarnation}"
            )


def _write_segments(
    connection: Connection, session: str, before: list[StoredSegment], after: list[StoredSegment]
) -> None:
    """Replaces the rows from the first that differs on: one row, for a conversation that only grows."""
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    if same < len(before):
        connection.execute(
            delete(t.segments).where(t.segments.c.session == session, t.segments.c.position >= same)
        )
    sessions.insert_segments(connection, session, after[same:], same)


def _advance(
    connection: Connection, session: RowMapping, plan: RowMapping, now: float, segments: list[Segment]
) -> None:
    """The next version of the session; one that moved to another identity takes it on with its first
    commit."""
    # Another turn of it may go on for longer.
    expires_at = sessions.renewed(connection, now, session["session"], session["ttl_s"], plan["plan"])
    connection.execute(
        update(t.sessions)
        .where(t.sessions.c.session == session["session"], t.sessions.c.version == plan["version"])
        .values(
            version=session["version"] + 1,
            tokens=segments[-1].token_end,
            bytes=sum(segment.kv_length or 0 for segment in segments),
            last_plan=plan["plan"],
            kv_identity=plan["kv_identity"],
            format_name=plan["format_name"],
            bytes_per_token=plan["bytes_per_token"],
            granule=plan["granule"],
            updated_at=now,
            expires_at=expires_at,
        )
    )


def _answer(session: str, version: int, segments: list[Segment]) -> dict[str, Any]:
    return {
        "session": session,
        "version": version,
        "stored_kv_cache": [segment_to_json(segment) for segment in segments],
    }
