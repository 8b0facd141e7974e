"""The reference engine's connector, and the example for others: explicit KV metadata in, stored KV out.

One `RequestKv` lives as long as one request: `verify` and `load` before prefill, `computed` after every step,
`finish` after the last. None of them raises, and each returns within its own limit: whatever storage does,
the request goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import quote

from gd2fs.connectors import load as loading
from gd2fs.connectors.commit import CALL_TIMEOUT_S, Committer, Outcome
from gd2fs.connectors.save import Saver
from gd2fs.connectors.storage import Client, File, Miss, described, layout_of, miss_reason, path_of
from gd2fs.kv import KvFormat, KvMetadata, Segment, SegmentError, as_ids, cut, digest, parse, tokens_of

log = logging.getLogger("gd2fs.connector")


class KvMemory(Protocol):
    """The engine's memory for one sequence, as the bytes of its kv_format from token 0 on."""

    def rows(self, start: int, end: int) -> memoryview: ...

    @property
    def capacity(self) -> int: ...


@dataclass
class KvReport:
    """What happened to the KV of one request. `miss` is the first reason why stored KV was not used."""

    stored_tokens: int = 0
    cached_tokens: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    load_ms: float = 0.0
    miss: str | None = None
    miss_detail: str = ""
    committed: bool = False
    commit_error: str | None = None
    loaded_crc32c: int | None = None
    saved_crc32c: int | None = None


@dataclass(frozen=True)
class LoadResult:
    """`tokens` are in memory. `in_doubt`: move to other memory before going on (see RequestKv.load)."""

    tokens: int
    in_doubt: bool = False


@dataclass
class _Plan:
    """What came with the metadata from control; empty for plain clients."""

    token: str | None = None
    layouts: Mapping[str, Any] = field(default_factory=dict)
    controls: Sequence[str] = ()


class ReferenceConnector:
    """Shared by all requests of one engine.

    `client` may be None; then `connect(control_urls)` is called with the first plan's control addresses,
    since a plan carries everything else. `crc32c(data, initial)` sums what the report shows.
    """

    def __init__(
        self,
        client: Client | None,
        kv_identity: str,
        kv_format: KvFormat,
        crc32c: Callable[[memoryview, int], int],
        connect: Callable[[Sequence[str]], Client] | None = None,
    ) -> None:
        self.kv_identity, self.kv_format, self.crc32c = kv_identity, kv_format, crc32c
        self.pace = loading.Pace()
        self.committer = Committer()
        self._client, self._connect = client, connect

    def client_for(self, controls: Sequence[str]) -> Client:
        """The engine's own client, or one made for the first plan. Raises Miss when there is none."""
        if self._client is None:
            if not controls or self._connect is None:
                raise Miss(
                    "no_client", "the engine was started without --control and the request has no plan"
                )
            self._client = self._connect(controls)
        return self._client

    def close(self) -> None:
        self.committer.close()

    def begin(self, params: object, ids: Sequence[int], not_covered: str | None = None) -> RequestKv:
        """KV of one request whose prompt is `ids`; `params` is its kvcache_params as it came. Never raises.

        `not_covered` names what decides the KV of this request besides its ids: it then runs without GD2FS.
        """
        return RequestKv(self, params, ids, not_covered)


