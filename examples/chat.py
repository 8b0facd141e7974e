"""A conversation through the gateway; what each turn found in GD2FS stands beside the answer.

Start `gd2fs up`, `gd2fs engine` and `gd2fs gateway` first, then run `python examples/chat.py`. Nothing but
the session id makes the turns a conversation: each could go to another engine.
"""

from __future__ import annotations

import json
import urllib.request

GATEWAY = "http://127.0.0.1:8000"
QUESTIONS = (
    "Carrick has three piers. The north pier is for fishing boats. Which pier is for fishing boats?",
    "The south pier is for the ferry, which sails at nine. When does the ferry sail?",
    "How many piers does Carrick have?",
)


def ask(messages: list[dict[str, str]], session: str | None) -> dict:
    body: dict = {"messages": messages, "max_tokens": 24, "temperature": 0}
    if session:
        body["session_id"] = session
    request = urllib.request.Request(
        f"{GATEWAY}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def main() -> None:
    messages: list[dict[str, str]] = []
    session = None
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        reply = ask(messages, session)
        session = reply["session_id"]
        messages.append(reply["choices"][0]["message"])
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"> {question}\n{messages[-1]['content'].strip()}")
        print(f"  [{cached} of {usage['prompt_tokens']} prompt tokens from GD2FS]\n")
    print(f"session {session}: gd2fs sessions show {session}")


if __name__ == "__main__":
    main()
