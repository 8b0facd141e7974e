"""Calls to control: failover, errors, time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.client import Client
from tests.client_fake_control import FakeControl


@pytest.fixture
def control() -> Iterator[FakeControl]:
    one = FakeControl()
    yield one
    one.stop()


def test_cluster_and_tenant_come_from_control(control: FakeControl) -> None:
    control.answers["/v1/cluster"] = (200, {"cluster": "c7", "tenant": "t7"})
    with Client([control.url], cluster=None, token="the token") as client:
        assert (client.cluster, client.tenant) == ("c7", "t7")
    assert {seen[2] for seen in control.seen} == {"Bearer the token"}


def test_the_next_address_is_asked_when_one_is_away(control: FakeControl) -> None:
    control.answers["/x"] = (200, {"answer": 1})
    with Client(["http://127.0.0.1:1", control.url], cluster="c", token="") as client:
        assert client.control("GET", "/x") == {"answer": 1}
        assert client.control("POST", "/x", {"a": [1]}) == {"answer": 1}
        assert client.control("DELETE", "/x?y=1") == {"answer": 1}
    assert control.seen[1] == ("POST", "/x", "", b'{"a": [1]}')


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (404, {"error": {"code": 501, "name": "NOT_FOUND", "message": "/a: no such file"}}, errors.NotFound),
        (409, {"error": {"code": 302, "name": "STALE_WRITER", "message": "m"}}, errors.StaleWriter),
        (422, {"detail": "the field"}, errors.Invalid),
        (502, b"<html>", errors.Unavailable),
        (200, b"not json", errors.Unavailable),
        (200, [1], errors.Unavailable),
        (403, {}, errors.Forbidden),
    ],
)
def test_errors_become_exceptions_by_their_code(
    control: FakeControl, status: int, answer: Any, kind: type[errors.Gd2fsError]
) -> None:
    control.answers["/v1/fs/stat"] = (status, answer)
    with Client([control.url], cluster="c", token="") as client, pytest.raises(kind):
        client.stat("/a")


def test_a_silent_control_costs_the_timeout_and_no_more(control: FakeControl) -> None:
    control.delay_s = 1.0
    with Client([control.url], cluster="c", token="") as client:
        start = time.monotonic()
        with pytest.raises(errors.Timeout):
            client.control("GET", "/x", timeout_s=0.2)
        assert time.monotonic() - start < 0.8


def test_without_an_address_only_layouts_work() -> None:
    with Client([], cluster="c", token="") as client, pytest.raises(errors.Unavailable, match="no address"):
        client.control("GET", "/x")
