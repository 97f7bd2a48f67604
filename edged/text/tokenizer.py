"""Text and tokens: the model's tokenizer, incremental detokenization, stop strings."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AddedToken, AutoConfig, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from edged.runtime import logs
from edged.text.answer_parser import AnswerForm, ParsedAnswer, known_templates
from edged.text.call_form import SAMPLES, CallForm, find_call_form, plain_call_form
from edged.text.remote_code import Untrusted, check_code, read_json

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD_CHARS = 3
"""A character has at most four bytes, so an unfinished one shows as at most three replacement characters."""
_BORDER = "\N{OBJECT REPLACEMENT CHARACTER}"
_STAND_IN = f"{_BORDER}answer{_BORDER}"
"""Marks where a chat template writes an answer."""
_PRIVATE = range(0x100000, 0x10FFFE)
"""Characters that no text has by right: each stands for a special token's name in a text."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: the `role` and `content` of each message, and what else chat templates read in it."""
Arguments = Mapping[str, Any]
"""Arguments of a chat template by name: `tools`, and those that a model's author made up."""
_TEXTS = ("content", "reasoning_content")
"""Fields of a message that are text: names of special tokens in them are no special tokens."""
_PREFIX_TOKENS = 64
"""Number of a prompt's last tokens that tell what the chat template wrote of the answer."""
_WRITE_ONE = "write one there with tokenizer.save_pretrained"
_WINDOW_TOKENS = 16
_KINDS = ("image", "video", "audio")
_MAX_NAMED = 5
"""Tokens without a row that a message names."""
_CONTEXT_TOKENS = 8
"""Number of tokens before the new ones that are decoded again: they decide leading spaces and how bytes join."""


class TokenizerError(ValueError):
    """Text cannot be turned into tokens; the message says why and what to do."""


class NoChatTemplate(TokenizerError):
    """The model has no chat template, so that messages cannot become a prompt."""