class RequestKv:
    """Load, save and commit of one request. Used by one thread at a time."""

    def __init__(
        self,
        connector: ReferenceConnector,
        params: object,
        ids: Sequence[int],
        not_covered: str | None = None,
    ) -> None:
        self.report = KvReport()
        self._connector = connector
        self._ids = ids  # grows while the request decodes
        self._format = connector.kv_format
        self._files: dict[tuple[str, str], File] = {}
        self._metadata: KvMetadata | None = None
        self._plan = _Plan()
        self._client: Client | None = None
        self._saver: Saver | None = None
        self._memory: KvMemory | None = None
        self._save_refused: str | None = None
        self._started = self._deadline = time.monotonic()
        self._usable = 0
        try:
            self._read(params)
            if not_covered is not None and self._metadata is not None:
                raise Miss(
                    not_covered, f"KV cache of a request with {not_covered} is not covered by the kv_identity"
                )
        except Exception as error:  # bad metadata costs a recomputation, not the answer
            self._missed(error)
            self._save_refused = self.report.miss
        self._kept: tuple[Segment, ...] = self._metadata.stored if self._metadata else ()

    def verify(self) -> int:
        """Compare the prompt with the stored ids. Returns how many tokens `load` would load."""
        stored = self._metadata.stored if self._metadata else ()
        if not stored or self._save_refused:
            return 0
        self._started = time.monotonic()
        wanted = min(tokens_of(stored), len(self._ids) - 1)
        self._deadline = self._started + self._connector.pace.load_limit_s(
            wanted, self._format.bytes_of(wanted)
        )
        try:
            common = loading.matching_tokens(
                self._readable, stored, self._format, as_ids(self._ids), self._deadline
            )
        except Exception as error:
            self._missed(error)
            # Nothing may be appended to what could not be compared.
            self._save_refused = self.report.miss
            return 0
        if common < tokens_of(stored):
            # What is stored continues another text.
            self._save_refused = "edited"
            self._kept = tuple(cut(stored, common, self._format))
        self._usable = self._format.round_down(min(common, wanted))
        if common < wanted:
            self._missed(Miss("edited", f"the prompt differs from the stored tokens at {common}"))
        assert self._metadata is not None
        if self._usable < self._metadata.load_threshold:
            self._missed(
                Miss("threshold", f"fewer than load_threshold={self._metadata.load_threshold} tokens")
            )
            self._usable = 0
        return self._usable

    def load(self, memory: KvMemory) -> LoadResult:
        """Fill `memory` with what `verify` found.

        After an `in_doubt` result a transfer may still write behind the returned tokens: the caller copies
        them to other memory and drops this one.
        """
        if not self._usable:
            return LoadResult(0)
        assert self._metadata is not None
        size = self._format.bytes_per_token
        pieces = loading.pieces_of(self._readable, self._metadata.stored, self._format, self._usable)
        loaded = loading.load(pieces, memory.rows(0, self._usable), self._deadline)
        tokens = self._format.round_down(loaded.prefix_bytes // size)
        seconds = time.monotonic() - self._started
        if loaded.miss is None:
            self._connector.pace.loaded(tokens * size, seconds)
        else:
            self._missed(Miss(loaded.miss, loaded.detail))
        self.report.cached_tokens, self.report.loaded_bytes = tokens, tokens * size
        self.report.load_ms = seconds * 1e3
        return LoadResult(tokens, loaded.in_doubt)

    def start_saving(self, memory: KvMemory) -> None:
        """From now on `computed` saves from `memory`, which must stay as it is until `finish` returned."""
        self._memory = memory
        if self._save_refused or self._metadata is None or not self._metadata.fresh:
            return
        try:
            fresh = self._metadata.fresh[0]
            kv, tokens = self._writable(fresh.kv_uri), self._writable(fresh.kv_uri + ".tokens")
            everything = memory.rows(0, memory.capacity)
            self._saver = Saver(kv, tokens, fresh, self._format, everything, self._ids)
        except Exception as error:
            self._save_refused = miss_reason(error)
            self.report.commit_error = described(error)

    def computed(self, end: int) -> None:
        """The KV of all tokens below `end` is final."""
        if self._saver is not None:
            self._saver.computed(end)

    def finish(self) -> dict[str, Any] | None:
        """Wait for the acknowledgements, commit, and complete the report.

        Returns the kvcache_params of the response: stored as they hold for this prompt, fresh cut to what is
        acknowledged. None when the request had none that could be read.
        """
        fresh: tuple[Segment, ...] = ()
        try:
            if self._saver is not None:
                fresh = self._finish_saving(self._saver)
            else:
                self._abort()
            self._sum_loaded()
        except Exception as error:  # malformed layouts and the like: the answer goes out all the same
            self.report.commit_error = described(error)
            log.warning("the KV of a request was not committed: %s", self.report.commit_error)
        if self._metadata is None:
            return None
        extra = {key: value for key, value in self._metadata.extra.items() if key != "plan"}
        return replace(self._metadata, stored=self._kept, fresh=fresh, extra=extra).to_json()

    @property
    def memory_is_free(self) -> bool:
        """No write reads the memory any more. Asked after `finish`."""
        return self._saver is None or self._saver.idle

    def _read(self, params: object) -> None:
        """Check the metadata against this engine. Raises Miss, SegmentError or what the client raises."""
        if params is None:
            return
        try:
            metadata = parse(params)
            self._plan = _read_plan(metadata.extra.get("plan"), self._connector.kv_identity, self._format)
            _check_bytes((*metadata.stored, *metadata.fresh), self._format)
        except SegmentError as error:
            raise Miss("bad_params", str(error)) from error
        finally:
            # Even a plan that does not fit is ended, so that its grant is free again.
            if self._plan.token is None:
                self._plan = _token_only(params)
        self._metadata = metadata
        self.report.stored_tokens = tokens_of(metadata.stored)
        if len(metadata.fresh) > 1:
            raise Miss("bad_params", "fresh_kvcache: this engine writes one fresh segment")
        if metadata.stored or metadata.fresh:
            self._client = self._connector.client_for(self._plan.controls)

    def _finish_saving(self, saver: Saver) -> tuple[Segment, ...]:
        assert self._metadata is not None and self._client is not None
        fresh = self._metadata.fresh[0]
        end, reason, detail = saver.finish()
        tokens = end - fresh.token_start
        self.report.saved_bytes = tokens * self._format.bytes_per_token
        if tokens and self._memory is not None:
            self.report.saved_crc32c = self._connector.crc32c(self._memory.rows(fresh.token_start, end), 0)
        written = replace(fresh, token_length=tokens, kv_length=self.report.saved_bytes)
        outcome = Outcome(False)
        if self._plan.token is not None:
            if tokens:
                outcome = self._connector.committer.commit(self._client, self._commit_body(written))
            if not outcome.committed and not outcome.pending:
                # Also a plan whose commit was refused: it holds a grant and a file until it ends.
                self._abort()
        self.report.committed = outcome.committed
        self.report.commit_error = outcome.error or (f"{reason}: {detail}" if reason else None)
        if reason is not None:
            log.warning("saved %d tokens and no more: %s (%s)", tokens, reason, detail)
        # A plan that control refused leaves bytes that nobody may use.
        usable = tokens and (self._plan.token is None or outcome.committed or outcome.pending)
        return (written,) if usable else ()

    def _commit_body(self, written: Segment) -> dict[str, Any]:
        columns = layout_of(self._plan.layouts, written.kv_uri)["columns"]
        acks = [
            {"column": index, "epoch": column["epoch"], "incarnation": column["replicas"][0]["incarnation"]}
            for index, column in enumerate(columns)
        ]
        segment = {
            "kv_uri": written.kv_uri,
            "token_start": written.token_start,
            "token_length": written.token_length,
            "kv_start": written.kv_start,
            "kv_length": written.kv_length,
        }
        ids = digest(self._ids[: written.token_end])
        return {"plan_token": self._plan.token, "fresh": [segment], "digest": ids, "acks": acks}

    def _readable(self, uri: str) -> File:
        return self._open(uri, "read")

    def _writable(self, uri: str) -> File:
        if self._plan.token is None:
            self._create(uri)
        return self._open(uri, "read,write")

    def _open(self, uri: str, rights: str) -> File:
        """The file of a URI: by the plan's layout, or else by the engine's own right."""
        assert self._client is not None
        key = (uri, "" if self._plan.token else rights)
        if key not in self._files:
            layout = layout_of(self._plan.layouts, uri) if self._plan.token else self._own_layout(uri, rights)
            self._files[key] = self._client.open_layout(layout)
        return self._files[key]

    def _own_layout(self, uri: str, rights: str) -> dict[str, Any]:
        assert self._client is not None
        query = f"/v1/fs/layout?path={quote(path_of(uri))}&rights={rights}"
        layout = self._client.control("GET", query, timeout_s=CALL_TIMEOUT_S)
        if layout.get("kv_identity") != self._connector.kv_identity:
            raise Miss("identity", f"{uri} holds KV cache of identity {layout.get('kv_identity')!r}")
        return layout

    def _abort(self) -> None:
        """End the plan, if there is one, so that its grant is free for the next."""
        if self._plan.token is not None:
            # Raises Miss without a client; the plan then expires by itself.
            client = self._connector.client_for(self._plan.controls)
            self._connector.committer.abort(client, self._plan.token)

    def _create(self, uri: str) -> None:
        """Public clients create before they write; a file that is there already is as good."""
        assert self._client is not None
        body = {"path": path_of(uri), "kv_identity": self._connector.kv_identity}
        try:
            self._client.control("POST", "/v1/fs/create", body, timeout_s=CALL_TIMEOUT_S)
        except FileExistsError:
            return

    def _sum_loaded(self) -> None:
        """Sum what was loaded, at the end of the request, where it delays no token."""
        if self.report.cached_tokens and self._memory is not None:
            self.report.loaded_crc32c = self._connector.crc32c(
                self._memory.rows(0, self.report.cached_tokens), 0
            )

    def _missed(self, error: BaseException) -> None:
        if self.report.miss is None:
            self.report.miss, self.report.miss_detail = miss_reason(error), described(error)
            log.info("stored KV is not used: %s", self.report.miss_detail)


def _read_plan(plan: object, kv_identity: str, kv_format: KvFormat) -> _Plan:
    """Raises Miss when the plan is not whole, or is for KV of another identity or format."""
    if plan is None:
        return _Plan()
    if not isinstance(plan, Mapping):
        raise Miss("bad_params", "plan: must be a JSON object")
    token, layouts, controls = plan.get("token"), plan.get("layouts"), plan.get("control", [])
    if not isinstance(token, str) or not isinstance(layouts, Mapping) or not isinstance(controls, list):
        raise Miss("bad_params", "plan: token must be a string, layouts an object and control a list")
    if plan.get("kv_identity") != kv_identity:
        raise Miss(
            "identity",
            f"the plan is for kv_identity {plan.get('kv_identity')!r}, this engine has {kv_identity}",
        )
    named = plan.get("kv_format")
    ours = {
        "name": kv_format.name,
        "bytes_per_token": kv_format.bytes_per_token,
        "granule": kv_format.granule,
    }
    if not isinstance(named, Mapping) or {key: named.get(key) for key in ours} != ours:
        raise Miss("format", f"the plan is for kv_format {named!r}, this engine has {ours}")
    return _Plan(token, layouts, controls)


def _token_only(params: object) -> _Plan:
    """The plan's token alone, dug out of metadata that was refused."""
    plan = params.get("plan") if isinstance(params, Mapping) else None
    token = plan.get("token") if isinstance(plan, Mapping) else None
    return _Plan(token) if isinstance(token, str) else _Plan()


def _check_bytes(segments: Sequence[Segment], kv_format: KvFormat) -> None:
    """Token-major segments: bytes and tokens of each must agree."""
    for segment in segments:
        segment.token_index(kv_format, segment.token_start)
        if segment.kv_length is not None and segment.kv_length != kv_format.bytes_of(segment.token_length):
            wanted = kv_format.bytes_of(segment.token_length)
            raise SegmentError(
                "kv_length", f"{segment.kv_length} bytes for {segment.token_length} tokens, not {wanted}"
            )
