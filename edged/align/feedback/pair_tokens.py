"""The tokenizing of stored pairs: the prompt's tokens, the answer's, then an EOS where it is not cut, as in serving."""

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, Protocol, cast

from edged.align.feedback.pair import PairState, TokenPair
from edged.store.feedback import TAKEN_BACK, PairRow, Side

_IDS: dict[int, int] = {}
"""Each token id as one object: a backlog of pairs would else hold an integer for every token."""
_MIN_PROMPT_SHARE = 4
"""Divisor: an over-long pair's prompt keeps at least a quarter of its tokens, for answers need something to answer."""


class UnusablePrompt(ValueError):
    """A prompt that came as tokens of another tokenizer than the served model's."""


class PairTokenizer(Protocol):
    """The tokenizer's interface to pairs. `eos_ids` are all tokens that end an answer, `eos_id` is training's."""

    @property
    def eos_id(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def refuses(self) -> bool: ...
    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_exchange(
        self,
        before: str | Sequence[Mapping[str, Any]],
        text: str,
        arguments: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> list[int]: ...
    def encode_answer(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def demand_rows(tokenizer: PairTokenizer, pair: Mapping[str, Any]) -> None:
    """Check that the model may have each token of a pair (`messages` or `prompt`, `chosen`, `rejected`).

    Texts are tokenized only where the tokenizer refuses some. Raises what the tokenizer raises.
    """
    if tokenizer.refuses:
        before = pair.get("messages") or pair.get("prompt") or ""
        for side in ("chosen", "rejected"):
            tokenizer.encode_exchange(before, pair.get(side) or "")


def tokenize_pair(tokenizer: PairTokenizer, row: PairRow, max_tokens: int) -> tuple[TokenPair, str]:
    """Tokenize a pair; returns it and a note when something had to be cut ("" otherwise).

    A single rating has the tokens of its answer alone.
    Where edged generated an answer, the generated tokens and their prompt's are used, unless they no longer decode to
    the stored text, as after a change of the model. Other answers are tokenized with their prompt as one text, and
    begin where its tokens differ from the prompt's own. Where that is before the prompt's end, as tokens join the two
    or the chat template writes the prompt differently, both answers begin there, as in TRL 1.16.
    `max_tokens` bounds prompt + chosen + rejected, EOS included: the prompt loses its start, down to a quarter of
    `max_tokens`; then the longer answer, or both, lose their ends.
    Raises UnusablePrompt, and what `tokenizer.render_chat` raises when the chat template refuses the messages.
    """
    sides = (row.chosen, row.rejected)
    stored = [_stored_ids(tokenizer, side, max_tokens) for side in sides]
    prompt = _prompt(tokenizer, row, any(ids is not None for ids in stored))
    fresh = [side for side, ids in zip(sides, stored, strict=True) if ids is None and side.text]
    joint, answers = _fresh(tokenizer, row, prompt, fresh) if fresh else (0, [])
    prompt, joined = prompt[: len(prompt) - joint], prompt[len(prompt) - joint :]
    chosen, rejected = (
        [*joined, *ids] if ids is not None else answers.pop(0) if side.text else []
        for ids, side in zip(stored, sides, strict=True)
    )
    notes = []
    if not prompt:
        prompt = [tokenizer.eos_id]
        notes.append("the prompt has no tokens: EOS stands for it")
    least = min(len(prompt), max(1, max_tokens // _MIN_PROMPT_SHARE))
    room = max(2, max_tokens - least - 2)
    kept = _share(room, len(chosen), len(rejected))
    if len(chosen) + len(rejected) > sum(kept):
        notes.append(f"the answers lost their ends: {sum(kept)} tokens are learned (max {max_tokens})")
    # An answer that was cut has no end to learn.
    chosen, rejected = (
        [*ids, tokenizer.eos_id] if side.text and keep == len(ids) else ids[:keep]
        for ids, keep, side in zip((chosen, rejected), kept, sides, strict=True)
    )
    if (cut := len(prompt) + len(chosen) + len(rejected) - max_tokens) > 0:
        cut = min(cut, len(prompt) - 1)
        prompt = prompt[cut:]
        notes.append(f"the prompt lost its start: {len(prompt)} tokens are learned (max {max_tokens})")
    pair = TokenPair(
        pair_id=row.id,
        adapter=row.adapter,
        prompt=_same(prompt),
        chosen=_same(chosen),
        rejected=_same(rejected),
        weight=row.weight,
        ref_chosen_logp=row.ref_chosen_logp,
        ref_rejected_logp=row.ref_rejected_logp,
        epochs_done=row.epochs_done,
        state=cast(PairState, row.state),
        again=row.note.startswith(TAKEN_BACK),
        first_party=row.direct,
        trusted=row.trusted,
        own=(stored[0] is not None, stored[1] is not None),
    )
    return pair, "; ".join(notes)


def _same(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(_IDS.setdefault(token, token) for token in ids)


def _stored_ids(tokenizer: PairTokenizer, side: Side, max_tokens: int) -> list[int] | None:
    """The generated tokens without the EOS that ended them; None where none are stored that decode to the text.

    Of more than can be learned the first `max_tokens` are returned: the store may have no more.
    """
    if side.token_ids is None or any(not 0 <= token < tokenizer.vocab_size for token in side.token_ids):
        return None
    ids = list(side.token_ids[:max_tokens])
    while ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    if side.beside:
        decoded, names = tokenizer.decode(ids), [call["function"]["name"] for call in side.beside.get("tool_calls", ())]
        parts = [side.content, side.beside.get("reasoning_content", ""), *names]
        return ids if all(part in decoded for part in parts) or len(ids) == max_tokens else None
    # Tokenizers that mark words by a leading space decode the first one with or without it, by context.
    decoded, text = tokenizer.decode(ids).lstrip(), side.text.lstrip()
    # Those of a longer answer may end within a character.
    same = text.startswith(decoded.rstrip("\ufffd")) if len(ids) == max_tokens else decoded == text
    return ids if same else None


def _fresh(
    tokenizer: PairTokenizer, row: PairRow, prompt: Sequence[int], sides: Sequence[Side]
) -> tuple[int, list[list[int]]]:
    """Tokenize answers as the model would have generated them: in a chat, as the template continues the prompt.

    Returns how many of the prompt's last tokens the answers begin with, or what replaces these, and each one's tokens.
    """
    before = row.messages if row.messages is not None else row.prompt
    before = tokenizer.decode(prompt) if before is None else before
    about = row.template_arguments
    own = tokenizer.encode_prompt(before) if isinstance(before, str) else tokenizer.render_chat(before, about)
    exchanges = [tokenizer.encode_exchange(before, side.content, about, side.beside) for side in sides]
    start = len(commonprefix([own, *exchanges]))
    joint = len(own) - start
    if joint and list(prompt[-joint:]) != own[start:]:
        # The prompt came as tokens that its text has not.
        return 0, [tokenizer.encode_answer(side.text) for side in sides]
    return joint, [ids[start:] for ids in exchanges]


def _prompt(tokenizer: PairTokenizer, row: PairRow, same_tokens: bool) -> list[int]:
    """The prompt's stored tokens when the model still has the tokenizer that made them, else fresh ones.

    Raises UnusablePrompt for a prompt of tokens alone that another model's tokenizer made.
    """
    bare = row.messages is None and row.prompt is None
    if row.prompt_ids is not None and bare:
        answered = row.chosen.token_ids is not None or row.rejected.token_ids is not None
        beyond = any(not 0 <= token < tokenizer.vocab_size for token in row.prompt_ids)
        if beyond or (answered and not same_tokens):
            raise UnusablePrompt("its prompt came as tokens of another model's tokenizer")
    if row.prompt_ids is not None and (same_tokens or bare):
        return list(row.prompt_ids)
    if row.messages is not None:
        return tokenizer.render_chat(row.messages, row.template_arguments)
    return tokenizer.encode_prompt(row.prompt or "")


def _share(room: int, one: int, other: int) -> tuple[int, int]:
    """Split `room` between `one` and `other` tokens: the shorter stays whole where it takes no more than half."""
    kept = min(one, max(room // 2, room - other))
    return kept, min(other, room - kept)
