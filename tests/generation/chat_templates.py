"""The structure of published chat templates, rebuilt in a few lines each, with the tokens that they write.

The texts that they write between an answer and the next one (`after_call`, `after_answer`) are those of the published
templates: of the templates in TRL where it has the family (`published`; tests/contracts/test_chat_templates.py), else of
public documentation. Prompts are shorter: default system prompts, descriptions of tools and dates are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.generation.tiny import ADD_TOOL


@dataclass(frozen=True, slots=True)
class Format:
    """A chat template, its tokens, and the texts that follow an answer in it."""

    name: str
    template: str
    special: tuple[str, ...]
    """Its special tokens; the tokenizer's end of text is the first."""
    stops: tuple[str, ...]
    """`eos_token_id` of the published generation_config.json."""
    call: str
    """A tool call as the policy generates it, with its end of turn."""
    after_call: str
    """Text between the tokens of the call and the next answer, for the result 5."""
    answer: str
    """An answer as the policy generates it, with its end of turn."""
    after_answer: str
    """Text between the tokens of the answer and the next one, for the question "And 3+4?"."""
    published: str | None = None
    """Name of the published template in TRL."""
    parser: str = "hermes"
    """The tool-call parser for it, by vLLM's name."""
    unread: bool = False
    """vLLM has no parser for its calls."""

    def save(self, directory: Path, template: str | None = None) -> Path:
        """Write a tokenizer of bytes with these special tokens, and a configuration."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(self.special))
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.special[0],
            "bos_token": self.special[1],
            "chat_template": self.template if template is None else template,
            "clean_up_tokenization_spaces": False,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        (directory / "config.json").write_text(json.dumps({"vocab_size": 300}))
        stops = [tokenizer.token_to_id(token) for token in self.stops]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return directory


CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"
CHATML = (
    "{%- for m in messages %}{%- set role = 'user' if m.role == 'tool' else m.role %}"
    "{{- '<|im_start|>' + role + '\n' }}{%- if m.role == 'tool' %}{{- '<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'assistant' %}%s{{- m.content or '' }}{%- for c in m.tool_calls or [] %}"
    '{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}{{- c.function.arguments | tojson }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN_3 = "{%- set last = messages | map(attribute='role') | list %}" + CHATML.replace(
    "%s",
    "{%- set text = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.last or 'user' not in last[loop.index:] %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
).replace("{{- m.content or '' }}", "{{- text }}")  # thoughts are kept up to the next question
LLAMA_3 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call') }}{%- endif %}"
    "{%- set f = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA_3 = (
    "{{- bos_token }}{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
GEMMA_4 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role != 'tool' %}"
    "{%- if not (m.role == 'assistant' and messages[loop.index0 - 1].role == 'tool') %}"
    "{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{- '<|tool_call>call:' + c.function.name + '{' }}"
    "{%- for k, v in c.function.arguments.items() %}{{- k ~ ':' ~ v ~ ('' if loop.last else ',') }}{%- endfor %}"
    "{{- '}<tool_call|>' }}{%- endfor %}"
    "{%- if m.tool_calls %}{{- '<|tool_response>' }}{%- else %}{{- m.content + '<turn|>\n' }}{%- endif %}"
    "{%- else %}{{- 'response:add{value:<|\"|>' + m.content + '<|\"|>}<tool_response|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|turn>model\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools and loop.index == ns.last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}{%- elif m.tool_calls %}{%- for c in m.tool_calls %}"
    "{%- if c.id | length != 9 %}{{- raise_exception('nine letters and digits') }}{%- endif %}"
    '{{- \'[TOOL_CALLS] [{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{- ', \"id\": \"' + c.id + '\"}]</s>' }}{%- endfor %}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}{%- endfor %}"
)
PHI_4_MINI = (
    "{%- for m in messages %}{%- if m.tool_calls %}{{- '<|assistant|><|tool_call|>' }}"
    "{{- m.tool_calls | map(attribute='function') | list | tojson + '<|/tool_call|><|end|>' }}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"
)
GLM_4_5 = (
    "{{- '[gMASK]<sop>' }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'tool' %}{{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|assistant|>\n<think></think>' }}{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{- '\n<tool_call>' + c.function.name }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '\n<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ v ~ '</arg_value>' }}{%- endfor %}"
    "{{- '\n</tool_call>' }}{%- endfor %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
GPT_OSS = (
    "{%- for m in messages %}{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}"
    "{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{- f.arguments | tojson + '<|call|>' }}{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
DEEPSEEK_V3 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}"
    "{%- elif m.tool_calls %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    "{{- '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content }}"
    "{{- '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}"
    "{%- else %}{{- '' if messages[loop.index0 - 1].role == 'tool' else '<｜Assistant｜>' }}"
    "{{- m.content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"
)
GRANITE_3 = (
    "{%- for m in messages %}{{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' }}"
    "{%- if m.tool_calls %}{{- '<|tool_call|>' + m.tool_calls | map(attribute='function') | list | tojson }}"
    "{%- else %}{{- m.content }}{%- endif %}{{- '<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
IM = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
DEEPSEEK = (
    "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
TURN = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
RESULT, QUESTION = "<tool_response>\n5\n</tool_response>", "And 3+4?"

FORMATS = (
    Format("Qwen 2.5", CHATML.replace("%s", ""), IM, IM[:2], HERMES_CALL, TURN.format(RESULT), "5<|im_end|>",
           TURN.format(QUESTION), "qwen2_5"),
    Format("Qwen 3", QWEN_3, IM, IM[:2], f"<think>\nI add.\n</think>\n\n{HERMES_CALL}", TURN.format(RESULT),
           "<think>\n\n</think>\n\n5<|im_end|>", TURN.format(QUESTION), "qwen3"),
    Format("SmolLM 3", CHATML.replace("%s", "").replace("'<tool_response>\n' + m.content + '\n</tool_response>'", "m.content"),
           IM, IM[:1], HERMES_CALL, TURN.format("5"), "<think>\n\n</think>\n5<|im_end|>", TURN.format(QUESTION)),
    Format("Llama 3", LLAMA_3, ("<|eot_id|>", "<|begin_of_text|>", "<|eom_id|>", "<|end_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|python_tag|>"), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
           '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
           '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
           "5<|eot_id|>",
           f"<|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
           "llama3_1", "llama3_json"),
    Format("Gemma 3", GEMMA_3, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>"), "", "",
           "5<end_of_turn>", f"\n<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n", "gemma3"),
    Format("Gemma 4", GEMMA_4, ("<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
           "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"), ("<eos>", "<turn|>", "<|tool_response>"),
           "<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>", 'response:add{value:<|"|>5<|"|>}<tool_response|>',
           "5<turn|>", f"\n<|turn>user\n{QUESTION}<turn|>\n<|turn>model\n", "gemma4_v5", "gemma4"),
    Format("Mistral", MISTRAL, ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), ("</s>",), '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]</s>',
           '[TOOL_RESULTS] {"content": 5}[/TOOL_RESULTS]', " 5</s>",
           f"[AVAILABLE_TOOLS] {json.dumps([ADD_TOOL])}[/AVAILABLE_TOOLS][INST] {QUESTION}[/INST]", parser="mistral"),
    Format("Phi 4 mini", PHI_4_MINI, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>",
           "<|tool_call|>", "<|/tool_call|>"), ("<|end|>", "<|endoftext|>"),
           f"<|tool_call|>[{CALL}]<|/tool_call|><|end|>", "<|tool|>5<|end|><|assistant|>", "5<|end|>",
           f"<|user|>{QUESTION}<|end|><|assistant|>", unread=True),
    Format("GLM 4.5", GLM_4_5, ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>",
           "<|observation|>"), ("<|endoftext|>", "<|user|>", "<|observation|>"),
           "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
           "<arg_value>3</arg_value>\n</tool_call><|observation|>", "\n<tool_response>\n5\n</tool_response><|assistant|>",
           "\n<think></think>\n5<|user|>", f"\n{QUESTION}<|assistant|>", "glm4moe", "glm45"),
    Format("GPT-OSS", GPT_OSS, ("<|return|>", "<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>",
           "<|channel|>", "<|constrain|>", "<|call|>"), ("<|return|>", "<|endoftext|>", "<|call|>"),
           "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
           '<|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>',
           '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|><|start|>assistant',
           "<|channel|>analysis<|message|>It is 5.<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>",
           f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant", "gptoss", "openai"),
    Format("DeepSeek V3", DEEPSEEK_V3, DEEPSEEK, DEEPSEEK[:1],
           '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": 3}\n```'
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
           "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>5<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
           "5<｜end▁of▁sentence｜>", f"<｜User｜>{QUESTION}<｜Assistant｜><think>\n", "deepseekv3", "deepseek_v3"),
    Format("Granite 3", GRANITE_3, ("<|end_of_text|>", "<|fim_pad|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
           ("<|end_of_text|>",), f"<|tool_call|>[{CALL}]<|end_of_text|>",
           "\n<|start_of_role|>tool_response<|end_of_role|>5<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
           "5<|end_of_text|>",
           f"\n<|start_of_role|>user<|end_of_role|>{QUESTION}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
           parser="granite"),
)  # fmt: skip
