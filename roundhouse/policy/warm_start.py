"""Make a starting policy from nothing: a tokenizer, a small Qwen3, supervised training on the environment's demonstrations.

Invariants
- No problem that the environment holds out is ever seen: all demonstrations are of the training split.
- The loss covers exactly what the assistant says, its end of turn included; never the prompt or a tool's result.
- The same (config, environment, seed) gives the same files, byte for byte, on one machine with one number of threads.
- Initial weights are float32 and depend on the configuration, the vocabulary and the seed alone; the caller's random state is
  left as it was.
- `directory` is complete or absent: the files are written beside it and moved into place at the end.

The demonstrations mix right and wrong procedures (`good_fraction`), and the policy learns the mixture: it can do each step of
the task, and takes the right ones about as often as they were shown. That is what makes it a starting point for training by
reward. Measured recipes: docs/policies.md.

A warm start that was made before on this machine is copied, not trained:

    <state>/cache/warm-starts/<digest>/report.json, files/

An entry is stored under the digest of everything that determines its bytes: the recipe, the seed, the demonstrations as text,
this package's code, the libraries, the processor and the number of threads. It is complete or absent (renamed into place), and
a copy is used only if every file has the digest that was written down. So runs may share the directory at the same time: of two
that make the same policy one's stays, and a lost or damaged entry is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundhouse.config.models import WarmStartPolicy
from roundhouse.environments import without_demonstrations
from roundhouse.environments.base import TaskSource
from roundhouse.errors import StoreError
from roundhouse.imports import lean_transformers
from roundhouse.policy.tokenizer import TURN_END, TURN_START, blank_tokenizer, render, train_tokenizer
from roundhouse.rollout.responses import chat_tools
from roundhouse.store.location import file_digests
from roundhouse.store.stage import sha256
from roundhouse.trajectories.records import derive_seed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


KEPT = 8
"""Entries of the cache; the oldest go. One is some megabytes."""
MAX_POSITIONS = 4096
MIN_DEMONSTRATIONS, MAX_DEMONSTRATIONS = 2048, 8192
"""As many demonstrations are made as training takes, within these bounds: the tokenizer needs the first, and longer training
passes over the second again."""
OPTIMIZER_WARMUP_STEPS = 30
FINAL_LEARNING_RATE_SHARE = 0.05
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0

OnProgress = Callable[[int, int, float], None]
"""Told (step, steps, loss) after each optimizer step."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What was made."""

    parameters: int
    vocabulary: int
    demonstrations: int
    steps: int
    trained_tokens: int
    """Tokens that the loss covered, over all steps."""
    first_loss: float
    final_loss: float
    """Mean over the last tenth of the steps, in nats a token. Not near 0: the demonstrations' wrong guesses are random."""
    seconds: float
    """Of its making; nothing of it was spent where it is `reused`."""
    reused: bool = False
    """Copied from the cache."""


@dataclass(frozen=True, slots=True)
class Example:
    """One demonstration as tokens; `trained` marks those that the loss covers."""

    token_ids: list[int]
    trained: list[bool]


def make_starting_policy(
    config: WarmStartPolicy,
    environment: TaskSource,
    seed: int,
    directory: Path,
    *,
    on_progress: OnProgress | None = None,
    cache: Path | None = None,
) -> WarmStartReport:
    """Write a complete Hugging Face model directory. `config.seed`, where set, takes precedence over `seed`.

    Args:
        cache: directory of warm starts that were made before; one that is the same is copied.

    Raises:
        ConfigError: the environment has no demonstrations.
        StoreError: `directory` exists and is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise StoreError(
            f"{directory} is not empty: a starting policy is written into a new directory. Remove it first."
        )
    started = time.monotonic()
    seed = seed if config.seed is None else config.seed
    texts = _texts(config, environment, seed)
    entry = None if cache is None else cache / recipe_digest(config, seed, texts)
    if entry is not None and (known := take_cached(entry, directory)) is not None:
        return WarmStartReport(**{**known, "reused": True})
    tokenizer = train_tokenizer(texts[:MIN_DEMONSTRATIONS])
    model = make_model(config, tokenizer, derive_seed(seed, "weights"))
    examples = encode(tokenizer, texts)
    losses, trained_tokens = _train(model, examples, config, derive_seed(seed, "batches"), on_progress)
    _write(model, tokenizer, directory)
    tail = losses[-max(1, len(losses) // 10) :]
    report = WarmStartReport(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=len(tokenizer),
        demonstrations=len(examples),
        steps=len(losses),
        trained_tokens=trained_tokens,
        first_loss=losses[0],
        final_loss=sum(tail) / len(tail),
        seconds=time.monotonic() - started,
    )
    if entry is not None:
        keep_cached(directory, asdict(report), entry)
    return report


def write_engine_files(config: WarmStartPolicy, environment: TaskSource, seed: int, directory: Path) -> None:
    """Write what an engine needs to start before the policy is trained: its config and tokenizer, as they will be."""
    seed = seed if config.seed is None else config.seed
    tokenizer = train_tokenizer(_texts(config, environment, seed)[:MIN_DEMONSTRATIONS])
    model = make_model(config, tokenizer, derive_seed(seed, "weights"))
    model.config.architectures = [type(model).__name__]  # save_pretrained of a model would set it
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_model(config: WarmStartPolicy, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained model for `tokenizer`'s vocabulary."""
    import torch

    with lean_transformers():
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        # 0.02 is meant for wide models. At 64 dimensions 0.1 learns to copy in half the steps, and 0.125 was less even.
        initializer_range=0.8 * config.hidden_size**-0.5,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[Example]:
    """Rendered conversations as tokens. Trained on: from behind `<|im_start|>assistant\\n` to `<|im_end|>`."""
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    header = tokenizer(f"{TURN_START}assistant\n", add_special_tokens=False)["input_ids"]
    examples = []
    for token_ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
        trained: list[bool] = []
        speaking = False
        for index, token in enumerate(token_ids):
            trained.append(speaking)
            if speaking:
                speaking = token != end
            elif token == header[-1]:
                speaking = token_ids[index + 1 - len(header) : index + 1] == header
        examples.append(Example(token_ids, trained))
    return examples


