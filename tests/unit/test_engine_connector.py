"""Load, save and commit against a storage that fails in every way: it costs a recomputation, never the
answer.

No model here: KV of token t is a pattern of t and its id, so that every byte can be told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.connectors import load as loading
from gd2fs.connectors import save as saving
from gd2fs.connectors.commit import INLINE_S, Committer
from gd2fs.connectors.load import PIECE_BYTES, Pace
from gd2fs.connectors.reference import ReferenceConnector, RequestKv
from gd2fs.kv import KvFormat
from tests.engine_doubles import MemoryStorage, StoredFile, until, uri

pytest_plugins = ["tests.engine_fixtures"]

TOKEN_BYTES = 32_768
FORMAT = KvFormat("token", TOKEN_BYTES, 1)
CAPACITY = 1024


class Model:
    kv_identity = "identity-of-the-model"
    kv_format = FORMAT


class Memory:
    """What the engine's Sequence is to the connector."""

    capacity = CAPACITY

    def __init__(self) -> None:
        self.data = np.zeros((CAPACITY, TOKEN_BYTES), np.uint8)

    def rows(self, start: int, end: int) -> memoryview:
        return self.data[start:end].reshape(-1).data

    def compute(self, ids: list[int], start: int, end: int) -> None:
        for token in range(start, end):
            self.data[token] = row(token, ids[token])


