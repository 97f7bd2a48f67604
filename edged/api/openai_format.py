"""OpenAI's response objects as JSON-ready dicts."""

from collections.abc import Sequence

from edged.api.generation import ChoiceText, Generation, TokenLogprob
from edged.api.requests import CompletionRequest
from edged.http.errors import ApiError
from edged.http.json_format import Json, dumps, server_event
from edged.text.tokenizer import Detokenizer, Tokenizer


def usage(generation: Generation) -> Json:
    """Token counts over all choices; the prompt counts once."""
    prompt = len(generation.completion.prompt_ids)
    finish = generation.answers[0].finish
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generation.num_tokens - prompt,
        "total_tokens": generation.num_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.cached_tokens if finish else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reasoning_tokens for each in generation.answers)},
    }


def fingerprint(generation: Generation) -> str:
    """The name of the weights that answered: `ADAPTER@VERSION`, or `base` for no adapter or one without a version.

    `+taste@VERSION` follows where a taste model has chosen the answer, `+edits` where it was edited as its user does.
    """
    version, chooser = generation.version, generation.chooser
    weights = f"{generation.completion.adapter}@{version}" if version else "base"
    taste = f"+taste@{chooser.taste.version:08x}" if chooser and generation.chosen_of > 1 else ""
    return weights + taste + "+edits" * generation.edited


def tier(generation: Generation) -> str:
    """The class in which it was served, in OpenAI's words."""
    return "flex" if generation.body.service_tier == "flex" else "default"


def notes(generation: Generation, answer: ChoiceText) -> Json:
    """Remarks on an answer at its end: how it was chosen, whether it was edited, how it was read."""
    told: Json = {"best_of": generation.chosen_of} if generation.chosen_of > 1 else {}
    if answer.edited:
        told["edited"] = True
    if answer.finish is not None and (reader := answer.finish.reader) is not None:
        told |= {
            "qoe": round(reader.qoe, 4),
            "qoe_paper": round(reader.qoe_paper, 4),
            "stall_ms": round(reader.stall_s * 1e3, 1),
            "tokens_per_second": round(reader.pace, 2),
        }
    return told


def full(generation: Generation) -> Json:
    """The response of a request that does not stream."""
    choices: list[Json] = []
    for answer in generation.answers:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": answer.calls}
        said: Json = {"message": message} if generation.is_chat else {"text": answer.text}
        logprobs = None if generation.sampling.logprobs is None else _logprobs(generation, answer.take_logprobs())
        if isinstance(generation.body, CompletionRequest) and generation.body.echo:
            said["text"], logprobs = _echoed(generation, answer, logprobs)
        choices.append({"index": answer.index, **said, "logprobs": logprobs, "finish_reason": answer.reason})
    return {
        **_head(generation),
        "system_fingerprint": fingerprint(generation),
        "service_tier": tier(generation),
        "choices": choices,
        "usage": usage(generation),
    }


class ChunkStream:
    """The chunks of an answer that is streamed, as events."""

    def __init__(self, generation: Generation) -> None:
        options = generation.body.stream_options
        self._generation, self._usage = generation, bool(options and options.include_usage)

    def begin(self) -> bytes:
        """Nothing: a stream begins with its first token."""
        return b""

    def update(self, touched: Sequence[ChoiceText]) -> bytes:
        """The chunks of what is new."""
        extra: Json = {"usage": None} if self._usage else {}
        made = ((answer, {**chunk, **extra}) for answer in touched for chunk in chunks(self._generation, answer))
        return b"".join(chunk_event(self._generation, answer, chunk) for answer, chunk in made)

    def end(self) -> bytes:
        """The usage, if it was asked for, and the mark of the end."""
        return (server_event(usage_chunk(self._generation)) if self._usage else b"") + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        """The event of a failure."""
        return server_event(error.body())


def chunks(generation: Generation, answer: ChoiceText) -> list[Json]:
    """Return what is new of one choice as chunks of a stream.

    The end is a chunk of its own, without text: clients stop reading there. All content comes before the first call,
    and each call is whole and has a chunk of its own: some clients read no further in a chunk, and no content then.
    """
    text, logprobs, reasoning = answer.take_text(), answer.take_logprobs(), answer.take_reasoning()
    first = not answer.announced
    choices: list[Json] = []
    if text or logprobs or first or reasoning:
        answer.announced = True
        delta: Json = {"role": "assistant"} if first else {}
        delta |= ({"reasoning_content": reasoning} if reasoning else {}) | ({"content": text} if text or first else {})
        said: Json = {"delta": delta} if generation.is_chat else {"text": text}
        shown = _logprobs(generation, logprobs) if logprobs else None
        choices.append({**said, "logprobs": shown, "finish_reason": None})
    finish = None if answer.ended else answer.finish
    if finish is not None:
        answer.ended = True
        for number, call in [*enumerate(answer.calls)][answer.told_calls :]:
            delta = {"tool_calls": [{"index": number, **call}]}
            choices.append({"delta": delta, "logprobs": None, "finish_reason": None})
        end: Json = {"delta": {}} if generation.is_chat else {"text": ""}
        choices.append({**end, "logprobs": None, "finish_reason": answer.reason})
    head = _head(generation, chunk=True)
    made = [{**head, "choices": [{"index": answer.index, **choice}]} for choice in choices]
    if finish is not None and (told := notes(generation, answer)):
        made[-1]["edged"] = told
    return made


