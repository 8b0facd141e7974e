"""Telling control what was saved: at once where it answers, from a bounded queue where it does not."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from gd2fs.connectors.storage import Client, described
from gd2fs.errors import Disconnected, Overloaded, ShuttingDown, Timeout, Unavailable

log = logging.getLogger("gd2fs.connector")

# Only what says nothing about the plan is tried again; CONFLICT and PLAN_SUPERSEDED are answers.
_RETRIED = (Disconnected, Overloaded, ShuttingDown, Timeout, Unavailable, ConnectionError, TimeoutError)
CALL_TIMEOUT_S = 2.0
CALL_MIN_S = 0.05  # of the last call, when INLINE_S is nearly over
# How long the end of a request waits for control before the commit goes to the background.
INLINE_S = 1.0
# A plan that control has not heard of for this long is better planned anew.
RETRY_S = 60.0
WAITING_MAX = 256
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Outcome:
    """`committed`, or the reason why not; `pending`: it is still being tried in the background."""

    committed: bool
    error: str | None = None
    pending: bool = False


@dataclass
class _Waiting:
    client: Client
    path: str
    body: dict[str, Any]
    deadline: float
    attempts: int = field(default=0)


class Committer:
    """Commits and aborts plans. One background thread, started with the first call that has to wait."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[_Waiting | None] = queue.Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.committed_late = 0
        self.given_up = 0

    def commit(self, client: Client, body: dict[str, Any]) -> Outcome:
        """Commit within about `INLINE_S`; when control can't be reached, go on trying behind the answer."""
        deadline = time.monotonic() + INLINE_S
        for pause in _BACKOFF_S:
            # A call that is cut short may have arrived: the next one, of the same plan, gets the same answer.
            left = max(CALL_MIN_S, deadline - time.monotonic())
            try:
                client.control("POST", "/v1/kv/commit", body, timeout_s=left)
                return Outcome(True)
            except _RETRIED as error:
                if time.monotonic() + pause >= deadline:
                    return self._later(client, "/v1/kv/commit", body, described(error))
                time.sleep(pause)
            except Exception as error:
                return Outcome(False, described(error))
        return self._later(client, "/v1/kv/commit", body, "control did not answer")

    def abort(self, client: Client, plan_token: str) -> None:
        """End a plan that will not be committed. Behind the answer: nobody waits for it."""
        self._later(client, "/v1/kv/abort", {"plan_token": plan_token}, "")

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop trying. What still waits is dropped; its plans expire."""
        self._closed.set()
        if self._thread is not None:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                log.warning("%d commits are dropped at the end of the process", self._waiting.qsize())
            self._thread.join(timeout_s)

    def _later(self, client: Client, path: str, body: dict[str, Any], error: str) -> Outcome:
        try:
            self._waiting.put_nowait(_Waiting(client, path, body, time.monotonic() + RETRY_S))
        except queue.Full:
            return Outcome(False, f"{error}; {WAITING_MAX} commits are waiting already")
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="gd2fs-commit", daemon=True)
                self._thread.start()
        return Outcome(False, f"pending: {error}", pending=True)

    def _run(self) -> None:
        while not self._closed.is_set():
            item = self._waiting.get()
            if item is None:
                return
            try:
                item.client.control("POST", item.path, item.body, timeout_s=CALL_TIMEOUT_S)
                self.committed_late += item.path.endswith("commit")
            except _RETRIED as error:
                self._again(item, error)
            except Exception as error:
                log.warning("%s refused: %s", item.path, described(error))
                self.given_up += 1

    def _again(self, item: _Waiting, error: BaseException) -> None:
        pause = _BACKOFF_S[min(item.attempts, len(_BACKOFF_S) - 1)]
        item.attempts += 1
        if time.monotonic() + pause >= item.deadline or self._closed.wait(pause):
            log.warning("%s given up after %d attempts: %s", item.path, item.attempts, described(error))
            self.given_up += 1
            return
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.given_up += 1