class Tokenizer:
    """The tokenizer and chat template that `save_pretrained` wrote beside a model, held against the model's size.

    All ids that reach the model come from here or pass `check_text`. Safe to use from several threads: nothing in the
    tokenizer changes after `load`.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        generation_eos: Sequence[int] = (),
        vocab_size: int | None = None,
        arguments: Arguments | None = None,
        placeholders: Iterable[int] = (),
    ) -> None:
        """`vocab_size` is the model's number of tokens, by default the tokenizer's; it may be larger (padded).

        `arguments` are the chat template's where a request has no other. `placeholders` are tokens in whose place the
        model's towers put an image, a video or a sound. Raises TokenizerError.
        """
        self._tokenizer, self._name, self._arguments = tokenizer, name, dict(arguments or {})
        self.form: AnswerForm | None = None
        """The form of the model's answers, where a response template is known that fits the chat template."""
        ids = {int(token_id): token for token, token_id in tokenizer.get_vocab().items()}
        self._size = max(ids, default=-1) + 1
        self.vocab_size: int = self._size if vocab_size is None else vocab_size
        """Number of rows of the model's embedding, and of scores of its head."""
        self.rowless = {token_id: ids[token_id] for token_id in sorted(ids) if token_id >= self.vocab_size}
        """Tokens that have no row in the embedding, by id: texts that contain one are refused."""
        self._placeholders = frozenset(placeholders)
        self.refuses = bool(self.rowless or self._placeholders)
        """Whether there are tokens that no text may have: those without a row, and those of images."""
        own = tokenizer.eos_token_id
        ends = [*([] if own is None else [int(own)]), *generation_eos]
        known = [token for token in ends if 0 <= token < self.vocab_size]
        self._unknown_ends = sorted(set(ends).difference(known))
        if not known:
            way_out = "set eos_token in its tokenizer_config.json or eos_token_id in its generation_config.json"
            seen = f" among its {self.vocab_size} tokens ({self._unknown_ends} are not)" if ends else ""
            raise TokenizerError(f'model "{name}" has no end-of-sequence token{seen}: {way_out}')
        self.eos_id: int = known[0]
        """The token that ends an answer in training: the tokenizer's, as TRL appends it, else the first configured."""
        self.eos_ids: frozenset[int] = frozenset(known)
        """All tokens that end an answer in serving."""
        named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {token_id: AddedToken(str(name), special=True) for token_id, name in named.items()}
        self._special_tokens |= {token_id: token for token_id, token in added if token.special or token_id in named}
        self._special_name = re.compile(any_of(map(str, self._special_tokens.values())) or "(?!)")
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()} if _joins_bytes(tokenizer) else None
        self.token_bytes = cache(self._bytes_of)
        """The bytes that one token stands for, with its leading space; a special token's name."""
        # What is too long is refused with a reason; the library's own warning would only be in the log.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        tokenizer.encode("", add_special_tokens=False)  # clears a saved truncation once, while nobody else reads
        # At once: a large vocabulary takes seconds to copy, for which no request is to wait.
        self._plain = self._plain_copy()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        trust_remote_code: bool = False,
        arguments: Arguments | None = None,
        response_template: str = "",
    ) -> Tokenizer:
        """Load from a model's directory; its own Python code runs only where that is trusted.

        `arguments` as above; `response_template` is a JSON file that stands for what the model's own files say.
        Raises TokenizerError that names it and what is missing.
        """
        try:
            check_code(Path(directory), trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
        except Untrusted as error:
            raise TokenizerError(f'model "{directory}" is not loaded: {error}') from None
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, TypeError, ... here
            why = f"no usable tokenizer ({logs.first_line(error)})"
            raise TokenizerError(f'model "{directory}" has {why}: {_WRITE_ONE}') from error
        if len(tokenizer) == 0 or not tokenizer.encode("a", add_special_tokens=False):
            raise TokenizerError(f'model "{directory}" has no tokenizer: {_WRITE_ONE}')
        if not tokenizer.chat_template:
            # Wrappers with towers keep it in a file of their processor.
            tokenizer.chat_template = read_json(Path(directory) / "chat_template.json").get("chat_template")
        vocab_size, placeholders = _model_tokens(directory, trust_remote_code)
        eos = _generation_eos(Path(directory))
        loaded = cls(tokenizer, str(directory), eos, vocab_size, arguments, placeholders)
        loaded._find_form(read_json(Path(directory) / "config.json").get("model_type"), response_template)
        return loaded

    def for_grammars(self) -> LLTokenizer:
        """Return what llguidance needs of the tokens, with those that pad the vocabulary. Raises TokenizerError."""
        ends = [self.eos_id, *sorted(self.eos_ids - {self.eos_id})]
        try:
            return from_tokenizer(self._tokenizer, max(self._size, self.vocab_size), ends)
        except Exception as error:  # the library reads the tokenizer's whole definition, and knows not all kinds
            raise TokenizerError(f"the tokens of this model's tokenizer cannot be matched: {error}") from error

    def check(self, ids: Iterable[int]) -> None:
        """Raise TokenizerError, which names the largest of the `ids`, unless all are tokens of the model."""
        if (largest := max(ids, default=0)) >= self.vocab_size:
            named = f' ("{self.rowless[largest]}")' if largest in self.rowless else ""
            raise TokenizerError(f"token id {largest}{named} is not one of this model's {self.vocab_size} tokens")

    def check_text(self, ids: Collection[int]) -> None:
        """Raise TokenizerError unless all of the `ids` are tokens of the model, and none stands for an image."""
        self.check(ids)
        if found := self._placeholders.intersection(ids):
            named = self._tokenizer.convert_ids_to_tokens(min(found))
            stands = "stands for an image, a video or a sound"
            raise TokenizerError(f'token id {min(found)} ("{named}") {stands}: this model reads text only')

    def problems(self) -> list[str]:
        """Return what in the tokenizer's files does not fit the model, for people to mend: the start is not refused."""
        found, trial = [], [{"role": "user", "content": "a"}]
        if self.writes_tools and (self.form is None or not self.form.has_calls):
            found.append("its chat template writes tools, but calls stay text: set model.response_template")
        if self.rowless:
            named = ", ".join(f'{token_id} "{token}"' for token_id, token in [*self.rowless.items()][:_MAX_NAMED])
            more = f" and {len(self.rowless) - _MAX_NAMED} more" if len(self.rowless) > _MAX_NAMED else ""
            rows = f"have no row in the model's embedding of {self.vocab_size}: texts with one are refused"
            found.append(f"tokens of its tokenizer {rows}: {named}{more}")
        if self._unknown_ends:
            ids = ", ".join(map(str, self._unknown_ends))
            found.append(f"end tokens that are not among the model's {self.vocab_size} end no answer: {ids}")
        for what, encode in {
            "plain prompts are refused": lambda: self.encode_prompt("a"),
            "chats are refused": lambda: self.render_chat(trial),
            "answers in chats are not learned": lambda: self.encode_exchange(trial, "a"),
        }.items():
            try:
                encode()
            except NoChatTemplate:
                break
            except TokenizerError as error:
                found.append(f"{what}: {error}")
        return found

    def render_chat(self, messages: Messages, arguments: Arguments | None = None) -> list[int]:
        """Return the tokens of a conversation up to where the assistant's answer starts.

        Raises NoChatTemplate, or TokenizerError with the template's own complaint (roles in a wrong order, ...).
        """
        hidden = self._hide(text for message in messages for text in _texts(message))
        return self._encode(self._chat_text(messages, True, hidden, arguments), hidden)

    def takes(self, name: str) -> bool:
        """Whether the chat template names an argument, so that it may change prompts."""
        template = self._tokenizer.chat_template
        templates = template.values() if isinstance(template, dict) else [template or ""]
        return any(re.search(rf"\b{re.escape(name)}\b", each) for each in templates)

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the chat template writes tools, calls and what came of these: marked ones are looked for."""
        tool, words, call, value, answer = (f"marked{_BORDER}{number}" for number in range(5))
        try:
            text = self._chat_text(_called(call, value, answer), True, {}, {"tools": [_tool(tool, words)]})
        except TokenizerError:
            return False
        return all(mark in text for mark in (tool, words, call, value, answer))

    def fits(self, form: AnswerForm) -> bool:
        """Whether a form is that of the chat template: a call that it writes is read as that call."""
        asked, arguments = _called("marked_name", "marked", ""), {"tools": [_tool("marked_name", "")]}
        try:
            if form.begun(self._chat_text(asked[:1], True, {})) is None:
                return False
            if not (form.has_calls and self.writes_tools):
                return True
            written = form.begun(self._chat_text(asked[:2], False, {}, arguments)) or ""
        except TokenizerError:
            return False
        function = {"name": "marked_name", "arguments": '{"key": "marked"}'}
        return _calls_in(form, written, arguments["tools"]) == [function]

    def _find_form(self, model_type: str | None, response_template: str) -> None:
        """Find the form of answers, in the file `response_template` where it names one. Raises TokenizerError."""
        if response_template:
            try:
                form = AnswerForm(json.loads(Path(response_template).read_text("utf-8")))
            except (OSError, ValueError, TypeError, AttributeError, re.error) as error:
                told = f'model.response_template = "{response_template}" cannot be used'
                raise TokenizerError(f"{told}: {error}; give a JSON file as transformers' docs describe it") from None
            if not self.fits(form):
                told = "does not read what the model's chat template writes"
                raise TokenizerError(f'model.response_template = "{response_template}" {told}: correct one of them')
            self.form = form
            return
        if self.writes_tools or "think" in str(self._tokenizer.chat_template):
            for template in known_templates(self._tokenizer, model_type):
                with suppress(ValueError, TypeError, AttributeError, re.error):
                    if self.fits(form := AnswerForm(template)):
                        self.form = form
                        return

    @cached_property
    def _shown(self) -> frozenset[int]:
        """Special tokens that are marks in answers."""
        forms = [form for form in (self.form, self.call_form.form) if form is not None]
        shown = ((token, str(name)) for token, name in self._special_tokens.items())
        return frozenset(token for token, name in shown if any(form.names(name) for form in forms))

    def parsed(
        self, prompt_ids: Sequence[int], tools: Sequence[Any] | None, must_call: bool = False
    ) -> ParsedAnswer | None:
        """Return what reads the answer to a chat; calls are read where there are `tools`. None: it is all content.

        An answer that `must_call` has the form of `call_form`.
        """
        form = self.call_form.form if must_call else self.form
        if form is None:
            return None
        hidden = self._special_name if self._shown else re.compile("(?!)")
        return ParsedAnswer(
            form, self._prompt_end(prompt_ids), tools, hidden, self.call_form.closing if must_call else ""
        )

    def _prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, with special tokens by name."""
        return self._decode(prompt_ids[-_PREFIX_TOKENS:], frozenset(self._special_tokens))

    @cached_property
    def call_form(self) -> CallForm:
        """The form of calls that a grammar can have the model write."""
        if self.form is not None and self.form.has_calls and self.writes_tools:
            ends = re.compile(f"({'|'.join(re.escape(self.token_text(token)) for token in self.eos_ids)})")
            tools = [_tool(name, "") for name, _ in SAMPLES]
            turn = {"role": "assistant", "content": ""}
            calls = [_called(name, value, "")[1]["tool_calls"][0] for name, value in SAMPLES]
            for count in (2, 1):
                turns: Messages = [{"role": "user", "content": "a"}, {**turn, "tool_calls": calls[:count]}]
                with suppress(TokenizerError):
                    written = self.form.begun(self._chat_text(turns, False, {}, {"tools": tools})) or ""
                    found = find_call_form(self.form, written, ends)
                    if found is not None and len(_calls_in(self.form, written, tools)) == count:
                        return found
        return plain_call_form(self.form)

    def reasoning_before(self, prompt_ids: Sequence[int]) -> tuple[str, str, bool] | None:
        """Return the marks of the reasoning that comes before the content of the answer to a chat, and whether the
        prompt has begun it; None where none comes."""
        marks = self.form.marks_of_reasoning if self.form is not None else None
        parsed = self.parsed(prompt_ids, None)
        if marks is None or parsed is None or marks[1] not in str(self._tokenizer.chat_template):
            return None
        if self._prompt_end(prompt_ids).rstrip().endswith(marks[1]):
            return None
        return *marks, parsed.thinking or not marks[0]

    def decode_marked(self, ids: Sequence[int]) -> str:
        """Return the text of tokens as `decode` does, with the special tokens that mark parts of answers by name."""
        return self._decode(ids, self._shown) if self._shown else self.decode(ids)

    def mark_of(self, token_id: int) -> str:
        """Return the name of a special token that marks parts of answers; "" for any other."""
        return self.token_text(token_id) if token_id in self._shown else ""

    def special_in(self, text: str) -> str:
        """Return the first special token that a text names; "" for none."""
        found = self._special_name.search(text)
        return found[0] if found else ""

    @cached_property
    def has_system_turn(self) -> bool:
        """Whether the chat template writes a system message before a user's."""
        return self._written_turns[0]

    @cached_property
    def turn_marks(self) -> list[str]:
        """Text that the chat template writes around contents, but for plain words: "[INST]", "Human:"."""
        parts = (part.strip() for piece in self._written_turns[1] for part in self._special_name.split(piece))
        return [part for part in dict.fromkeys(parts) if not re.fullmatch(r"\w*", part)]

    @cached_property
    def _writes_parts(self) -> bool:
        """Whether the chat template writes texts in lists of parts alone, as those of wrappers with towers may."""
        for content in (_STAND_IN, [{"type": "text", "text": _STAND_IN}]):
            # A template is a program: it raises what it likes.
            with suppress(Exception):
                if _STAND_IN in self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], tokenize=False
                ):
                    return content != _STAND_IN
        return False

    def special_among(self, ids: Iterable[int]) -> list[int]:
        """Return those of some tokens that are special."""
        return [token for token in ids if token in self._special_tokens]

    @cached_property
    def _written_turns(self) -> tuple[bool, list[str]]:
        """Whether the chat template writes system messages, and what it writes around a conversation's contents."""
        marks = {role: f"{_BORDER}{role}{_BORDER}" for role in ("system", "user", "assistant")}
        turns = [{"role": role, "content": mark} for role, mark in marks.items()]
        for first in (0, 1):
            with suppress(TokenizerError):
                whole = self._chat_text([*turns[first:], turns[1]], True, {})
                return marks["system"] in whole, re.split("|".join(marks.values()), whole)
        return False, []

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with the special tokens that the model expects around one (BOS)."""
        return self._checked(self._tokenizer.encode(text))

    def encode_exchange(
        self, before: str | Messages, text: str, arguments: Arguments | None = None, beside: Arguments | None = None
    ) -> list[int]:
        """Return the tokens of a prompt, plain or a conversation, with an answer to it, without the EOS behind that.

        `beside` has the answer's other fields: `reasoning_content` and `tool_calls`.

        Both are tokenized as one text, as TRL does: tokens may join the two, and a template may write the prompt
        differently. They end before the first special token behind the answer. Raises like `render_chat`.
        """
        turns = [*([{"content": before}] if isinstance(before, str) else before), {**(beside or {}), "content": text}]
        hidden = self._hide(text for turn in turns for text in _texts(turn))
        if isinstance(before, str):
            ending = self._tokenizer.eos_token or ""
            whole = f"{before}{self._hidden(text, hidden)}{ending}"
        else:
            whole, ending = self._exchange_text(before, text, hidden, arguments, beside)
        ends = sum(token in self._special_tokens for token in self._encode(ending, {}))
        ids = self._encode(whole if ends else whole.removesuffix(ending), hidden, isinstance(before, str))
        if ends:
            ids = ids[: [index for index, token in enumerate(ids) if token in self._special_tokens][-ends]]
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        return ids

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of a text that continues others; names of special tokens in it are text."""
        hidden = self._hide([text])
        return self._encode(self._hidden(text, hidden), hidden)

    def _exchange_text(
        self,
        messages: Messages,
        text: str,
        hidden: Mapping[str, str],
        arguments: Arguments | None,
        beside: Arguments | None,
    ) -> tuple[str, str]:
        """Return a conversation and its answer as the chat template writes them, and what it writes behind."""
        prompt = self._chat_text(messages, True, hidden, arguments)
        marked = self._chat_text([*messages, {"role": "assistant", "content": _STAND_IN}], False, hidden, arguments)
        start, _, ending = marked.rpartition(_STAND_IN)
        space = start.removeprefix(prompt) if start.startswith(prompt) else ""
        if space and space == text[: len(text) - len(text.lstrip())]:
            text = text.lstrip()  # an answer that was shown with the template's space
        answer = {**(beside or {}), "role": "assistant", "content": text}
        whole = self._chat_text([*messages, answer], False, hidden, arguments)
        return whole, ending if start and whole.endswith(ending) else ""

    def _chat_text(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        hidden: Mapping[str, str],
        arguments: Arguments | None = None,
    ) -> str:
        if not self._tokenizer.chat_template:
            way_out = "use /v1/completions, or put a chat_template.jinja into its directory"
            raise NoChatTemplate(f'model "{self._name}" has no chat template: {way_out}')
        plain = [
            {**message, **{name: self._hidden(message[name], hidden) for name in _TEXTS if name in message}}
            for message in messages
        ]
        if self._writes_parts:
            plain = [
                {**each, "content": [{"type": "text", "text": each["content"]}]} if each.get("content") else each
                for each in plain
            ]
        about = {**self._arguments, **(arguments or {}), "add_generation_prompt": add_generation_prompt}
        try:
            try:
                return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **about))
            except TypeError:
                # Some templates join the arguments of calls to text.
                return str(self._tokenizer.apply_chat_template(_as_text(plain), tokenize=False, **about))
        except Exception as error:  # a template is a program: it raises what it likes
            raise TokenizerError(f"the model's chat template refuses these messages: {error}") from error

    def _hide(self, texts: Iterable[str]) -> dict[str, str]:
        """Return a character, which none of the texts has, for each special token that they name.

        The content of a message is text, also where it reads like the marks between turns.
        """
        text = "\n".join(texts)
        free = (char for char in map(chr, _PRIVATE) if char not in text)
        return dict(zip(dict.fromkeys(self._special_name.findall(text)), free, strict=False))

    def _hidden(self, text: str, hidden: Mapping[str, str]) -> str:
        return self._special_name.sub(lambda name: hidden[name[0]], text) if hidden else text

    def _encode(self, text: str, hidden: Mapping[str, str], add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text in which special tokens are named; names that are hidden in it are text."""
        if not hidden:
            return self._checked(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        plain, marks, special = self._plain
        text = self._special_name.sub(lambda name: marks[name[0]], text)
        for name, char in hidden.items():
            text = text.replace(char, name)
        ids = plain.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=plain.is_fast)
        return self._checked(special.get(token, token) for token in ids)

    def _checked(self, ids: Iterable[int]) -> list[int]:
        made = list(ids)
        if self.refuses:
            self.check_text(made)
        return made

    def _plain_copy(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """Return a copy of the tokenizer to which names of special tokens are text, for it knows them by secret marks.

        The marks by name, and the special tokens' ids by those of the marks, come with it. How the shared tokenizer
        reads special tokens must not change.
        """
        plain, secret, marks = copy.deepcopy(self._tokenizer), secrets.token_hex(8), list[AddedToken]()
        for token_id, token in self._special_tokens.items():
            flags = {flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
            marks.append(AddedToken(f"{_BORDER}{secret}-{token_id}{_BORDER}", **flags))
        plain.add_tokens(marks)
        if not plain.is_fast:
            others = [name for name in plain.get_added_vocab() if not self._special_name.fullmatch(name)]
            plain.tokens_trie = type(plain.tokens_trie)(others)
        names = [str(mark) for mark in marks]
        ids = dict(zip(plain.convert_tokens_to_ids(names), self._special_tokens, strict=True))
        return plain, dict(zip(map(str, self._special_tokens.values()), names, strict=True)), ids

    def _decode(self, ids: Sequence[int], shown: frozenset[int]) -> str:
        kept = [token for token in ids if token < self._size and (token in shown or token not in self._special_tokens)]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; special tokens have none, nor have those that pad the model's vocabulary."""
        known = [token for token in ids if token < self._size]
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens by name; bytes that are no text show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self._size else None
        if token is None:
            return b""
        if token_id in self._special_tokens:
            return str(token).encode()
        if self._byte_of is not None:
            known = [self._byte_of.get(char) for char in token]
            return bytes(b for b in known if b is not None) if None not in known else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def ids_of_text(self, ids: Sequence[int], text: str) -> list[int]:
        """Return tokens of an answer whose text was cut at a stop string: the generated ids if they decode to `text`.

        `ids` are the generated tokens. The longest prefix of them that decodes to `text` or to its beginning wins; what
        the stop string left of the next token is encoded.
        Of a text that the model cannot take, it is the longest prefix of the ids within it.
        """
        try:
            fresh = self.encode_answer(text)
        except TokenizerError:
            fresh = []
        end = next(end for end in range(len(ids), -1, -1) if text.startswith(self.decode(ids[:end])))
        for rest in range(min(len(fresh), _WINDOW_TOKENS) + 1 if end else 0):
            whole = [*ids[:end], *fresh[len(fresh) - rest :]]
            if self.decode(whole) == text:
                return whole
        return fresh or list(ids[:end])


def _texts(message: Mapping[str, Any]) -> list[str]:
    return [message[name] for name in _TEXTS if name in message]


def _as_text(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls as JSON text."""

    def call(each: dict[str, Any]) -> dict[str, Any]:
        function = each["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**each, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": [call(each) for each in message["tool_calls"]]}
        if "tool_calls" in message
        else {**message}
        for message in messages
    ]


def _calls_in(form: AnswerForm, written: str, tools: Sequence[Any]) -> list[Any]:
    """Return the functions that an answer in a form calls."""
    read = ParsedAnswer(form, "", tools, re.compile("(?!)"))
    read.push(written)
    read.finish()
    return [call["function"] for call in read.calls]


def _tool(name: str, description: str) -> dict[str, Any]:
    """A tool to look for in what a chat template writes."""
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _called(name: str, value: str, answer: str) -> list[dict[str, Any]]:
    """A conversation with a call and its result to look for in what a chat template writes."""
    call = {"id": f"call_{24 * '0'}", "type": "function", "function": {"name": name, "arguments": {"key": value}}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer, "name": name, "tool_call_id": call["id"]},
    ]


def any_of(names: Iterable[str]) -> str:
    """Return a pattern of the longest of some names, which reads each character of a text a few times at most."""
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(name[:1], []).append(name)
    starts = {commonprefix(same): same for first, same in tails.items() if first}
    branches = [re.escape(start) + any_of(name[len(start) :] for name in same) for start, same in starts.items()]
    return f"(?:{'|'.join(branches)}){'?' if '' in tails else ''}" if branches else ""


class Detokenizer:
    """Turns sampled tokens into text piece by piece; the pieces join to what a decode of all tokens gives.

    A character whose bytes are not all there yet is held back; bytes that can no longer become one, and what is
    unfinished at `finish`, come out as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, marked: bool = False) -> None:
        """`marked` shows the special tokens that mark parts of answers by name."""
        self._decode = tokenizer.decode_marked if marked else tokenizer.decode
        self._window: list[int] = []
        self._shown = ""
        """Part of the window's text that was given out."""
        self._fresh = 0
        """Number of tokens since text was last given out."""

    def push(self, token_id: int) -> str:
        """Return the text that has become certain with this token, often empty."""
        self._window.append(token_id)
        self._fresh += 1
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # Byte-fallback decoders turn a whole run of bytes into U+FFFD while its last character is unfinished.
            return "" if self._fresh <= _CONTEXT_TOKENS else self._restart()
        certain = text
        for _ in range(_HELD_CHARS):
            certain = certain.removesuffix(REPLACEMENT)
        piece = certain[len(self._shown) :]
        if piece:
            self._shown, self._fresh = certain, 0
        if len(self._window) > _WINDOW_TOKENS:
            self._slide(len(text) - len(self._shown))
        return piece

    def finish(self) -> str:
        """Return the rest, with U+FFFD for an unfinished character."""
        text = self._decode(self._window)
        rest = text[len(self._shown) :] if text.startswith(self._shown) else self._restart()
        self._window, self._shown = [], ""
        return rest

    def _slide(self, held: int) -> None:
        """Shorten the window to a few tokens of context; its last `held` characters are not out yet.

        A cut inside a character could spoil how the bytes after it read: one of four neighbouring cuts is between two.
        """
        text = self._decode(self._window)
        for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _HELD_CHARS + 1):
            context = self._decode(self._window[-size:])
            if text.endswith(context) and len(context) >= held:
                self._window, self._shown = self._window[-size:], context[: len(context) - held]
                return

    def _restart(self) -> str:
        """Give up on joining: decode the tokens since the last piece by themselves."""
        piece = self._decode(self._window[-self._fresh :])
        self._window, self._shown, self._fresh = self._window[-self._fresh :], piece, 0
        return piece


