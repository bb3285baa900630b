"""Plain Hugging Face transformers as an `Engine`: slow, simple, and a reference for vLLM.

Invariant: waiting requests are answered in one left-padded batch, and a row's tokens and log-probabilities equal those
of the row alone, up to rounding. One thread holds the model; it does other work (new weights, a score) between two
tokens of a running batch.

A row's token depends only on its logits and its generator, never on the batch. The returned log-probability is that of
the sampling distribution (temperature, then top-k, then top-p, as in vLLM). Greedy rows (temperature 0) take the most
likely token and report its log-probability at temperature 1.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import orjson

from roundhouse import pretrained
from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import GenerationConfig
from roundhouse.cpu import parameters_of, threads_for
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.chat_server import token_list
from roundhouse.generation.protocol import AsgiApp, Draw, EnginePoisoned, Generated, GenerationAborted
from roundhouse.http.asgi import Receive, Send, read_body, reply_error, reply_json
from roundhouse.imports import gc_paused, lean_transformers
from roundhouse.weight_sync.tensor_files import iterate

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from roundhouse.images import ImageReader


@dataclass(frozen=True, slots=True)
class Change:
    """New weights, as the running batch has to know of them."""

    version: int
    running: InflightRequests = "continue"
    recompute: bool = True
    """Keys and values of the tokens so far are computed anew."""


Between = Callable[[], Change | None]
"""Called before each token; returns the change to the model since the last token."""


def build_model(model_dir: str, config: GenerationConfig) -> Any:
    """A model of the directory's config.json with arbitrary weights, ready to be loaded."""
    with gc_paused():
        import torch

    if config.gpus_per_replica == 0:
        torch.set_num_threads(threads_for(parameters_of(Path(model_dir) / "config.json"), config.threads))
    dtype = getattr(torch, config.dtype)
    with lean_transformers():  # a model's own module is imported when the model is built
        from transformers import AutoConfig

        model = pretrained.build_model(pretrained.load_pretrained(AutoConfig, model_dir), dtype=dtype).eval()
    return model.to("cuda") if config.gpus_per_replica > 0 else model


def key_value_bytes(shape: PreTrainedConfig, dtype: str) -> int:
    """Return bytes per token: 2 · layers · key-value heads · head dimension · bytes of the type."""
    text: Any = shape.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dimension = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * dimension * (4 if dtype == "float32" else 2)


def give_back_memory() -> None:
    """Return what nothing refers to any more to the GPU and to the machine."""
    import ctypes
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps freed pages for itself
    except (OSError, AttributeError):
        return  # another C library: it has its own way


