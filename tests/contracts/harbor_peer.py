"""Harbor's own parser and trials on task directories, as JSON: `python harbor_peer.py WORK DIRECTORY…`, in its own interpreter.

An environment runs commands of a task in a root directory below WORK, in a mount namespace with this machine's programs.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

ENTER = """
root=$1 place=$2 command=$3
for each in usr bin sbin lib lib32 lib64 etc dev; do
    if [ -L /$each ]; then cp -P /$each "$root/$each" 2>/dev/null
    elif [ -d /$each ]; then mkdir -p "$root/$each" && mount --rbind /$each "$root/$each" || exit 99; fi
done
exec chroot "$root" sh -c 'cd "$1" && exec bash -c "$2"' - "$place" "$command"
"""


class LocalEnvironment(BaseEnvironment):
    """A task in a directory of this machine."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)

    async def start(self, force_build: bool) -> None:
        """Make the directories and copies of a Dockerfile of FROM, WORKDIR and COPY."""
        self.root = self.trial_paths.trial_dir / "roots" / self.session_id
        text = (self.environment_dir / "Dockerfile").read_text()
        lines = [line.split() for line in text.replace("\\\n", " ").splitlines() if line]
        built = next(words[1] for words in lines if words[0] == "WORKDIR")
        self.workdir = self.task_env_config.workdir or built
        for path in (built, self.workdir, "/tmp", "/tests", "/logs/verifier", "/logs/agent", "/logs/artifacts"):
            self.inside(path).mkdir(parents=True, exist_ok=True)
        for _, *sources, target in (words for words in lines if words[0] == "COPY"):
            place = self.inside(str(Path(built, target)))
            for content in (self.environment_dir / source for source in sources):
                if content.is_dir():
                    shutil.copytree(content, place, dirs_exist_ok=True)
                else:
                    (place if target.endswith(("/", ".")) else place.parent).mkdir(parents=True, exist_ok=True)
                    shutil.copy(content, place)

    def inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    async def stop(self, delete: bool) -> None:
        return

    async def upload_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, self.inside(target_path))

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, self.inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(self.inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(self.inside(source_dir), target_dir, symlinks=True, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", **(self._merge_env(env) or {})}
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "-"),
            *(str(self.root), cwd or self.workdir, command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
        return ExecResult(stdout=output.decode(errors="replace"), return_code=process.returncode)


async def play(directory: Path, work: Path, state: str) -> dict:
    """Return the rewards, or the error, of a trial: by Harbor's oracle, or of the first state."""
    config = TrialConfig(
        task=TaskConfig(path=directory),
        trial_name=f"{directory.name.replace(' ', '-')}-{state}",
        trials_dir=work,
        agent=AgentConfig(name="oracle" if state == "solved" else "nop"),
        environment=EnvironmentConfig(import_path="harbor_peer:LocalEnvironment"),
    )
    result = await (await Trial.create(config)).run()
    steps = [step for step in result.step_results or () if step.verifier_result]
    played = {"steps": {step.step_name: step.verifier_result.rewards for step in steps}}
    errors = [
        each.exception_info.exception_type for each in (result, *(result.step_results or ())) if each.exception_info
    ]
    if errors:
        played["error"] = errors[0]
    if result.verifier_result:
        played["rewards"] = result.verifier_result.rewards
    return played


def examine(directory: Path, work: Path) -> dict:
    try:
        task = Task(directory)
        environment = task.paths.environment_dir
        require_agent_environment_definition(environment, docker_image=task.config.environment.docker_image)
    except Exception as error:  # noqa: BLE001 - its name is the result
        return {"refused": f"{type(error).__name__}: {error}"}
    timeouts = [task.config.agent.timeout_sec, task.config.verifier.timeout_sec]
    instructions = [task.step_instruction(step.name) for step in task.config.steps or ()] or [task.instruction]
    examined = {"name": task.name, "instructions": instructions, "timeouts": timeouts}
    for state in ("solved", "unsolved") if (directory / "play").exists() else ():
        examined[state] = asyncio.run(play(directory, work, state))
    return examined


def main() -> None:
    work, *directories = map(Path, sys.argv[1:])
    json.dump({each.name: examine(each, work) for each in directories}, sys.stdout)


if __name__ == "__main__":
    main()
