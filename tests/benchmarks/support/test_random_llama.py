"""Random-weight models have the sizes of those that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.random_llama import MAX_POSITIONS, SHAPES, config_of, write_random_llama


@pytest.mark.parametrize(("size", "parameters"), [("135m", 134_515_008), ("3b", 3_212_749_824)])
def test_a_shape_has_the_parameters_of_its_model(size: str, parameters: int) -> None:
    """As their makers state them: SmolLM2-135M and Llama-3.2-3B."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(SHAPES[size]))
    assert model.num_parameters() == parameters


def test_weights_are_written_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    directory = write_random_llama(tmp_path, SHAPES["4m"], "bfloat16")
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - no mapping


def test_a_long_prompt_leaves_room_for_an_answer(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_random_llama(tmp_path, SHAPES["4m"]))
    assert config.max_position_embeddings == MAX_POSITIONS > 2048 + 512
