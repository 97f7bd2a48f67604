"""OpenAI's response objects as JSON-ready dicts."""

from collections.abc import Sequence

from edged.api.generation import ChoiceText, Generation, TokenLogprob
from edged.http.json_format import Json
from edged.text.tokenizer import Tokenizer


def usage(generation: Generation) -> Json:
    """Token counts over all choices; the prompt counts once."""
    prompt = len(generation.completion.prompt_ids)
    finish = generation.answers[0].finish
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generation.num_tokens - prompt,
        "total_tokens": generation.num_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.cached_tokens if finish else 0},
    }


def fingerprint(generation: Generation) -> str:
    """The name of the weights that answered: `ADAPTER@VERSION`, or `base` for no adapter or one without a version.

    `+taste@VERSION` follows where a taste model has chosen the answer, `+edits` where it was edited as its user does.
    """
    version, chooser = generation.version, generation.chooser
    weights = f"{generation.completion.adapter}@{version}" if version else "base"
    taste = f"+taste@{chooser.taste.version:08x}" if chooser and generation.chosen_of > 1 else ""
    return weights + taste + "+edits" * generation.edited


def full(generation: Generation) -> Json:
    """The response of a request that does not stream."""
    choices: list[Json] = []
    for answer in generation.answers:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        said: Json = {"message": message} if generation.is_chat else {"text": answer.text}
        logprobs = None if generation.sampling.logprobs is None else _logprobs(generation, answer.take_logprobs())
        choices.append({"index": answer.index, **said, "logprobs": logprobs, "finish_reason": answer.reason})
    return {
        **_head(generation),
        "system_fingerprint": fingerprint(generation),
        "service_tier": "flex" if generation.body.service_tier == "flex" else "default",
        "choices": choices,
        "usage": usage(generation),
    }


def chunks(generation: Generation, answer: ChoiceText) -> list[Json]:
    """Return what is new of one choice as chunks of a stream.

    The end is a chunk of its own, without text: clients stop reading there.
    """
    text, logprobs = answer.take_text(), answer.take_logprobs()
    first = not answer.announced
    choices: list[Json] = []
    if text or logprobs or first:
        answer.announced = True
        delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        said: Json = {"delta": delta} if generation.is_chat else {"text": text}
        shown = _logprobs(generation, logprobs) if logprobs else None
        choices.append({**said, "logprobs": shown, "finish_reason": None})
    if answer.finish is not None:
        end: Json = {"delta": {}} if generation.is_chat else {"text": ""}
        choices.append({**end, "logprobs": None, "finish_reason": answer.reason})
    head = _head(generation, chunk=True)
    made = [{**head, "choices": [{"index": answer.index, **choice}]} for choice in choices]
    if answer.finish is not None and generation.chosen_of > 1:
        made[-1]["edged"] = {"best_of": generation.chosen_of}
    if answer.finish is not None and answer.edited:
        made[-1]["edged"] = made[-1].get("edged", {}) | {"edited": True}
    if answer.finish is not None and answer.finish.reader is not None:
        reader = answer.finish.reader
        made[-1]["edged"] = made[-1].get("edged", {}) | {
            "qoe": round(reader.qoe, 4),
            "qoe_paper": round(reader.qoe_paper, 4),
            "stall_ms": round(reader.stall_s * 1e3, 1),
            "tokens_per_second": round(reader.pace, 2),
        }
    return made


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
        "top_logprobs": [{tokenizer.token_text(other): value for other, value in entry.top} for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }
