"""What can go wrong with a peer."""

from __future__ import annotations


class PeerUnavailable(Exception):
    """The peer can't be measured on this machine; the message says why and what helps."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PeerFailed(Exception):
    """A process of a running peer ended, did not answer in time, or answered with an error."""


class WrongBytes(PeerFailed):
    """A read left other bytes in memory than those that were stored: its time means nothing."""
