"""Repair a small Python repository: a test fails, hidden tests judge the repair in a fresh sandbox.

Invariant: the reward is 1 exactly if every hidden test passes with the policy's sources. It is the sum of its
components: `fixed` (0.7: all hidden tests of the function with the bug) and `kept` (0.3: those of all other functions;
only with `fixed`). Changes outside of `library/`, also to the tests, do not count: the policy's sources are copied into
a new sandbox, next to the original other files. That sandbox receives only arguments, and results are compared here, so
judged code cannot know the expected values.

    Repair library/: clamp(9, 0, 5) is 9, but should be 5. To run the tests: python3 run_tests.py
      ->  run(command="cat library/numbers.py") = … return max(low, value)
      ->  replace(path="library/numbers.py", old="max(low, value)", new="max(low, min(value, high))") = replaced   ->   Done.

Repositories are drawn from a small set of functions and bugs. The splits share no repository, but share functions. A
wrong demonstration runs the tests and repairs nothing. The sandbox needs `python3`.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.config.sandboxes import LocalSandbox, SandboxConfig
from roundhouse.environments.base import TaskRow, Verdict, tool
from roundhouse.environments.generated import Message, calls, distinct, returns, says
from roundhouse.environments.sandbox import canonical
from roundhouse.environments.sandboxed import SandboxedEnvironment, shown
from roundhouse.environments.sandboxes import CommandResult, FilesRefused, Sandbox

FIXED, KEPT = 0.7, 0.3
VISIBLE, HIDDEN = 2, 10
"""Tests of each function."""
SOURCES, TESTS = "library/", "run_tests.py"
TESTS_FIRST = """import sys

sys.path.insert(0, ".")
from library import {modules}

CASES = [
"""
TESTS_LAST = """]
failed = False
for name, function, arguments, expected in CASES:
    call = f"{name}({', '.join(map(repr, arguments))})"
    try:
        result = repr(function(*arguments))
    except Exception as error:
        result = type(error).__name__
    right = result == repr(expected)
    failed |= not right
    print(f"ok {call}" if right else f"FAIL {call} = {result}, expected {expected!r}")
sys.exit(failed)
"""
CALLS, RESULTS = "calls.json", "results.json"
DRIVER = f"""import importlib, json, sys
sys.path.insert(0, ".")
results = []
for module, function, arguments in json.load(open("{CALLS}")):
    try:
        value = getattr(importlib.import_module("library." + module), function)(*arguments)
        results.append([json.dumps(value, sort_keys=True)])
    except BaseException as error:
        results.append([])