def row(token: int, token_id: int) -> np.ndarray:
    return np.frombuffer(np.array([token, token_id], "<u4").tobytes() * (TOKEN_BYTES // 8), np.uint8)


def crc(data: Any, initial: int = 0) -> int:
    """The sum's own correctness is tested elsewhere; here it must only tell bytes apart."""
    return hash((bytes(data), initial))


@pytest.fixture
def connector(storage: MemoryStorage) -> Iterator[ReferenceConnector]:
    connector = ReferenceConnector(storage, Model.kv_identity, FORMAT, crc)
    yield connector
    connector.close()


def serve(
    connector: ReferenceConnector, params: Any, ids: list[int], output: list[int] | None = None
) -> tuple[RequestKv, dict[str, Any] | None, Memory]:
    """What the engine does with one request."""
    everything = list(ids)
    kv = connector.begin(params, everything)
    memory = Memory()
    kv.verify()
    loaded = kv.load(memory)
    if loaded.in_doubt:
        safe = Memory()
        safe.data[: loaded.tokens] = memory.data[: loaded.tokens]
        memory = safe
    kv.start_saving(memory)
    memory.compute(everything, loaded.tokens, len(ids))
    kv.computed(len(ids))
    for token in output or []:
        everything.append(token)
        memory.compute(everything, len(everything) - 1, len(everything))
        kv.computed(len(everything))
    answer = kv.finish()
    expected = Memory()
    expected.compute(everything, 0, len(everything))
    assert np.array_equal(memory.data[: len(everything)], expected.data[: len(everything)]), (
        "wrong KV was used"
    )
    return kv, answer, memory


def turn(
    storage: MemoryStorage, connector: ReferenceConnector, count: int = 300
) -> tuple[list[int], list[Any]]:
    """A first turn that stores `count` tokens; returns their ids and the stored segments."""
    ids = list(range(1000, 1000 + count))
    kv, answer, _ = serve(connector, storage.plan(Model, []), ids)
    assert answer is not None and kv.report.committed, kv.report
    storage.log.clear()
    storage.reset_counts()
    storage.under_way_max = 0
    return ids, answer["fresh_kvcache"]


def test_a_turn_saves_commits_and_the_next_one_loads_it(
    storage: MemoryStorage, connector: ReferenceConnector
) -> None:
    ids, stored = turn(storage, connector)
    assert stored == [
        {
            "token_start": 0,
            "token_length": 300,
            "kv_uri": uri("a"),
            "kv_start": 0,
            "kv_length": 300 * TOKEN_BYTES,
        }
    ]
    longer = [*ids, 7, 8, 9]
    kv, answer, memory = serve(connector, storage.plan(Model, stored), longer, output=[11, 12])
    assert answer is not None
    report = kv.report
    assert (report.stored_tokens, report.cached_tokens, report.loaded_bytes) == (300, 300, 300 * TOKEN_BYTES)
    assert (report.miss, report.committed, report.saved_bytes) == (None, True, 5 * TOKEN_BYTES)
    assert report.loaded_crc32c == crc(memory.rows(0, 300))
    assert report.saved_crc32c == crc(memory.rows(300, 305))
    assert answer["stored_kvcache"] == stored
    (fresh,) = answer["fresh_kvcache"]
    assert (fresh["token_start"], fresh["token_length"], fresh["kv_start"]) == (300, 5, 300 * TOKEN_BYTES)
    assert "plan" not in answer
    assert storage.bytes_of(uri("a")) == bytes(memory.rows(0, 305))


def test_ids_are_acknowledged_before_the_kv_they_describe(
    storage: MemoryStorage, connector: ReferenceConnector
) -> None:
    storage.delay_s = {("write", ".tokens"): 0.02}
    kv, _, _ = serve(connector, storage.plan(Model, []), list(range(200)), output=list(range(100)))
    assert kv.report.committed
    ids_end = 0
    for _, path, offset, length in storage.log:
        if path.endswith(".tokens"):
            ids_end = max(ids_end, (offset + length) // 4)
        else:
            assert (offset + length) / TOKEN_BYTES <= ids_end


def test_transfers_are_several_pieces_at_once_and_bounded(
    storage: MemoryStorage, connector: ReferenceConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.delay_s = {("write", ".kv"): 0.01}
    ids, stored = turn(storage, connector, 900)
    assert storage.files["/.kv/s/a.kv"].covers(0, 900 * TOKEN_BYTES)
    monkeypatch.setattr(loading, "OUTSTANDING_MAX", 3)  # there are 8 pieces
    storage.delay_s = {("read", ".kv"): 0.03}
    kv = connector.begin(storage.plan(Model, stored), [*ids, 1])
    assert kv.verify() == 900
    assert kv.load(Memory()).tokens == 900
    kv.finish()
    reads = [(at, length) for way, path, at, length in storage.log if way == "read" and path.endswith(".kv")]
    assert all(length <= PIECE_BYTES and at % PIECE_BYTES == 0 for at, length in reads)
    assert sum(length for _, length in reads) == 900 * TOKEN_BYTES and len(reads) == 8
    assert storage.under_way_max == 3


def test_a_file_that_ends_too_early_is_a_hole(storage: MemoryStorage, connector: ReferenceConnector) -> None:
    ids, stored = turn(storage, connector)
    del storage.files["/.kv/s/a.kv"].data[250 * TOKEN_BYTES :]
    kv, _, _ = serve(connector, storage.plan(Model, stored), [*ids, 1])
    assert kv.report.miss == "hole"
    assert kv.report.cached_tokens == PIECE_BYTES // TOKEN_BYTES, "only whole pieces are known to be filled"


def test_writes_are_bounded_and_never_hold_up_the_computing(
    storage: MemoryStorage,
    connector: ReferenceConnector,
) -> None:
    storage.delay_s = {("write", ".kv"): 0.05}
    ids = list(range(900))
    kv = connector.begin(storage.plan(Model, []), ids)
    memory = Memory()
    kv.start_saving(memory)
    memory.compute(ids, 0, 900)
    started = time.monotonic()
    for end in range(1, 901):
        kv.computed(end)
    assert time.monotonic() - started < 0.05
    kv.finish()
    assert kv.report.committed
    assert storage.under_way_max <= saving.OUTSTANDING_MAX


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_an_edited_history_is_used_up_to_the_edit_and_not_appended_to(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    percent: int,
) -> None:
    ids, stored = turn(storage, connector)
    edit = 300 * percent // 100
    edited = [*ids[:edit], 5, *ids[edit + 1 :], 6]
    before = storage.bytes_of(uri("a"))
    kv, answer, _ = serve(connector, storage.plan(Model, stored), edited)
    assert answer is not None
    assert (kv.report.cached_tokens, kv.report.miss, kv.report.committed) == (edit, "edited", False)
    assert answer["fresh_kvcache"] == []
    assert answer["stored_kvcache"][0]["token_length"] == edit
    assert answer["stored_kvcache"][0]["kv_length"] == edit * TOKEN_BYTES
    assert storage.bytes_of(uri("a")) == before
    until(lambda: storage.aborts, "the plan is ended")


def test_a_prompt_inside_what_is_stored_leaves_its_last_token_to_compute(
    storage: MemoryStorage,
    connector: ReferenceConnector,
) -> None:
    ids, stored = turn(storage, connector)
    before = storage.bytes_of(uri("a"))
    kv, _, _ = serve(connector, storage.plan(Model, stored), ids[:200], output=list(range(200)))
    assert (kv.report.cached_tokens, kv.report.miss, kv.report.committed) == (199, None, False)
    assert storage.bytes_of(uri("a")) == before, "another continuation was appended"
    kv, _, _ = serve(connector, storage.plan(Model, stored), ids, output=[1])
    assert (kv.report.cached_tokens, kv.report.miss, kv.report.committed) == (299, None, True)


@pytest.mark.parametrize(
    "error",
    [errors.Hole("x"), errors.Lost("x"), errors.Corrupt("x"), errors.Disconnected("x"), errors.Checksum("x")],
)
@pytest.mark.parametrize("nth", [0, 2])
def test_a_failed_read_ends_the_prefix_that_arrived(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    error: errors.Gd2fsError,
    nth: int,
) -> None:
    ids, stored = turn(storage, connector, 400)
    storage.fail["read", ".kv", nth] = error
    kv, _, _ = serve(connector, storage.plan(Model, stored), [*ids, 1])
    # Pieces run at once, so the failing one may be another than the nth; what precedes it is used.
    assert kv.report.cached_tokens % (PIECE_BYTES // TOKEN_BYTES) == 0
    assert kv.report.cached_tokens < 400
    assert kv.report.miss == error.name.lower()
    assert kv.report.committed, "what is fresh continues the same tokens, so it is kept"


def test_ids_that_cannot_be_read_mean_that_nothing_is_loaded_or_appended(
    storage: MemoryStorage,
    connector: ReferenceConnector,
) -> None:
    ids, stored = turn(storage, connector)
    storage.fail["read", ".tokens", 0] = errors.Lost("x")
    kv, answer, _ = serve(connector, storage.plan(Model, stored), [*ids, 1])
    assert (kv.report.cached_tokens, kv.report.miss, kv.report.committed) == (0, "lost", False)
    assert answer is not None and answer["fresh_kvcache"] == []


def test_a_storage_that_hangs_is_given_up(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pace, "SHORTEST_S", 0.2)
    monkeypatch.setattr(Pace, "load_limit_s", lambda *_: 0.2)
    ids, stored = turn(storage, connector)
    storage.delay_s = {("read", ".kv"): 30.0}
    started = time.monotonic()
    kv, _, _ = serve(connector, storage.plan(Model, stored), [*ids, 1])
    assert time.monotonic() - started < 2
    assert (kv.report.cached_tokens, kv.report.miss) == (0, "timeout")


def test_a_transfer_that_ends_too_late_touches_nothing_that_is_used(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deaf transfer writes into its buffer long after it was cancelled; the request has moved away."""
    monkeypatch.setattr(Pace, "load_limit_s", lambda *_: 0.1)
    monkeypatch.setattr(loading, "CANCEL_GRACE_S", 0.05)
    ids, stored = turn(storage, connector)
    everything = [*ids, 1]
    storage.deaf, storage.delay_s = {".kv"}, {("read", ".kv"): 0.6}
    memory = Memory()
    kv = connector.begin(storage.plan(Model, stored), everything)
    assert kv.verify() == 300
    loaded = kv.load(memory)
    assert loaded.tokens == 0 and loaded.in_doubt
    assert not memory.data.any()
    until(lambda: memory.data.any(), "the late transfer lands in the memory that was left")
    kv.finish()


def test_a_node_that_dies_while_saving_costs_the_rest_only(
    storage: MemoryStorage, connector: ReferenceConnector
) -> None:
    for nth in range(3, 40):
        storage.fail["write", ".kv", nth] = errors.Disconnected("the node is gone")
    kv, answer, _ = serve(connector, storage.plan(Model, []), list(range(500)))
    assert answer is not None
    saved = kv.report.saved_bytes // TOKEN_BYTES
    assert 0 <= saved < 500 and saved % saving.BATCH_TOKENS == 0
    assert kv.report.committed == (saved > 0)
    assert "disconnected" in (kv.report.commit_error or "")
    assert sum(segment["token_length"] for segment in answer["fresh_kvcache"]) == saved


def test_a_write_that_never_ends_does_not_hold_the_answer(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving.Saver.finish, "__defaults__", (0.2,))
    storage.delay_s = {("write", ".kv"): 30.0}
    started = time.monotonic()
    kv, answer, _ = serve(connector, storage.plan(Model, []), list(range(100)))
    assert time.monotonic() - started < 2
    assert answer is not None and answer["fresh_kvcache"] == []
    assert not kv.report.committed and "timeout" in (kv.report.commit_error or "")
    assert not kv.memory_is_free, "the memory is still being read"


BAD = {
    "not an object": (lambda plan: [1, 2], "bad_params"),
    "a gap in tokens": (lambda plan: plan["stored_kvcache"][0].update(token_start=5) or plan, "bad_params"),
    "bytes that are not the tokens'": (
        lambda plan: plan["stored_kvcache"][0].update(kv_length=5) or plan,
        "bad_params",
    ),
    "an odd offset": (lambda plan: plan["stored_kvcache"][0].update(kv_start=5) or plan, "bad_params"),
    "a negative length": (
        lambda plan: plan["stored_kvcache"][0].update(token_length=-3) or plan,
        "bad_params",
    ),
    "text for a number": (lambda plan: plan["stored_kvcache"][0].update(kv_start="0") or plan, "bad_params"),
    "no layouts": (lambda plan: plan["plan"].pop("layouts") and plan, "bad_params"),
    "a layout too few": (
        lambda plan: plan["plan"]["layouts"].pop(uri("a") + ".tokens") and plan,
        "bad_params",
    ),
    "a plan that is text": (lambda plan: plan.update(plan="p") or plan, "bad_params"),
    "another model": (lambda plan: plan["plan"].update(kv_identity="other") or plan, "identity"),
    "another format": (lambda plan: plan["plan"]["kv_format"].update(granule=16) or plan, "format"),
    "a forged capability": (
        lambda plan: (
            [layout.update(capability="forged") for layout in plan["plan"]["layouts"].values()] and plan
        ),
        "bad_signature",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_a_miss_and_writes_nothing(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    case: str,
) -> None:
    ids, stored = turn(storage, connector)
    before = storage.bytes_of(uri("a"))
    spoil, reason = BAD[case]
    params = spoil(storage.plan(Model, [dict(stored[0])]))
    kv, _, _ = serve(connector, params, [*ids, 1, 2])
    assert (kv.report.cached_tokens, kv.report.miss, kv.report.committed) == (0, reason, False)
    assert storage.bytes_of(uri("a")) == before


def test_the_earlier_spelling_is_answered_in_itself(
    storage: MemoryStorage, connector: ReferenceConnector
) -> None:
    ids, stored = turn(storage, connector)
    plan = storage.plan(Model, stored)
    plan["stored_kv_cache"], plan["fresh_kv_cache"] = plan.pop("stored_kvcache"), plan.pop("fresh_kvcache")
    kv, answer, _ = serve(connector, plan, [*ids, 1])
    assert answer is not None and kv.report.cached_tokens == 300
    assert answer["stored_kv_cache"] == stored and answer["fresh_kv_cache"][0]["token_length"] == 1


def test_fewer_tokens_than_the_threshold_are_recomputed(
    storage: MemoryStorage, connector: ReferenceConnector
) -> None:
    ids, stored = turn(storage, connector)
    params = {**storage.plan(Model, stored), "load_threshold": 301}
    kv, _, _ = serve(connector, params, [*ids, 1])
    assert (kv.report.cached_tokens, kv.report.miss, kv.report.committed) == (0, "threshold", True)
    kv, _, _ = serve(connector, {**params, "load_threshold": 300}, [*ids, 1])
    assert kv.report.cached_tokens == 300


def test_a_plain_client_without_a_plan_creates_writes_and_loads(
    storage: MemoryStorage,
    connector: ReferenceConnector,
) -> None:
    ids = list(range(100))
    params = {"fresh_kvcache": [{"token_start": 0, "token_length": -1, "kv_uri": uri("p"), "kv_start": 0}]}
    kv, answer, _ = serve(connector, {"id": "x", **params}, ids)
    assert answer is not None and kv.report.commit_error is None and not storage.commits
    assert storage.files["/.kv/s/p.kv"].kv_identity == Model.kv_identity
    kv, _, _ = serve(connector, {"id": "x", "stored_kvcache": answer["fresh_kvcache"]}, [*ids, 1])
    assert kv.report.cached_tokens == 100
    storage.files["/.kv/s/p.kv"].kv_identity = "another"
    kv, _, _ = serve(connector, {"id": "x", "stored_kvcache": answer["fresh_kvcache"]}, [*ids, 1])
    assert (kv.report.cached_tokens, kv.report.miss) == (0, "identity")


def test_without_a_client_a_plan_brings_one(storage: MemoryStorage) -> None:
    calls = []

    def connect(controls: Any) -> MemoryStorage:
        calls.append(list(controls))
        return storage

    connector = ReferenceConnector(None, Model.kv_identity, FORMAT, crc, connect)
    bare = {"id": "x", "stored_kvcache": [], "fresh_kvcache": storage.plan(Model, [])["fresh_kvcache"]}
    kv, _, _ = serve(connector, bare, [1, 2, 3])
    assert kv.report.miss == "no_client"
    turn(storage, connector)
    assert calls == [["http://127.0.0.1:1"]]
    connector.close()


def test_what_the_identity_does_not_cover_runs_without_stored_kv(
    storage: MemoryStorage,
    connector: ReferenceConnector,
) -> None:
    ids, stored = turn(storage, connector)
    kv = connector.begin(storage.plan(Model, stored), [*ids, 1], "cache_salt")
    assert kv.verify() == 0 and kv.report.miss == "cache_salt"
    kv.start_saving(Memory())
    kv.computed(301)
    kv.finish()
    assert not kv.report.committed and not kv.report.saved_bytes


@pytest.mark.parametrize(
    "error",
    [
        errors.StaleWriter("x"),
        errors.PlanSuperseded("x"),
        errors.Conflict("x"),
        errors.Lost("x"),
        errors.PlanExpired("x"),
    ],
)
def test_a_refused_commit_is_reported_and_not_tried_again(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    error: errors.Gd2fsError,
) -> None:
    storage.control_errors = [error]
    plan = storage.plan(Model, [])
    kv, answer, _ = serve(connector, plan, [1, 2, 3])
    assert answer is not None
    until(lambda: storage.aborts == [plan["plan"]["token"]], "the plan is ended, so that its grant is free")
    assert not kv.report.committed and error.name in (kv.report.commit_error or "")
    assert answer["fresh_kvcache"] == [] and not storage.commits


def test_an_absent_control_is_tried_again_at_once_and_then_in_the_background(
    storage: MemoryStorage,
    connector: ReferenceConnector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage.control_errors = [errors.Unavailable("x")]
    kv, _, _ = serve(connector, storage.plan(Model, []), [1, 2, 3])
    assert kv.report.committed
    monkeypatch.setattr("gd2fs.connectors.commit.INLINE_S", 0.1)
    storage.control_errors = [errors.Disconnected("x") for _ in range(5)]
    kv, answer, _ = serve(connector, storage.plan(Model, [], uri("b")), [1, 2, 3])
    assert not kv.report.committed and (kv.report.commit_error or "").startswith("pending")
    assert answer is not None and answer["fresh_kvcache"][0]["token_length"] == 3
    until(lambda: len(storage.commits) == 2, "the commit arrives behind the answer")
    assert connector.committer.committed_late == 1


def test_the_end_of_a_request_waits_for_control_no_longer_than_it_says(storage: MemoryStorage) -> None:
    class Hanging:
        limits: ClassVar[list[float]] = []

        def open_layout(self, layout: dict[str, Any]) -> Any:
            raise AssertionError("not of interest")

        def control(
            self, method: str, path: str, body: Any = None, timeout_s: float | None = None
        ) -> dict[str, Any]:
            assert timeout_s is not None
            self.limits.append(timeout_s)
            time.sleep(timeout_s)
            raise errors.Timeout("control hangs")

    committer = Committer()
    started = time.monotonic()
    assert committer.commit(Hanging(), {}).pending
    assert time.monotonic() - started < INLINE_S + 0.5 and max(Hanging.limits[:1]) <= INLINE_S
    committer.close(0.0)


def test_ids_are_read_no_further_than_the_prompt(
    storage: MemoryStorage, connector: ReferenceConnector
) -> None:
    """Metadata may claim any number of stored tokens; it costs no memory."""
    ids, stored = turn(storage, connector)
    claimed = [{**stored[0], "token_length": 2**40, "kv_length": 2**40 * TOKEN_BYTES}]
    kv = connector.begin(storage.plan(Model, claimed), [*ids[:200], 7])
    assert kv.verify() == 200
    kv.finish()
    assert max(length for way, _, _, length in storage.log if way == "read") == 201 * 4


def test_the_queue_of_late_commits_has_an_end(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gd2fs.connectors.commit.INLINE_S", 0.0)
    monkeypatch.setattr("gd2fs.connectors.commit.WAITING_MAX", 2)
    committer = Committer()
    storage.control_errors = [errors.Unavailable("x") for _ in range(10_000)]
    outcomes = [committer.commit(storage, {}) for _ in range(8)]
    assert not any(outcome.committed for outcome in outcomes)
    assert any(outcome.pending for outcome in outcomes)
    assert any("waiting already" in (outcome.error or "") for outcome in outcomes)
    committer.close()


def test_a_load_is_worth_at_most_its_recomputation() -> None:
    pace = Pace()
    assert pace.load_limit_s(10, 10 * TOKEN_BYTES) == Pace.SHORTEST_S
    for _ in range(50):
        pace.loaded(100 << 20, 10.0)  # 10 MiB/s
        pace.prefilled(1000, 2.0)
    assert pace.load_limit_s(1000, 100 << 20) == pytest.approx(2.0, rel=0.05)
    for _ in range(50):
        pace.loaded(100 << 20, 0.8)
    assert pace.load_limit_s(1000, 100 << 20) == pytest.approx(1.6, rel=0.05)


def test_ids_are_compared_across_segments_of_several_files(
    storage: MemoryStorage,
    connector: ReferenceConnector,
) -> None:
    ids, stored = turn(storage, connector)
    kv, answer, _ = serve(connector, storage.plan(Model, stored, uri("b")), [*ids, *range(50)])
    assert answer is not None and kv.report.committed
    both = [*stored, *answer["fresh_kvcache"]]
    assert [segment["kv_uri"] for segment in both] == [uri("a"), uri("b")]
    assert both[1]["kv_start"] == 0 and both[1]["token_start"] == 300
    kv, _, _ = serve(connector, storage.plan(Model, both), [*ids, *range(50), 1])
    assert (kv.report.cached_tokens, kv.report.miss) == (350, None)
    assert isinstance(storage.files["/.kv/s/b.kv"], StoredFile)
