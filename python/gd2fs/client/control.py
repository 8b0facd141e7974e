"""JSON calls to control."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gd2fs import errors
from gd2fs.client.files import milliseconds

if TYPE_CHECKING:
    from gd2fs import _native

# What an answer without GD2FS's own error object means; it comes from something in between, such as a proxy.
_BY_STATUS: dict[int, type[errors.Gd2fsError]] = {
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.TooLarge,
    422: errors.Invalid,
}


class Control:
    """Calls ``(method, path, body, timeout_s)`` through one native client."""

    def __init__(self, native: _native.Client, timeout_s: float) -> None:
        self._native = native
        self._timeout_s = timeout_s

    def __call__(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The JSON object of the answer. Raises what the answer's error says, Unavailable, Timeout."""
        data = None if body is None else json.dumps(body).encode()
        limit = milliseconds(self._timeout_s if timeout_s is None else timeout_s)
        status, answer = self._native.control(method, path, data, limit)
        try:
            parsed = json.loads(answer) if answer else {}
        except ValueError:
            parsed = None
        if 200 <= status < 300 and isinstance(parsed, dict):
            return parsed
        raise _error(status, parsed, f"{method} {path.partition('?')[0]}")


def _error(status: int, parsed: Any, what: str) -> errors.Gd2fsError:
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict) and isinstance(error.get("code"), int):
        return errors.from_code(error["code"], str(error.get("message", "")))
    # FastAPI's own refusal of a body or a query that does not fit.
    detail = f": {parsed['detail']}" if isinstance(parsed, dict) and "detail" in parsed else ""
    # A success that is no JSON object comes from something else that listens there.
    broken = status >= 500 or status < 300
    known = _BY_STATUS.get(status, errors.Unavailable if broken else errors.Invalid)
    return known(f"{what}: control answered HTTP {status}{detail}")
