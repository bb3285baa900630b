"""Policies that start from an existing model: a model directory, a GGUF file, or a model that a package brings along."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundhouse.activity import announce
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.tool_formats import OWN_PARSERS, parser_of_template
from roundhouse.images import ImageReader
from roundhouse.policy.gguf import check_gguf, converted, gguf_file, template_of, tokenizer_of
from roundhouse.policy.model_directory import (
    BUNDLED,
    TEMPLATE,
    ChatTemplate,
    bundled_file,
    check_model_directory,
    refuse_unfit_template,
    template_in,
    template_text,
)
from roundhouse.policy.prompt_lengths import Prompts, Tokens, tokens_by
from roundhouse.policy.starting import StartingPolicy
from roundhouse.pretrained import has_linear_attention, is_composite
from roundhouse.store.directories import policy_cache
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import model_location

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Looks like a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B."""


class ExistingModel(StartingPolicy):
    """Common part: the run may render with another chat template than the model's own."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.template: str | None = self.section.chat_template

    @abstractmethod
    def _files(self, run: Run, work: Path) -> tuple[Path, dict[str, object]]:
        """Fetch or convert the model; see `make`."""

    @abstractmethod
    def _source(self, run: Run, work: Path) -> Location:
        """Return the model directory, which a GGUF file is converted to."""

    def make(self, run: Run, work: Path) -> tuple[Path, dict[str, object]]:
        directory, details = self._files(run, work)
        if self.template is not None:
            if directory != work:  # in the cache, which does not change
                directory = Path(shutil.copytree(directory, work, dirs_exist_ok=True))
            self._write_template(directory)
        return directory, details

    def write_untrained(self, run: Run, directory: Path) -> None:
        with tempfile.TemporaryDirectory() as work:
            source = self._source(run, Path(work))
            names = [name for name in source.tree() if "/" not in name and not name.endswith(".safetensors")]
            source.download(names, directory)
        self._write_template(directory)

    def _write_template(self, directory: Path) -> None:
        if self.template is not None:
            (directory / TEMPLATE).write_text(template_text(self.template), encoding="utf-8")

    def _converted(self, run: Run, file: Path) -> tuple[Path, dict[str, object]]:
        def on_progress(text: str) -> None:
            announce("conversion", text=text)

        directory, report = converted(file, policy_cache(self.config) / "converted", on_progress, run.created_at)
        return directory, {"converted": report}

    def _chosen(self, own: ChatTemplate) -> ChatTemplate:
        """Return the template that the run renders with. Report a template that writes today's date."""
        name, template = self.template, own
        if name is not None:
            template = replace(own, source=f"policy.chat_template ({name})", text=template_text(name))
        if "strftime_now" in template.text and self.config.generation.template_date is None:
            logger.warning(
                "The chat template in %s writes today's date: the prompts of the run change at midnight. Set "
                "generation.template_date to keep one day.",
                template.source,
            )
        return template

    def _prompts_of_gguf(self, file: Path, tools: list[dict[str, Any]], system: str | None) -> Prompts | None:
        """Return None if `rollout.max_prompt_tokens` does not need the tokenizer, which takes seconds to read."""
        template = self._chosen(template_of(file))
        refuse_unfit_template(template, tools, system)
        if self.config.rollout.max_prompt_tokens is None:
            return None
        return Prompts(self.config.rollout, template, tokens_by(lambda: tokenizer_of(file)))


