"""A side that answers with what it was asked; `fail` makes it die. Run by test_interleave in a process of its own."""

from __future__ import annotations

import sys

from benchmarks.support.interleave import Conversation


def be_side(name: str) -> None:
    conversation = Conversation()
    print("a library's progress bar", flush=True)
    while True:
        question = conversation.question()
        if question.get("fail"):
            sys.exit("the disk is full")
        conversation.answer({"name": name, **question})