def load_into(model: Any, directory: str) -> None:
    """Copy every tensor of a Hugging Face directory into the model, in place. A model of which transformers fuses some, such as
    experts, is there twice for a moment.

    Raises:
        RuntimeError: a parameter found no tensor, or a tensor no parameter.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    composite = model.config.get_text_config() is not model.config  # transformers renames its tensors on loading
    if composite or any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model)):
        tensors = _converted(model, directory)
    else:
        tensors = dict(iterate(Path(directory)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors:
                raise RuntimeError(f"{directory} lacks {name}.")
            parameter.copy_(tensors.pop(name))
    surplus = set(tensors) - set(model.state_dict())
    if leftover := sorted(name for name in surplus if not pretrained.is_left_out(model, name)):
        raise RuntimeError(f"{directory} has {leftover[0]}, which the model has not.")


def _converted(model: Any, directory: str) -> dict[str, Any]:
    """The parameters that transformers makes of the directory's tensors."""
    loaded, report = pretrained.load_pretrained(
        type(model), directory, dtype=model.dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for problem, names in report.items():
        if names:
            raise RuntimeError(f"{directory}: {problem}: {', '.join(sorted(map(str, names))[:3])}.")
    return dict(loaded.named_parameters())


def score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all tokens but the first, each given those before it."""
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.tensor([list(token_ids)], device=device)).logits[0, :-1].float()
        chosen_T = torch.tensor(list(token_ids)[1:], device=device)
        scores: list[float] = torch.log_softmax(logits_TV, dim=-1).gather(1, chosen_T[:, None])[:, 0].tolist()
    return scores


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    draws: Sequence[Draw],
    stop_token_ids: frozenset[int],
    between: Between = lambda: None,
    version: Callable[[], int] | None = None,
    is_wanted: Callable[[int], bool] = lambda row: True,
    reader: ImageReader | None = None,
) -> list[Generated]:
    """Answer several prompts together; each row ends at a stop token or at its own limit.

    Args:
        between: may change the model's weights.
        version: returns the model's version; without it, answers are not labelled with a version.
        is_wanted: whether a caller still waits for a row; the batch ends when the others are finished.
        reader: of the images in `draws`; None without any.

    Raises:
        GenerationAborted: new weights arrived, and the batch was not to continue with them.
    """
    import torch

    device = next(model.parameters()).device
    all_ids, mask = _left_padded(prompts, device)
    input_ids = all_ids
    rows, row_generators = [_Row(draw) for draw in draws], generators(draws)
    places = _Places(model, all_ids, [image for draw in draws for image in draw.images], reader)
    cache: Any = None
    with torch.inference_mode():
        while any(not row.finished and is_wanted(place) for place, row in enumerate(rows)):
            if (change := between()) is not None:
                if change.running == "restart":
                    raise GenerationAborted(f"Version {change.version} came while the answer was drawn.")
                if change.recompute:
                    cache, input_ids = None, all_ids
            out = model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=places.of(all_ids, mask)[..., -input_ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                **(places.pixels if cache is None else {}),
            )
            cache, logits_BV = out.past_key_values, out.logits[:, -1].float().cpu()
            for row, logits_V, generator in zip(rows, logits_BV, row_generators, strict=True):
                if not row.finished:
                    row.add(*draw_row(logits_V, row.draw, generator), stop_token_ids, version and version())
            input_ids = torch.tensor([[row.ids[-1]] for row in rows], device=device)
            all_ids = torch.cat([all_ids, input_ids], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    return [Generated(row.ids, row.log_probs, row.finished, row.versions or None) for row in rows]


class _Places:
    """Positions of tokens: of text a number, of a model that shows images to its policy three."""

    def __init__(self, model: Any, prompts: torch.Tensor, images: Sequence[bytes], reader: ImageReader | None) -> None:
        self._model = model
        self.pixels: dict[str, torch.Tensor] = {}
        if reader is not None and images:
            self.pixels = {name: values.to(prompts.device) for name, values in reader.pixels(images).items()}
            self._shown = (prompts == reader.token_id).int()

    def of(self, all_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[rows, tokens], or [3, rows, tokens] if a row has an image."""
        if not self.pixels:
            return (mask.cumsum(-1) - 1).clamp(min=0)
        kinds = all_ids.new_zeros(all_ids.shape, dtype=self._shown.dtype)  # generated tokens are text
        kinds[:, : self._shown.shape[1]] = self._shown
        positions: torch.Tensor = self._model.base_model.get_rope_index(
            all_ids, mm_token_type_ids=kinds, image_grid_thw=self.pixels["image_grid_thw"], attention_mask=mask
        )[0]
        return positions


class _Row:
    """An answer that grows."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[tuple[int, int]] = []
        self.finished = ""

    def add(self, token: int, log_prob: float, stop_token_ids: frozenset[int], version: int | None) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        if version is not None:
            before = self.versions.pop() if self.versions and self.versions[-1][0] == version else (version, 0)
            self.versions.append((version, before[1] + 1))
        if token in stop_token_ids:
            self.finished = "stop"
        elif len(self.ids) >= self.draw.max_tokens:
            self.finished = "length"


def _left_padded(prompts: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token IDs and attention mask, both [rows, longest prompt]."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return input_ids.to(device), mask.to(device)


def draw_row(logits_V: torch.Tensor, draw: Draw, generator: torch.Generator) -> tuple[int, float]:
    """One token and its log-probability from the logits of one position."""
    import torch

    logits_V = logits_V.float()
    if draw.temperature == 0:
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        token = int(logits_V.argmax())
        return token, float(logprobs_V[token])
    logits_V = logits_V / draw.temperature
    if draw.top_k is not None and draw.top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(draw.top_k).values[-1], -torch.inf)
    if draw.top_p < 1:
        ordered_V, index_V = logits_V.sort(descending=True)
        probs_V = ordered_V.softmax(-1)
        # Keep tokens until the mass before them reaches top_p, so at least one stays.
        dropped_V = probs_V.cumsum(-1) - probs_V >= draw.top_p
        logits_V = logits_V.masked_fill(dropped_V.scatter(0, index_V, dropped_V), -torch.inf)
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])


def generators(draws: Sequence[Draw]) -> list[torch.Generator]:
    """One generator a row, from its seed; without a seed from the process's own randomness."""
    import torch

    result = []
    for draw in draws:
        generator = torch.Generator()
        if draw.seed is None:
            generator.seed()
        else:
            generator.manual_seed(draw.seed)
        result.append(generator)
    return result


BATCH = 64
"""Requests answered together at most; `engine_args: {max_num_seqs: 1}` answers each alone, bit for bit the same each time."""
Waiting = tuple[list[int], Draw, "asyncio.Future[Generated]"]


class BatchingEngine(ABC):
    """Base of engines that answer in batches, from one thread: each request gets its answer, or the cause of the
    failure."""

    def __init__(self, max_model_len: int, thread: str) -> None:
        self.max_model_len = max_model_len
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread)
        self._loop: asyncio.Task[None] | None = None
        self._answering: list[asyncio.Future[Generated]] = []
        """Requests that wait for the rows of the running batch."""
        self._unanswered: set[asyncio.Future[Generated]] = set()

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """See `Engine.generate`."""
        await self.check_health()
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        await self._waiting.put((list(prompt_token_ids), draw, future))
        return await future

    async def check_health(self) -> None:
        if self._loop is None or self._loop.done():
            raise EnginePoisoned("The engine's loop has ended.")

    def shutdown(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            self._loop = None
        for future in self._unanswered:
            if not future.done():
                future.set_exception(EnginePoisoned("The engine was shut down."))
        self._thread.shutdown(wait=False)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    @abstractmethod
    def _answers(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        """Answer a batch; called in the thread."""

    async def _answer(self, batch: Sequence[Waiting]) -> None:
        self._answering = [future for *_, future in batch]
        try:
            answers = await self._run(self._answers, [item[0] for item in batch], [item[1] for item in batch])
        except Exception as error:  # noqa: BLE001 (border of a batch: each request gets the cause)
            aborted = isinstance(error, GenerationAborted)
            for *_, future in batch:
                if not future.done():
                    cause = f"The batch failed: {type(error).__name__}: {error}"
                    future.set_exception(GenerationAborted(str(error)) if aborted else EnginePoisoned(cause))
            return
        for (*_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


class TransformersEngine(BatchingEngine):
    """`Engine` over `AutoModelForCausalLM`, in a separate thread."""

    def __init__(self, config: GenerationConfig, model_dir: str, codec: ChatCodec) -> None:
        super().__init__(config.max_model_len, "transformers")
        self.config = config
        self._batch = int(config.engine_args.get("max_num_seqs", BATCH))
        self._model_dir = model_dir
        self._codec = codec
        self._app = OpenAIRoutes(codec)
        self._model: Any = None
        self._version = 0
        self._broken = False
        """A load failed: nothing more is drawn until one succeeds."""
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    async def start(self) -> None:
        self._model = await self._run(self._build)
        self._loop = asyncio.create_task(self._serve())

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        def load() -> Change:
            self._broken = True
            load_into(self._model, directory)
            self._version, self._broken = version, False
            return Change(version, running, recompute=not keep_prefix_cache)

        await self._between(load)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        def score() -> list[float]:
            with self._computing() as model:
                return score_tokens(model, token_ids)

        scores: list[float] = await self._between(score)
        return scores

    async def sleep(self) -> None:
        await self._between(self._forget)

    async def wake(self) -> None:
        def build() -> None:
            self._model = self._build()

        await self._between(build)

    async def _between(self, work: Callable[[], Any]) -> Any:
        """Have the thread do something: between two tokens of the batch that is running, or at once."""
        future: Future[Any] = Future()
        self._asked.put((work, future))
        self._thread.submit(self._do_what_was_asked)
        return await asyncio.wrap_future(future)

    def _do_what_was_asked(self) -> Change | None:
        change = None
        while True:
            try:
                work, future = self._asked.get_nowait()
            except Empty:
                break
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 (border of a piece of work: its requester gets the cause)
                future.set_exception(error)
            else:
                change = result if isinstance(result, Change) else change
                future.set_result(result)
        if self._broken:
            raise GenerationAborted("New weights could not be loaded.")
        return change

    def openai_app(self) -> AsgiApp | None:
        return self._app

    def shutdown(self) -> None:
        super().shutdown()
        self._thread.shutdown()  # a token's time: nobody waits for the running batch any more
        self._forget()

    def _forget(self) -> None:
        self._model = None
        give_back_memory()

    @contextmanager
    def _computing(self) -> Iterator[Any]:
        """The model, ready to generate and to score."""
        yield self._model

    def _have_room(self, batch: Sequence[Waiting]) -> bool:
        """Return whether these requests may be answered together; a single one always may."""
        return len(batch) <= self._batch

    async def _serve(self) -> None:
        following: list[Waiting] = []
        while True:
            batch = following or [await self._waiting.get()]
            following = []
            while not following and not self._waiting.empty():
                item = self._waiting.get_nowait()
                (batch if self._have_room([*batch, item]) else following).append(item)
            batch = [item for item in batch if not item[2].done()]
            if batch:
                await self._answer(batch)

    def _answers(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        between, stops, waiting = self._do_what_was_asked, self._codec.stop_token_ids, self._answering
        with self._computing() as model:
            return generate_batch(
                model,
                prompts,
                draws,
                stops,
                between,
                lambda: self._version,
                lambda row: not waiting[row].done(),
                self._codec.images,
            )

    def _build(self) -> Any:
        return build_model(self._model_dir, self.config)


class OpenAIRoutes:
    """/detokenize, and /tokenize of plain text; conversations are tokenised by the chat server."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"])
        if route not in (("POST", "/tokenize"), ("POST", "/detokenize")):
            await reply_error(send, 404, "not_found", f"The path {scope['path']} does not exist.")
            return
        try:
            body = orjson.loads(await read_body(receive))
            if scope["path"] == "/tokenize":
                reply = token_list(self.codec.encode(body["prompt"]), self.codec.max_model_len)
            else:
                reply = {"prompt": self.codec.tokenizer.decode(body["tokens"])}
            await reply_json(send, 200, reply)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            await reply_error(send, 400, "invalid_request", f"{type(error).__name__}: {error}")
