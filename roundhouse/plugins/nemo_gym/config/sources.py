"""The files that a configuration is made of, in the order in which they are merged.

Invariant: a later layer overrides an earlier one. A file comes after everything that its own `config_paths` pulled in, and
each file's subtree stays together in the listed order; `env.yaml` comes after all files, the command line after it.

    a.yaml: config_paths [b.yaml, c.yaml]      layers: b, c, a, env.yaml, command line

A relative path is looked for under each search root in turn; the first hit wins.

Command-line overrides in the form that NeMo Gym's users know: `+a.b=1`, `++a.b=[x, y]`, `a.b=true`, `~a.b`.

Invariant: parsing is pure and total: a text becomes an `Override` or a ConfigError that quotes it.

    +a.b=1, ++a.b=1   set the value, whether or not the key is there
    a.b=1             change a value that is there; a key that is not is refused, since it is mostly a spelling mistake
    ~a.b              remove the key; ~a.b=1 only if its value is 1

A value is `null`, `true`, `false`, a number, a quoted text, a list `[x, y]`, a mapping `{k: v}`, an interpolation `${…}`, or
plain text. A backslash takes the next character as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roundhouse.errors import ConfigError

EXTRA_ROOTS = "NEMO_GYM_EXTRA_ROOTS"
"""Environment variable: more search roots, separated as in PATH."""
DOTENV = "env.yaml"
_REASONING_GYM = {
    "claude_code": "claude_code",
    "hermes": "hermes",
    "orchestrator": "langgraph_orchestrator",
    "parallel_thinking": "langgraph_parallel_thinking",
    "reflection": "langgraph_reflection",
    "rewoo": "langgraph_rewoo",
}
_AGENTS = "responses_api_agents"
RENAMED = {
    **{
        f"environments/reasoning_gym_{old}/config.yaml": f"environments/{new}_reasoning_gym/config.yaml"
        for old, new in _REASONING_GYM.items()
    },
    f"{_AGENTS}/stirrup_agent/configs/stirrup_gdpval.yaml": f"{_AGENTS}/stirrup_agent/configs/stirrup_agent.yaml",
    f"{_AGENTS}/tau2/configs/tau2_agent.yaml": f"{_AGENTS}/tau2/configs/tau2.yaml",
    f"{_AGENTS}/verifiers_agent/configs/acereason-math.yaml": f"{_AGENTS}/verifiers_agent/configs/verifiers_agent.yaml",
}
"""Files of NeMo Gym that 0.7 renamed, by their earlier names."""


@dataclass(frozen=True, slots=True)
class SearchRoots:
    """Directories under which relative paths are looked for, the first hit wins."""

    roots: tuple[Path, ...]

    @classmethod
    def of(
        cls,
        search: Sequence[Path] = (),
        install: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
    ) -> SearchRoots:
        """Given directories, those of NEMO_GYM_EXTRA_ROOTS, the working directory, NeMo Gym's own checkout."""
        extra = [Path(root) for root in environ.get(EXTRA_ROOTS, "").split(os.pathsep) if root]
        candidates = [*search, *extra, cwd or Path.cwd(), *([install] if install else [])]
        unique = {root.expanduser().resolve(): None for root in candidates}
        return cls(tuple(unique))

    def find(self, path: str | Path, marks: Sequence[str] = ()) -> Path | None:
        """The first existing candidate; with `marks`, the first directory that holds one of these files."""
        for candidate in self.candidates(path):
            if any((candidate / mark).exists() for mark in marks) or (not marks and candidate.exists()):
                return candidate
        return None

    def candidates(self, path: str | Path) -> list[Path]:
        candidate = Path(path).expanduser()
        return [candidate] if candidate.is_absolute() else [root / candidate for root in self.roots]


@dataclass(slots=True)
class Layers:
    """Configuration files in the order of merging."""

    paths: list[str] = field(default_factory=list)
    """Paths as they were named: the given ones first, then the included ones."""
    trees: list[DictConfig] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_layers(paths: Sequence[str], roots: SearchRoots) -> Layers:
    """Read `paths` and what their `config_paths` pull in. A path that is named again is read once, with a warning.

    Raises:
        ConfigError: a file is missing or no YAML mapping, or a `config_paths` is not a list of texts.
    """
    layers = Layers(paths=list(dict.fromkeys(paths)))
    layers.warnings += [_named_again(path) for path in layers.paths if list(paths).count(path) > 1]
    trees: dict[str, DictConfig] = {}
    pulled_in: dict[str, list[str]] = {}
    for path in layers.paths:  # grows while it is walked: breadth first decides which file a repeated path belongs to
        if (file := roots.find(path)) is None and path in RENAMED:
            file = roots.find(RENAMED[path])
            layers.warnings.append(f"config_paths names {path}, which NeMo Gym 0.7 calls {RENAMED[path]}.")
        if file is None:
            looked = ", ".join(str(candidate) for candidate in roots.candidates(path))
            raise ConfigError(
                f"config_paths names {path!r}, which does not exist. Looked for: {looked}. Name another search root with "
                f"--search-dir or {EXTRA_ROOTS}."
            )
        trees[path] = load_yaml(file)
        named = config_paths_of(trees[path], path)
        layers.warnings += [_named_again(one) for one in named if one in layers.paths]
        pulled_in[path] = [one for one in dict.fromkeys(named) if one not in layers.paths]
        layers.paths += pulled_in[path]

    def with_inner(path: str) -> Iterator[DictConfig]:
        """Return the trees that the path includes, then its tree."""
        for one in pulled_in[path]:
            yield from with_inner(one)
        yield trees[path]

    layers.trees += [tree for path in dict.fromkeys(paths) for tree in with_inner(path)]
    return layers


