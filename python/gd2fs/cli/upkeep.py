"""gd2fs fsck and gd2fs scrub: does control believe what is true, and are the bytes what they were?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from gd2fs.cli.connection import ControlOption, connect
from gd2fs.cli.output import CommandFailed, JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from gd2fs.client import Client

NodeOption = Annotated[
    str | None, typer.Option("--node", metavar="NAME", help="This node only. Default: all that are alive.")
]
PAGE = 1024
# A page is a LIST, and each repair of it a call to the node.
PAGE_TIMEOUT_S = 60.0
TRIES_MAX = 3
WATCH_S = 0.5
# A scrub gives way to requests, but not for so long.
STALL_S = 120.0


def fsck(
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what can be; orphaned bytes are deleted.")
    ] = False,
    node: NodeOption = None,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare control with what nodes keep, while the cluster works. Needs a token of role admin.

    Exit code 1 if something is wrong that was not repaired, or a node could not be asked. A node that left in
    order is only named.
    """
    with connect(control) as client:
        asked = _nodes(client, node)
        checked = [
            found
            for name in list(asked.living)
            if (found := asked.try_on(client, name, lambda n: _check(client, n, repair)))
        ]
    silent = asked.silent
    findings = [finding for one in checked for finding in one["findings"]]
    open_findings = [finding for finding in findings if not finding["repaired"]]
    facts = {
        "nodes": [{key: one[key] for key in ("node", "columns", "reclaims")} for one in checked],
        "not_asked": silent,
        "left": asked.left,
        "findings": findings,
        "ok": not open_findings and not silent,
    }
    if not as_json:
        _show(facts)
        _say_left(asked.left)
    if not facts["ok"]:
        raise CommandFailed(_verdict(len(open_findings), silent, repair), data=facts)
    if as_json:
        print_json(facts)