def _texts(config: WarmStartPolicy, environment: TaskSource, seed: int) -> list[str]:
    """The demonstrations as rendered text; the tokenizer is trained on the first of them."""
    count = min(max(config.steps * config.batch_size, MIN_DEMONSTRATIONS), MAX_DEMONSTRATIONS)
    parts, blank = environment.parts(), blank_tokenizer()
    shown = []
    for part in parts:
        try:
            conversations = part.demonstrations(
                "train", -(-count // len(parts)), config.good_fraction, derive_seed(seed, "demos")
            )
        except NotImplementedError as error:
            raise without_demonstrations(part.name) from error
        tools = chat_tools(part.tool_schemas())
        shown.append([render(blank, conversation, tools) for conversation in conversations])
    in_turn = itertools.zip_longest(*shown)  # the tokenizer is trained on the first of all
    return [text for texts in in_turn for text in texts if text is not None]


def _train(
    model: Qwen3ForCausalLM, examples: list[Example], config: WarmStartPolicy, seed: int, on_progress: OnProgress | None
) -> tuple[list[float], int]:
    """Supervised training; the losses by step and how many tokens they cover."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    batches = _batches(examples, config.batch_size, random.Random(seed))
    losses: list[float] = []
    trained_tokens = 0
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate_share(step, config.steps)
        loss, count = _loss(model, next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        losses.append(loss.item())
        trained_tokens += count
        if on_progress is not None:
            on_progress(step + 1, config.steps, losses[-1])
    model.eval()
    return losses, trained_tokens


def learning_rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then linear to `FINAL_LEARNING_RATE_SHARE`."""
    if step < OPTIMIZER_WARMUP_STEPS:
        return (step + 1) / OPTIMIZER_WARMUP_STEPS
    done = (step - OPTIMIZER_WARMUP_STEPS) / max(1, steps - OPTIMIZER_WARMUP_STEPS)
    return 1 - (1 - FINAL_LEARNING_RATE_SHARE) * done


def _batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches without end: every example once, in random order, before any comes again."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, max(1, len(order) - size + 1), size):
            yield order[start : start + size]


def _loss(model: Qwen3ForCausalLM, batch: list[Example]) -> tuple[torch.Tensor, int]:
    """Mean cross-entropy over the trained tokens, and how many they are.

    Padding is on the right, where causal attention of earlier tokens cannot see it: no attention mask is needed. Logits are
    made only where the loss looks.
    """
    import torch

    width = max(len(example.token_ids) for example in batch)
    ids_BT = torch.zeros(len(batch), width, dtype=torch.long)
    trained_BT = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids_BT[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        trained_BT[row, : len(example.trained)] = torch.tensor(example.trained)
    targets_BT = trained_BT[:, 1:]
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTD[targets_BT])
    return torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][targets_BT]), len(logits_NV)


def _write(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    from transformers.utils import logging

    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # transformers draws one to write half a megabyte; the caller has its own display
    try:
        model.save_pretrained(partial)
    finally:
        if with_bars:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(partial)
    partial.replace(directory)


def recipe_digest(config: WarmStartPolicy, seed: int, texts: Sequence[str]) -> str:
    """Of all that decides which bytes a warm start writes."""
    import torch

    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    facts = {
        "config": config.model_dump(mode="json") | {"seed": seed},
        "code": sha256(code),
        "libraries": [version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")],
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for text in texts:
        digest.update(sha256(text.encode()).encode())
    return digest.hexdigest()[:32]


def take_cached(entry: Path, directory: Path) -> dict[str, Any] | None:
    """Copy an entry into a new directory; its report, or None where there is none that is whole."""
    partial = directory.with_name(directory.name + ".cached")
    try:
        record = json.loads((entry / "report.json").read_text())
        shutil.copytree(entry / "files", partial)
        if file_digests(partial) == record["files"]:
            partial.replace(directory)
            report: dict[str, Any] = record["report"]
            return report
    except (OSError, ValueError, KeyError):
        pass  # not there, or not whole
    shutil.rmtree(partial, ignore_errors=True)
    return None


def keep_cached(directory: Path, report: dict[str, Any], entry: Path) -> None:
    """Add a warm start under its digest, and let the oldest go. A directory that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".partial-"))
        shutil.copytree(directory, partial / "files")
        (partial / "report.json").write_text(json.dumps({"report": report, "files": file_digests(partial / "files")}))
        shutil.rmtree(entry, ignore_errors=True)  # a damaged one, or an equal one of another run
        try:
            partial.rename(entry)
        except OSError:  # another run was quicker
            shutil.rmtree(partial, ignore_errors=True)
        entries = sorted(entry.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in entries[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
