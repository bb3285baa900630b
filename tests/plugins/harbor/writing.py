"""Task directories for tests."""

from __future__ import annotations

from pathlib import Path

TOML = 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 60.0\n'
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\n"
TEST = """#!/bin/bash
if [ "$(cat out.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLUTION = "#!/bin/bash\necho hello > out.txt\n"


def write_task(directory: Path, files: dict[str, str | None] | None = None, programs: tuple[str, ...] = ()) -> Path:
    """Write a task that asks for the word hello in out.txt, with other files; None leaves one out."""
    content = {
        "task.toml": TOML,
        "instruction.md": f"Write hello to out.txt ({directory.name}).\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLUTION,
        **(files or {}),
    }
    directory.mkdir(parents=True)
    for name, text in content.items():
        if text is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
    for name in programs:
        (directory / name).chmod(0o755)
    return directory


def toml(top: str = "", verifier: str = "", rest: str = "") -> dict[str, str | None]:
    """A task.toml with lines at its top, in [verifier] and at its end."""
    return {"task.toml": f"{top}\n" + TOML.replace("20.0\n", f"20.0\n{verifier}\n") + rest}


def stepped(top: str = "", verifier: str = "", **steps: str) -> dict[str, str | None]:
    """A task.toml with steps: the lines of each by its name. No file of a task without steps is written."""
    tables = "".join(f'[[steps]]\nname = "{name}"\n{lines}\n' for name, lines in steps.items())
    instructions = {f"steps/{name}/instruction.md": f"Do {name}.\n" for name in steps}
    without: dict[str, str | None] = {"instruction.md": None, "tests/test.sh": None, "solution/solve.sh": None}
    return {**without, **toml(top, verifier, tables), **instructions}


def script(path: str, *commands: str) -> dict[str, str | None]:
    return {path: "\n".join(["#!/bin/bash", *commands, ""])}
