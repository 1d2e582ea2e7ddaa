"""Tiny models with meaningful weights, trained in seconds on text every Python carries, for tests.

Random weights cannot tell a good quantizer from a bad one: their logits are noise, and no margin or agreement means
anything. These models (4 layers, hidden 128, 4 heads over 2 KV heads, 1,024 byte-level BPE tokens) have read the
language reference in ``pydoc_data.topics`` and predict held-out passages of it far better than token frequencies do.
All layers of the qwen3_moe and of the qwen3_5_moe_text are mixtures of experts; nothing made the routers of the former
choose evenly. Three of the four layers of the lfm2 are short convolutions, and three of the qwen3_5_moe_text are gated
delta rules.

Each is trained once per machine, and again when this file or a version that shapes its weights changes.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tests.kept import kept

PAD, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 1024
MAX_POSITIONS = 512
PASSAGE_CHARS = 600
HELD_OUT_EVERY = 6  # every sixth passage is never trained on
STEPS, BATCH, WINDOW, LEARNING_RATE = 480, 8, 96, 6e-3
SEED = 20

# By model type of transformers: what its configuration says beyond the sizes that all of them share.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,  # else the size of the MLP is not the one given
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 64,
    },
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_texts(count: int, seed: int) -> list[str]:
    """``count`` different passages of about 280 tokens (186 at least, on Python 3.11) that no model was trained on.

    Two seeds draw from the same passages, so for disjoint sets take one longer draw and cut it.
    """
    held_out = _passages()[::HELD_OUT_EVERY]
    if count > len(held_out):
        raise ValueError(f"{count} texts asked for, {len(held_out)} passages are held out")
    return random.Random(seed).sample(held_out, count)


def tiny_checkpoint(architecture: str = "llama") -> Path:
    """The Hugging Face checkpoint folder: weights, tokenizer, chat template, generation config with a stop token.

    ``architecture``: of :data:`ARCHITECTURES`.
    """
    return kept(f"tiny-{architecture}", _key(), partial(_train, architecture))


@cache
def _passages() -> list[str]:
    """The language reference, cut between paragraphs into passages of at least ``PASSAGE_CHARS``, in a fixed order.

    Topics share paragraphs; each is kept once, so that nothing held out was also trained on.
    """
    passages: list[str] = []
    seen: set[str] = set()
    for name in sorted(topics):
        passage = ""
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            if text in seen:
                continue
            seen.add(text)
            passage = f"{passage}\n{text}".strip()
            if len(passage) >= PASSAGE_CHARS:
                passages.append(passage)
                passage = ""
    return passages


def _key() -> str:
    import torch
    import transformers

    versions = f"{platform.python_version()} {torch.__version__} {transformers.__version__}"
    return Path(__file__).read_text() + versions


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=START, eos_token=STOP, pad_token=PAD, model_max_length=MAX_POSITIONS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _train(architecture: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    texts = [text for i, text in enumerate(_passages()) if i % HELD_OUT_EVERY]
    tokenizer = _tokenizer(texts)
    start, stop = tokenizer.bos_token_id, tokenizer.eos_token_id
    order = random.Random(SEED)
    order.shuffle(texts)
    stream = torch.tensor([token for text in texts for token in (start, *tokenizer(text).input_ids, stop)])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads differ between machines
    random_state = torch.get_rng_state()
    torch.manual_seed(SEED)
    try:
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                architecture,
                vocab_size=VOCAB_SIZE,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=MAX_POSITIONS,
                tie_word_embeddings=True,
                bos_token_id=start,
                eos_token_id=stop,
                pad_token_id=tokenizer.pad_token_id,
                **ARCHITECTURES[architecture],
            )
        )
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1, final_div_factor=100
        )
        for _ in range(STEPS):
            starts = torch.tensor([order.randrange(len(stream) - WINDOW - 1) for _ in range(BATCH)])
            batch = stream[starts[:, None] + torch.arange(WINDOW)]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        model.generation_config.eos_token_id = stop
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
