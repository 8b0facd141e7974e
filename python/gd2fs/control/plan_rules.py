"""What a plan may reuse and where it may write. Pure: every rule here is a function of what it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gd2fs import errors
from gd2fs.control.files import FileView, Unusable
from gd2fs.control.pins import Pinned
from gd2fs.control.sessions import SessionView, StoredSegment
from gd2fs.kv import ID_BYTES, Ids, KvFormat, RunningDigest, Segment, cut, lcp

Miss = Literal["edited", "lost", "identity", "unreachable", "granule"]
ReadIds = Callable[[StoredSegment, int, int], Ids]
"""`read(segment, token, count)`: ids of the session's tokens `[token, token + count)`, all inside the
segment."""

SEGMENTS_MAX = 128
"""A conversation that is edited every turn gains a segment a turn. Beyond this it is recomputed from the
middle on, so that what travels with a request stays small; half, so that this happens seldom."""


@dataclass(slots=True)
class Agreement:
    """How far prompt and session are known to agree, in tokens."""

    ids: Ids
    common: int
    known: RunningDigest
    """Has hashed the whole segments of the common prefix."""
    unread: Miss | None = None
    """Why nothing could be compared beyond `common`, if that is so."""

    def digest_at(self, tokens: int) -> str:
        """Digest of the first `tokens` ids; hashed anew only if a miss put them before what is known."""
        return (self.known if tokens >= self.known.tokens else RunningDigest(self.ids)).at(tokens)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of the session serves a prompt, in tokens; `miss` says why it is not all that is stored."""

    reusable: int
    cached: int
    miss: Miss | None


def agree(view: SessionView, ids: Ids, kv_identity: str, read_ids: ReadIds) -> Agreement:
    """The longest common prefix of the prompt's ids and the stored ones.

    Digests settle whole segments; ids are read (never KV) from the first segment whose digest differs only.
    """
    known = RunningDigest(ids)
    if kv_identity != view.row["kv_identity"]:
        return Agreement(ids, 0, known)
    common = 0
    for stored in view.segments:
        end = stored.segment.token_end
        if end <= ids.size:
            further = known.copy()
            if further.at(end) == stored.digest:
                common, known = end, further
                continue
        return _compare(view, ids, stored, common, known, read_ids)
    return Agreement(ids, common, known)


def _compare(
    view: SessionView, ids: Ids, stored: StoredSegment, common: int, known: RunningDigest, read_ids: ReadIds
) -> Agreement:
    wanted = min(ids.size, stored.segment.token_end) - common
    if wanted <= 0:
        return Agreement(ids, common, known)
    count, unread = readable_ids(view, stored, common, wanted)
    if count == 0:
        return Agreement(ids, common, known, unread)
    try:
        found = read_ids(stored, common, count)
    except errors.StoreError:
        return Agreement(ids, common, known, "lost")
    except errors.Gd2fsError:
        return Agreement(ids, common, known, "unreachable")
    agreed = lcp(ids[common : common + count], found)
    return Agreement(ids, common + agreed, known, unread if agreed == count else None)


def readable_ids(
    view: SessionView, stored: StoredSegment, token: int, count: int
) -> tuple[int, Unusable | None]:
    """How many of the ids `[token, token + count)` of a segment its `.tokens` file still has, and why not
    all."""
    file = view.tokens_file(stored.file)
    if file.unusable:
        return 0, file.unusable
    if file.valid is None:
        return count, None
    there = file.valid // ID_BYTES - stored.segment.token_index(view.kv_format, token)
    return (count, None) if there >= count else (max(0, there), "lost")


def usable_prefix(view: SessionView, agreement: Agreement, prompt_tokens: int, kv_identity: str) -> Prefix:
    """reusable: the common prefix, at most prompt - 1 (one token must be computed), whole granules. cached:
    what of it is on nodes that still have it."""
    stored = view.tokens
    if stored and kv_identity != view.row["kv_identity"]:
        return Prefix(0, 0, "identity")
    kv_format = view.kv_format
    reusable = kv_format.round_down(min(agreement.common, prompt_tokens - 1))
    end, unusable = view.reachable()
    cached = kv_format.round_down(min(reusable, end))
    kept = cut(view.stored, cached, kv_format)
    if len(kept) > SEGMENTS_MAX:
        cached = kv_format.round_down(kept[SEGMENTS_MAX // 2 - 1].token_end)
        return Prefix(reusable, cached, "edited")
    miss: Miss | None = None
    if cached < reusable:
        miss = unusable
    elif reusable < stored:
        at_granule = agreement.common == stored and prompt_tokens > stored
        miss = agreement.unread or ("granule" if at_granule else "edited")
    return Prefix(reusable, cached, miss)


def shortened(prefix: Prefix, pinned: Pinned) -> Prefix:
    """The prefix without what its nodes turned out not to have."""
    return prefix if pinned.end >= prefix.cached else Prefix(prefix.reusable, pinned.end, pinned.miss)


@dataclass(frozen=True, slots=True)
class Target:
    """The existing file that a plan goes on writing, from `kv_start` on."""

    file: str
    kv_start: int


def target(
    files: Mapping[str, FileView],
    cached: Sequence[tuple[Segment, str]],
    *,
    held: Collection[str],
    closed: Collection[str],
    taken_over: Sequence[str],
    kv_format: KvFormat,
    bytes_needed: int,
) -> Target | None:
    """The one of the session's own `files` that goes on, or None for a new one.

    `cached` are the planned segments with their files. The tail file goes on if the cached range is all that
    was ever sealed in it, nobody else holds its grant (`held`), its node is there with room, and nothing is
    missing in it and its `.tokens` file, as far as control knows and its node just said (`closed`).
    Otherwise a file of the same request's former plan (`taken_over`)
    is used from its beginning, if nothing was ever sealed in it.
    """
    ids = {view.ids_of: view for view in files.values() if view.ids_of}

    def writable(file: str) -> bool:
        view = files.get(file)
        return (
            view is not None
            and file not in held
            and file not in closed
            and view.whole
            and ids[file].whole
            and all(column.free_bytes >= bytes_needed for column in view.columns)
        )

    if cached:
        segment, file = cached[-1]
        end = segment.kv_start + kv_format.bytes_of(segment.token_length)
        if writable(file) and files[file].sealed == end:
            return Target(file, end)
    for file in taken_over:
        if writable(file) and files[file].sealed == 0:
            return Target(file, 0)
    return None
