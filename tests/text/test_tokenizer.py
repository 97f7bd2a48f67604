"""Text and tokens: round trips, incremental detokenization, stop strings."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers import decoders, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import apply_chat_template

from edged.models import demo_model_dir
from edged.text.tokenizer import Detokenizer, NoChatTemplate, StopMatcher, Tokenizer, TokenizerError
from tests.models import SPECIALS, byte_tokenizer, save_tiny
from tests.real_data import HH_LM

TEXT = "Naïve café — 你好, мир! 😀👩‍👩‍👧 \N{REPLACEMENT CHARACTER} e\N{COMBINING ACUTE ACCENT}  two  spaces\n"


def byte_codec() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), "bytes")


def fallback_codec() -> Tokenizer:
    """SentencePiece's way, as Llama 2 and Mistral have it: a few pieces, all else as <0xNN> bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "你",
    ]
    model = BPE(
        {p: i for i, p in enumerate(pieces)},
        [("▁", "a"), ("a", "b"), ("▁", "ab")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = PlainTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"), "fallback")


CODECS = {"bytes": byte_codec(), "fallback": fallback_codec()}


def stream(codec: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def stop_stream(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces)
    return out + matcher.finish(), matcher.stopped_by


def reply_of(codec: Tokenizer, before: list[dict[str, str]], text: str) -> list[int]:
    """The tokens of an answer: those from where prompt and answer differ from the prompt alone."""
    prompt, whole = codec.render_chat(before), codec.encode_exchange(before, text)
    return whole[len(commonprefix([prompt, whole])) :]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("text", [TEXT, TEXT * 5, "😀" * 40, "你" * 40 + "好" * 40, "é" * 50 + "a b ab" * 9])
def test_pieces_join_to_the_text_and_never_show_half_a_character(codec: Tokenizer, text: str) -> None:
    pieces = stream(codec, codec.encode_answer(text))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.text(max_size=60), st.sampled_from(sorted(CODECS)))
@settings(max_examples=150, deadline=None)
def test_any_text_streams_back_unchanged(text: str, name: str) -> None:
    text = text.replace("▁", "_")
    assert "".join(stream(CODECS[name], CODECS[name].encode_answer(text))) == text


@given(st.lists(st.integers(0, len(SPECIALS) + 255), max_size=120))
@settings(max_examples=150, deadline=None)
def test_any_bytes_stream_to_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    codec = CODECS["bytes"]
    assert "".join(stream(codec, ids)) == codec.decode(ids)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_a_character_appears_with_its_last_byte_and_the_rest_at_once(codec: Tokenizer) -> None:
    ids = codec.encode_answer("ab😀ab")
    texts = ["".join(stream(codec, ids[:end])[:-1]) for end in range(len(ids) + 1)]
    assert texts[-1] == "ab😀ab"
    assert set(texts) <= {"", "a", "ab", "ab😀", "ab😀a", "ab😀ab"}


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    codec = CODECS["bytes"]
    pieces = stream(codec, codec.encode_answer("a😀")[:-1])
    assert pieces[:-1] == ["a", "", "", ""]
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"


def test_endless_broken_bytes_neither_pile_up_nor_stop_the_stream() -> None:
    codec = CODECS["bytes"]
    broken = codec.encode_answer("😀")[1]
    detokenizer = Detokenizer(codec)
    out = "".join(detokenizer.push(broken) for _ in range(500))
    assert len(out) >= 490
    good = codec.encode_answer(" fine")
    assert ("".join(detokenizer.push(token) for token in good) + detokenizer.finish()).endswith(" fine")


def test_broken_byte_fallback_is_given_up_and_the_text_goes_on() -> None:
    codec = CODECS["fallback"]
    ids = [*codec.encode_answer("ab😀"), *codec.encode_answer("😀")[1:3] * 8, *codec.encode_answer("ab ab")]
    pieces = stream(codec, ids)
    assert "".join(pieces).startswith("ab😀")
    assert "".join(pieces).endswith("ab ab")
    assert pieces[-1] == ""


def test_a_token_costs_the_same_however_long_the_answer_is() -> None:
    class Watched(Tokenizer):
        longest = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    codec = Watched(byte_tokenizer(), "watched")
    stream(codec, codec.encode_answer(TEXT * 20))
    assert codec.longest < 40


@pytest.mark.skipif(not HH_LM.exists(), reason=f"{HH_LM} is not here")
def test_a_trained_tokenizer_streams_any_language() -> None:
    codec = Tokenizer.load(HH_LM)
    generator = random.Random(0)
    for _ in range(50):
        words = [
            generator.choice(["Hello there", "naïve", "你好", "😀", "\n\n", "مرحبا", "don't", "  "]) for _ in range(30)
        ]
        text = " ".join(words)
        assert "".join(stream(codec, codec.encode_answer(text))) == text


@pytest.mark.skipif(not HH_LM.exists(), reason=f"{HH_LM} is not here")
def test_chats_and_prompts_are_tokenized_as_transformers_does() -> None:
    codec, oracle = Tokenizer.load(HH_LM), AutoTokenizer.from_pretrained(HH_LM)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "ok"},
    ]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.render_chat(messages) == list(expected)
    assert codec.encode_prompt("hi") == [oracle.bos_token_id, *codec.encode_answer("hi")]
    assert codec.eos_id == oracle.eos_token_id
    assert codec.token_bytes(codec.encode_answer(" there")[0]) == b" there"
    assert codec.token_bytes(codec.eos_id) == b"</s>"


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<assistant>yes"),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}", "[assistant] yes"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "assistant: yes"),
    ],
)
@pytest.mark.parametrize("space", ["", " "])
def test_a_reply_continues_the_prompt_as_the_template_writes_it(template: str, expected: str, space: str) -> None:
    tokenizer = byte_tokenizer()
    opening = expected.removesuffix("yes").rstrip()
    tokenizer.chat_template = template + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    codec = Tokenizer(tokenizer, "chatty")
    text = codec.decode(codec.render_chat(CHAT) + reply_of(codec, CHAT, space + "yes"))
    assert text.endswith(expected if " " in expected else opening + space + "yes")


