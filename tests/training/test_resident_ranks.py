"""Two ranks that stay do what one process does, verb by verb, and a rank that is lost or hangs ends with a named error."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.http.asgi import token_digest
from roundhouse.launch.base import Program, Say
from roundhouse.launch.resident_ranks import ResidentRanks
from roundhouse.launch.subprocesses import SubprocessLauncher
from roundhouse.stages.trainers import open_service
from roundhouse.store.location import Location
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.parallel import Ranks
from roundhouse.training.service import protocol, ranks
from roundhouse.training.service.client import RemoteTrainService
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.job_entry import ADDRESS_VARIABLE
from roundhouse.training.service.verbs import LossBatch, Role, TrainService
from roundhouse.weight_sync.tensor_files import digest_of, digest_of_tensors, iterate, tensor_digests, weight_files
from tests import fork_server
from tests.ports import free_port
from tests.stages.test_distributed import is_alive
from tests.training.service.test_engine import loss_batch
from tests.training.test_ranks import distance
from tests.training.tiny import sequences
from tests.waiting import until

pytestmark = pytest.mark.real

OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.05}
CHANGES = {"device": "cpu", "threads": 1, "optimizer": OPTIMIZER, "tokens_per_microbatch": 100}
ALONE = TrainConfig.model_validate(CHANGES)


def ranks_of(timeout_seconds: float = 120, launcher: str = "subprocess", processes: int = 2) -> ResidentRanks:
    section = {"kind": "resident", "processes": processes, "timeout_seconds": timeout_seconds, "launcher": launcher}
    config = TrainConfig.model_validate({**CHANGES, "service": section})
    service = open_service(config, owner="run", temperature=0.9)
    assert isinstance(service, ResidentRanks)
    return service


@pytest.fixture(scope="module")
def together() -> Iterator[ResidentRanks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
        service = ranks_of()
    yield service
    service.close()


@pytest.fixture
def alone(model_dir: Path) -> TrainEngine:
    torch.set_num_threads(1)
    return TrainEngine(ALONE, temperature=0.9)


def pids(service: ResidentRanks) -> list[int]:
    return [pid for _, pid in sorted(service.ranks.pids.items())]


def test_log_probabilities_gradients_and_state_are_those_of_one_process(
    together: ResidentRanks, alone: TrainEngine, model_dir: Path, reference_dir: Path, tmp_path: Path
) -> None:
    batch = loss_batch(list(range(len(sequences()))))
    found = []
    for service, name in ((alone, "alone"), (together, "together")):
        service.load_checkpoint(model_dir)
        service.load_checkpoint(reference_dir, role=Role.REFERENCE)
        forward = [service.forward(batch.tokens, role) for role in (Role.POLICY, Role.REFERENCE)]
        gradient = service.forward_backward(batch)
        assert gradient.microbatches > 2, "each rank accumulates"
        norm = service.optim_step(1e-3, 1.0).grad_norm
        service.save_checkpoint(tmp_path / name, Cursor(optimizer_steps=1))
        found.append((forward, gradient, norm))
    (before, expected, norm), (after, gradient, found_norm) = found
    for theirs, ours in zip([*before, expected.log_probs], [*after, gradient.log_probs], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert gradient.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
    assert found_norm == pytest.approx(norm, rel=1e-5)
    # after one step AdamW's first moment is the clipped gradient times 1 - beta
    assert distance(*(tmp_path / name / "trainer/optimizer.safetensors" for name in ("together", "alone"))) < 1e-5


def step(service: TrainService, batch: LossBatch) -> None:
    service.forward_backward(batch)
    service.optim_step(1e-3, 1.0)


@contextmanager
def train_server(secret: Path, *options: str) -> Iterator[tuple[str, int]]:
    """The command, with a token from a file; its URL and process."""
    secret.write_text("a token\n")
    command = [str(Path(sys.executable).with_name("roundhouse")), "train-server", "--token-file", str(secret)]
    command += ["--threads", "1", "--device", "cpu", "--port", str(port := free_port()), *options]
    process = fork_server.start(command)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(20)


def remote(url: str) -> RemoteTrainService:
    return RemoteTrainService(url, ALONE, owner="run", token="a token", temperature=0.9, retry_seconds=60)


def two_steps(service: TrainService, model_dir: Path, directory: Path) -> dict[str, bytes]:
    """Return the service's files after two steps, the second from a checkpoint of the first."""
    service.load_checkpoint(model_dir)
    step(service, loss_batch([0, 1, 2, 3, 4, 5]))
    service.save_checkpoint(directory / "first", Cursor(optimizer_steps=1))
    service.load_checkpoint(directory / "first", trainer_state=directory / "first/trainer")
    step(service, loss_batch([6, 7, 8, 9, 10]))
    service.save_checkpoint(directory / "second", Cursor(optimizer_steps=2))
    return contents(directory)


