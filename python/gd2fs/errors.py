"""Every error of GD2FS: one class per status code, the same codes as on the wire, in Rust and (as errno) in
C.

::

    Gd2fsError                                    also derives from
    ├── WireError
    │   ├── BadFrame            101               OSError
    │   ├── Version             102               OSError
    │   ├── UnknownOpcode       103               NotImplementedError
    │   ├── BadRequest          104               ValueError
    │   ├── TooLarge            105               ValueError
    │   ├── Timeout             106  retry        TimeoutError
    │   ├── Disconnected        107  retry        ConnectionError
    │   ├── Overloaded          108  retry        OSError
    │   ├── ShuttingDown        109  retry        ConnectionError
    │   ├── Cancelled           110               OSError
    │   ├── Checksum            111  retry        OSError
    │   └── Internal            112               OSError
    ├── StoreError
    │   ├── Hole                201               OSError
    │   ├── Lost                202               OSError
    │   ├── Sealed              203               PermissionError
    │   ├── NoSpace             204  retry        OSError
    │   ├── Corrupt             205               OSError
    │   └── Deleted             206               FileNotFoundError
    ├── LayoutError
    │   ├── StaleLayout         301  retry        OSError
    │   ├── StaleWriter         302               OSError
    │   ├── StaleIncarnation    303  retry        OSError
    │   ├── WrongNode           304  retry        OSError
    │   └── NotHere             305  retry        OSError
    ├── AuthError
    │   ├── Unauthenticated     401               PermissionError
    │   ├── Forbidden           402               PermissionError
    │   ├── Expired             403  retry        PermissionError
    │   ├── BadSignature        404               PermissionError
    │   └── WrongCluster        405               PermissionError
    ├── ControlError
    │   ├── NotFound            501               FileNotFoundError
    │   ├── Exists              502               FileExistsError
    │   ├── NotEmpty            503               OSError
    │   ├── IsADirectory        504               IsADirectoryError
    │   ├── NotADirectory       505               NotADirectoryError
    │   ├── Conflict            506  retry        OSError
    │   ├── Unavailable         507  retry        ConnectionError
    │   ├── Invalid             508               ValueError
    │   ├── NoNodes             509  retry        OSError
    │   └── Unsupported         510               NotImplementedError
    ├── KvError
    │   ├── PlanExpired         601               OSError
    │   ├── PlanSuperseded      602               OSError
    │   └── Identity            603               ValueError
    ├── ForkedError             (never on the wire)   RuntimeError
    └── ClosedError             (never on the wire)   RuntimeError

Every class and instance has ``code``, ``name`` (the label of the wire, such as ``"STALE_LAYOUT"``),
``errno``, ``retryable`` (the same request may succeed later, or after a fresh layout) and
``may_have_changed`` (the request may have had an effect all the same). The class of a code is named like
the code.
"""

from __future__ import annotations

import errno as _e
import re
from typing import Any

__all__ = [
    "BY_CODE",
    "AuthError",
    "BadFrame",
    "BadRequest",
    "BadSignature",
    "Cancelled",
    "Checksum",
    "ClosedError",
    "Conflict",
    "ControlError",
    "Corrupt",
    "Deleted",
    "Disconnected",
    "Exists",
    "Expired",
    "Forbidden",
    "ForkedError",
    "Gd2fsError",
    "Hole",
    "Identity",
    "Internal",
    "Invalid",
    "IsADirectory",
    "KvError",
    "LayoutError",
    "Lost",
    "NoNodes",
    "NoSpace",
    "NotADirectory",
    "NotEmpty",
    "NotFound",
    "NotHere",
    "Overloaded",
    "PlanExpired",
    "PlanSuperseded",
    "Sealed",
    "ShuttingDown",
    "StaleIncarnation",
    "StaleLayout",
    "StaleWriter",
    "StoreError",
    "Timeout",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "UnknownOpcode",
    "Unsupported",
    "Version",
    "WireError",
    "WrongCluster",
    "WrongNode",
    "from_code",
]

