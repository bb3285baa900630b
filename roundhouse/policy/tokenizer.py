"""A small tokenizer, trained on an environment's demonstrations, with a short chat template.

Invariants: every number from 0 to 99, and every longer one that the demonstrations repeat, is one token everywhere, so
that copying a number is copying a token. Fixed text (the JSON of a tool call, the tools in the prompt) is one token or
few. Any text survives encoding and decoding, because single bytes are tokens too. With a token for each digit, a model
of this size does not learn to copy in minutes (docs/policies.md).

`<tool_call>` and the like are tokens but not "special", because decoding drops special tokens, and tool calls could not
be parsed. `<|im_start|>` and `<|im_end|>` are special; the latter ends a turn.

The chat template writes Hermes tool calls in ChatML. Rendering only appends: with P = render(messages,
add_generation_prompt) and a canonical generation G, rendering messages + [the message parsed from G] + anything begins
with P + G. (For other G the engine keeps the recorded tokens; see `roundhouse.generation.protocol`.)

    <|im_start|>system
    <tools>
    {"name": "calculate", "parameters": {"expression": "string"}}
    </tools><|im_end|>

A tool's schema is reduced to the names and types of its arguments, because a policy trained from nothing cannot read
descriptions, and each prompt token costs time. Every tool result is a separate block, so that a second one appends.
The template writes no separator between content and tool call, because the parser would not drop it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MAX_VOCABULARY = 2048
_NUMBERS = [str(number) for number in range(100)]
_MARKUP = re.compile("|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS)))


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding over rendered conversations, merged as far as they repeat.

    Text is cut after each newline and around each run of digits before merging, never elsewhere.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY - len(MARKUP_TOKENS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The trainer knows nothing of added tokens: without the cut it would merge them with their neighbours.
    pieces = [piece for text in texts for piece in _MARKUP.split(text) if piece]
    core.train_from_iterator([*pieces, *_NUMBERS, *_NUMBERS], trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return _wrap(core)


def blank_tokenizer() -> PreTrainedTokenizerFast:
    """The chat template without a vocabulary: it renders the texts that the tokenizer is trained on."""
    from tokenizers import Tokenizer, models

    return _wrap(Tokenizer(models.BPE()))


def _wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool = False,
) -> str:
    """The conversation as text; `tools` in chat shape."""
    text = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert isinstance(text, str)
    return text


CHAT_TEMPLATE = r"""
{%- macro fields(properties) -%}
    {{- '{' -}}
    {%- for name, schema in properties.items() -%}
        {{- (', ' if not loop.first else '') ~ '"' ~ name ~ '": ' ~ kind(schema) -}}
    {%- endfor -%}
    {{- '}' -}}
{%- endmacro -%}
{%- macro kind(schema) -%}
    {%- set choices = schema.get('anyOf') or schema.get('oneOf') or [] if schema is mapping else [] -%}
    {%- set item = schema.get('items') if schema is mapping else none -%}
    {%- if schema is mapping and schema.get('properties') -%}
        {{- fields(schema['properties']) -}}
    {%- elif choices -%}
        {%- for choice in choices -%}{{- (' | ' if not loop.first else '') ~ kind(choice) -}}{%- endfor -%}
    {%- elif item is mapping and (item.get('properties') or item.get('items') or item.get('anyOf')) -%}
        {{- '[' ~ kind(item) ~ ']' -}}
    {%- else -%}
        {%- set type = (schema.get('type') if schema is mapping else none) or 'any' -%}
        {{- '"' ~ (type if type is string else type | join(' | ')) ~ '"' -}}
    {%- endif -%}
{%- endmacro -%}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages and messages[0].role == 'system' else messages -%}
{%- if system or tools -%}
    {{- '<|im_start|>system\n' ~ system ~ ('\n' if system and tools else '') -}}
    {%- if tools -%}
        {{- '<tools>\n' -}}
        {%- for tool in tools -%}
            {%- set function = tool.function if tool.function is defined else tool -%}
            {{- '{"name": "' ~ function.name ~ '", "parameters": ' -}}
            {{- fields((function.parameters or {}).get('properties') or {}) ~ '}\n' -}}
        {%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in rest -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' ~ (message.content or '') ~ '\n</tool_response><|im_end|>\n' -}}
    {%- else -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {{- ('\n' if not loop.first else '') ~ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) ~ '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
