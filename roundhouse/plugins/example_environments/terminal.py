"""Chores in a small file tree, done with commands: find, count, sort, replace, rename, delete, repair.

Invariant: the reward is 1 exactly if, at the end, the tree holds the chore's wanted files, and all others unchanged. It
is the sum of its components, which judge the final tree alone: `done` (0.8: every file that the chore changes, makes or
removes is right) and `tidy` (0.2: every other file is unchanged and no new one exists; only with `done`).

    Sort the lines of notes/ant.txt.   ->   run(command="sort -o notes/ant.txt notes/ant.txt") = exit status 0   ->   Done.

The wanted tree is computed from the chore, never by running its command; the policy sees neither. A wrong demonstration
does a part of the chore. Any kind of sandbox with the programs of POSIX is suitable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from roundhouse.config.sandboxes import LocalSandbox, SandboxConfig
from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.generated import Message, calls, distinct, returns, says
from roundhouse.environments.sandboxed import SandboxedEnvironment
from roundhouse.environments.sandboxes import FilesRefused, Sandbox

DONE, TIDY = 0.8, 0.2
ANSWER = "answer.txt"
DIRECTORIES, ENDINGS = ("logs", "notes", "data"), (".log", ".txt", ".csv")
NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "koi", "lynx")
WORDS = ("red", "blue", "green", "gold", "grey", "pink", "teal", "plum")
RARE = ("zinc", "jade", "opal", "onyx")
LINES = 6
Tree = dict[str, str]
"""Text by path."""


@dataclass(frozen=True, slots=True)
class Chore:
    """A task in a tree, the command that does it, and a command that does a part of it."""

    text: str
    before: tuple[tuple[str, str], ...]
    after: tuple[tuple[str, str], ...]
    command: str
    careless: str


class Terminal(SandboxedEnvironment[Chore]):
    """Trees of `files` files."""

    name = "terminal"

    def __init__(
        self,
        files: int = 8,
        problems: int = 1000,
        heldout_fraction: float = 0.2,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        chores = distinct(lambda rng: draw(files, rng), self.key, problems, f"terminal with {files} files")
        super().__init__(chores, heldout_fraction, sandbox or LocalSandbox())

    def key(self, problem: Chore) -> str:
        return f"{random.Random(repr(problem.before)).getrandbits(48):012x}/{problem.command}"

    def row(self, problem: Chore) -> TaskRow:
        return self.task(problem, problem.text, files=dict(problem.before), wanted=dict(problem.after))

    async def verify(self, session: Sandbox, row: TaskRow, response: dict[str, Any]) -> Verdict:
        try:
            tree = await session.read_files()
        except FilesRefused:
            return Verdict(0.0, {"done": 0.0, "tidy": 0.0})
        parts = judge({name: read(name, content) for name, content in tree.items()}, row["files"], row["wanted"])
        return Verdict(sum(parts.values()), parts)

    def demonstration(self, problem: Chore, right: bool, rng: random.Random) -> Iterator[Message]:
        yield calls("run", "call_1", command=problem.command if right else problem.careless)
        yield returns("call_1", "exit status 0")
        yield says("Done.")


def read(name: str, content: bytes) -> str:
    """Return a file's text; for the answer, without optional formatting."""
    text = content.decode(errors="replace")
    return text.strip().removeprefix("./") if name == ANSWER else text


def judge(found: Tree, before: Tree, wanted: Tree) -> dict[str, float]:
    """The components of the reward, from the tree at the end."""
    concerned = {name for name in {*before, *wanted} if before.get(name) != wanted.get(name)}
    is_done = all(found.get(name) == wanted.get(name) for name in concerned)
    tidy = all(found.get(name) == wanted.get(name) for name in {*found, *wanted} - concerned)
    return {"done": DONE * is_done, "tidy": TIDY * (is_done and tidy)}


def draw(files: int, rng: random.Random) -> Chore:
    """A chore for which the careless command does too little."""
    while True:
        tree = draw_tree(files, rng)
        text, after, command, careless = rng.choice(CHORES)(tree, rng)
        if command and after != tree:
            return Chore(text, tuple(tree.items()), tuple(after.items()), command, careless)