#: The class of every status code but 0 (OK).
BY_CODE: dict[int, type[Gd2fsError]] = {}


class Gd2fsError(Exception):
    """Root of all errors of GD2FS. ``message`` names the path, the range and the remedy."""

    code: int = 0
    name: str = ""
    errno: int | None = None
    strerror: str | None = None
    retryable: bool = False
    may_have_changed: bool = False

    def __init_subclass__(
        cls, *, code: int = 0, errno: int = 0, retry: bool = False, changed: bool = False, **more: Any
    ) -> None:
        super().__init_subclass__(**more)
        if not errno:
            return  # a range class, or a subclass that a user made: it keeps what it inherits
        # These class attributes hide OSError's own per-instance `errno`, which only its two-argument form
        # would set.
        cls.code, cls.errno, cls.retryable, cls.may_have_changed = code, errno, retry, changed
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).upper()
        if code:
            BY_CODE[code] = cls

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message
        if isinstance(self, OSError):
            self.strerror = message

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" if self.name else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), self.__dict__


class WireError(Gd2fsError):
    """The message, not the data: frames, connections, time."""


class BadFrame(WireError, OSError, code=101, errno=_e.EPROTO):
    """A frame that is not well-formed; the connection was closed."""


class Version(WireError, OSError, code=102, errno=_e.EPROTO):
    """The peers share no protocol version."""


class UnknownOpcode(WireError, NotImplementedError, code=103, errno=_e.EPROTO):
    """The peer does not know this operation."""


class BadRequest(WireError, ValueError, code=104, errno=_e.EINVAL):
    """The request contradicts itself or the layout."""


class TooLarge(WireError, ValueError, code=105, errno=_e.EMSGSIZE):
    """Over a limit of the protocol."""


class Timeout(WireError, TimeoutError, code=106, errno=_e.ETIMEDOUT, retry=True, changed=True):
    """The time of the request is over."""


class Disconnected(WireError, ConnectionError, code=107, errno=_e.ECONNRESET, retry=True, changed=True):
    """The peer can't be reached, or the connection ended before the reply."""


class Overloaded(WireError, OSError, code=108, errno=_e.EAGAIN, retry=True):
    """A bounded queue or table of the peer is full."""


class ShuttingDown(WireError, ConnectionError, code=109, errno=_e.ESHUTDOWN, retry=True):
    """The peer is being stopped."""


class Cancelled(WireError, OSError, code=110, errno=_e.ECANCELED, changed=True):
    """Cancelled by the caller, or by closing the client."""


class Checksum(WireError, OSError, code=111, errno=_e.EBADMSG, retry=True):
    """The bytes that arrived do not match their sums."""


class Internal(WireError, OSError, code=112, errno=_e.EIO, changed=True):
    """A fault of GD2FS itself, or a status code newer than this library."""


class StoreError(Gd2fsError):
    """The bytes on a node."""


class Hole(StoreError, OSError, code=201, errno=_e.ENODATA):
    """The range, or part of it, was never written."""


class Lost(StoreError, OSError, code=202, errno=_e.ENODATA):
    """The range was written, and its node has lost it."""


class Sealed(StoreError, PermissionError, code=203, errno=_e.EPERM):
    """Below the seal nothing can be written any more."""


class NoSpace(StoreError, OSError, code=204, errno=_e.ENOSPC, retry=True):
    """The node's memory is full of what it must keep."""


class Corrupt(StoreError, OSError, code=205, errno=_e.EIO):
    """The stored bytes do not match their stored sum."""


class Deleted(StoreError, FileNotFoundError, code=206, errno=_e.ESTALE):
    """The file was deleted; a late write can't bring it back."""


class LayoutError(Gd2fsError):
    """The caller's picture of where bytes live, and of who may write, is out of date."""