json.dump(results, open("{RESULTS}", "w"))
"""


@dataclass(frozen=True, slots=True)
class Function:
    """Function of a library: its lines, its possible bugs (line number, wrong line), and the source of test arguments."""

    module: str
    name: str
    lines: tuple[str, ...]
    bugs: tuple[tuple[int, str], ...]
    draw: Callable[[random.Random], tuple[Any, ...]]

    def source(self, bug: int | None = None) -> str:
        lines = list(self.lines)
        if bug is not None:
            number, wrong = self.bugs[bug]
            lines[number] = wrong
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Repository:
    """Names of the repository's functions, and the index of the first function's bug."""

    functions: tuple[str, ...]
    bug: int

    @property
    def broken(self) -> Function:
        return FUNCTIONS[self.functions[0]]

    @property
    def key(self) -> str:
        return f"{self.functions[0]}/{self.bug}/{'-'.join(self.functions[1:])}"


class BugFix(SandboxedEnvironment[Repository]):
    """Repositories of `functions` functions, one of them with a bug."""

    name = "bug_fix"
    programs = (*SandboxedEnvironment.programs, "python3")

    def __init__(
        self,
        functions: int = 4,
        problems: int = 500,
        heldout_fraction: float = 0.2,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        repositories = distinct(
            lambda rng: draw(functions, rng), self.key, problems, f"bug_fix with {functions} functions"
        )
        super().__init__(repositories, heldout_fraction, sandbox or LocalSandbox())

    def key(self, problem: Repository) -> str:
        return problem.key

    def row(self, problem: Repository) -> TaskRow:
        hidden = [
            [function.module, name, list(arguments), result]
            for name in problem.functions
            for function in [FUNCTIONS[name]]
            for arguments, result in cases(function, problem.key, HIDDEN)
        ]
        failing = next(line for line in tested(problem, problem.bug).output.split("\n") if line.startswith("FAIL "))
        report = failing.removeprefix("FAIL ").replace(" = ", " is ").replace(", expected", ", but should be")
        prompt = f"Repair {SOURCES}: {report}. To run the tests: python3 {TESTS}"
        return self.task(problem, prompt, files=files(problem), tests=hidden)

    @tool("Replace a part of a file.", path="The file.", old="Text that it has once.", new="Text instead.")
    async def replace(self, session: Sandbox, path: str, old: str, new: str) -> str:
        try:
            text = (await session.read_files())[path].decode()
            if (count := text.count(old)) != 1:
                return f"error: {path} has the text {count} times"
            await session.write_files({path: text.replace(old, new).encode()})
        except (FilesRefused, KeyError, UnicodeDecodeError) as error:
            return f"error: {path} cannot be changed: {error}"
        return "replaced"

    async def verify(self, session: Sandbox, row: TaskRow, response: dict[str, Any]) -> Verdict:
        tests, broken = row["tests"], row["tests"][0][1]
        try:
            results = await self._results(await session.read_files(), row)
        except FilesRefused:
            results = [None] * len(tests)
        wrong = {test[1] for value, test in zip(results, tests, strict=True) if value != canonical(test[3])}
        parts = {"fixed": FIXED * (broken not in wrong), "kept": KEPT * (not wrong)}
        return Verdict(sum(parts.values()), parts)

    async def _results(self, left: dict[str, bytes], row: TaskRow) -> list[str | None]:
        """Return the results of the policy's sources for the hidden arguments, as JSON texts; None for exceptions.

        Raises:
            FilesRefused, InfraError
        """
        tree = {name: text.encode() for name, text in row["files"].items() if not name.startswith(SOURCES)}
        tree |= {name: content for name, content in left.items() if name.startswith(SOURCES)}
        tree[CALLS] = json.dumps([test[:3] for test in row["tests"]]).encode()
        sandbox = await self.sandbox_with(tree | {"driver.py": DRIVER.encode()})
        try:
            await sandbox.run("python3 driver.py")
            text = (await sandbox.read_files()).get(RESULTS, b"")
        finally:
            await sandbox.close()
        try:
            results = json.loads(text)
        except (ValueError, RecursionError):  # the code that is judged may have written anything there
            results = None
        if not isinstance(results, list) or len(results) != len(row["tests"]):
            return [None] * len(row["tests"])
        return [each[0] if isinstance(each, list) and each else None for each in results]

    def demonstration(self, problem: Repository, right: bool, rng: random.Random) -> Iterator[Message]:
        broken = problem.broken
        yield calls("run", "call_1", command=f"python3 {TESTS}")
        yield returns("call_1", shown(tested(problem, problem.bug)))
        if right:
            number, wrong = broken.bugs[problem.bug]
            path = f"{SOURCES}{broken.module}.py"
            yield calls("replace", "call_2", path=path, old=wrong, new=broken.lines[number])
            yield returns("call_2", "replaced")
            yield calls("run", "call_3", command=f"python3 {TESTS}")
            yield returns("call_3", shown(tested(problem, None)))
        yield says("Done.")


def draw(count: int, rng: random.Random) -> Repository:
    """Return a repository with a bug that at least one shown and one hidden test detect."""
    while True:
        names = rng.sample(sorted(FUNCTIONS), count)
        repository = Repository((names[0], *sorted(names[1:])), rng.randrange(len(FUNCTIONS[names[0]].bugs)))
        broken, key = repository.broken, repository.key
        if all(
            any(
                outcome(broken.source(repository.bug), broken.name, arguments) != repr(result)
                for arguments, result in tests
            )
            for tests in (cases(broken, f"{key}/shown", VISIBLE), cases(broken, key, HIDDEN))
        ):
            return repository


def files(repository: Repository) -> dict[str, str]:
    """Return the repository's files by path: a module for each kind of functions, and the tests."""
    texts: dict[str, str] = {f"{SOURCES}__init__.py": ""}
    lines = []
    for name in sorted(repository.functions):
        function = FUNCTIONS[name]
        path = f"{SOURCES}{function.module}.py"
        source = function.source(repository.bug if function is repository.broken else None)
        texts[path] = f"{texts[path]}\n\n{source}" if path in texts else source
        for arguments, result in cases(function, f"{repository.key}/shown", VISIBLE):
            lines.append(f'    ("{name}", {function.module}.{name}, {arguments!r}, {result!r}),\n')
    modules = ", ".join(sorted({FUNCTIONS[name].module for name in repository.functions}))
    return texts | {TESTS: TESTS_FIRST.format(modules=modules) + "".join(lines) + TESTS_LAST}


