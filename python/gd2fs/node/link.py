"""The agent's line to control: register, heartbeat, leave. Plain HTTP/JSON with fail-over between
addresses.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx2

from gd2fs.config.tree import control_urls

# One call must not outlast a lease (10 s): better to try the next address.
CALL_TIMEOUT_S = 4.0


class ControlUnreachable(Exception):
    """No control address answered; worth trying again later."""


class RegistrationLost(Exception):
    """Control knows another incarnation of this node, or none: this process must end and register anew."""


class RegistrationRefused(OSError):
    """Control refused the registration for a reason that trying again will not change."""


class ControlLink:
    """Calls control for one node. Not for use by several tasks at once."""

    def __init__(self, uri: str, token: str, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._urls = control_urls(uri)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx2.AsyncClient(headers=headers, timeout=CALL_TIMEOUT_S, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def register(self, body: dict[str, Any]) -> dict[str, Any]:
        """Registers; the reply has "incarnation", "now", "lease_s", "heartbeat_s". Raises ControlUnreachable,
        RegistrationRefused."""
        response = await self._call("POST", "/v1/nodes/register", body)
        if response.status_code >= 400:
            raise RegistrationRefused(f"control refused to register this node: {_message(response)}")
        reply: dict[str, Any] = response.json()
        return reply

    async def heartbeat(self, node: str, body: dict[str, Any]) -> float:
        """Reports. Returns what time it is (unix seconds). Raises ControlUnreachable, RegistrationLost."""
        response = await self._call("POST", f"{_path(node)}/heartbeat", body)
        _refuse(response)
        return float(response.json()["now"])

    async def ranges(self, node: str, body: dict[str, Any]) -> dict[str, Any]:
        """Says how far columns are valid; the reply has "unknown", those control does not place here. Raises
        ControlUnreachable, RegistrationLost."""
        response = await self._call("POST", f"{_path(node)}/ranges", body)
        _refuse(response)
        reply: dict[str, Any] = response.json()
        return reply

    async def leave(self, node: str, incarnation: int) -> None:
        """Tells control that the node ends on purpose; nothing happens if another has its name by now. Raises
        ControlUnreachable."""
        await self._call("DELETE", f"{_path(node)}?incarnation={incarnation}", None)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> httpx2.Response:
        reasons = []
        for position, url in enumerate(self._urls):
            try:
                response = await self._http.request(method, url + path, json=body)
            except httpx2.HTTPError as error:
                reasons.append(f"{url}: {error or type(error).__name__}")
                continue
            if response.status_code < 500:
                # The address that answered is tried first next time.
                self._urls.insert(0, self._urls.pop(position))
                return response
            reasons.append(f"{url}: {_message(response)}")
        raise ControlUnreachable("; ".join(reasons))


def _refuse(response: httpx2.Response) -> None:
    if response.status_code in (404, 409, 410):
        raise RegistrationLost(_message(response))
    if response.status_code >= 400:
        raise ControlUnreachable(_message(response))


def _path(node: str) -> str:
    return f"/v1/nodes/{quote(node, safe='')}"


def _message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
