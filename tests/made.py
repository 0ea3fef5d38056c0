"""Small tokenizers of every family, made on the spot: byte-level BPE with the family's control tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxagent.chat import chatml, gemma, llama, mistral
from jaxagent.chat.dialect import schema
from jaxagent.chat.history import ChatOptions
from jaxagent.chat.tokenizer_template import TokenizerTemplate
from jaxagent.types import Message, ToolSpec

LOOK = ToolSpec("look", "Looks up a key.", {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]})

# The control tokens of a family: special ones, the first of which pads, and others that only stay whole.
SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": (
        *("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "gemma": ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "mistral": (
        *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[CALL_ID]", "[ARGS]"),
    ),
}
WHOLE = {
    "chatml": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "gemma": ("\n\n", "\t\t", "<table>"),  # which mean nothing, but have ids of their own
}
BOS = {"llama": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}
EOS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "gemma": "<eos>", "mistral": "</s>"}


# Chat templates in the shape of the families' own: of Qwen2.5 with thoughts, Llama 3.1, Gemma 2 and Mistral v3.
JINJA = {
    "chatml": """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools you may call:\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
{%- if not loop.first or m.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (tools and loop.first and m.role == 'system') %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "llama": """
{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nKnowledge: old\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions, to be called in JSON with parameters:\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set f = m.tool_calls[0].function %}{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
""",
    "gemma": """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}{{ raise_exception('not in turns') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
""",
    "mistral": """
{{- bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if system else messages %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- else %}{{ '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
""",
}
DIALECT = {"chatml": chatml.DIALECT, "llama": llama.DIALECT, "gemma": gemma.DIALECT, "mistral": mistral.DIALECT}


def make(family: str, jinja: str = "", options: ChatOptions | None = None) -> TokenizerTemplate:
    return TokenizerTemplate(make_tokenizer(family, jinja), DIALECT[family], options)


def make_tokenizer(family: str, jinja: str = "") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the user and the assistant look up the key", "im_start im_end tool_call assistant arguments name"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[family]])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in WHOLE.get(family, ())])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS.get(family),
        eos_token=EOS[family],
        pad_token=SPECIAL[family][0],
        chat_template=(jinja or JINJA[family]).strip(),
    )


def hf(message: Message) -> dict[str, Any]:
    """A message as `apply_chat_template` takes it."""
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls]
    entries = {"role": message.role, "content": message.content, "reasoning_content": message.thinking, "tool_calls": calls}
    return {name: value for name, value in entries.items() if value or name == "content"}


def own(tokenizer: Any, messages: Any, tools: Any, *, header: bool) -> list[int]:
    """What the tokenizer's own template gives."""
    ids = tokenizer.apply_chat_template(
        [hf(m) for m in messages], tools=[schema(t) for t in tools] or None, add_generation_prompt=header, return_dict=False
    )
    return list(ids)
