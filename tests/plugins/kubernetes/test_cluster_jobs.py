"""A training Job on a real kubelet, scheduler and Job controller, and the report of its end.

The other tests of Jobs simulate the kubelet; these compare the simulation with a real one. They run as
`tests/plugins/kubernetes/nodes.py` describes; only the program in the pods is not the trainer's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roundhouse.errors import ConfigError, DataError, InfraError
from tests.plugins.kubernetes.nodes import Command, Nodes, fresh_namespace, images
from tests.waiting import until

pytestmark = pytest.mark.real

SLEEP = "import time; print('here', flush=True); time.sleep(60)"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    trainer = images("trainer")["trainer"]
    with fresh_namespace(trainer) as ready:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "roundhouse-trainer"}}
        ready.cluster.create(ready.path("serviceaccounts"), account)
        yield ready


class Under:
    """A plan under way in a thread."""

    def __init__(self, nodes: Nodes, plan: Command) -> None:
        self.nodes, self.plan = nodes, plan
        self.said: list[str] = []
        self.outcome: list[Any] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome.append(self.nodes.run(self.plan, self.said.append))
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.outcome.append(error)

    def pod(self, other_than: str = "", saying: str = "here") -> str:
        """The name of its pod once it runs."""

        def running() -> str | None:
            name = self.plan.identity.job_name(1)
            pods = self.nodes.found("pods", f"batch.kubernetes.io/job-name={name}")
            names = [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"]
            return next((name for name in names if name != other_than and saying in self.nodes.log(name)), None)

        return str(until(running, f"a pod that runs; said so far: {self.said}"))

    def end(self, seconds: float = 90) -> Any:
        self.thread.join(seconds)
        assert self.outcome, f"still under way after {seconds:g} s; said: {self.said}"
        return self.outcome[0]


def test_a_job_ends_well_and_its_log_is_told_as_it_is_written(nodes: Nodes) -> None:
    said: list[str] = []
    assert nodes.run(nodes.plan("print('one'); print('two')"), said.append) == 1
    assert [line for line in said if line in ("one", "two")] == ["one", "two"]


def test_a_pod_writes_nothing_but_its_volumes_and_is_not_root(nodes: Nodes) -> None:
    program = """
import os, pathlib, tempfile
assert os.getuid() == 10001, os.getuid()
for path in ("/x", "/code/x", "/opt/roundhouse/x"):
    try:
        pathlib.Path(path).write_text("x")
    except OSError:
        continue
    raise SystemExit(f"{path} was written")
tempfile.NamedTemporaryFile(dir="/scratch").write(b"x")
tempfile.NamedTemporaryFile(dir="/dev/shm").write(b"x")
assert not os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""
    assert nodes.run(nodes.plan(program)) == 1


@pytest.mark.parametrize(("code", "kind"), [(65, DataError), (78, ConfigError), (75, InfraError), (3, InfraError)])
def test_an_exit_code_is_the_kind_of_error_and_the_log_its_words(nodes: Nodes, code: int, kind: type) -> None:
    plan = nodes.plan(f"import sys; print('the reason'); sys.exit({code})")
    with pytest.raises(kind, match=rf"exit code {code}\..*the reason"):
        nodes.run(plan)


def test_out_of_memory_is_told_with_the_key_to_raise(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match=r"ran out of memory.*limit is 64Mi.*infra\.trainer\.memory"):
        nodes.run(nodes.plan("x = b'x' * 10**9"))


def test_an_image_that_is_nowhere_is_given_up_soon(nodes: Nodes) -> None:
    plan = nodes.plan("", trainer={"image": "registry.invalid/roundhouse/none:1", "image_seconds": 5})
    with pytest.raises((ConfigError, InfraError), match=r"registry\.invalid/roundhouse/none:1.*cannot be pulled"):
        nodes.run(plan)
    until(
        lambda: not nodes.found("jobs", f"roundhouse/stage=train,batch.kubernetes.io/job-name={name_of(plan)}"), "gone"
    )


def test_a_secret_that_is_not_there_is_told(nodes: Nodes) -> None:
    plan = nodes.plan("", secret="nowhere", trainer={"image_seconds": 5})
    with pytest.raises(ConfigError, match=r'secret "nowhere" not found.*infra\.secret'):
        nodes.run(plan)


def test_a_claim_that_is_not_there_is_told(nodes: Nodes) -> None:
    plan = nodes.plan("", trainer={"pending_seconds": 5}, store_claim="nowhere")
    with pytest.raises(InfraError, match=r'persistentvolumeclaim "nowhere" not found'):
        nodes.run(plan)


def test_more_gpus_than_any_node_has_are_told_in_the_schedulers_words(nodes: Nodes) -> None:
    plan = nodes.plan("", trainer={"gpus": 512, "pending_seconds": 5})
    with pytest.raises(InfraError, match=r"Insufficient nvidia\.com/gpu"):
        nodes.run(plan)


def test_a_pod_that_is_evicted_as_by_a_drain_is_replaced(nodes: Nodes) -> None:
    program = "import time; print('here', flush=True); time.sleep(8)"
    under = Under(nodes, nodes.plan(program))
    first = under.pod()
    nodes.evict(first)
    assert under.pod(other_than=first) != first
    assert under.end() == 1, under.said


def test_a_pod_that_is_deleted_costs_the_step(nodes: Nodes) -> None:
    under = Under(nodes, nodes.plan(SLEEP))
    began = time.monotonic()
    nodes.cluster.delete(f"{nodes.path('pods')}/{under.pod()}", propagation="Background")
    error = under.end()
    assert isinstance(error, InfraError), error
    assert time.monotonic() - began < 25, "it hears SIGTERM, and does not wait for its grace period of 30 s to end"


def test_of_two_pods_one_that_is_evicted_ends_the_other(nodes: Nodes) -> None:
    under = Under(nodes, nodes.plan(SLEEP, trainer={"pods": 2}))
    nodes.evict(under.pod())
    error = under.end()
    assert isinstance(error, InfraError)
    assert "drained" in str(error)


def test_a_deadline_ends_a_pod_that_hangs(nodes: Nodes) -> None:
    plan = nodes.plan(SLEEP, trainer={"pending_seconds": 15}, service={"timeout_seconds": 1})
    with pytest.raises(InfraError, match=r"ended after 16 s, its deadline"):
        nodes.run(plan)


def name_of(plan: Command) -> str:
    return plan.identity.job_name(1)