def tested(repository: Repository, bug: int | None) -> CommandResult:
    """Return the result that `python3 run_tests.py` would have with this bug, computed in this process; for
    demonstrations.
    """
    lines = []
    for name in sorted(repository.functions):
        function = FUNCTIONS[name]
        source = function.source(bug if function is repository.broken else None)
        for arguments, result in cases(function, f"{repository.key}/shown", VISIBLE):
            call, actual = f"{name}({', '.join(map(repr, arguments))})", outcome(source, name, arguments)
            lines.append(f"ok {call}" if actual == repr(result) else f"FAIL {call} = {actual}, expected {result!r}")
    return CommandResult(int(any(line.startswith("FAIL") for line in lines)), "\n".join(lines))


def cases(function: Function, name: str, count: int) -> Sequence[tuple[tuple[Any, ...], Any]]:
    """Return test arguments with the right results; the same for the same function, `name` and `count`."""
    rng = random.Random(f"{function.name}/{name}")
    drawn = [function.draw(rng) for _ in range(count)]
    return [(arguments, _call(function.source(), function.name, arguments)) for arguments in drawn]


def outcome(source: str, name: str, arguments: tuple[Any, ...]) -> str:
    """Return the result of a trusted source in a repository's tests, or the exception's name."""
    try:
        return repr(_call(source, name, arguments))
    except Exception as error:  # noqa: BLE001 - a bug of ours raises what it raises
        return type(error).__name__


