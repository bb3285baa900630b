"""vLLM's asynchronous engine as our `Engine`: the only module that uses vLLM's internal names.

Invariant: log-probabilities are those of the sampling distribution (`processed_logprobs`), tokens are never detokenised
here, and all weights arrive through `load_weights`: the engine starts with dummy weights, so it can start before the
starting policy exists.

Pinned to vLLM 0.32. Guards against silent faults:
  - seeded sampling of a prompt that is prefilled in chunks kills vLLM's CPU engine ("CPU Generator does not use
    offset"), so
    prompts are prefilled whole on CPU;
  - the prefix cache outlives weights unless it is cleared;
  - more than one OpenMP thread a process makes small models several times slower on shared cores;
  - its CPU engine reads attributes of every object of every imported module, and some objects of other libraries answer
    with
    an error (`allow_proxies`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from roundhouse.config.generation import InflightRequests, transfer_engines
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import (
    AsgiApp,
    Draw,
    EnginePoisoned,
    Generated,
    GenerationAborted,
)
from roundhouse.generation.tool_calls import ToolCalls, ToolParser, bounded, thought_end, tool_call
from roundhouse.generation.weights_probe import require_proofs
from roundhouse.http.asgi import Receive, Send
from roundhouse.images import ImageReader, image_name
from roundhouse.imports import (
    broken_torch_extensions,
    extensions_remedy,
    lacks_compiled_operators,
    mend_extensions_of_children,
)
from roundhouse.pretrained import is_composite, keeps_states
from roundhouse.weight_sync.base import WeightChange, WeightTransferFailed
from roundhouse.weight_sync.tensor_files import digest_of_tensors

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import EngineInput
    from vllm.v1.engine.async_llm import AsyncLLM

PAUSE_MODES: dict[InflightRequests, Literal["wait", "keep", "abort"]] = {
    "drain": "wait",
    "continue": "keep",
    "restart": "abort",
}
"""vLLM's name for each treatment of requests in flight."""
WORKER_EXTENSION = "roundhouse.generation.vllm_worker.RefitExtension"


def environment(config: GenerationConfig) -> dict[str, str]:
    """Environment variables of a process that runs the engine; they must be set before vLLM is imported."""
    common = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if config.gpus_per_replica > 0:
        return common
    return common | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def without_compiler(config: GenerationConfig) -> dict[str, str]:
    """Environment variable by which a process that is started for an eager engine on CPU does without torch.compile. vLLM's
    sampler compiles the count of likelier tokens also there: that takes a C++ compiler, and 10 CPU seconds at a machine's first
    start; the counts are the same without."""
    if config.gpus_per_replica > 0 or config.backend != "vllm" or not config.engine_args.get("enforce_eager", True):
        return {}
    return {"TORCHDYNAMO_DISABLE": "1"}


def preload(config: GenerationConfig) -> dict[str, str]:
    """Return the environment variable that loads tcmalloc into an engine's process, if the machine has it: vLLM on CPU
    then takes 0.86 to 0.99 of its CPU seconds (docs/pretrained.md). An existing `LD_PRELOAD`, even an empty one, is
    kept."""
    if config.gpus_per_replica > 0 or config.backend != "vllm" or "LD_PRELOAD" in os.environ:
        return {}
    library = find_library("tcmalloc_minimal") or find_library("tcmalloc")
    return {"LD_PRELOAD": library} if library else {}


def refuse_broken_extensions(model_dir: str) -> None:
    """Hide extensions of torch that cannot be imported from vLLM and its processes, which also get the operators that a
    torchvision of another build lacks. Refuse a torchvision that cannot be imported for a composite model, whose class
    needs it."""
    broken = broken_torch_extensions()
    if "torchvision" in broken and is_composite(Path(model_dir)):
        errors = "; ".join(f"{name}: {error}" for name, error in broken.items())
        raise ConfigError(
            f"vLLM cannot start, because packages do not fit torch: {errors}. {extensions_remedy(broken)}"
        )
    if broken or lacks_compiled_operators():
        mend_extensions_of_children(tuple(broken), lacks_compiled_operators())