@pytest.mark.long
def test_ranks_behind_a_train_server_write_what_resident_ranks_write(
    together: ResidentRanks, model_dir: Path, tmp_path: Path
) -> None:
    with train_server(tmp_path / "token", "--model", str(model_dir), "--processes", "2") as (url, server):
        service = remote(url)
        served = two_steps(service, model_dir, tmp_path / "served")
        assert sum("torch.distributed.run" in each.cmdline() for each in psutil.Process(server).children(True)) >= 1
        service.close()
    assert served == two_steps(together, model_dir, tmp_path / "resident")


@pytest.mark.long
def test_a_server_that_lost_a_rank_says_so_and_starts_ranks_anew_for_the_next_session(
    model_dir: Path, tmp_path: Path
) -> None:
    with train_server(tmp_path / "token", "--processes", "2") as (url, server):
        service = remote(url)
        expected = two_steps(service, model_dir, tmp_path / "before")
        ranks = [each for each in psutil.Process(server).children(True) if "--spec" in each.cmdline()]
        last = max(each.pid for each in ranks if "torch.distributed.run" not in each.cmdline())
        os.kill(last, signal.SIGKILL)
        with pytest.raises(InfraError, match="was killed by signal 9"):
            step(service, loss_batch([0, 1, 2]))
        service.close()
        again = remote(url)
        assert two_steps(again, model_dir, tmp_path / "after") == expected
        again.close()


@pytest.mark.long
def test_ranks_beneath_an_actor_write_what_resident_ranks_write(
    together: ResidentRanks, model_dir: Path, tmp_path: Path
) -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        config = TrainConfig.model_validate({**CHANGES, "service": {"kind": "ray", "processes": 2}})
        service = open_service(config, owner="run", temperature=0.9)
        found = two_steps(service, model_dir, tmp_path / "actor")
        service.close()
    finally:
        ray.shutdown()
    assert found == two_steps(together, model_dir, tmp_path / "resident")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--processes", "2", "--context-parallel", "3"), "context_parallel is 3.*processes 2\\. Set processes to 3"),
        (("--processes", "16", "--tensor-parallel", "8"), "heads"),
        (
            ("--processes", "2", "--expert-parallel", "2"),
            "expert_parallel is 2, but Qwen3ForCausalLM has no matrix to split",
        ),
        (("--device", "tpu"), "No train server can run so.*'auto', 'cpu' or 'cuda'"),
        (("--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from other machines"),
    ],
)
def test_a_server_that_cannot_run_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("ROUNDHOUSE_TRAIN_TOKEN", raising=False)
    found = CliRunner().invoke(app, ["train-server", "--model", str(model_dir), *options])
    assert isinstance(found.exception, ConfigError)
    assert re.search(said, str(found.exception))


@pytest.mark.smoke("torchrun ranks")
def test_a_checkpoint_that_is_loaded_again_continues_bit_for_bit(
    together: ResidentRanks, model_dir: Path, tmp_path: Path
) -> None:
    first, second = loss_batch([0, 1, 2, 3, 4, 5]), loss_batch([6, 7, 8, 9, 10])
    together.load_checkpoint(model_dir)
    step(together, first)
    together.save_checkpoint(tmp_path / "first", Cursor(optimizer_steps=1))
    step(together, second)
    together.save_checkpoint(tmp_path / "on", Cursor(optimizer_steps=2))
    cursor = together.load_checkpoint(tmp_path / "first", trainer_state=tmp_path / "first/trainer")
    assert cursor.optimizer_steps == 1
    step(together, second)
    together.save_checkpoint(tmp_path / "resumed", Cursor(optimizer_steps=2))
    for file in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "on" / file).read_bytes()


