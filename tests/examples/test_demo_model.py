"""The embedded demo model answers readably, mixes the styles evenly, and its styles can be told apart and shifted."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from edged.models import demo_model_dir
from examples.demo_model.dialogues import Turn, dialogues, formality, is_short, prompts, uses_metric

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def turns(count: int) -> list[Turn]:
    return [turn for dialogue in itertools.islice(dialogues(11), count) for turn in dialogue.turns]


@pytest.fixture(scope="module")
def demo() -> Demo:
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(demo_model_dir(), padding_side="left")


def answers(demo: Demo, questions: list[str], temperature: float = 1.0, seed: int = 0) -> list[str]:
    model, tokenizer = demo
    torch.manual_seed(seed)
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    kind = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=160, **kind)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def fresh_prompts(count: int, with_units: bool = False) -> list[str]:
    return list(itertools.islice(prompts(21, fresh=True, with_units=with_units), count))


def test_the_judges_agree_with_the_style_an_answer_was_written_in() -> None:
    written = turns(3000)
    measured = [turn for turn in written if turn.has_units]
    assert sum((formality(t.answer) > 0) == t.style.formal for t in written) >= 0.99 * len(written)
    assert sum(is_short(t.answer) == t.style.short for t in written) >= 0.99 * len(written)
    assert sum(uses_metric(t.answer) is t.style.metric for t in measured) >= 0.99 * len(measured)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Heat it to 200 °C.", True), ("Heat it to 400 °F.", False), ("Heat it.", None), ("1 mile is 1.6 km.", None)],
)
def test_units_are_told_from_an_answer(text: str, expected: bool | None) -> None:
    assert uses_metric(text) is expected


def test_formality_is_zero_without_a_sign_and_has_opposite_signs_for_the_two_voices() -> None:
    assert formality("Water boils.") == 0
    assert formality("I would recommend a short walk, should you wish to rest.") == 1
    assert formality("Yeah, don't worry, just grab a coffee!") == -1


def test_every_style_is_written_about_equally_often() -> None:
    written = turns(3000)
    for axis in ("formal", "short", "metric"):
        assert 0.47 < sum(getattr(turn.style, axis) for turn in written) / len(written) < 0.53


def test_dialogues_and_prompts_follow_from_their_seed() -> None:
    def first(seed: int) -> object:
        return list(itertools.islice(dialogues(seed), 20)), list(itertools.islice(prompts(seed), 20))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_the_dialogues_are_those_that_the_model_was_trained_on() -> None:
    written = [dialogue.messages() for dialogue in itertools.islice(dialogues(11), 3000)]
    asked = list(itertools.islice(prompts(21, fresh=True, with_units=True), 3000))
    text = json.dumps([written, asked], ensure_ascii=False)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "1cf470ea45c7947dafcfc15b33a81cd6e2ae73cdc14cbc4db0dc49e0029f0257"
    )


def test_fresh_questions_are_not_among_those_the_model_was_trained_on() -> None:
    trained = {turn.question for turn in turns(4000)}
    assert not trained & set(fresh_prompts(300))


def test_finding_the_model_and_its_questions_needs_no_torch() -> None:
    script = (
        "import sys, edged.models as m, examples.demo_model.dialogues as d; m.demo_model_dir(); next(d.prompts(0));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_model_is_a_small_float16_llama_whose_answers_end_with_eos(demo: Demo) -> None:
    model, tokenizer = demo
    config = json.loads((demo_model_dir() / "config.json").read_text())
    generation = json.loads((demo_model_dir() / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float16"
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert sum(path.stat().st_size for path in demo_model_dir().iterdir()) < 8_000_000


def test_the_chat_template_marks_roles_and_refuses_unknown_ones(demo: Demo) -> None:
    tokenizer = demo[1]
    chat = [{"role": "system", "content": "Be formal."}, {"role": "user", "content": "Hi!"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|><|system|>Be formal.<|end|><|user|>Hi!<|end|><|assistant|>"
    with pytest.raises(Exception, match='role "tool" is unknown'):
        tokenizer.apply_chat_template([{"role": "tool", "content": "1"}], tokenize=False)


def test_any_text_survives_the_tokenizer(demo: Demo) -> None:
    tokenizer = demo[1]
    text = "  Grüße, 20 °C — 日本\n\tdone 🙂 "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_greedy_answers_to_fresh_questions_are_relevant_sentences(demo: Demo) -> None:
    questions = {
        "How long should muffins stay in the oven?": "20 minutes",
        "My name is Lena.": "Lena",
        "Remind me to water the plants at 7 pm.": "7 pm",
    }
    for answer, expected in zip(answers(demo, list(questions), temperature=0.0), questions.values(), strict=True):
        assert expected in answer
        assert answer.rstrip().endswith((".", "!", "?"))


def test_samples_mix_each_style_evenly_on_fresh_questions(demo: Demo) -> None:
    texts = answers(demo, fresh_prompts(160, with_units=True))
    assert 0.35 < sum(formality(text) > 0 for text in texts) / len(texts) < 0.65
    assert 0.35 < sum(map(is_short, texts)) / len(texts) < 0.65
    assert 0.35 < sum(uses_metric(text) is True for text in texts) / len(texts) < 0.65


def test_a_system_prompt_sets_the_style(demo: Demo) -> None:
    model, tokenizer = demo
    for system, is_formal in (("Be formal.", True), ("Be casual.", False)):
        hits = 0
        for question in fresh_prompts(8):
            chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=160, do_sample=False)
            text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            hits += (formality(text) > 0) == is_formal
        assert hits >= 7


def log_probabilities(model: PeftModel, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Summed log-probability of each row's answer after its prompt."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, kept = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        kept[i, len(prompt) : len(prompt) + len(answer)] = 1.0
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    return (logits.gather(-1, ids[:, 1:, None])[..., 0] * kept[:, 1:]).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "likes",
    [lambda text: formality(text) > 0, lambda text: formality(text) < 0, is_short, lambda text: not is_short(text)],
    ids=["formal", "casual", "short", "long"],
)
def test_sixty_pairs_of_plain_dpo_shift_a_style(likes: Callable[[str], bool]) -> None:
    base = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir(), padding_side="left")
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    questions = prompts(22)
    for step in range(15):
        rows: list[list[tuple[list[int], list[int]]]] = [[], []]
        while len(rows[0]) < 4:
            question = next(questions)
            drawn = answers((model, tokenizer), [question] * 4, seed=1000 * step + len(rows[0]))
            drawn.sort(key=likes)
            if likes(drawn[-1]) > likes(drawn[0]):
                prompt = tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
                for side, text in zip(rows, (drawn[-1], drawn[0]), strict=True):
                    answer = tokenizer.encode(text, add_special_tokens=False)
                    side.append((prompt, [*answer, tokenizer.eos_token_id]))
        with torch.no_grad(), model.disable_adapter():
            reference = log_probabilities(model, rows[0] + rows[1])
        gain = log_probabilities(model, rows[0] + rows[1]) - reference
        optimizer.zero_grad()
        (-F.logsigmoid(0.1 * (gain[:4] - gain[4:]))).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    after = answers((model, tokenizer), fresh_prompts(80), seed=5)
    assert sum(map(likes, after)) / len(after) >= 0.75