def load_yaml(path: Path) -> DictConfig:
    """Return one file as a mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: it cannot be read, or is not a YAML mapping.
    """
    try:
        tree: Any = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a configuration file is a YAML mapping.")
    return tree


def config_paths_of(tree: DictConfig, where: str) -> list[str]:
    """The files that a tree pulls in.

    Raises:
        ConfigError: `config_paths` is not a list of texts.
    """
    value: Any = tree.get("config_paths") or []
    paths = [value] if isinstance(value, str) else list(value)
    if isinstance(value, str) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{where}: config_paths is {paths!r}; it must be a list of paths.")
    return paths


def _named_again(path: str) -> str:
    return (
        f"config_paths names {path} more than once; it is merged once, at its first place. For a second instance of the same "
        "server, copy it under a new name with `_copy`."
    )


Action = Literal["set", "change", "remove"]

_NAME = re.compile(r"[^\s=~+\[\]{}][^\s=\[\]{}]*")
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT = re.compile(r"[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Override:
    """One override: what to do with the key at `path`."""

    action: Action
    path: tuple[str, ...]
    value: Any
    text: str
    """The original text, for messages."""

    @property
    def has_value(self) -> bool:
        return self.value is not _ABSENT


def parse_override(text: str) -> Override:
    """Parse a command-line override.

    Raises:
        ConfigError: it does not have one of the four forms, or its value cannot be read.
    """
    action: Action = "change"
    rest = text.strip()
    if rest.startswith("~"):
        action, rest = "remove", rest[1:]
    elif rest.startswith("+"):
        action, rest = "set", rest.removeprefix("++") if rest.startswith("++") else rest[1:]
    name, equals, value = rest.partition("=")
    if not _NAME.fullmatch(name) or (action != "remove" and not equals):
        raise ConfigError(f"The override {text!r} is not one of +key=value, ++key=value, key=value and ~key.")
    path = tuple(name.split("."))
    if not all(path):
        raise ConfigError(f"The override {text!r} has an empty part in its key {name!r}.")
    return Override(action, path, _Value(value, text).read() if equals else _ABSENT, text)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """(a, b), 1 -> {a: {b: 1}}"""
    for key in reversed(path):
        value = {key: value}
    return value


class _Value:
    """Reads one value; a cursor over its text."""

    def __init__(self, value: str, override: str) -> None:
        self._text = value
        self._at = 0
        self._override = override

    def read(self) -> Any:
        value = self._element(stops="")
        self._skip_space()
        if self._at < len(self._text):
            raise self._wrong(f"{self._text[self._at :]!r} follows the value")
        return value

    def _element(self, stops: str) -> Any:
        self._skip_space()
        match self._peek():
            case "[":
                self._at += 1
                items: list[Any] = []
                while not self._closed("]"):
                    items.append(self._element(stops=",]"))
                    self._separated("]")
                return items
            case "{":
                self._at += 1
                members: dict[str, Any] = {}
                while not self._closed("}"):
                    key = self._quoted() if self._peek() in "'\"" else self._plain(":,}").strip()
                    if self._peek() != ":":
                        raise self._wrong(f"the key {key!r} has no ':'")
                    self._at += 1
                    members[key] = self._element(stops=",}")
                    self._separated("}")
                return members
            case "'" | '"':
                return self._quoted()
        text = self._plain(stops)
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    def _closed(self, bracket: str) -> bool:
        self._skip_space()
        if self._peek() != bracket:
            return False
        self._at += 1
        return True

    def _separated(self, bracket: str) -> None:
        self._skip_space()
        if self._peek() == ",":
            self._at += 1
        elif self._peek() != bracket:
            raise self._wrong(f"',' or {bracket!r} is missing")

    def _quoted(self) -> str:
        quote = self._text[self._at]
        self._at += 1
        taken = []
        while (character := self._peek()) != quote:
            if not character:
                raise self._wrong(f"the quote {quote} is not closed")
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in (quote, "\\"):
                self._at += 1
            taken.append(self._text[self._at])
            self._at += 1
        self._at += 1
        return "".join(taken)

    def _plain(self, stops: str) -> str:
        """Up to one of `stops` outside of `${…}`."""
        taken, depth = [], 0
        while character := self._peek():
            if character == "\\" and self._at + 1 < len(self._text):
                self._at += 1
            elif self._text.startswith("${", self._at):
                depth += 1
            elif character == "}" and depth:
                depth -= 1
            elif not depth and character in stops:
                break
            taken.append(self._text[self._at])
            self._at += 1
        return "".join(taken).strip()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> None:
        while self._peek().isspace():
            self._at += 1

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"The override {self._override!r} cannot be read: {what}.")
