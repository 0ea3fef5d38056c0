"""Makes a model of random weights with a tokenizer and prompts, nothing downloaded: `python model.py --size small --out DIR`.

A Hugging Face checkpoint (Qwen3, float32, tied embedding) that all runners load; made in the environment of TRL, for its torch.
The end token has no chance to be drawn, so that turns are as long as the runners are told to make them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "small": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp": 768, "vocab": 4096},
    "base": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "mlp": 2048, "vocab": 8192},
}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SYLLABLES = ("ka", "dro", "min", "sel", "tou", "vea", "plo", "rin", "bas", "cho", "len", "wir", "gus", "fa", "ne")

# ChatML. What tools there are is not told, so that the prompts of all runners are of one length.
CHAT_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{%- set f = call.function if call.function else call %}\n<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{%- endfor %}<|im_end|>\n'
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def main() -> None:
    """Writes the checkpoint; the prompts last, so that who finds them finds all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16, help="how many are written")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of a prompt with its chat template")
    options = parser.parse_args()
    tokenizer = make_tokenizer(SIZES[options.size]["vocab"])
    tokenizer.save_pretrained(options.out)
    make_model(SIZES[options.size], tokenizer).save_pretrained(options.out)
    (options.out / "prompts.json").write_text(json.dumps(make_prompts(tokenizer, options.prompts, options.prompt_tokens)))


def sentences(count: int) -> Iterator[str]:
    """Made-up words and sums, of enough variety for a vocabulary of thousands, and the words that a dialogue is made of."""
    rng = random.Random(0)
    words = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(20000)]
    for _ in range(count):
        a, b = rng.randint(0, 999), rng.randint(0, 999)
        yield " ".join(rng.choice(words) for _ in range(12)) + f" {a} + {b} = {a + b}.\nuser\nassistant\nresult: {a}"


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with exactly `vocab` ids. Raises ValueError where the sentences have too little variety."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, show_progress=False, initial_alphabet=alphabet, min_frequency=1
    )
    bpe.train_from_iterator(sentences(20000), trainer)
    if bpe.get_vocab_size() != vocab:
        raise ValueError(f"a vocabulary of {vocab} is wanted, the sentences gave {bpe.get_vocab_size()}: add syllables")
    # google-tunix's sampler needs a bos.
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(size: dict[str, int], tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights by a fixed seed; no control token is ever drawn after another token. Raises ValueError where one may be.

    Channel 0 of the residual stream is a positive constant that no layer writes to. The tied row of a token, moved along it,
    has its logit moved by as much everywhere.
    """
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen3Config(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[:, 0] = 0.2
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        embedding[: len(SPECIALS)] = 0.0
        embedding[: len(SPECIALS), 0] = -200.0
        probed = torch.randint(len(SPECIALS), size["vocab"], (4, 64), generator=torch.Generator().manual_seed(0))
        most = model(probed).logits.softmax(-1)[..., : len(SPECIALS)].max().item()
    if most > 1e-9:
        raise ValueError(f"control tokens are drawn with probability {most}")
    return model


def make_prompts(tokenizer: PreTrainedTokenizerFast, count: int, tokens: int) -> dict[str, Any]:
    """Prompts of exactly `tokens` ids with the chat template around them, all different."""
    rng, messages, texts = random.Random(0), [], []
    while len(texts) < count:
        words: list[str] = []
        while True:
            words.append(rng.choice((*SYLLABLES, "7", "42", "193")))
            said = [{"role": "user", "content": " ".join(words)}]
            text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            length = len(tokenizer.encode(text, add_special_tokens=False))
            if length >= tokens:
                break
        if length == tokens and text not in texts:
            messages.append(" ".join(words))
            texts.append(text)
    return {"messages": messages, "texts": texts, "tokens": tokens}


if __name__ == "__main__":
    main()