class StopMatcher:
    """Finds stop strings in text that arrives in pieces; the result does not depend on where the pieces end.

    Text that may be the start of a stop string is held back. Where two could match, the one that is complete
    first wins, and of those the longest. Time is linear in the text (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted((stop for stop in stops if stop), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was found; all text from its start on is dropped."""

    def push(self, piece: str) -> str:
        """Return the text that is certainly before any stop string. Empty once `stopped_by` is set."""
        if self.stopped_by is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            for index, stop in enumerate(self._stops):
                matched = _advance(stop, self._borders[index], self._matched[index], text[end])
                if matched == len(stop):
                    self.stopped_by, self._held = stop, ""
                    return text[: end + 1 - matched]
                self._matched[index] = matched
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that was held back, which can no longer become a stop string."""
        held, self._held = self._held, ""
        return held


def _borders(pattern: str) -> list[int]:
    """Return KMP's failure function: for each prefix, the length of its longest proper border."""
    borders = [0] * len(pattern)
    for index in range(1, len(pattern)):
        borders[index] = _advance(pattern, borders, borders[index - 1], pattern[index])
    return borders


def _advance(pattern: str, borders: list[int], matched: int, char: str) -> int:
    while matched and pattern[matched] != char:
        matched = borders[matched - 1]
    return matched + 1 if pattern[matched] == char else 0


def _generation_eos(directory: Path) -> list[int]:
    """Return `eos_token_id` of generation_config.json, or of config.json where that file says nothing."""
    for name in ("generation_config.json", "config.json"):
        if (value := read_json(directory / name).get("eos_token_id")) is not None:
            return [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    return []


def _model_tokens(directory: str | Path, trust_remote_code: bool) -> tuple[int | None, set[int]]:
    """Return the model's number of tokens by its config.json, and those in whose place its towers put something; None
    if that cannot be read, which refuses the model."""
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
        ids = {getattr(config, f"{kind}_token_{end}", None) for kind in _KINDS for end in ("id", "index")}
        return int(config.get_text_config().vocab_size), {token for token in ids if type(token) is int}
    except Exception:  # transformers raises OSError, ValueError, KeyError, TypeError, ... here
        return None, set()


def _joins_bytes(tokenizer: Any) -> bool:
    """Whether tokens are written in GPT-2's byte alphabet (a ByteLevel decoder)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