class BundledModel(ExistingModel):
    """The GGUF file of a package of the Python index."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        bundled = BUNDLED[self.section.name]
        self.remedy, self.memory_gib = bundled.install, bundled.memory_gib

    def check(self) -> str:
        file = bundled_file(self.section.name)
        check_gguf(file)
        return f"{self.section.name}: {file}"

    def prompts(self, tools: list[dict[str, Any]], system: str | None, *, remote: bool) -> Prompts | None:
        self.check()
        return self._prompts_of_gguf(bundled_file(self.section.name), tools, system)

    def _files(self, run: Run, work: Path) -> tuple[Path, dict[str, object]]:
        return self._converted(run, bundled_file(self.section.name))

    def _source(self, run: Run, work: Path) -> Location:
        return Location(str(self._files(run, work)[0]))


class PretrainedModel(ExistingModel):
    """A directory on this machine or in a bucket, with safetensors or with one GGUF file."""

    remedy = "Set policy.path to a Hugging Face model directory."

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.source = model_location(Location(self.section.path))

    def check(self) -> str | None:
        if not self.source.is_local:
            return None
        path = self.source.local_path
        if (gguf := gguf_file(path)) is not None:
            check_gguf(gguf)
        else:
            check_model_directory(path, self.config.generation.max_model_len)
        return f"{path} is a model directory"

    def write_shape(self, directory: Path) -> bool:
        if "config.json" not in self.source.names():
            return False
        self.source.download(["config.json"], directory)
        return True

    def _files(self, run: Run, work: Path) -> tuple[Path, dict[str, object]]:
        original = self.source
        if not (names := original.tree()):
            raise ConfigError(f"policy.path: {original.uri} holds no files. Give a Hugging Face model directory.")
        original.download([name for name in names if "/" not in name], work)
        details: dict[str, object] = {"source": original.uri}
        if (file := gguf_file(work)) is not None:
            directory, report = self._converted(run, file)
            return directory, details | report
        try:
            check_model_directory(work, self.config.generation.max_model_len)
        except ConfigError as error:  # names the copy
            place = original.uri.removeprefix("file://")
            raise ConfigError(str(error).replace(str(work), place)) from None
        return work, details

    def _source(self, run: Run, work: Path) -> Location:
        if not (names := [name for name in self.source.names() if name.endswith(".gguf")]):
            return self.source
        self.source.download(names, work)
        file = gguf_file(work)
        assert file is not None
        return Location(str(self._converted(run, file)[0]))

    def prompts(self, tools: list[dict[str, Any]], system: str | None, *, remote: bool) -> Prompts | None:
        source, path = self.source, self.section.path
        if source.is_local:
            if HUB_ID.fullmatch(path) and not source.local_path.exists():
                raise ConfigError(
                    f"policy.path is {path}, which is not a directory. Models are not downloaded. Run `hf download "
                    f"{path} --local-dir DIRECTORY` and name the directory. Or set policy.kind to "
                    "bundled for the model that comes with Roundhouse."
                )
            self.check()
            if (gguf := gguf_file(source.local_path)) is not None:
                return self._prompts_of_gguf(gguf, tools, system)
            return self._prompts_here(source.local_path, tools, system)
        if not remote:
            return None
        if source.exists("config.json"):
            return prompts_in(self.config, source, self._chosen)
        if not any(name.endswith(".gguf") for name in source.names()):
            raise ConfigError(
                f"policy.path is {source.uri}: it holds no config.json. Give a Hugging Face model directory."
            )
        return None

    def _prompts_here(self, model: Path, tools: list[dict[str, Any]], system: str | None) -> Prompts:
        self._refuse_no_torchvision(model)
        if self.config.generation.images:
            ImageReader.of(model)  # refuses other models
        self._refuse_exact_linear_attention(model)
        self._refuse_no_tokenizer(model)
        template = self._chosen(template_in(model))
        refuse_unfit_template(template, tools, system)
        self._refuse_unread_calls(template, tools)
        return Prompts(self.config.rollout, template, _tokens_in(self.source))

    def _refuse_no_torchvision(self, model: Path) -> None:
        """Refuse a composite model if vLLM, in this installation, cannot import its class, as also for text alone."""
        generation = self.config.generation
        here = generation.backend == "vllm" and generation.engine_url is None and generation.endpoint is None
        if here and self.config.infra.runs_here and is_composite(model) and not find_spec("torchvision"):
            raise ConfigError(
                f"policy.path is {model}, a model with towers beside its language model, whose class in vLLM needs "
                "torchvision. Install the version for your torch (pip install --no-deps torchvision==0.28.0 for torch 2.13), "
                "or set generation.backend to transformers."
            )

    def _refuse_exact_linear_attention(self, model: Path) -> None:
        """Refuse float32 for linear attention in vLLM on CPUs, whose kernel knows bfloat16 alone."""
        generation = self.config.generation
        on_cpu = generation.backend == "vllm" and generation.gpus_per_replica == 0 and generation.engine_url is None
        if on_cpu and generation.dtype != "bfloat16" and has_linear_attention(model):
            raise ConfigError(
                f"generation.dtype is {generation.dtype}, but vLLM computes the linear attention of {model} "
                "(policy.path) on CPUs in bfloat16 alone. Set it to bfloat16, or generation.backend to transformers."
            )

    def _refuse_no_tokenizer(self, model: Path) -> None:
        """Refuse to limit the prompts of a model without tokenizer.json, which counts their tokens."""
        limit = self.config.rollout.max_prompt_tokens
        if limit is not None and not (model / "tokenizer.json").is_file():
            raise ConfigError(
                f"rollout.max_prompt_tokens is {limit}, and policy.path {model} has no tokenizer.json "
                "to count with. Save it with the fast tokenizer of transformers (tokenizer.save_pretrained), or leave the "
                "key out."
            )

    def _refuse_unread_calls(self, template: ChatTemplate, tools: list[dict[str, Any]]) -> None:
        """Refuse tools if the engine has no parser for the calls that the template writes."""
        generation, name = self.config.generation, parser_of_template(template.text)
        if tools and generation.backend != "vllm" and generation.tool_call_parser == "auto" and name not in OWN_PARSERS:
            raise template.unfit(
                f"writes tool calls that vLLM's parser {name} reads, but generation.backend is {generation.backend}",
                "Set generation.backend to vllm, or policy.chat_template to hermes",
            )


def prompts_in(
    config: RunConfig, source: Location, chosen: Callable[[ChatTemplate], ChatTemplate] = lambda own: own
) -> Prompts | None:
    """Return the template and tokenizer of a model directory; None if `rollout` limits neither prompts nor epochs."""
    if config.rollout.max_prompt_tokens is None and config.rollout.epochs is None:
        return None
    if not source.exists("tokenizer.json"):
        return None
    with tempfile.TemporaryDirectory() as directory:
        names = {"tokenizer.json", "tokenizer_config.json", TEMPLATE} & {*source.names()}
        source.download(sorted(names), Path(directory))
        template = template_in(Path(directory))
    return Prompts(config.rollout, chosen(template), _tokens_in(source))


def _tokens_in(source: Location) -> Tokens:
    """Return a counter by the tokenizer of a directory; without tokenizer.json it counts 0, and the engine counts later."""
    if not source.exists("tokenizer.json"):
        return lambda text: 0
    return tokens_by(lambda: source.read("tokenizer.json"))