class StaleLayout(LayoutError, OSError, code=301, errno=_e.ESTALE, retry=True):
    """Another epoch than the column's current one."""


class StaleWriter(LayoutError, OSError, code=302, errno=_e.ESTALE):
    """Another writer has taken the grant over."""


class StaleIncarnation(LayoutError, OSError, code=303, errno=_e.ESTALE, retry=True):
    """The node was registered anew since."""


class WrongNode(LayoutError, OSError, code=304, errno=_e.ESTALE, retry=True):
    """The address belongs to another node than the layout says."""


class NotHere(LayoutError, OSError, code=305, errno=_e.ESTALE, retry=True):
    """A read replica that is not copied this far."""


class AuthError(Gd2fsError):
    """Who may do what."""


class Unauthenticated(AuthError, PermissionError, code=401, errno=_e.EACCES):
    """No token where one is needed."""


class Forbidden(AuthError, PermissionError, code=402, errno=_e.EACCES):
    """The token or the capability does not allow this."""


class Expired(AuthError, PermissionError, code=403, errno=_e.EKEYEXPIRED, retry=True):
    """The token or the capability is over its time."""


class BadSignature(AuthError, PermissionError, code=404, errno=_e.EKEYREJECTED):
    """Not signed by a key of this cluster."""


class WrongCluster(AuthError, PermissionError, code=405, errno=_e.EACCES):
    """The peer belongs to another cluster."""


class ControlError(Gd2fsError):
    """The namespace and the control service."""


class NotFound(ControlError, FileNotFoundError, code=501, errno=_e.ENOENT):
    """No such path, file, session or node."""


class Exists(ControlError, FileExistsError, code=502, errno=_e.EEXIST):
    """The path is taken."""


class NotEmpty(ControlError, OSError, code=503, errno=_e.ENOTEMPTY):
    """The directory has entries; `recursive` deletes them too."""


class IsADirectory(ControlError, IsADirectoryError, code=504, errno=_e.EISDIR):
    """A file was expected."""


class NotADirectory(ControlError, NotADirectoryError, code=505, errno=_e.ENOTDIR):
    """A directory was expected."""


class Conflict(ControlError, OSError, code=506, errno=_e.EAGAIN, retry=True):
    """Somebody else changed it first; look again."""


class Unavailable(ControlError, ConnectionError, code=507, errno=_e.EAGAIN, retry=True, changed=True):
    """Control can't be reached, or can't answer now."""


class Invalid(ControlError, ValueError, code=508, errno=_e.EINVAL):
    """An argument that control refuses; the message names the field."""


class NoNodes(ControlError, OSError, code=509, errno=_e.ENOSPC, retry=True):
    """No living node has room for the file."""


class Unsupported(ControlError, NotImplementedError, code=510, errno=_e.EOPNOTSUPP):
    """Known, and not built yet: refused, never silently weaker."""


class KvError(Gd2fsError):
    """Sessions, segments and plans."""


class PlanExpired(KvError, OSError, code=601, errno=_e.ESTALE):
    """The plan is over its time, committed or aborted."""


class PlanSuperseded(KvError, OSError, code=602, errno=_e.ESTALE):
    """A retry of the same request has taken the plan's grant over."""


class Identity(KvError, ValueError, code=603, errno=_e.EINVAL):
    """KV cache of another identity: model, quantisation, adapter, format…"""


class ForkedError(Gd2fsError, RuntimeError, errno=_e.EPERM):
    """The client was made before a fork: its threads and connections live in the parent. Connect again in
    the child."""


class ClosedError(Gd2fsError, RuntimeError, errno=_e.EBADF):
    """The client is closed."""


def from_code(code: int, message: str = "") -> Gd2fsError:
    """The exception of a status code other than 0; an unknown one (a newer peer) becomes `Internal`."""
    known = BY_CODE.get(code)
    return known(message) if known else Internal(f"{message} (status {code} is not known here)".lstrip())
