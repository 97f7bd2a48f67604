"""OpenAI's Responses API: a chat's answer as output items, and the events that tell of them."""

from collections.abc import Iterator, Sequence

from edged.api.generation import ChoiceText, Generation
from edged.api.openai_format import chat_logprobs, fingerprint, notes, tier, usage
from edged.api.openai_responses import ResponseChat
from edged.http.errors import ApiError
from edged.http.json_format import Json, server_event

_FORMS = {"reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text")}
"""Items that have text: the beginning of their ids, and the type of their only part."""


def full(generation: Generation) -> Json:
    """The response of a request that does not stream."""
    output, (answer,) = ResponseOutput(generation), generation.answers
    for _ in output.grow(answer):
        pass
    return output.response()


class ResponseOutput:
    """The output items of a response as its answer grows, and the events that tell of them."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._items = generation, list[Json]()
        self._open: dict[str, Json] = {}
        """Items to which text may still be added, by type."""
        self._logprobs: list[Json] = []
        """Those of tokens whose text has not come."""
        self._number = 0

    def begin(self) -> bytes:
        """The first events."""
        return b"".join(self._event(kind, response=self.response()) for kind in ("created", "in_progress"))

    def update(self, touched: Sequence[ChoiceText]) -> bytes:
        """The events of what is new."""
        return b"".join(event for answer in touched for event in self.grow(answer))

    def end(self) -> bytes:
        """The last event, with the whole response."""
        response = self.response()
        return self._event(response["status"], response=response)

    def error(self, error: ApiError) -> bytes:
        """The event of a failure; `error` within it is what clients of both APIs look for."""
        body = error.body()
        return self._event("error", **body["error"], **body)

    def grow(self, answer: ChoiceText) -> Iterator[bytes]:
        """Add what is new of the answer; yields the events of it."""
        if answer.ended:
            return
        reasoning, text, logprobs = answer.take_reasoning(), answer.take_text(), answer.take_logprobs()
        # Those of the reasoning, before any content, are not the text's.
        said = [entry for entry in logprobs if entry.end or not answer.reasoning]
        self._logprobs += chat_logprobs(said, self._generation.services.tokenizer)["content"]
        if reasoning:
            yield from self._add("reasoning", reasoning)
        if text or (self._logprobs and "message" in self._open):
            yield from self._close("reasoning", "completed")
            entries, self._logprobs = self._logprobs, []
            yield from self._add("message", text, entries)
        if answer.finish is not None:
            answer.ended = True
            yield from self._finish(answer)

    def _finish(self, answer: ChoiceText) -> Iterator[bytes]:
        status = "incomplete" if answer.reason == "length" else "completed"
        if not (answer.calls or self._open):
            yield from self._add("message", "")
        for kind in _FORMS:
            yield from self._close(kind, status)
        for call in answer.calls:
            function = call["function"]
            item = self._item("fc", "function_call", call_id=call["id"], name=function["name"], arguments="")
            yield self._event("output_item.added", item, item=item)
            yield self._event("function_call_arguments.delta", item, delta=function["arguments"])
            item |= {"arguments": function["arguments"], "status": "completed"}
            told = {name: item[name] for name in ("arguments", "name")}
            yield self._event("function_call_arguments.done", item, **told)
            yield self._event("output_item.done", item, item=item)

    def _item(self, prefix: str, kind: str, **fields: object) -> Json:
        name = self._generation.completion.id.removeprefix("resp_")
        item = {"id": f"{prefix}_{name}_{len(self._items)}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        return item

    def _add(self, kind: str, text: str, logprobs: Sequence[Json] = ()) -> Iterator[bytes]:
        """Add text to the open item of a type, or to a new one."""
        prefix, part_type = _FORMS[kind]
        beside: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
        item = self._open.get(kind)
        if item is None:
            about: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = self._open[kind] = self._item(prefix, kind, content=[], **about)
            yield self._event("output_item.added", item, item=item)
            item["content"].append({"type": part_type, "text": "", **beside})
            yield self._event("content_part.added", item, content_index=0, part=item["content"][0])
        (part,) = item["content"]
        part["text"] += text
        told: Json = {"logprobs": [*logprobs]} if kind == "message" else {}
        if logprobs:
            part["logprobs"] += logprobs
        if text or logprobs:
            yield self._event(f"{part_type}.delta", item, content_index=0, delta=text, **told)

    def _close(self, kind: str, status: str) -> Iterator[bytes]:
        if (item := self._open.pop(kind, None)) is None:
            return
        (part,) = item["content"]
        item["status"] = status
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._event(f"{part['type']}.done", item, content_index=0, **told)
        yield self._event("content_part.done", item, content_index=0, part=part)
        yield self._event("output_item.done", item, item=item)

    def _event(self, kind: str, about: Json | None = None, **fields: object) -> bytes:
        """Return an event with its number, about an item or none."""
        name = kind if kind == "error" else f"response.{kind}"
        where: Json = {} if about is None else {"output_index": self._items.index(about)}
        if about is not None and "item" not in fields:
            where["item_id"] = about["id"]
        event = {**fields, "type": name, "sequence_number": self._number, **where}
        self._number += 1
        return f"event: {name}\n".encode() + server_event(event)

    def response(self) -> Json:
        """The response as it is now."""
        generation, (answer,) = self._generation, self._generation.answers
        body = generation.body
        assert isinstance(body, ResponseChat)
        asked, ended = body.asked, answer.ended
        cut = ended and answer.reason == "length"
        counts = usage(generation)
        form = (
            asked.text and asked.text.format and asked.text.format.model_dump(by_alias=True, exclude_none=True)
        ) or {"type": "text"}
        choice = asked.tool_choice
        told: Json = {
            "id": generation.completion.id,
            "object": "response",
            "created_at": generation.created_s,
            "status": "in_progress" if not ended else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": generation.completion.model,
            "output": self._items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "service_tier": tier(generation),
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": form},
            "tool_choice": (choice if isinstance(choice, str) else choice.model_dump()) if choice else "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": "disabled",
            "user": asked.user,
            "usage": None,
        }
        if not ended:
            return told
        details = counts["prompt_tokens_details"] | {"cache_write_tokens": 0}
        told["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": details,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }
        told["system_fingerprint"] = fingerprint(generation)
        said = notes(generation, answer)
        return told | ({"edged": said} if said else {})
