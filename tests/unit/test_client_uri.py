"""Where control is."""

from __future__ import annotations

from pathlib import Path

import pytest

from gd2fs import errors
from gd2fs.client import connect, uri


def test_addresses_path_and_cluster() -> None:
    parsed = uri.parse("gd2fs://a,10.0.0.1:99,[::1]:5,[fe80::1]/x%20y/z?cluster=c")
    assert parsed.addresses == (
        "http://a:7527",
        "http://10.0.0.1:99",
        "http://[::1]:5",
        "http://[fe80::1]:7527",
    )
    assert (parsed.path, parsed.cluster) == ("/x y/z", "c")
    assert uri.parse("gd2fs://h") == uri.ControlUri(("http://h:7527",), "/", None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("http://h", "gd2fs://"),
        ("gd2fs://", "HOST"),
        ("gd2fs://h:0", "HOST"),
        ("gd2fs://h:x", "HOST"),
        ("gd2fs://h,,g", "HOST"),
        ("gd2fs://[::1]5x", "HOST"),
        ("gd2fs://h?colour=red", "colour"),
    ],
)
def test_a_bad_uri_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(errors.Invalid, match=word):
        uri.parse(text)


def test_connect_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(errors.Invalid, match="path"):
        connect("gd2fs://127.0.0.1/a")
    with pytest.raises(errors.Invalid, match="timeout_s"):
        connect("gd2fs://127.0.0.1?cluster=c", timeout_s=0)
    with pytest.raises(errors.Invalid, match="nics"):
        connect("gd2fs://127.0.0.1?cluster=c", nics=["eth0"])
    with pytest.raises(errors.Invalid, match="streams"):
        connect("gd2fs://127.0.0.1?cluster=c", streams=0)
    monkeypatch.delenv("GD2FS_TOKEN", raising=False)
    monkeypatch.setenv("GD2FS_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(errors.Unauthenticated, match="GD2FS_TOKEN_FILE"):
        connect("gd2fs://127.0.0.1?cluster=c")


def test_an_absent_control_is_named_with_the_remedy() -> None:
    with pytest.raises(errors.Unavailable, match="gd2fs up"):
        connect("gd2fs://127.0.0.1:1")
