"""A pair has the tokens that TRL gives it, whatever the tokenizer does to spaces and at the borders of texts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.data_utils import _tokenize, common_prefix_length

from edged.align.feedback.pair_tokens import tokenize_pair
from edged.store.feedback import PairRow, Side
from edged.text.tokenizer import Tokenizer
from tests.models import tiny_model

SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
NAMED = "<|named|>"
"""A special token that no template writes."""
CORPUS = ["the sky is blue. the answer is no! yes, of course. [INST] why? [/INST] be short"] * 3


def sentencepiece(prepend: str, split: bool) -> PlainTokenizer:
    tokenizer = PlainTokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=split)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def legacy() -> PlainTokenizer:
    tokenizer = sentencepiece("never", False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def byte_level(prefix_space: bool) -> PlainTokenizer:
    tokenizer = PlainTokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


KINDS = {
    **{
        f"{prepend} {split}": (sentencepiece, prepend, split)
        for prepend in ("always", "first", "never")
        for split in (True, False)
    },
    "legacy": (legacy,),
    "bytes": (byte_level, False),
    "bytes after a space": (byte_level, True),
}
STRIPS = ("", "lstrip", "rstrip", "both")
TEMPLATES = {
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "llama": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %}"
    " {{ m.content | trim }} </s>{% endif %}{% endfor %}",
    "mistral": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}",
    "thinks": "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    "empty thought": "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think>"
    "\n\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}


@cache
def tokenizer_of(kind: str, strips: str, named: bool) -> PreTrainedTokenizerFast:
    make, *how = KINDS[kind]
    tokenizer = make(*how)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if make is byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    specials = [*SPECIALS, *(() if make is byte_level else alphabet)]
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=alphabet if make is byte_level else []
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][: len(SPECIALS)]
    for token in saved["added_tokens"]:
        token |= {side: strips in (side, "both") for side in ("lstrip", "rstrip")}
    tokenizer = PlainTokenizer.from_str(json.dumps(saved))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if named:
        tokenizer.add_special_tokens([AddedToken(NAMED, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def trl(tokenizer: Any, before: Any, chosen: str, rejected: str) -> tuple[list[int], list[int], list[int]]:
    """What `DPOTrainer` does in its tokenize_fn, after it ended plain texts with EOS; of the answers without that."""
    if isinstance(before, str):
        prompt = _tokenize(tokenizer, before)["input_ids"]
        wholes = [_tokenize(tokenizer, before + text + tokenizer.eos_token)["input_ids"] for text in (chosen, rejected)]
    else:
        prompt = _tokenize(tokenizer, before, add_generation_prompt=True)["input_ids"]
        said = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
        wholes = [_tokenize(tokenizer, before + answer)["input_ids"] for answer in said]
    length = min(common_prefix_length(prompt, whole) for whole in wholes)
    special = [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS]
    ends = (max(index for index, token in enumerate(whole) if token in special) for whole in wholes)
    return prompt[:length], *(whole[length:end] for whole, end in zip(wholes, ends, strict=True))


def tokenized(tokenizer: Any, before: Any, chosen: Any, rejected: Any, **more: Any) -> tuple[list[int], ...]:
    about = {"prompt": before, "messages": None} if isinstance(before, str) else {"prompt": None, "messages": before}
    sides = {"chosen": chosen, "rejected": rejected}
    sides = {name: side if isinstance(side, Side) else Side(side) for name, side in sides.items()}
    fields = {"prompt_ids": None, "state": "queued", **about, **sides, **more}
    row = PairRow(id=1, created_at="", adapter="ada", signal_id="fb", source="pair", weight=1.0, **fields)
    pair, note = tokenize_pair(Tokenizer(tokenizer, "made"), row, 10_000)
    assert not note
    return tuple(map(list, (pair.prompt, pair.chosen, pair.rejected)))


words = st.lists(
    st.sampled_from(["the", "sky", "is", "blue.", "no!", " ", "\n", "é", "😀", "▁", "$4", NAMED]),
    min_size=1,
    max_size=6,
)
texts = (
    st.tuples(words, st.sampled_from(["", " "]))
    .map(lambda made: made[1].join(made[0]))
    .filter(lambda text: text.strip())
)
answers = st.tuples(st.sampled_from(["", "  ", "\n"]), texts).map(lambda made: made[0] + made[1].lstrip())
chats = st.lists(texts, min_size=1, max_size=3).map(lambda said: said[: len(said) - 1 + len(said) % 2])


@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from(STRIPS), st.sampled_from(sorted(TEMPLATES)), chats, answers, answers
)
@settings(max_examples=400, deadline=None)
def test_a_chats_pair_has_trls_tokens(kind, strips, template, chat, chosen, rejected):
    ours, theirs = tokenizer_of(kind, strips, True), tokenizer_of(kind, strips, False)
    ours.chat_template = theirs.chat_template = TEMPLATES[template]
    before = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(chat)]
    prompt, good, bad = trl(theirs, before, chosen, rejected)
    end = [ours.eos_token_id]
    assert tokenized(ours, before, chosen, rejected) == (prompt or end, good + end, bad + end)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(STRIPS), texts, texts, answers)
@settings(max_examples=300, deadline=None)
def test_a_plain_pair_has_trls_tokens(kind, strips, before, chosen, rejected):
    before = before.replace(NAMED, "")  # there it is the token, as in serving
    ours, theirs = tokenizer_of(kind, strips, True), tokenizer_of(kind, strips, False)
    prompt, good, bad = trl(theirs, before, chosen, rejected)
    end = [ours.eos_token_id]
    assert tokenized(ours, before, chosen, rejected) == (prompt or end, good + end, bad + end)


SKY = [{"role": "user", "content": "is the sky blue?"}]


def test_a_served_answer_keeps_its_tokens_and_prompt_beside_an_edit_that_the_template_continues():
    tokenizer = tokenizer_of("legacy", "", True)
    tokenizer.chat_template = TEMPLATES["mistral"]
    prompt, good, _ = trl(tokenizer, SKY, "yes", "no")
    served = tokenizer.convert_tokens_to_ids(["▁", "n", "o"])
    stored = {"prompt_ids": tuple(prompt), "rejected": Side("no", tuple(served))}
    end = [tokenizer.eos_token_id]
    assert tokenized(tokenizer, SKY, "yes", **stored) == (prompt, good + end, served + end)


def test_where_an_edit_joins_the_prompts_end_the_served_answer_begins_there_too():
    tokenizer, before = tokenizer_of("always False", "", True), "the answer "
    prompt, good, _ = trl(tokenizer, before, "is", "is")
    asked, served = tokenizer.encode(before), tokenizer.convert_tokens_to_ids(["n", "o"])
    assert len(prompt) == len(asked) - 1
    stored = {"prompt_ids": tuple(asked), "rejected": Side("no", tuple(served))}
    end = [tokenizer.eos_token_id]
    assert tokenized(tokenizer, before, "is", **stored) == (prompt, good + end, asked[-1:] + served + end)
    # Of a prompt that has other tokens than its text none is replaced.
    stored["prompt_ids"] = (*asked[:-1], 7, 8)
    prompt, chosen, rejected = tokenized(tokenizer, before, "is", **stored)
    assert (prompt, rejected) == ([*asked[:-1], 7, 8], served + end)
    assert tokenizer.decode(chosen[:-1]).strip() == "is"


def test_an_answer_to_bare_tokens_continues_their_text():
    tokenizer = tokenizer_of("always True", "", True)
    asked = tokenizer.encode("is the sky blue?")
    whole = tokenizer.encode("is the sky blue? no, green.")
    about = {"prompt": None, "messages": None, "prompt_ids": tuple(asked)}
    prompt, chosen, _ = tokenized(tokenizer, "", " no, green.", " yes", **about)
    assert (prompt, chosen) == (asked, [*whole[len(asked) :], tokenizer.eos_token_id])


def test_a_space_that_the_template_writes_is_not_written_twice():
    tokenizer = tokenizer_of("bytes", "", True)
    tokenizer.chat_template = TEMPLATES["llama"].replace(" {{ m.content | trim }} </s>", " {{ m.content }}</s>")
    end = [tokenizer.eos_token_id]
    one, other = (tokenized(tokenizer, SKY, text, "no") for text in ("yes", " yes"))
    assert one == other
    assert tokenizer.decode(one[1]) == " yes</s>"
    assert tokenized(tokenizer, SKY, "  yes", "no")[1] == [*trl(tokenizer, SKY, "  yes", "no")[1], *end]


def test_dpo_trainer_makes_the_same_rows(tmp_path):
    tokenizer = tokenizer_of("legacy", "", True)
    tokenizer.chat_template = TEMPLATES["zephyr"]
    tokenizer.pad_token = tokenizer.eos_token
    said = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "yes"), ("rejected", "no!"))}
    config = DPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, max_length=None)
    rows = Dataset.from_list([{"prompt": SKY, **said}])
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    made = DPOTrainer(tiny_model(), args=config, train_dataset=rows, processing_class=tokenizer, peft_config=lora)
    (row,) = made.train_dataset
    prompt, chosen, rejected = tokenized(tokenizer, SKY, "yes", "no!")
    newline = tokenizer.encode("</s>\n", add_special_tokens=False)[1:]
    assert row["prompt_ids"] == prompt
    assert (row["chosen_ids"], row["rejected_ids"]) == (chosen + newline, rejected + newline)
