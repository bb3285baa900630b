"""The environment: the policy works in a sandbox with the files of a task, and the tests of the task judge its state.

Invariant: the reward is Harbor's after the same commands: the number of the tests, or of a task with steps the mean, or
the last one, of its judged steps. Tests that leave no finite number or reach their time limit fail the rollout, as does a
failed setup.sh.

    instruction of step 1  …  reply without a call  →  tests of step 1  →  instruction of step 2  …  tests of step 2  →  reward

A rollout that ends earlier, as at its limit of tokens, has the remaining steps judged as it left them.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from roundhouse.config.sandboxes import LocalSandbox, SandboxConfig, SandboxLimits
from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.generated import Message, calls, returns, says, user
from roundhouse.environments.sandboxed import SandboxedEnvironment, shown
from roundhouse.environments.sandboxes import FilesRefused, new_sandbox
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.plugins.harbor.tasks import HarborTask, Place, find_tasks
from roundhouse.plugins.harbor.trial import Trial, composed
from roundhouse.rollout.protocol import SeedFailed, VerifierFailed

T = TypeVar("T")
IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII)


class Harbor(SandboxedEnvironment[HarborTask]):
    """Task directories below one path."""

    name = "harbor"

    def __init__(
        self,
        path: str,
        weights: Mapping[str, float] | None = None,
        heldout_fraction: float = 0.2,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: a directory is not a task, or cannot be played in this kind of sandbox.
        """
        self._weights = dict(weights or {})
        self._tasks = {task.name: task for task in find_tasks(path)}
        self._demonstrations: dict[tuple[str, bool], list[Message]] = {}
        self.sandbox = sandbox or LocalSandbox()
        for task in self._tasks.values():
            for place in (task.place, *(step.verifier for step in task.steps)):
                if place is not None:
                    self._section(task, place)
        super().__init__(self._tasks.values(), heldout_fraction, self.sandbox)

    def key(self, problem: HarborTask) -> str:
        return problem.name

    def row(self, problem: HarborTask) -> TaskRow:
        return self.task(problem, problem.steps[0].instruction, name=problem.name, digest=problem.digest)

    def demonstration(self, problem: HarborTask, right: bool, rng: random.Random) -> Iterator[Message]:
        """Run the task's own solution; a wrong demonstration looks at the files and changes nothing."""
        if any(step.solution is None for step in problem.steps):
            raise ConfigError(
                f"policy.kind is warm_start, but {problem.directory} has no solution/solve.sh, a script of a shell, alone, for "
                "each step. Leave the task out, or set policy.kind to pretrained."
            )
        if (problem.name, right) not in self._demonstrations:
            self._demonstrations[problem.name, right] = _run(self._play(problem, right))
        yield from self._demonstrations[problem.name, right]

    async def seed_session(self, row: TaskRow) -> Trial:
        task = self._tasks.get(row["name"])
        if task is None or task.digest != row["digest"]:
            raise SeedFailed(f"The directory of {row['name']} has changed since its row was made. Start the run again.")
        trial = Trial(task, lambda place: new_sandbox(self._section(task, place)), self.sandbox.command_seconds)
        try:
            await trial.start()
        except BaseException:
            await trial.close()
            raise
        return trial

    async def follow_up(self, session: Trial, row: TaskRow, response: dict[str, Any]) -> str | None:
        return await session.advance()

    async def verify(self, session: Trial, row: TaskRow, response: dict[str, Any]) -> Verdict:
        while await session.advance() is not None:
            pass  # the policy has no turn left for this step
        task = self._tasks[row["name"]]
        values = composed(session.results, task.toml.multi_step_reward_strategy)
        names = self._weights or ({"reward": 1.0} if "reward" in values else dict.fromkeys(values, 1.0))
        if missing := [name for name in names if name not in values]:
            raise VerifierFailed(f"{row['name']}: reward.json lacks {', '.join(missing)} of environment.weights.")
        if not self._weights and len(names) != 1:
            raise VerifierFailed(
                f"{row['name']}: reward.json has the numbers {', '.join(values)}, not `reward`. Set environment.weights."
            )
        parts = {name: weight * values[name] for name, weight in names.items()}
        metrics = values if len(values) > 1 else {}
        if task.toml.steps:
            metrics |= {
                f"{step.table.name}.{name}": value
                for step, numbers in zip(task.steps, session.results, strict=False)
                for name, value in numbers.items()
            }
        return Verdict(sum(parts.values()), parts if self._weights else {}, metrics)

    def check_sandbox(self) -> None:
        async def probe() -> None:
            await self.close_session(await self.seed_session(self.tasks("train")[0]))

        try:
            _run(probe())
        except (InfraError, DataError, FilesRefused) as error:
            raise ConfigError(
                f"environment.sandbox.kind is {self.sandbox.kind}: no task begins there: {error}"
            ) from error

    async def _play(self, task: HarborTask, right: bool) -> list[Message]:
        """Return the messages of a demonstration, up to the last step that begins."""
        session = await self.seed_session(self.row(task))
        messages: list[Message] = []
        try:
            for number, step in enumerate(task.steps, start=1):
                if messages:
                    if await session.advance() is None:
                        break
                    messages.append(user(step.instruction))
                call, command = f"call_{number}", (step.solution or "") if right else "ls"
                output = shown(await session.run(command))
                messages += [calls("run", call, command=command), returns(call, output), says("Done.")]
            return messages
        finally:
            await self.close_session(session)

    def _section(self, task: HarborTask, place: Place) -> SandboxConfig:
        """Return the section of a sandbox of a task.

        Raises:
            ConfigError: it needs an image, or less network.
        """
        where, toml = f"environment.path: {task.directory}", task.toml
        image = getattr(self.sandbox, "image", None)
        if place.image and not (self.sandbox.has_image and (not place.has_tests or "{" in str(image))):
            verifier = " of its verifier alone" if place.has_tests else ""
            raise ConfigError(
                f"{where} needs an image{verifier} ({place.image}), but environment.sandbox.kind is {self.sandbox.kind}, with "
                f"image {image or 'unset'}. Build its Dockerfile, and set environment.sandbox to {{kind: container, image: "
                "NAME}, where NAME contains {task}; or leave the task out."
            )
        network = getattr(self.sandbox, "network", "none")
        modes = [*(each.network_mode for each in toml.environments), *(each.network_mode for each in toml.phases)]
        if network != "none" and (less := {*modes} - {"public", None}):
            raise ConfigError(
                f"{where} has network_mode {less.pop()}, but environment.sandbox.network is {network}. Set it to none."
            )
        limits = [step.table.verifier.timeout_sec for step in task.steps]
        limits += [hook.timeout_sec for step in task.steps for hook in step.hooks]
        command = max(*limits, self.sandbox.command_seconds)
        lifetime = sum(step.seconds or self.sandbox.lifetime_seconds for step in task.steps) + 2 * sum(limits) + command
        changes: dict[str, Any] = {"command_seconds": command, "lifetime_seconds": lifetime}
        if isinstance(self.sandbox, SandboxLimits):
            changes["directories"] = tuple(dict.fromkeys((*self.sandbox.directories, *place.directories)))
        if isinstance(image, str):
            named = image.replace("{task}", place.image_name).replace("{docker_image}", place.docker_image)
            if not IMAGE.fullmatch(named):
                raise ConfigError(
                    f"{where}: environment.sandbox.image {image} is {named!r:.200}, not the name of an image."
                )
            changes["image"] = named
        return self.sandbox.model_copy(update=changes)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Await at the construction of a run, which may be inside of an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