def allow_proxies() -> None:
    """Let a CPU engine start in a process that has imported Flask, as MLflow's server and others do.

    vLLM's `_rebind_kernels` looks through the names of every module and takes `hasattr` for harmless; Flask's `request` and its
    like raise RuntimeError outside of a request.
    """
    from vllm.triton_utils import dispatcher

    def has(value: Any, name: str) -> bool:
        try:
            return hasattr(value, name)
        except RuntimeError:
            return False

    vars(dispatcher)["hasattr"] = has


TRANSFER_LIMITS = 3
"""The meeting, group and broadcasts of a transfer may each take its time limit, and all of them together this many."""


def engine_arguments(config: GenerationConfig, model_dir: str) -> dict[str, Any]:
    """vLLM's engine arguments for a configuration; `config.engine_args` wins."""
    arguments: dict[str, Any] = {
        "model": model_dir,
        "load_format": "dummy",
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # else its own routes sample as generation_config.json says
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if config.transfer_backend in transfer_engines():
        arguments["weight_transfer_config"] = {"backend": config.transfer_backend}
    if config.images:
        # Profiling would run vLLM's own processor, which needs torchvision
        arguments |= {"limit_mm_per_prompt": {"video": 0}, "skip_mm_profiling": True}
    elif is_composite(Path(model_dir)):
        arguments["language_model_only"] = True  # towers are not made: conversations are text
    if config.gpus_per_replica > 0:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        arguments |= {
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            "enforce_eager": True,
            # vLLM prefills layers with states in chunks alone
            "enable_chunked_prefill": keeps_states(Path(model_dir)),
            "max_num_batched_tokens": max(8192, config.max_model_len),
        }
    return arguments | config.engine_args


def sampling_params(draw: Draw, stop_token_ids: Sequence[int]) -> SamplingParams:
    """vLLM's parameters for one answer: token IDs and the sampled tokens' log-probabilities, all at once at the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=draw.temperature,
        top_p=draw.top_p,
        top_k=draw.top_k or 0,
        max_tokens=draw.max_tokens,
        seed=draw.seed,
        stop_token_ids=list(stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def read_output(output: Any) -> Generated:
    """vLLM's completion as ours.

    Raises:
        EnginePoisoned: a log-probability is not a number, which healthy weights never give.
        GenerationAborted: the engine ended it before its end, for a refit.
    """
    if output.finish_reason == "abort":
        raise GenerationAborted("The answer was broken off by a refit. Ask again.")
    ids, flat = list(output.token_ids), output.logprobs.logprobs
    if not math.isfinite(math.fsum(flat)):
        raise EnginePoisoned(
            "The engine returned a log-probability that is not finite: the weights hold NaN or infinity."
        )
    if not output.weight_versions or any(not span.version.isdecimal() for span in output.weight_versions):
        versions = None
    else:
        versions = [(int(span.version), span.end - span.start) for span in output.weight_versions]
    return Generated(ids, list(flat), output.finish_reason or "length", versions)


def _cause(error: Exception) -> str:
    """Return the first line of a worker's error."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


class VllmEngine:
    """`Engine` over `AsyncLLM`."""

    def __init__(
        self,
        config: GenerationConfig,
        model_dir: str,
        served_name: str,
        stop_token_ids: Sequence[int],
        images: ImageReader | None = None,
    ) -> None:
        self.config = config
        self._images = images
        self.max_model_len = config.max_model_len
        self._model_dir = model_dir
        self._served_name = served_name
        self._stop_token_ids = sorted(stop_token_ids)
        self._ids = itertools.count()
        self._engine: AsyncLLM | None = None
        self.devices: list[str] = []
        """Device of each worker's weights."""
        self._app: AsgiApp | None = None
        self._making = asyncio.Lock()

    @property
    def engine(self) -> AsyncLLM:
        if self._engine is None:
            raise EnginePoisoned("The engine was not started.")
        return self._engine

    async def start(self) -> None:
        refuse_broken_extensions(self._model_dir)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        allow_proxies()
        arguments = engine_arguments(self.config, self._model_dir)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(disable_log_stats=True, **arguments))
        self.devices = await self._engine.collective_rpc("roundhouse_device")
        # The first step pays for lazy imports and allocations; better now than in the first rollout.
        await self.generate([0, 1], Draw(max_tokens=2, seed=0))

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        final: RequestOutput | None = None
        params, prompt = sampling_params(draw, self._stop_token_ids), self._input(list(prompt_token_ids), draw.images)
        async for output in self.engine.generate(prompt, params, str(next(self._ids))):
            final = output
        if final is None:
            raise EnginePoisoned("vLLM ended a request without an answer.")
        return replace(read_output(final.outputs[0]), cached_tokens=final.num_cached_tokens)

    def _input(self, prompt_token_ids: list[int], images: Sequence[bytes]) -> EngineInput:
        """A prompt for vLLM, with our pixels of its images: those of vLLM's own processor would differ by rounding."""
        from vllm.inputs import mm_input, tokens_input

        if self._images is None or not images:
            return tokens_input(prompt_token_ids)
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        pixels = self._images.pixels(images)
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", pixels["image_grid_thw"].prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        places = [PlaceholderRange(start, length) for start, length in self._images.runs(prompt_token_ids)]
        return mm_input(
            prompt_token_ids,
            MultiModalKwargsItems.from_hf_inputs(BatchFeature(pixels), fields),
            {"image": [image_name(image) for image in images]},
            {"image": places},
        )

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        engine, clear = self.engine, not keep_prefix_cache
        # With its cache cleared, a kept generation is prefilled anew: by the new weights, from its own tokens so far.
        await engine.pause_generation(mode=PAUSE_MODES[running], clear_cache=clear)
        try:
            require_proofs(await engine.collective_rpc("roundhouse_load", args=(directory,)), directory)
            await engine.update_weight_version(str(version))
            if clear:
                await engine.reset_prefix_cache(reset_running_requests=running == "continue")
        except BaseException:
            await engine.pause_generation(mode="abort", clear_cache=False)
            raise
        await engine.resume_generation()

    def transfer_workers(self) -> int:
        parallel = self.engine.vllm_config.parallel_config
        return int(parallel.world_size * parallel.data_parallel_size)

    async def receive_weights(
        self, init: dict[str, Any], update: dict[str, Any], seconds: float, change: WeightChange
    ) -> tuple[str, int]:
        engine, running, clear = self.engine, change.running, not change.keep_prefix_cache
        try:
            # Gloo keeps the limits by itself. A worker that waits in NCCL can only be ended.
            async with asyncio.timeout(seconds * TRANSFER_LIMITS):
                from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

                try:
                    await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init))
                except Exception as error:  # vLLM re-raises its workers' errors as a bare Exception
                    await self.engine.check_health()
                    raise WeightTransferFailed(
                        f"the group of the sender at {init['master_address']} did not come together: {_cause(error)}",
                        touched=False,
                    ) from error
                await engine.pause_generation(mode=PAUSE_MODES[running], clear_cache=clear)
                arrived = await self._receive(update, change)
                if clear:
                    await engine.reset_prefix_cache(reset_running_requests=running == "continue")
        except TimeoutError as error:
            raise EnginePoisoned(f"A transfer did not end within {seconds * TRANSFER_LIMITS:g} s.") from error
        await engine.resume_generation()
        return arrived

    async def _receive(self, update: dict[str, Any], change: WeightChange) -> tuple[str, int]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self.engine
        try:
            await engine.collective_rpc("roundhouse_watch")
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest(update))
            digests = await engine.collective_rpc("roundhouse_arrived")
            for digest in digests:
                arrived = digest_of_tensors(digest)
                if change.digest is not None and arrived != change.digest:
                    raise WeightTransferFailed(f"digest {arrived} came, wanted was {change.digest}", touched=True)
            await engine.finish_weight_update(str(change.version))
            require_proofs(await engine.collective_rpc("roundhouse_prove"), f"version {change.version}")
            await engine.shutdown_weight_transfer_engine()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # The following calls fail if the engine has died.
            await engine.collective_rpc("roundhouse_abandon")
            await engine.shutdown_weight_transfer_engine()
            await engine.pause_generation(mode="abort", clear_cache=False)
            raise WeightTransferFailed(f"it broke off: {_cause(error)}", touched=True) from error
        return digest_of_tensors(digests[0]), len(digests[0])

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        final: RequestOutput | None = None
        async for output in self.engine.generate(tokens_input(list(token_ids)), params, str(next(self._ids))):
            final = output
        if final is None or final.prompt_logprobs is None:
            raise EnginePoisoned("vLLM gave no log-probabilities of a prompt.")
        entries = zip(final.prompt_logprobs[1:], token_ids[1:], strict=True)
        return [entry[token].logprob for entry, token in entries if entry is not None]

    async def sleep(self) -> None:
        # Level 2 keeps no copy of the weights in the machine's memory: whichever come next, they come from the node's cache.
        await self.engine.sleep(level=2, mode="wait")

    async def wake(self) -> None:
        await self.engine.wake_up()

    async def check_health(self) -> None:
        await self.engine.check_health()

    def openai_app(self) -> AsgiApp | None:
        return self._answer

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """By vLLM's whole OpenAI server, around the engine that runs already. It is made for the first request: that takes
        seconds, and most runs ask for none of its routes."""
        async with self._making:
            if self._app is None:
                self._app = await self._made_app()
        await self._app(scope, receive, send)

    async def _made_app(self) -> AsgiApp:
        tasks = await self.engine.get_supported_tasks()
        args, app = await asyncio.to_thread(self._empty_app, tasks)  # generations continue in the meantime
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        await init_app_state(self.engine, app.state, args, tasks)
        return app

    def _empty_app(self, tasks: Any) -> tuple[Any, Any]:
        from vllm.entrypoints.launchers.api_server import app_state  # noqa: F401  (imported here, beside the loop)
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        line = ["--model", self._model_dir, "--served-model-name", self._served_name, "--enable-auto-tool-choice"]
        line += ["--tool-call-parser", self.config.tool_call_parser, "--max-model-len", str(self.max_model_len)]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        validate_parsed_serve_args(args)
        return args, build_app(args, tasks, self.engine.model_config)

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def tool_parser(name: str, tokenizer: Any) -> ToolParser:
    """vLLM's tool-call parser of this name, over the text after the policy's thought.

    Raises:
        KeyError: vLLM knows none of this name; the text lists those it knows.
    """
    from vllm.tool_parsers import ToolParserManager

    parser_class = ToolParserManager.get_tool_parser(name)
    # It logs a traceback for every call that is not JSON. A policy in training writes thousands of them.
    logging.getLogger(parser_class.__module__).setLevel(logging.CRITICAL)

    def parse(text: str, tools: list[dict[str, Any]]) -> tuple[str | None, ToolCalls]:
        request, start = _parser_request(orjson.dumps(tools)), thought_end(text)
        parsed = parser_class(tokenizer, request.tools).extract_tool_calls(text[start:], request)
        calls = [tool_call(call.function.name, call.function.arguments) for call in parsed.tool_calls]
        try:
            for call in parsed.tool_calls:
                (call.function.name + call.function.arguments).encode()
        except UnicodeEncodeError:  # a lone surrogate, which no JSON carries
            return text, []
        return (text[:start] + (parsed.content or "") or None, bounded(calls)) if parsed.tools_called else (text, [])

    return parse


@lru_cache(maxsize=256)
def _parser_request(tools: bytes) -> Any:
    """The part of a request that parsers read: its tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    message = {"role": "user", "content": ""}
    return ChatCompletionRequest.model_validate(
        {"messages": [message], "model": "policy", "tools": orjson.loads(tools) or None}
    )