@dataclass(slots=True)
class _Asked:
    """Nodes by whether they can be asked. `silent` should be there and are not; `left` ended in order, and
    what they keep waits for them."""

    living: list[str]
    silent: list[str]
    left: list[str]

    def try_on(
        self, client: Client, name: str, call: Callable[[str], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """What `call` answers of a living node; None if it turns out to be silent. Until a lease is over a
        node that was killed counts as alive, and one that hangs does so for ever: the others are asked all
        the same."""
        from gd2fs import errors

        try:
            return call(name)
        except (errors.Disconnected, errors.Timeout, errors.Unavailable, errors.ShuttingDown) as error:
            # Raises if it is control that can't be asked.
            client.control("GET", "/v1/nodes")
            typer.echo(f"{name} can't be asked: {error}", err=True)
            self.living.remove(name)
            self.silent.append(name)
            return None


def _nodes(client: Client, wanted: str | None) -> _Asked:
    states = {one["node"]: one["state"] for one in client.control("GET", "/v1/nodes")["nodes"]}
    if wanted is not None:
        if wanted not in states:
            known = ", ".join(sorted(states)) or "none"
            raise ValueError(f"--node: there is no node {wanted!r}; known are: {known}")
        states = {wanted: states[wanted]}
    # Whoever names a node wants it asked, whatever the reason why it can't be.
    left = [name for name, state in states.items() if state == "left" and wanted is None]
    living = [name for name, state in states.items() if state == "alive"]
    return _Asked(living, [name for name in states if name not in living and name not in left], left)


def _say_left(left: list[str]) -> None:
    if left:
        typer.echo(f"not asked, since they have left: {', '.join(left)}", err=True)


def _check(client: Client, node: str, repair: bool) -> dict[str, Any]:
    """All pages of one node; again from the beginning if it was started anew meanwhile."""
    from gd2fs import errors

    for tries in range(1, TRIES_MAX + 1):
        try:
            return _check_once(client, node, repair)
        except errors.StaleIncarnation:
            if tries == TRIES_MAX:
                raise
            time.sleep(WATCH_S)
    raise AssertionError("the loop returns or raises")


def _check_once(client: Client, node: str, repair: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"node": node, "columns": 0, "reclaims": 0, "findings": []}
    after = None
    while True:
        body = {"node": node, "repair": repair, "after": after, "limit": PAGE}
        page = client.control("POST", "/v1/fsck", body, PAGE_TIMEOUT_S)
        found["columns"] += page["columns"]
        found["reclaims"] += page["reclaims"]
        found["findings"] += [{"node": node, **finding} for finding in page["findings"]]
        after = page["next"]
        if after is None:
            return found


def _show(facts: dict[str, Any]) -> None:
    rows = ((one["node"], one["columns"], one["reclaims"]) for one in facts["nodes"])
    print_table("", ["node", ">columns", ">still to free"], rows)
    if facts["findings"]:
        columns = ["node", "what", "file", "column", "path", "detail", "repaired"]
        keys = ["node", "kind", "file", "column", "path", "detail"]
        print_table(
            "",
            columns,
            ([*(one[key] for key in keys), "yes" if one["repaired"] else "no"] for one in facts["findings"]),
        )


def _verdict(findings: int, silent: list[str], repair: bool) -> str:
    parts = []
    if findings:
        remedy = "" if repair else "; `gd2fs fsck --repair` repairs what can be"
        parts.append(f"{findings} finding(s) stand{remedy}")
    if silent:
        parts.append(_not_asked(silent))
    return "; ".join(parts)


def _not_asked(silent: list[str]) -> str:
    return f"not asked, since they are not alive: {', '.join(silent)}"


def scrub(
    node: NodeOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is through, on every node.")] = False,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Have nodes read again and verify everything they keep, in the background. Needs a token of role admin.

    What is corrupt is dropped and reported as lost; what a disk can't read now is left as it is. With --wait,
    exit code 1 if there was either, or if a node could not be asked.
    """
    with connect(control) as client:
        asked = _nodes(client, node)
        states = {
            name: state
            for name in list(asked.living)
            if (state := asked.try_on(client, name, lambda n: _scrub(client, "POST", n)))
        }
        if not states:
            raise CommandFailed("no node is alive that could be scrubbed")
        if wait:
            _wait(client, asked, states)
    corrupt = sum(state["corrupt_chunks"] for state in states.values())
    unreadable = sum(_unreadable(state) for state in states.values())
    facts = {
        "nodes": list(states.values()),
        "not_asked": asked.silent,
        "left": asked.left,
        "corrupt_chunks": corrupt,
        "unreadable_chunks": unreadable,
    }
    if not as_json:
        _show_scrub(facts)
        _say_left(asked.left)
    if wait and (faults := _faults(corrupt, unreadable, asked.silent)):
        raise CommandFailed("; ".join(faults), data=facts)
    if as_json:
        print_json(facts)
    elif asked.silent:
        typer.echo(_not_asked(asked.silent), err=True)


def _faults(corrupt: int, unreadable: int, silent: list[str]) -> list[str]:
    faults = []
    if corrupt:
        faults.append(
            f"{corrupt} chunk(s) were corrupt and are dropped; what they held is lost and will be recomputed"
        )
    if unreadable:
        faults.append(
            f"{unreadable} chunk(s) could not be read and were left as they are: the nodes' logs name the"
            " disk; scrub again when it works"
        )
    if silent:
        faults.append(_not_asked(silent))
    return faults


def _unreadable(state: dict[str, Any]) -> int:
    """Chunks that a scrub could not read; a node of the release before does not say."""
    return int(state.get("unreadable_chunks", 0))


def _wait(client: Client, asked: _Asked, states: dict[str, dict[str, Any]]) -> None:
    """Brings `states` up to date until none runs; those of nodes that can't be asked any more go.

    Raises CommandFailed if that can't be waited for.
    """
    moved = time.monotonic()
    while running := [name for name, state in states.items() if state["running"]]:
        time.sleep(WATCH_S)
        for name in running:
            former = states.pop(name)
            state = asked.try_on(client, name, lambda n: _scrub(client, "GET", n))
            if state is None:
                continue
            if state["incarnation"] != former["incarnation"]:
                raise CommandFailed(f"node {name} was started anew, which ended its scrub; begin again")
            if state != former:
                moved = time.monotonic()
            states[name] = state
        if time.monotonic() - moved > STALL_S:
            raise CommandFailed(f"no scrub has gone on for {STALL_S:g} s: {', '.join(running)}")


def _scrub(client: Client, method: str, node: str) -> dict[str, Any]:
    return client.control(method, f"/v1/nodes/{quote(node, safe='')}/scrub")


def _show_scrub(facts: dict[str, Any]) -> None:
    from gd2fs.config.units import format_bytes

    print_table(
        "",
        ["node", "state", ">read", ">of", ">seconds", ">corrupt chunks", ">unreadable", ">rounds"],
        (
            (
                state["node"],
                "running" if state["running"] else "done",
                format_bytes(state["bytes"]),
                format_bytes(state["bytes_total"]),
                f"{state['seconds']:.1f}",
                state["corrupt_chunks"],
                _unreadable(state),
                state["rounds"],
            )
            for state in facts["nodes"]
        ),
    )
