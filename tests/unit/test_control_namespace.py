"""Directories and files by path, their classes, their layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.control import schema
from gd2fs.control.paths import normal
from gd2fs.signing import Capability, Keys
from tests.control_api import ControlApi, control
from tests.control_fakes import FakeColumn


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        for name in ("n1", "n2", "n3"):
            api.start_node(name)
        yield api


def _mkdir(api: ControlApi, path: str, **more: Any) -> Any:
    return api.call("POST", "/v1/fs/mkdir", {"path": path, **more})


def _create(api: ControlApi, path: str, **more: Any) -> Any:
    return api.call("POST", "/v1/fs/create", {"path": path, **more})


def _list(api: ControlApi, path: str, **more: Any) -> Any:
    return api.call("GET", "/v1/fs/list", path=path, **more)


@pytest.mark.parametrize(
    "path", ["", "a", "a/b", "/a//b", "//", "/.", "/a/../b", "/a/.", "/a\0b", "/" + "x" * 1024, "/\udc80"]
)
def test_paths_that_are_not_normal_are_refused(path: str) -> None:
    with pytest.raises(errors.Invalid):
        normal(path)


def test_paths_that_are() -> None:
    assert normal("/") == "/"
    assert normal("/a/b.kv/") == "/a/b.kv"
    assert normal("/" + "x" * 1023) == "/" + "x" * 1023
    assert normal("/…/...") == "/…/..."


def test_create_stat_and_length(api: ControlApi) -> None:
    info = _create(api, "/a.bin", stripe_unit=65536, kv_identity="k")
    layout = info.pop("layout")
    assert info == api.call("GET", "/v1/fs/stat", path="/a.bin")
    assert info["length"] == 0 and info["sealed"] == 0 and not info["is_dir"]
    assert (info["class"], info["stripe_unit"], info["width"]) == ("cache", 65536, 1)
    assert (layout["file"], layout["kv_identity"], layout["refresh"]) == (info["file"], "k", True)
    api.nodes.write(layout, 0, 1000)
    assert api.call("GET", "/v1/fs/stat", path="/a.bin")["length"] == 1000
    assert api.call("GET", "/v1/fs/layout", file=info["file"])["length"] == 1000
    capability = Keys.development().verify(layout["capability"], Capability, now=api.clock.now)
    assert capability.rights == ("read", "write") and capability.ranges == () and capability.grant == 0
    assert not capability.bearer and capability.expiry == int(api.clock.now) + 3600
    with pytest.raises(errors.Exists):
        _create(api, "/a.bin")
    with pytest.raises(errors.NotFound):
        _create(api, "/missing/a.bin")
    with pytest.raises(errors.NotADirectory):
        _create(api, "/a.bin/b")
    with pytest.raises(errors.IsADirectory):
        _create(api, "/")
    with pytest.raises(errors.Invalid, match="power of two"):
        _create(api, "/b.bin", stripe_unit=65537)


def test_a_length_that_can_not_be_asked_is_null_and_a_lost_one_says_so(api: ControlApi) -> None:
    layout = _create(api, "/a.bin")["layout"]
    api.nodes.write(layout, 0, 10)
    node = layout["columns"][0]["replicas"][0]["node"]
    api.nodes.node(node).away = True
    info = api.call("GET", "/v1/fs/stat", path="/a.bin")
    assert info["length"] is None and "lost" not in info
    api.start_node(node)
    info = api.call("GET", "/v1/fs/stat", path="/a.bin")
    assert info["length"] is None and info["lost"] is True
    assert api.call("GET", "/v1/fs/layout", path="/a.bin")["columns"][0]["born"] == 1


def test_an_end_that_nobody_knows_is_no_length(api: ControlApi) -> None:
    layout = _create(api, "/a.bin", width=2)["layout"]
    api.nodes.write(layout, 0, 10)
    node = layout["columns"][1]["replicas"][0]["node"]
    api.nodes.node(node).columns[layout["file"], 1] = FakeColumn(1, 1, end_lost=True)
    info = api.call("GET", "/v1/fs/stat", path="/a.bin")
    assert (info["length"], info["end_lost"], "lost" in info) == (None, True, False)
    assert api.call("GET", "/v1/fs/layout", path="/a.bin")["length"] is None


def test_a_column_is_lost_as_soon_as_its_node_has_come_back_without_it(api: ControlApi) -> None:
    layout = _create(api, "/a.bin")["layout"]
    node = layout["columns"][0]["replicas"][0]["node"]
    assert api.call("GET", "/v1/fs/stat", path="/a.bin")["length"] == 0, "it was never written"
    # Control has not heard of the new incarnation, and the node answers all the same.
    api.nodes.node(node).incarnation += 1
    info = api.call("GET", "/v1/fs/stat", path="/a.bin")
    assert info["length"] is None and info["lost"] is True


def test_width_places_columns_on_different_nodes(api: ControlApi) -> None:
    layout = _create(api, "/wide", width=3)["layout"]
    assert {column["replicas"][0]["node"] for column in layout["columns"]} == {"n1", "n2", "n3"}
    assert Keys.development().verify_ever(layout["capability"], Capability).columns == ((1, 1),) * 3
    with pytest.raises(errors.NoNodes, match="4 nodes"):
        _create(api, "/wider", width=4)
    api.clock.now += 11
    with pytest.raises(errors.NoNodes, match="0 that are alive"):
        _create(api, "/narrow")


def test_lengths_of_a_page_need_one_stat_a_node(api: ControlApi) -> None:
    _mkdir(api, "/d")
    for i in range(30):
        _create(api, f"/d/{i:02}")
    api.nodes.calls["stat"] = 0
    assert len(_list(api, "/d")["entries"]) == 30
    assert api.nodes.calls["stat"] <= 3


def test_a_directory_gives_its_class_to_what_is_made_in_it(api: ControlApi) -> None:
    assert _mkdir(api, "/c", **{"class": "cache"})["class"] == "cache"
    assert _mkdir(api, "/c/d")["class"] == "cache"
    with pytest.raises(errors.Unsupported, match="not built yet"):
        _mkdir(api, "/m", **{"class": "durable"})
    with pytest.raises(errors.NotFound):
        api.call("GET", "/v1/fs/stat", path="/m")


def test_mkdir_with_and_without_parents(api: ControlApi) -> None:
    with pytest.raises(errors.NotFound):
        _mkdir(api, "/a/b/c", parents=False)
    assert _mkdir(api, "/a/b/c")["is_dir"]
    assert _mkdir(api, "/a/b/c")["path"] == "/a/b/c"
    with pytest.raises(errors.Exists):
        _mkdir(api, "/a/b/c", parents=False)
    _create(api, "/a/f")
    with pytest.raises(errors.Exists):
        _mkdir(api, "/a/f")
    with pytest.raises(errors.NotADirectory):
        _mkdir(api, "/a/f/g")
    assert _mkdir(api, "/")["path"] == "/"


def test_list_pages_in_name_order(api: ControlApi) -> None:
    _mkdir(api, "/d/sub")
    for name in ("b", "a", "é", "Z", "a0", "a-"):
        _create(api, f"/d/{name}")
    _create(api, "/d/sub/inner")
    names: list[str] = []
    after: str | None = None
    pages = 0
    while True:
        page = _list(api, "/d", limit=3, **({"after": after} if after else {}))
        names += [entry["path"] for entry in page["entries"]]
        pages += 1
        after = page["next"]
        if after is None:
            break
    assert pages == 3
    assert names == sorted((f"/d/{n}" for n in ("b", "a", "é", "Z", "a0", "a-", "sub")), key=str.encode)
    with pytest.raises(errors.NotADirectory):
        _list(api, "/d/a")
    with pytest.raises(errors.NotFound):
        _list(api, "/e")
    assert [entry["path"] for entry in _list(api, "/")["entries"]] == ["/d"]


def test_rename_moves_whole_trees_and_keeps_layouts(api: ControlApi) -> None:
    _mkdir(api, "/a/b")
    _mkdir(api, "/ab")  # a neighbour that begins alike
    file = _create(api, "/a/b/f")
    _create(api, "/ab/g")
    _mkdir(api, "/z")
    assert api.call("POST", "/v1/fs/rename", {"from": "/a", "to": "/z/moved"})["path"] == "/z/moved"
    assert api.call("GET", "/v1/fs/stat", path="/z/moved/b/f")["file"] == file["file"]
    assert [entry["path"] for entry in _list(api, "/z/moved/b")["entries"]] == ["/z/moved/b/f"]
    assert api.call("GET", "/v1/fs/stat", path="/ab/g")["path"] == "/ab/g"
    api.nodes.write(file["layout"], 0, 5)
    assert api.call("GET", "/v1/fs/stat", path="/z/moved/b/f")["length"] == 5
    for source, target, kind in [
        ("/a", "/q", errors.NotFound),
        ("/z", "/z/moved/inside", errors.Invalid),
        ("/z", "/ab", errors.Exists),
        ("/z", "/nowhere/z", errors.NotFound),
        ("/z", "/ab/g/z", errors.NotADirectory),
        ("/", "/q", errors.Invalid),
        ("/z", "/" + "x" * 1020, errors.Invalid),
    ]:
        with pytest.raises(kind):
            api.call("POST", "/v1/fs/rename", {"from": source, "to": target})
    assert api.call("POST", "/v1/fs/rename", {"from": "/z", "to": "/z"})["path"] == "/z"


def test_delete_frees_and_refuses_full_directories(api: ControlApi) -> None:
    _mkdir(api, "/a/b")
    for name in ("/a/f", "/a/b/g", "/a/b/h"):
        api.nodes.write(_create(api, name)["layout"], 0, 100)
    _create(api, "/a0")
    with pytest.raises(errors.NotEmpty):
        api.call("DELETE", "/v1/fs/file", path="/a")
    assert api.call("DELETE", "/v1/fs/file", path="/a/f") == {"deleted_files": 1, "freed_bytes": 100}
    answer = api.call("DELETE", "/v1/fs/file", path="/a", recursive=True)
    assert answer == {"deleted_files": 2, "freed_bytes": 200}
    assert sum(node.used_bytes() for node in api.nodes.nodes.values()) == 0
    assert [entry["path"] for entry in _list(api, "/")["entries"]] == ["/a0"]
    assert api.rows(schema.reclaims) == 0
    with pytest.raises(errors.NotFound):
        api.call("DELETE", "/v1/fs/file", path="/a")
    with pytest.raises(errors.Invalid):
        api.call("DELETE", "/v1/fs/file", path="/", recursive=True)


def test_a_late_write_to_a_deleted_file_is_refused(api: ControlApi) -> None:
    layout = _create(api, "/f")["layout"]
    api.call("DELETE", "/v1/fs/file", path="/f")
    with pytest.raises(errors.Deleted):
        api.nodes.write(layout, 0, 1)
    assert _create(api, "/f")["file"] != layout["file"], "an id is never used twice"


def test_session_files_can_be_seen_and_read_but_not_changed(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(10), [1, 2], "r1")
    directory = f"/.kv/{session}"
    assert [entry["path"] for entry in _list(api, "/.kv")["entries"]] == [directory]
    paths = [entry["path"] for entry in _list(api, directory)["entries"]]
    assert paths == [f"{directory}/1.kv", f"{directory}/1.kv.tokens"]
    assert api.call("GET", "/v1/fs/stat", path=paths[0])["sealed"] == 11 * 64
    assert api.call("GET", "/v1/fs/layout", path=paths[0])["kv_identity"] == "identity-1"
    for method, path, body, params in [
        ("GET", "/v1/fs/layout", None, {"path": paths[0], "rights": "read,write"}),
        ("DELETE", "/v1/fs/file", None, {"path": paths[0]}),
        ("DELETE", "/v1/fs/file", None, {"path": "/.kv", "recursive": True}),
        ("POST", "/v1/fs/create", {"path": f"{directory}/x"}, {}),
        ("POST", "/v1/fs/mkdir", {"path": "/.kv/x"}, {}),
        ("POST", "/v1/fs/rename", {"from": paths[0], "to": "/x"}, {}),
        ("POST", "/v1/fs/rename", {"from": "/.kv", "to": "/x"}, {}),
    ]:
        with pytest.raises(errors.Forbidden, match="sessions"):
            api.call(method, path, body, **params)


def test_layout_arguments(api: ControlApi) -> None:
    file = _create(api, "/f")["file"]
    for params in ({}, {"path": "/f", "file": file}, {"path": "/f", "rights": "all"}, {"file": "xyz"}):
        with pytest.raises(errors.Invalid):
            api.call("GET", "/v1/fs/layout", **params)
    with pytest.raises(errors.IsADirectory):
        api.call("GET", "/v1/fs/layout", path="/")
    layout = api.call("GET", "/v1/fs/layout", path="/f", rights="write")
    assert Keys.development().verify_ever(layout["capability"], Capability).rights == ("write",)
