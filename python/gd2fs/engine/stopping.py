"""Where an answer ends: stop strings, found across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until a stop string appears. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be shown now. Once `stopped`, the rest is dropped."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def finish(self) -> str:
        """What was held back, when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