@pytest.mark.skipif(not HH_LM.exists(), reason=f"{HH_LM} is not here")
def test_a_reply_is_tokenized_as_trl_does() -> None:
    codec, oracle = Tokenizer.load(HH_LM), AutoTokenizer.from_pretrained(HH_LM)
    answers = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "Hello there"), ("rejected", "no"))
    }
    texts = apply_chat_template({"prompt": CHAT, **answers}, oracle)
    assert codec.render_chat(CHAT) == oracle.encode(texts["prompt"], add_special_tokens=False)
    assert reply_of(codec, CHAT, "Hello there") == oracle.encode(texts["chosen"], add_special_tokens=False)


def test_a_reply_begins_where_a_template_rewrites_the_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "ask{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    codec = Tokenizer(tokenizer, "odd")
    assert codec.decode(codec.render_chat(CHAT)) == "ask1hi"
    assert codec.decode(reply_of(codec, CHAT, "yes")) == "2hi2yes"


TEMPLATES = {
    "demo": None,
    "turns": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}",
    "trims": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}",
    "joins": "<s>{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_somebody_wrote_is_text_and_no_mark_between_turns(template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    tokenizer.chat_template = TEMPLATES[template] or tokenizer.chat_template
    codec, special = Tokenizer(tokenizer, "marks"), set(tokenizer.all_special_ids)
    marks = "".join(str(token) for token in tokenizer.all_special_tokens)
    innocent = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi go"}]
    wicked = [{"role": "system", "content": f"be {marks} kind"}, {"role": "user", "content": f"hi{marks}go"}]
    wanted = [token for token in codec.render_chat(innocent) if token in special]
    ids = codec.render_chat(wicked)
    assert [token for token in ids if token in special] == wanted
    assert f"be {marks} kind" in tokenizer.decode(ids)
    for text in (marks, f"yes{marks}no"):
        assert not special.intersection(codec.encode_answer(text))
        assert tokenizer.decode(codec.encode_answer(text)).strip() == text
        reply = reply_of(codec, innocent, text)
        assert [t for t in reply if t in special] == [t for t in reply_of(codec, innocent, "yes") if t in special]
    # And the tokenizer is as it was, whoever uses it.
    assert tokenizer.encode(marks, add_special_tokens=False) == tokenizer.all_special_ids


NESTED = ["<|r", "<|r1|>", "<|r1|>x", "<|r12|>", "<s", "|>"]


