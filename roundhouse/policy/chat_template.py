"""Does a model's chat template show what a run puts into its conversations?

Invariant: a template passes only when each role's text, and with tools each tool's name, appears in what it renders. A template
that ignores `tools` says nothing about it: the policy would be asked to call tools that it never sees.

Found by rendering: two user turns with an answer between them; with tools, a user turn, and one with a call and its result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError
from roundhouse.imports import lean_transformers
from roundhouse.policy.tokenizer import CHAT_TEMPLATE

TEMPLATE = "chat_template.jinja"
"""The template's file beside a tokenizer; transformers takes it before that of tokenizer_config.json."""
ASKED, ANSWERED, RETURNED = "asked-8f2c", "answered-4b7e", "returned-91ad"
"""Words that no template writes by itself."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, the special tokens that it may name, and where it is from."""

    source: str
    text: str
    tokens: dict[str, str] = field(default_factory=dict)

    def render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        with lean_transformers():
            from transformers.utils.chat_template_utils import render_jinja_template

        try:
            options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True, **self.tokens}
            texts = render_jinja_template([messages], chat_template=self.text, **options)[0]
        except Exception as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise self.unfit(f"refuses the roles {roles}: {error}", "Take a template of its family") from error
        return str(texts[0])

    def unfit(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"The chat template in {self.source} {what}. {remedy}.")


def template_in(directory: Path) -> ChatTemplate:
    """The template of a Hugging Face directory."""
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    file = directory / TEMPLATE
    text = file.read_text(encoding="utf-8") if file.exists() else settings["chat_template"]
    if isinstance(text, list):  # several by name
        text = {each["name"]: each["template"] for each in text}["default"]
    tokens = {
        name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(name)
    }
    plain = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(str(directory), text, plain)


def template_text(name: str) -> str:
    """The text of `policy.chat_template`.

    Raises:
        ConfigError: it names no file.
    """
    if name == "hermes":
        return CHAT_TEMPLATE
    if not Path(name).is_file():
        raise ConfigError(
            f"policy.chat_template is {name}, which is no file. Give the path of a Jinja file, or hermes."
        )
    return Path(name).read_text(encoding="utf-8")


def refuse_unfit_template(
    template: ChatTemplate, tools: Sequence[dict[str, Any]], system_prompt: str | None = None
) -> None:
    """Refuse a template that drops a role, the system prompt, or the tools.

    Args:
        tools: of a task, in chat shape; empty where the tasks have none.
        system_prompt: `rollout.system_prompt`, or that of an environment.

    Raises:
        ConfigError: says what is dropped, and the remedy.
    """
    if template.text == CHAT_TEMPLATE:
        return  # shown to be fit by the tests, and importing transformers to show it again takes two seconds
    asked, answered = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
    turns = template.render([asked, answered, asked], [])
    if turns.count(ASKED) < 2 or ANSWERED not in turns:
        raise template.unfit("leaves out what the user or the assistant says", "Take a template of its family")
    if system_prompt and system_prompt not in template.render(
        [{"role": "system", "content": system_prompt}, asked], tools
    ):
        raise template.unfit(
            f"leaves out the system prompt {system_prompt!r} (rollout.system_prompt, rollout.environments)",
            "Unset it, or name a template with the role system",
        )
    if not tools:
        return
    shown = template.render([asked], tools)
    if hidden := [name for name in map(_name, tools) if name not in shown]:
        raise template.unfit(
            f"ignores tools: {', '.join(hidden)} {'is' if len(hidden) == 1 else 'are'} not in the prompt",
            "Name one that renders them (policy.chat_template: hermes, or a file of yours), or choose tasks without tools",
        )
    call = {"id": "call_0", "type": "function", "function": {"name": _name(tools[0]), "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "call_0", "content": RETURNED}
    called: list[dict[str, Any]] = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    if RETURNED not in template.render(called, tools):
        raise template.unfit("leaves out what a tool returns", "Write a template with the role tool")


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])