def test_what_a_request_brings_about_is_refused_and_the_ranks_stay(
    together: ResidentRanks, model_dir: Path, tmp_path: Path
) -> None:
    before = pids(together)
    together.load_checkpoint(model_dir)
    with pytest.raises(ConfigError, match=r"has no config.json"):
        together.load_checkpoint(tmp_path)
    with pytest.raises(DataError, match="call forward_backward first"):
        together.optim_step(1e-3, 1.0)
    batch = loss_batch([0, 1, 2])
    spoilt = replace(batch, old_logprobs=batch.gen_logprobs[:-1])
    with pytest.raises(DataError, match="must be equally long"):
        together.forward_backward(spoilt)
    step(together, batch)
    assert pids(together) == before
    assert all(map(is_alive, before))


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 10 MiB, of which each of two ranks writes a part."""
    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=101, hidden_size=256, intermediate_size=1023, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(directory)
    return directory


def test_each_rank_writes_its_part_of_an_ordinary_directory(alone: TrainEngine, wide_dir: Path, tmp_path: Path) -> None:
    together = ranks_of()
    try:
        _each_writes_its_part(together, alone, wide_dir, tmp_path)
    finally:
        together.close()


def _each_writes_its_part(together: ResidentRanks, alone: TrainEngine, wide_dir: Path, tmp_path: Path) -> None:
    for service, name in ((alone, "alone"), (together, "together")):
        service.load_checkpoint(wide_dir)
        service.save_checkpoint(tmp_path / f"{name}-begun", Cursor())
        step(service, loss_batch([0, 1, 2, 3]))
        service.save_checkpoint(tmp_path / name, Cursor(optimizer_steps=1))
    saved = tmp_path / "together"
    assert len(list(saved.glob("model-*-of-00002.safetensors"))) == 2
    assert len(list((saved / "trainer").glob("optimizer-*.safetensors"))) >= 2
    begun = [digest_of(tmp_path / f"{name}-begun") for name in ("alone", "together")]
    assert begun == [digest_of_tensors(tensor_digests(weight_files(wide_dir)))] * 2
    model = AutoModelForCausalLM.from_pretrained(saved)
    reference = dict(iterate(tmp_path / "alone"))
    for name, tensor in model.state_dict().items():
        if name in reference:
            torch.testing.assert_close(tensor, reference[name], rtol=1e-4, atol=1e-5)
    together.load_checkpoint(saved, trainer_state=saved / "trainer")
    together.save_checkpoint(tmp_path / "again", Cursor(optimizer_steps=1))
    assert contents(tmp_path / "again") == contents(saved)


def contents(directory: Path) -> dict[str, bytes]:
    files = list(directory.rglob("*.safetensors"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.long
def test_a_rank_that_is_killed_as_it_writes_is_named(wide_dir: Path, tmp_path: Path) -> None:
    service = ranks_of()
    try:
        service.load_checkpoint(wide_dir)
        step(service, loss_batch([0, 1, 2, 3]))
        pid, store = pids(service)[1], tmp_path / "saved"

        def kill() -> None:
            while not (scratch := list(store.glob(".saving-*"))):
                time.sleep(0.01)
            own = scratch[0] / "trainer/optimizer-00002-of-00002.safetensors"
            own.parent.mkdir(exist_ok=True)
            os.mkfifo(own)  # the rank writes no further than the pipe holds
            os.kill(pid, signal.SIGCONT)
            with own.open("rb"):  # returns when the rank has opened it
                os.kill(pid, signal.SIGKILL)

        os.kill(pid, signal.SIGSTOP)
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(InfraError, match="rank 1 of 2 was killed by signal 9"):
            service.store_checkpoint(Location(str(store)), "0001", Cursor(optimizer_steps=1))
        killer.join()
        assert not list(store.rglob("state.json")), "the cursor is written last"
    finally:
        service.close()


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def hung(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def lost(timeout_seconds: float, strike: int, model_dir: Path) -> str:
    """Send a signal to rank 1 and return the error; no rank remains."""
    service = ranks_of(timeout_seconds)
    try:
        service.load_checkpoint(model_dir)
        left = pids(service)
        os.kill(left[1], strike)
        with pytest.raises(InfraError) as raised:
            service.forward_backward(loss_batch([0, 1, 2]))
        until(lambda: not [pid for pid in left if is_alive(pid)], "the end of what was killed, which the kernel brings")
    finally:
        service.close()
    return str(raised.value)


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_and_none_is_left(model_dir: Path) -> None:
    said = lost(120, signal.SIGKILL, model_dir)
    assert "lost in /v1/forward_backward: rank 1 of 2 was killed by signal 9" in said


@pytest.mark.long
def test_ranks_end_with_the_launcher_that_is_killed(model_dir: Path) -> None:
    """Ray killed an actor, and with it torchrun: its ranks waited for each other for ever."""
    service = ranks_of()
    try:
        service.load_checkpoint(model_dir)
        ranks = [psutil.Process(pid) for pid in pids(service)]
        ranks[0].parent().kill()  # type: ignore[union-attr]
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    finally:
        service.close()


@pytest.mark.long
def test_a_rank_that_hangs_is_named_and_none_is_left(model_dir: Path) -> None:
    said = lost(30, signal.SIGSTOP, model_dir)
    assert "no answer within train.service.timeout_seconds (30 s): rank 0" in said
    assert re.search(r"rank 1 \(pid \d+\) stopped", said)


def test_no_call_of_the_ranks_goes_through_the_environments_proxy(together: ResidentRanks, model_dir: Path) -> None:
    """No program listens at the proxy that was set at their start."""
    together.load_checkpoint(model_dir)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_server_that_is_told_to_end_leaves_nothing_on_its_disk(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with train_server(tmp_path / "token", "--processes", str(processes)) as (url, _):
        remote(url).load_checkpoint(model_dir)
        assert list(scratch.glob("roundhouse-*"))
    assert not list(scratch.glob("roundhouse-*"))


def test_ranks_listen_on_loopback_only(together: ResidentRanks) -> None:
    connections = [each for pid in pids(together) for each in psutil.Process(pid).net_connections("tcp")]
    assert {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_ranks_elsewhere_end_when_nothing_is_heard_of_who_knows_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    monkeypatch.setattr(ranks, "SILENT_SECONDS", silent := 1.5)
    spec = ranks.RanksSpec(train=ALONE, timeout_seconds=60, token_sha256=token_digest("known"))
    thread = threading.Thread(target=ranks.serve, args=(spec, Ranks(), ranks.Verbs(Ranks()), tmp_path))
    thread.start()
    said = ""
    while not said.startswith(ranks.SERVING):
        said += capsys.readouterr().out
        time.sleep(0.02)
    heartbeat = {"authorization": "Bearer known", protocol.PROTOCOL_HEADER: protocol.PROTOCOL}
    with httpx.Client(base_url=said.removeprefix(ranks.SERVING).strip(), headers=heartbeat) as client:
        ends = time.monotonic() + 2 * silent
        while time.monotonic() < ends:
            assert client.get("/v1/alive").status_code == 200
            time.sleep(0.1)
        assert thread.is_alive()
        while thread.is_alive():
            with suppress(httpx.TransportError):
                client.get("/v1/alive", headers={"authorization": "Bearer guessed"})
                client.get("/health")
            thread.join(0.1)


class BrokenLauncher(SubprocessLauncher):
    """Launcher with machines that raise a foreign error."""

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        raise ValueError(f"no queue for {program.ranks} ranks and {program.spec.timeout_seconds:g} s")  # type: ignore[attr-defined]


def test_what_a_launcher_raises_is_told_by_the_verb_that_waits_for_the_ranks() -> None:
    with pytest.raises(InfraError, match=r"The ranks' launcher: ValueError.*no queue for 3 ranks and 77 s"):
        ranks_of(77, "tests.training.test_resident_ranks:BrokenLauncher", processes=3)