def _call(source: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Never called with anything that a policy wrote."""
    return _function(source, name)(*json.loads(json.dumps(arguments)))


@functools.cache
def _function(source: str, name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(source, names)
    function: Callable[..., Any] = names[name]
    return function


def _numbers(rng: random.Random) -> tuple[Any, ...]:
    return ([rng.randint(-9, 20) for _ in range(rng.randint(3, 8))],)


def _numbers_and_size(rng: random.Random) -> tuple[Any, ...]:
    return (*_numbers(rng), rng.randint(2, 4))


def _text(rng: random.Random) -> tuple[Any, ...]:
    words = [rng.choice(("Anna", "bob", "to", "be", "or", "not", "Level", "noon")) for _ in range(rng.randint(1, 4))]
    return (" ".join(words),)


def _bounds(rng: random.Random) -> tuple[Any, ...]:
    return (rng.randint(-9, 20), 0, rng.randint(3, 9))


def _number(rng: random.Random) -> tuple[Any, ...]:
    return (rng.choice((0, 1, 4, 9, 25, 49, rng.randint(2, 60))),)


def _two_numbers(rng: random.Random) -> tuple[Any, ...]:
    return (6 * rng.randint(1, 9), 4 * rng.randint(1, 9))


# fmt: off
FUNCTIONS = {function.name: function for function in (
    Function("lists", "chunks", (
        "def chunks(xs, size):",
        '    """Consecutive parts of that size; the last may be shorter."""',
        "    return [xs[at : at + size] for at in range(0, len(xs), size)]",
    ), (
        (2, "    return [xs[at : at + size] for at in range(0, len(xs) - size, size)]"),
        (2, "    return [xs[at : at + size - 1] for at in range(0, len(xs), size)]"),
    ), _numbers_and_size),
    Function("lists", "running_totals", (
        "def running_totals(xs):",
        '    """The sums of the first one, two, three … numbers."""',
        "    total, found = 0, []",
        "    for x in xs:",
        "        total += x",
        "        found.append(total)",
        "    return found",
    ), ((4, "        total = x"), (6, "    return found[1:]")), _numbers),
    Function("lists", "largest", (
        "def largest(xs, count):",
        '    """The `count` largest numbers, the largest first."""',
        "    return sorted(xs, reverse=True)[:count]",
    ), ((2, "    return sorted(xs)[:count]"), (2, "    return sorted(set(xs), reverse=True)[: count - 1]")), _numbers_and_size),
    Function("lists", "rotate", (
        "def rotate(xs, places):",
        '    """The last `places` items first, then the rest."""',
        "    return xs[-places:] + xs[:-places]",
    ), ((2, "    return xs[places:] + xs[:places]"), (2, "    return xs[-places:] + xs[: -places - 1]")), _numbers_and_size),
    Function("text", "is_palindrome", (
        "def is_palindrome(text):",
        '    """Whether its letters read the same backwards, in either case."""',
        "    letters = [letter.lower() for letter in text if letter.isalpha()]",
        "    return letters == letters[::-1]",
    ), (
        (2, "    letters = [letter for letter in text if letter.isalpha()]"),
        (3, "    return letters == letters[::-2]"),
    ), _text),
    Function("text", "word_counts", (
        "def word_counts(text):",
        '    """How often each word is there, by word in small letters."""',
        "    counts = {}",
        "    for word in text.lower().split():",
        "        counts[word] = counts.get(word, 0) + 1",
        "    return counts",
    ), ((3, "    for word in text.split():"), (4, "        counts[word] = counts.get(word, 1) + 1")), _text),
    Function("text", "initials", (
        "def initials(text):",
        '    """The first letter of each word, as capitals."""',
        '    return "".join(word[0].upper() for word in text.split())',
    ), (
        (2, '    return "".join(word[0] for word in text.split())'),
        (2, '    return "".join(word[-1].upper() for word in text.split())'),
    ), _text),
    Function("text", "longest_word", (
        "def longest_word(text):",
        '    """The longest word; the first of equally long ones."""',
        "    return max(text.split(), key=len)",
    ), ((2, "    return max(text.split())"), (2, "    return sorted(text.split(), key=len)[-1]")), _text),
    Function("numbers", "clamp", (
        "def clamp(value, low, high):",
        '    """The nearest number that is no less than low and no more than high."""',
        "    return max(low, min(value, high))",
    ), ((2, "    return max(low, value)"), (2, "    return min(low, max(value, high))")), _bounds),
    Function("numbers", "is_prime", (
        "def is_prime(n):",
        '    """Whether a number has exactly two divisors."""',
        "    if n < 2:",
        "        return False",
        "    return all(n % divisor for divisor in range(2, int(n**0.5) + 1))",
    ), ((2, "    if n < 1:"), (4, "    return all(n % divisor for divisor in range(2, int(n**0.5)))")), _number),
    Function("numbers", "divisors", (
        "def divisors(n):",
        '    """All divisors, the smallest first."""',
        "    return [number for number in range(1, n + 1) if n % number == 0]",
    ), (
        (2, "    return [number for number in range(1, n) if n % number == 0]"),
        (2, "    return [number for number in range(2, n + 1) if n % number == 0]"),
    ), _number),
    Function("numbers", "common_divisor", (
        "def common_divisor(a, b):",
        '    """The largest number that divides both."""',
        "    while b:",
        "        a, b = b, a % b",
        "    return a",
    ), ((2, "    if b:"), (4, "    return a * 2")), _two_numbers),
)}
# fmt: on
