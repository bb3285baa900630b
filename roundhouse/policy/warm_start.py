"""Make a starting policy from nothing: a tokenizer, a small Qwen3, supervised training on the environment's
demonstrations.

Invariants
- All demonstrations are of the training split; held-out problems are never used.
- The loss covers exactly the assistant's text with its end of turn; never the prompt or a tool's result.
- Equal (config, environment, seed) give equal files, byte for byte, on one machine with one number of threads.
- Initial weights are float32 and depend only on the configuration, the vocabulary and the seed; the caller's random
  state is
  unchanged.
- `directory` is complete or absent: the files are moved into place at the end.

The demonstrations mix right and wrong procedures (`good_fraction`), and the policy learns the mixture: it can do each
step of the task, and takes the right ones about as often as they were shown. It is therefore a starting point for
training by reward. Measured recipes: docs/policies.md.

A warm start that was made before on this machine is copied, not trained:

    <cache>/warm-starts/<digest>/report.json, files/

The digest covers everything that determines the bytes: the recipe, the seed, the demonstrations as text, this package's
code, the libraries, the processor and the number of threads. Entries are renamed into place, and used only if every
file has its recorded digest, so runs may share the directory, and a damaged entry is made again.
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
from roundhouse.errors import ConfigError, StoreError
from roundhouse.generation.tool_schemas import shown_tools
from roundhouse.imports import lean_transformers
from roundhouse.policy.tokenizer import SPECIAL_TOKENS, TURN_END, TURN_START, blank_tokenizer, render, train_tokenizer
from roundhouse.pretrained import without_progress_bars
from roundhouse.rollout.responses import chat_tools
from roundhouse.store.location import file_digests
from roundhouse.store.stage import sha256
from roundhouse.trajectories.records import derive_seed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


KEPT = 64
"""Entries of the cache; the oldest go. One is some megabytes."""
MAX_POSITIONS = 4096
MIN_DEMONSTRATIONS, MAX_DEMONSTRATIONS = 2048, 8192
"""Number of demonstrations: as many as training takes, within these bounds, because the tokenizer needs the first, and
longer training repeats the second."""
OPTIMIZER_WARMUP_STEPS = 30
FINAL_LEARNING_RATE_SHARE = 0.05
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0

OnProgress = Callable[[int, int, float], None]
"""Callback with (step, steps, loss) after each optimizer step."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """Report about a starting policy."""

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
    """Seconds of its original creation, even if it is `reused`."""
    reused: bool = False
    """Copied from the cache."""


@dataclass(frozen=True, slots=True)
class Example:
    """One demonstration as tokens; `trained` marks the tokens of the loss."""

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
    """Write a complete Hugging Face model directory. `config.seed`, if set, takes precedence over `seed`.

    Args:
        cache: directory of earlier warm starts; an equal one is copied.

    Raises:
        ConfigError: the environment does not provide demonstrations, or a demonstration spells a control token.
        StoreError: `directory` exists and is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise StoreError(
            f"{directory} is not empty: a starting policy is written into a new directory. Remove it first."
        )
    started = time.monotonic()
    seed = seed if config.seed is None else config.seed
    texts = demonstration_texts(config, environment, seed)
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


def starting_tokenizer(config: WarmStartPolicy, environment: TaskSource, seed: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the starting policy, which its demonstrations fix."""
    seed = seed if config.seed is None else config.seed
    return train_tokenizer(demonstration_texts(config, environment, seed)[:MIN_DEMONSTRATIONS])


def write_engine_files(config: WarmStartPolicy, environment: TaskSource, seed: int, directory: Path) -> None:
    """Write the files with which an engine starts before the policy is trained: its final config and tokenizer."""
    seed = seed if config.seed is None else config.seed
    tokenizer = starting_tokenizer(config, environment, seed)
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
    """Encode rendered conversations. Trained tokens are those after `<|im_start|>assistant\\n` up to `<|im_end|>`."""
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


def demonstration_texts(config: WarmStartPolicy, environment: TaskSource, seed: int) -> list[str]:
    """The demonstrations as rendered text; the tokenizer is trained on the first of them."""
    count = min(max(config.steps * config.batch_size, MIN_DEMONSTRATIONS), MAX_DEMONSTRATIONS)
    parts, blank = environment.parts(), blank_tokenizer()
    part_texts = []
    for part in parts:
        try:
            conversations = part.demonstrations(
                "train", -(-count // len(parts)), config.good_fraction, derive_seed(seed, "demos")
            )
        except NotImplementedError as error:
            raise without_demonstrations(part.name) from error
        tools = shown_tools(chat_tools(part.tool_schemas()))
        written = repr((conversations, tools))
        if spelled := [token for token in SPECIAL_TOKENS if token in written]:
            raise ConfigError(
                f"The demonstrations or tools of {part.name} spell {spelled[0]}, a control token of the chat template: the "
                "policy would learn to end or begin turns there. Remove it from demonstrations()."
            )
        part_texts.append([render(blank, conversation, tools) for conversation in conversations])
    in_turn = itertools.zip_longest(*part_texts)  # the tokenizer is trained on the first of all
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
    progress = (step - OPTIMIZER_WARMUP_STEPS) / max(1, steps - OPTIMIZER_WARMUP_STEPS)
    return 1 - (1 - FINAL_LEARNING_RATE_SHARE) * progress


def _batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches without end: every example once, in random order, before any comes again."""
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, max(1, len(order) - size + 1), size):
            yield order[start : start + size]


def _loss(model: Qwen3ForCausalLM, batch: list[Example]) -> tuple[torch.Tensor, int]:
    """Return the mean cross-entropy over the trained tokens, and their number.

    Padding is on the right, where causal attention of earlier tokens cannot see it, so no attention mask is needed.
    Logits are computed only for tokens of the loss.
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
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with without_progress_bars():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(directory)


def recipe_digest(config: WarmStartPolicy, seed: int, texts: Sequence[str]) -> str:
    """Return the digest of everything that determines a warm start's bytes."""
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
    """Copy an entry into a new directory and return its report; None if the entry is missing or damaged."""
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
    """Add a warm start under its digest, and remove the oldest. A directory that cannot be written is ignored."""
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