def chunk_event(generation: Generation, answer: ChoiceText, chunk: Json) -> bytes:
    """Return a chunk as an event; one that another node of a fleet may go on after says behind it what the client has.

    That is a comment, `BegunChoice` with what else `BegunStream` needs; an ingress takes it out.
    """
    event = server_event(chunk)
    if not generation.resumable:
        return event
    (choice,) = chunk["choices"]
    answer.told_calls += len(choice.get("delta", {}).get("tool_calls", ()))
    told = {"index": answer.index, **answer.take_progress(), "calls": answer.told_calls}
    told["ended"] = choice["finish_reason"] is not None
    return event[:-1] + f": {dumps(told | {'prompt': generation.prompt_sum})}\n\n".encode()


def usage_chunk(generation: Generation) -> Json:
    """The last chunk of a stream that asked for usage."""
    head = _head(generation, chunk=True)
    return {**head, "system_fingerprint": fingerprint(generation), "choices": [], "usage": usage(generation)}


def _head(generation: Generation, chunk: bool = False) -> Json:
    known = generation.completion
    kind = f"{known.object}.chunk" if chunk and generation.is_chat else known.object
    return {"id": known.id, "object": kind, "created": generation.created_s, "model": known.model}


def _logprobs(generation: Generation, entries: Sequence[TokenLogprob]) -> Json:
    return (chat_logprobs if generation.is_chat else text_logprobs)(entries, generation.services.tokenizer)


def _echoed(generation: Generation, answer: ChoiceText, logprobs: Json | None) -> tuple[str, Json | None]:
    """Return an answer's text, and its log-probabilities if there are any, behind those of the prompt."""
    tokenizer, prompt = generation.services.tokenizer, generation.completion
    detokenizer, text, offsets = Detokenizer(tokenizer), "", list[int]()
    for token in prompt.prompt_ids:
        offsets.append(len(text))
        text += detokenizer.push(token)
    text += detokenizer.finish()
    if prompt.prompt is not None:
        text = prompt.prompt
    if logprobs is None:
        return text + answer.text, None
    tops = [_by_text(top, tokenizer) for _, top in answer.prompt]
    before: Json = {
        "tokens": [tokenizer.token_text(token) for token in prompt.prompt_ids],
        # Nothing comes before the first.
        "token_logprobs": [None, *(logprob for logprob, _ in answer.prompt)],
        "top_logprobs": [None, *tops],
        "text_offset": offsets,
    }
    behind: Json = logprobs | {"text_offset": [offset + len(text) for offset in logprobs["text_offset"]]}
    return text + answer.text, {name: [*entries, *behind[name]] for name, entries in before.items()}


def joined(answers: Sequence[Json]) -> Json:
    """Return the answers to several prompts as one, which has the first's name."""
    choices = [choice for each in answers for choice in each["choices"]]
    counts = [each["usage"] for each in answers]
    details = {
        f"{kind}_tokens_details": {
            name: sum(count[f"{kind}_tokens_details"][name] for count in counts)
            for name in counts[0][f"{kind}_tokens_details"]
        }
        for kind in ("prompt", "completion")
    }
    total = {f"{name}_tokens": sum(c[f"{name}_tokens"] for c in counts) for name in ("prompt", "completion", "total")}
    numbered = [{**choice, "index": index} for index, choice in enumerate(choices)]
    return {**answers[0], "choices": numbered, "usage": total | details}


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Json:
    """Log-probabilities (natural logarithm) in the chat shape, with the bytes of each token."""

    def token(token_id: int, logprob: float) -> Json:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*other) for other in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def text_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Json:
    """Log-probabilities (natural logarithm) in the older shape: four parallel lists."""
    return {
        "tokens": [tokenizer.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_by_text(entry.top, tokenizer) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_text(top: Sequence[tuple[int, float]], tokenizer: Tokenizer) -> dict[str, float]:
    """Return likeliest tokens by their text, which several may share (bytes that are no text): the best of them."""
    return {tokenizer.token_text(token): value for token, value in reversed(top)}
