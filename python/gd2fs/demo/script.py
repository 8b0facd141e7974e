"""The conversation: a long text, handed over in pieces with a question each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHIPPED = Path(__file__).with_name("skerrow_light.md")
# The second turn is the first that can hit; the kill needs a turn before and two after it.
TURNS_MIN = 6


@dataclass(frozen=True)
class Piece:
    """What the user says in one turn."""

    text: str
    question: str

    @property
    def message(self) -> dict[str, str]:
        return {"role": "user", "content": f"{self.text}\n\n{self.question}"}


def read_script(path: Path | None) -> list[Piece]:
    """Reads a conversation: one `## ` section a turn, whose last paragraph begins with `> ` and is the
    question.

    Raises ValueError naming the section that has no text or no question.
    """
    path = path or SHIPPED
    pieces = []
    for section in path.read_text().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        text, mark, question = body.strip().rpartition("\n> ")
        if not mark or not text.strip() or not question.strip():
            raise ValueError(
                f"{path}: section {title!r} needs text, then a question in a line that begins with '> '"
            )
        pieces.append(Piece(" ".join(text.split()), " ".join(question.split())))
    if len(pieces) < TURNS_MIN:
        raise ValueError(
            f"{path}: at least {TURNS_MIN} sections that begin with '## ' are needed, not {len(pieces)}"
        )
    return pieces