def draw_tree(files: int, rng: random.Random) -> Tree:
    """`files` different paths in three directories, each with some lines of words; some are empty."""
    paths = [f"{directory}/{name}{ending}" for directory in DIRECTORIES for name in NAMES for ending in ENDINGS]
    tree = {}
    for path in sorted(rng.sample(paths, files)):
        count = rng.choice((0, 3, LINES, LINES))
        tree[path] = "".join(f"{rng.choice(WORDS)} {rng.randint(1, 9)}\n" for _ in range(count))
    return tree


Drawn = tuple[str, Tree, str, str]
"""The policy's text, the wanted tree, the command, the careless command; an empty command for an unsuitable tree."""
UNFIT: Drawn = ("", {}, "", "")


def find(tree: Tree, rng: random.Random) -> Drawn:
    path, other = rng.sample(sorted(tree), 2)
    word = rng.choice(RARE)
    tree[path] += f"{word} {rng.randint(1, 9)}\n"
    text = f"Write the path of the file that has the word {word} to {ANSWER}."
    return text, tree | {ANSWER: path}, f"grep -rl {word} [a-z]*/ > {ANSWER}", f"echo {other} > {ANSWER}"


def count(tree: Tree, rng: random.Random) -> Drawn:
    ending, word = rng.choice(ENDINGS), rng.choice(WORDS)
    paths = [path for path in tree if path.endswith(ending)]
    lines = [sum(line.startswith(f"{word} ") for line in tree[path].splitlines()) for path in paths]
    if len(paths) < 2 or lines[0] in (0, sum(lines)):
        return UNFIT
    text = f"How many lines of all {ending} files have the word {word}? Write the number to {ANSWER}."
    target = tree | {ANSWER: str(sum(lines))}
    return text, target, f"cat */*{ending} | grep -c {word} > {ANSWER}", f"grep -c {word} {paths[0]} > {ANSWER}"


def sort(tree: Tree, rng: random.Random) -> Drawn:
    path = rng.choice(sorted(tree))
    lines = sorted(tree[path].splitlines(keepends=True))
    target = tree | {path: "".join(lines)}
    return f"Sort the lines of {path}.", target, f"sort -o {path} {path}", f"sort -r -o {path} {path}"


def unrepeat(tree: Tree, rng: random.Random) -> Drawn:
    path = rng.choice(sorted(tree))
    lines = list(dict.fromkeys(tree[path].splitlines(keepends=True)))
    if lines == sorted(lines):
        return UNFIT
    text = f"Repair {path}: of lines that are there more than once, keep the first."
    command = f"awk '!seen[$0]++' {path} > /tmp/new && cat /tmp/new > {path}"
    return text, tree | {path: "".join(lines)}, command, f"sort -u -o {path} {path}"


def replace(tree: Tree, rng: random.Random) -> Drawn:
    directory = rng.choice(DIRECTORIES)
    old, new = rng.sample(WORDS, 2)
    paths = [path for path in tree if path.startswith(f"{directory}/") and f"{old} " in tree[path]]
    if len(paths) < 2:
        return UNFIT
    text = f"Replace the word {old} by {new} in all files of {directory}."
    target = tree | {path: tree[path].replace(f"{old} ", f"{new} ") for path in paths}
    return text, target, f"sed -i 's/{old}/{new}/' {directory}/*", f"sed -i 's/{old}/{new}/' {paths[0]}"


def rename(tree: Tree, rng: random.Random) -> Drawn:
    ending = rng.choice(ENDINGS)
    paths = [path for path in tree if path.endswith(ending)]
    if len(paths) < 2:
        return UNFIT
    target = {path.replace(ending, ".old"): text for path, text in tree.items()}
    command = f'for each in */*{ending}; do mv "$each" "${{each%{ending}}}.old"; done'
    careless = f"mv {paths[0]} {paths[0].replace(ending, '.old')}"
    return f"Rename every {ending} file, so that it ends in .old instead.", target, command, careless


def delete(tree: Tree, rng: random.Random) -> Drawn:
    empty = [path for path in tree if not tree[path]]
    if len(empty) < 2:
        return UNFIT
    target = {path: text for path, text in tree.items() if text}
    return "Delete all empty files.", target, "find . -type f -size 0 -exec rm {} +", f"rm {empty[0]}"


CHORES: tuple[Callable[[Tree, random.Random], Drawn], ...] = (find, count, sort, unrepeat, replace, rename, delete)
