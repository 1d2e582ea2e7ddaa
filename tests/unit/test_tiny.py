"""The tiny models are worth testing with only if they have learnt something and stop where they should."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_predicts_held_out_text_better_than_token_frequencies(
    architecture: str, tiny_texts: Callable[[int, int], list[str]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = tiny.tiny_checkpoint(architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    rows = [[tokenizer.bos_token_id, *tokenizer(text).input_ids] for text in tiny_texts(24, 3)]
    frequency = Counter(token for row in rows for token in row[1:])
    tokens = sum(frequency.values())
    entropy = -sum(count / tokens * math.log(count / tokens) for count in frequency.values())
    loss = 0.0
    with torch.inference_mode():
        for row in rows:
            logits = model(torch.tensor([row])).logits[0, :-1].double()
            loss -= logits.log_softmax(-1)[range(len(row) - 1), row[1:]].sum().item() / tokens
    assert loss < entropy - 1.0, (loss, entropy)  # 4.6 (llama) and 3.6 against 5.8 nats when this was written


def test_passages_are_held_out_distinct_and_seeded(tiny_texts: Callable[[int, int], list[str]]) -> None:
    texts = tiny_texts(20, 1)
    assert len(set(texts)) == 20
    assert texts == tiny_texts(20, 1) != tiny_texts(20, 2)


def test_stops_and_speaks_chat(tiny_checkpoint: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    chat = [{"role": "user", "content": "What is a class?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    generation: Any = GenerationConfig.from_pretrained(tiny_checkpoint)
    assert generation.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
