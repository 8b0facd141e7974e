"""Who is asking: bearer token → principal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gd2fs import errors
from gd2fs.signing import Keys, Role, Token

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Principal:
    tenant: str
    role: Role

    def require(self, *roles: Role) -> None:
        """Raises Forbidden unless the role is one of `roles`; admin may do everything."""
        if self.role != "admin" and self.role not in roles:
            raise errors.Forbidden(
                f"a token of role {self.role!r} can't do this; it needs {' or '.join(roles)}"
            )


def authenticate(keys: Keys, now: float, authorization: str | None, act_for: str | None) -> Principal:
    """The principal of a request with these `Authorization` and `X-GD2FS-Tenant` headers, at `now` (unix
    seconds).

    Without keys (the development key, loopback only) nobody needs a token. Raises Unauthenticated,
    BadSignature, Expired, Forbidden.
    """
    if authorization is None:
        if not keys.is_development:
            raise errors.Unauthenticated(
                "send 'Authorization: Bearer TOKEN' (GD2FS_TOKEN or GD2FS_TOKEN_FILE)"
            )
        principal = Principal(DEFAULT_TENANT, "admin")
    else:
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer" or not text:
            raise errors.Unauthenticated("the Authorization header must be 'Bearer TOKEN'")
        token = keys.verify(text.strip(), Token, now=now)
        principal = Principal(token.tenant, token.role)
    if act_for is None or act_for == principal.tenant:
        return principal
    if principal.role != "admin":
        raise errors.Forbidden("X-GD2FS-Tenant: only a token of role 'admin' may act for another tenant")
    if not _TENANT.fullmatch(act_for):
        raise errors.Invalid("X-GD2FS-Tenant: 1 to 64 of the letters A-Z a-z 0-9 . _ -")
    return Principal(act_for, principal.role)