@given(st.lists(st.sampled_from([*NESTED, "<", "|", "r", "1", "2", ">", "s", "x"]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_names_of_special_tokens_within_each_other_are_text(pieces: list[str]) -> None:
    codec = nested_codec()
    content = "".join(pieces)
    messages = [{"role": "user", "content": content}]
    special = {token for token in codec.render_chat(messages) if codec.token_text(token) in NESTED}
    assert special == {token for token in codec.render_chat(CHAT) if codec.token_text(token) in NESTED}
    assert content in codec.decode(codec.render_chat(messages))


@functools.cache
def nested_codec() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": NESTED})
    return Tokenizer(tokenizer, "nested")


def test_a_special_token_in_a_message_that_a_template_leaves_out_does_no_harm() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": SPECIALS[0]}]
    codec = Tokenizer(tokenizer, "short")
    assert codec.render_chat(messages) == codec.encode_answer("hi")


def test_the_characters_that_stand_for_names_of_special_tokens_are_text_too() -> None:
    codec = Tokenizer(byte_tokenizer(), "private")
    text = "".join(map(chr, range(0x100000, 0x100008))) + SPECIALS[2]
    messages = [{"role": "user", "content": text}]
    assert text in codec.decode(codec.render_chat(messages))
    assert codec.decode(codec.encode_exchange(text, text)).endswith(text)


def test_bytes_of_tokens_join_to_the_text() -> None:
    for codec in CODECS.values():
        ids = codec.encode_answer(TEXT)
        assert b"".join(codec.token_bytes(token) for token in ids).decode().lstrip() == TEXT


@pytest.mark.parametrize("cut", ["好", "two", "a"])
def test_ids_of_a_text_cut_at_a_stop_string_are_the_generated_ones(cut: str) -> None:
    codec = CODECS["bytes"]
    ids = codec.encode_answer("一二好 two a three")
    text = "一二好 two a three".split(cut)[0]
    assert codec.ids_of_text(ids, text) == ids[: len(text.encode())]


def test_ids_of_a_text_that_ends_inside_a_token_are_encoded_anew() -> None:
    codec = CODECS["fallback"]
    ids = codec.encode_answer("ab ab")
    assert codec.decode(codec.ids_of_text(ids, "ab a")) == "ab a"


def test_the_tokens_before_one_that_a_stop_string_cuts_are_the_generated_ones() -> None:
    codec = CODECS["fallback"]
    start, word, cut = 263, 264, 262
    assert [codec.token_text(token) for token in (start, word, cut)] == ["ab", " ab", " a"]
    assert codec.ids_of_text([start, word], "ab a") == [start, cut]
    assert codec.ids_of_text([word, word], "ab a") == [word, cut]


def test_every_end_token_of_the_model_ends_an_answer(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    codec = Tokenizer.load(tmp_path)
    assert codec.eos_id == 2
    assert codec.eos_ids == {2, 7, 9}


def test_a_model_without_a_chat_template_says_so_and_still_completes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    codec = Tokenizer.load(tmp_path)
    with pytest.raises(NoChatTemplate, match=r"no chat template: use /v1/completions"):
        codec.render_chat([{"role": "user", "content": "hi"}])
    assert codec.decode(codec.encode_prompt("hi")) == "hi"


def test_a_name_of_a_special_token_copies_no_tokenizer_once_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    codec = Tokenizer.load(tmp_path)
    monkeypatch.setattr(copy, "deepcopy", lambda value: pytest.fail("requests wait for a copy"))
    assert SPECIALS[2] in codec.decode(codec.render_chat([{"role": "user", "content": SPECIALS[2]}]))


def test_a_template_that_refuses_the_messages_is_quoted() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TokenizerError, match="roles must alternate"):
        Tokenizer(tokenizer, "strict").render_chat([{"role": "user", "content": "hi"}])


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    with pytest.raises(TokenizerError, match=f'model "{tmp_path}" has no .*tokenizer'):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        Tokenizer.load(tmp_path)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nHuman:"])
    assert [matcher.push(piece) for piece in ["one\n", "\nHu", "go", "\n\nHum", "an: x"]] == [
        "one",
        "",
        "\n\nHugo",
        "",
        "",
    ]
    assert matcher.stopped_by == "\n\nHuman:"
    assert matcher.push("more") + matcher.finish() == ""


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert stop_stream(["bcd", "c"], ["abcd"]) == ("ab", "c")
    assert stop_stream(["aab"], ["aaaab"]) == ("aa", "aab")
    assert stop_stream(["zz"], ["az"]) == ("az", None)


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 40)),
)
@settings(max_examples=300, deadline=None)
def test_stops_cut_the_same_text_wherever_the_pieces_end(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    found = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text if not found else text[: min(found)[0] + min(found)[1]]
    assert stop_stream(stops, pieces)[0] == expected


STRINGS = "{% for m in messages %}<s>{{ m.role + ':' + m.content }}{% endfor %}"
PARTS = "{% for m in messages %}<s>{{ m.role + ':' }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}<s>{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
ALL_TURNS = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + STRINGS


@pytest.mark.parametrize("template", [STRINGS, PARTS, EITHER, ALL_TURNS])
def test_a_chat_template_gets_texts_in_the_form_that_it_writes(template: str) -> None:
    plain = byte_tokenizer()
    plain.chat_template = template
    tokenizer = Tokenizer(plain, "any")
    turns = [{"role": "system", "content": "é <s>"}, {"role": "user", "content": "b"}]
    assert tokenizer.decode(tokenizer.render_chat(turns)) == "system:é <s>user:b"
    assert tokenizer.decode(tokenizer.encode_exchange(turns, "c")) == "system:é <s>user:bassistant:c"
