"""Signed text against the golden vectors that the Rust crate reads too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.signing import Capability, Keys, PlanToken, Token

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "signing.json").read_text())
KINDS: dict[str, Any] = {"token": Token, "cap": Capability, "plan": PlanToken}


def _named(case: dict[str, Any]) -> str:
    return str(case["name"])


@pytest.mark.parametrize("case", VECTORS["valid"], ids=_named)
def test_valid_text(case: dict[str, Any]) -> None:
    keys = Keys.parse(case["keys"])
    thing = keys.verify(case["text"], KINDS[case["typ"]], now=1_899_999_999)
    assert thing.payload() == case["payload"]
    assert keys.sign(thing) == case["text"]
    assert Keys.parse(keys.to_text()).sign(thing) == case["text"]


@pytest.mark.parametrize("case", VECTORS["invalid"], ids=_named)
def test_invalid_text_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(errors.BadSignature):
        Keys.parse(case["keys"]).verify_ever(case["text"], KINDS[case["typ"]])


@pytest.mark.parametrize("text", VECTORS["bad_keys"])
def test_bad_keys_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises(errors.Invalid, match="GD2FS_CLUSTER_KEYS") as caught:
        Keys.parse(text)
    assert "00112233" not in str(caught.value)


def test_every_changed_character_is_noticed() -> None:
    keys = Keys.parse("7:00112233445566778899aabbccddeeff")
    text = keys.sign(Token("a", "client", 2**40))
    for place, letter in enumerate(text):
        other = "A" if letter != "A" else "B"
        with pytest.raises(errors.BadSignature):
            keys.verify(text[:place] + other + text[place + 1 :], Token)


def test_expiry_is_exact() -> None:
    keys = Keys.development()
    text = keys.sign(Token("a", "client", 1000))
    assert keys.verify(text, Token, now=999.9).tenant == "a"
    with pytest.raises(errors.Expired, match="1000"):
        keys.verify(text, Token, now=1000)
    with pytest.raises(errors.Expired):
        keys.verify(text, Token)
    assert keys.verify(keys.sign(Token("a", "client", int(time.time()) + 60)), Token)


def test_keys_do_not_show_in_what_is_printed() -> None:
    assert "0011" not in repr(Keys.parse("7:00112233445566778899aabbccddeeff"))
