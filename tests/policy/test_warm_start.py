import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundhouse.config.models import WarmStartPolicy
from roundhouse.environments import Calculator, Sort
from roundhouse.environments.base import Environment
from roundhouse.environments.calculator import ArithmeticChain
from roundhouse.errors import ConfigError, StoreError
from roundhouse.policy import warm_start
from roundhouse.policy.tokenizer import blank_tokenizer, render, train_tokenizer
from roundhouse.policy.warm_start import MIN_DEMONSTRATIONS, WarmStartReport, encode, make_starting_policy
from roundhouse.rollout.responses import chat_tools

SMALL = WarmStartPolicy(steps=4, batch_size=8)
OTHER: dict[str, Any] = {
    "hidden_size": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "tie_word_embeddings": False, "steps": 5, "batch_size": 4, "learning_rate": 1e-3, "good_fraction": 0.9,
}  # fmt: skip


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer demonstrations than a real tokenizer needs: making them is most of the time of a warm start of four steps."""
    monkeypatch.setattr(warm_start, "MIN_DEMONSTRATIONS", 128)


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.mark.parametrize(
    "environment", [Calculator(), Sort(digits=3), ArithmeticChain(problems=400)], ids=lambda each: each.name
)
def test_the_loss_covers_exactly_what_the_assistant_says(environment: Environment) -> None:
    tools = chat_tools(environment.tool_schemas())
    conversations = environment.demonstrations("train", 300, 0.5, seed=0)
    texts = [render(blank_tokenizer(), conversation, tools) for conversation in conversations]
    tokenizer = train_tokenizer(texts)
    for conversation, example in zip(conversations, encode(tokenizer, texts), strict=True):
        said = []
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                before = render(tokenizer, conversation[:turn], tools, add_generation_prompt=True)
                after = render(tokenizer, conversation[: turn + 1], tools)
                assert after.startswith(before)
                said += tokenizer(after.removeprefix(before).removesuffix("\n"))["input_ids"]
        covered = [token for token, trained in zip(example.token_ids, example.trained, strict=True) if trained]
        assert covered == said
        assert covered[-1] == tokenizer.eos_token_id


def test_a_user_who_writes_assistant_is_not_trained_on() -> None:
    conversations = [
        [{"role": "user", "content": "assistant\nhello"}, {"role": "assistant", "content": "assistant\nyes"}]
    ]
    texts = [render(blank_tokenizer(), conversation, []) for conversation in conversations]
    tokenizer = train_tokenizer(texts)
    (example,) = encode(tokenizer, texts)
    covered = [token for token, trained in zip(example.token_ids, example.trained, strict=True) if trained]
    assert tokenizer.decode(covered) == "assistant\nyes<|im_end|>"


def test_a_demonstration_that_spells_a_control_token_is_refused(tmp_path: Path) -> None:
    class Forger(Sort):
        def demonstrations(self, *arguments: Any) -> list[list[dict[str, Any]]]:
            return [[{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]]

    with pytest.raises(ConfigError, match=r"sort spell <\|im_end\|>.*Remove it"):
        make_starting_policy(WarmStartPolicy(), Forger(digits=3), 0, tmp_path / "policy")


@pytest.mark.usefixtures("few")
def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        torch.rand(3)
        make_starting_policy(SMALL, Calculator(), seed, tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["model.safetensors"] != digests(tmp_path / "c")["model.safetensors"]


@pytest.mark.real
def test_another_process_makes_the_same_files(tmp_path: Path) -> None:
    make_starting_policy(SMALL, Calculator(), 5, tmp_path / "here")
    script = (
        f"import pathlib, torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from roundhouse.config.models import WarmStartPolicy\n"
        "from roundhouse.environments import Calculator\n"
        "from roundhouse.policy.warm_start import make_starting_policy\n"
        f"there = pathlib.Path({str(tmp_path / 'there')!r})\n"
        "make_starting_policy(WarmStartPolicy(steps=4, batch_size=8), Calculator(), 5, there)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=280)
    assert digests(tmp_path / "here") == digests(tmp_path / "there")


@pytest.mark.usefixtures("few")
def test_the_policys_own_seed_takes_precedence(tmp_path: Path) -> None:
    make_starting_policy(SMALL, Calculator(), 5, tmp_path / "a")
    make_starting_policy(SMALL.model_copy(update={"seed": 5}), Calculator(), 99, tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("key", OTHER)
def test_every_key_of_a_warm_start_changes_its_weights(tmp_path: Path, key: str) -> None:
    changed = WarmStartPolicy.model_validate(SMALL.model_dump() | {key: OTHER[key]})
    for name, config in (("plain", SMALL), ("changed", changed)):
        make_starting_policy(config, Calculator(), 5, tmp_path / name)
    assert digests(tmp_path / "changed")["model.safetensors"] != digests(tmp_path / "plain")["model.safetensors"]


@pytest.mark.usefixtures("few")
def test_the_callers_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    make_starting_policy(SMALL, Calculator(), 5, tmp_path / "a")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_directory_is_a_whole_hugging_face_model(tmp_path: Path, tied: bool) -> None:
    config = SMALL.model_copy(update={"tie_word_embeddings": tied})
    report = make_starting_policy(config, Calculator(), 0, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert model.dtype == torch.float32
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) == report.vocabulary
    assert model.num_parameters() == report.parameters
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    row = Calculator().tasks("train")[0]["responses_create_params"]
    prompt = tokenizer.apply_chat_template(
        row["input"], tools=chat_tools(row["tools"]), add_generation_prompt=True, return_dict=False
    )
    assert len(prompt) == 21
    assert not (tmp_path / "policy.partial").exists()


def test_training_lowers_the_loss_and_tells_its_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    config = WarmStartPolicy(steps=40, batch_size=8)
    report = make_starting_policy(
        config, Sort(digits=3), 0, tmp_path / "policy", on_progress=lambda *progress: told.append(progress)
    )
    assert [step for step, _, _ in told] == list(range(1, 41))
    assert {steps for _, steps, _ in told} == {40}
    assert report.first_loss == told[0][2] > 4
    assert report.final_loss < report.first_loss / 2
    assert report.trained_tokens == 40 * 8 * 6
    assert report.seconds > 0


@pytest.mark.usefixtures("few")
def test_nothing_is_left_in_place_when_it_fails(tmp_path: Path) -> None:
    def stop(step: int, steps: int, loss: float) -> None:
        assert steps == 4, "those of the configuration"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_starting_policy(SMALL, Calculator(), 0, tmp_path / "policy", on_progress=stop)
    assert not (tmp_path / "policy").exists()


@pytest.mark.usefixtures("few")
def test_a_leftover_of_an_interrupted_write_is_replaced_but_a_full_directory_is_not(tmp_path: Path) -> None:
    (tmp_path / "policy.partial").mkdir()
    (tmp_path / "policy.partial" / "stray").touch()
    (tmp_path / "policy").mkdir()
    make_starting_policy(SMALL, Calculator(), 0, tmp_path / "policy")
    assert not (tmp_path / "policy" / "stray").exists()
    with pytest.raises(StoreError, match="not empty"):
        make_starting_policy(SMALL, Calculator(), 0, tmp_path / "policy")


def test_an_environment_without_demonstrations_is_refused_with_the_remedy(tmp_path: Path) -> None:
    class Mute(Calculator):
        demonstrations = Environment.demonstrations

    with pytest.raises(ConfigError, match=r"policy\.kind to pretrained"):
        make_starting_policy(SMALL, Mute(), 0, tmp_path / "policy")


def test_no_more_demonstrations_are_made_than_training_can_use(tmp_path: Path) -> None:
    report = make_starting_policy(SMALL, Calculator(), 0, tmp_path / "policy")
    assert report.demonstrations == MIN_DEMONSTRATIONS


@pytest.mark.usefixtures("few")
def test_a_warm_start_that_was_made_before_is_copied_and_is_the_same_to_the_byte(tmp_path: Path) -> None:
    """The warm start of the same policy was trained anew for every run."""
    steps: list[int] = []

    def make(name: str, seed: int = 5, config: WarmStartPolicy = SMALL, environment: Any = None) -> WarmStartReport:
        steps.clear()
        return make_starting_policy(
            config,
            environment or Calculator(),
            seed,
            tmp_path / name,
            on_progress=lambda step, *_: steps.append(step),
            cache=tmp_path / "cache",
        )

    first = make("first")
    assert not first.reused
    again = make("again")
    assert (again.reused, steps, again.steps) == (True, [], first.steps)
    assert digests(tmp_path / "again") == digests(tmp_path / "first")
    assert not make("seed", seed=6).reused
    assert not make("recipe", config=SMALL.model_copy(update={"learning_rate": 1e-4})).reused
    assert not make("demonstrations", environment=Sort(digits=3)).reused


@pytest.mark.usefixtures("few")
def test_a_damaged_or_half_written_warm_start_is_made_again(tmp_path: Path) -> None:
    make_starting_policy(SMALL, Calculator(), 5, tmp_path / "a", cache=tmp_path / "cache")
    [entry] = (tmp_path / "cache").iterdir()
    (entry / "files/model.safetensors").write_bytes(b"cut")
    assert not make_starting_policy(SMALL, Calculator(), 5, tmp_path / "b", cache=tmp_path / "cache").reused
    assert digests(tmp_path / "b") == digests(tmp_path / "a")
    (entry / "report.json").unlink()
    assert not make_starting_policy(SMALL, Calculator(), 5, tmp_path / "c", cache=tmp_path / "cache").reused
    assert make_starting_policy(SMALL, Calculator(), 5, tmp_path / "d", cache=tmp_path / "cache").reused
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [entry.name]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b", "c", "cache", "d"]


@pytest.mark.usefixtures("few")
def test_runs_that_make_the_same_warm_start_at_the_same_time_leave_one_whole_entry(tmp_path: Path) -> None:
    make_starting_policy(SMALL, Calculator(), 5, tmp_path / "a")
    entry = tmp_path / "cache/digest"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: warm_start.keep_cached(tmp_path / "a", {"steps": 4}, entry), range(32)))
    assert [each.name for each in entry.parent.iterdir()] == ["digest"]
    assert warm_start.take_cached(entry, tmp_path / "b") == {"steps": 4}
    assert digests(tmp_path / "b") == digests(tmp_path / "a")
