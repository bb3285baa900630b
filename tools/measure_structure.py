"""How the code is built, in figures: `make measure`. The last line is JSON.

Counted are the files of `roundhouse/`; a cycle is counted between its packages, over imports at module level (imports inside a
function are made when they are needed, and cost a reader nothing).
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measures(root: Path) -> dict[str, object]:
    """Figures of the package below `root`."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((root / "roundhouse").rglob("*.py"))}
    lines = sum(len(path.read_text().splitlines()) for path in trees)
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    lengths = sorted(length(node) for tree in trees.values() for node in ast.walk(tree) if is_function(node))
    return {
        "modules": len(trees),
        "lines": lines,
        "lines of the core, without folders of plug-ins": sum(
            len(path.read_text().splitlines()) for path in trees if not in_plugin(path.relative_to(root))
        ),
        "median function": lengths[len(lengths) // 2],
        "longest function": lengths[-1],
        "private helpers called once, per 1,000 lines": round(1000 * sum(map(called_once, trees.values())) / lines, 1),
        "class names used for several things": sorted(name for name, count in classes.items() if count > 1),
        "tests of a configuration's kind outside of config": kind_tests(
            {path.relative_to(root): tree for path, tree in trees.items()}
        ),
        "package cycles": cycles({path.relative_to(root): tree for path, tree in trees.items()}),
    }


def in_plugin(path: Path) -> bool:
    """Return whether a module belongs to a folder of plug-ins."""
    return path.parts[:2] == ("roundhouse", "plugins") and len(path.parts) > 3


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def length(node: ast.AST) -> int:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def called_once(tree: ast.Module) -> int:
    """Private functions and methods that one place of their file names."""
    names = Counter(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    loads = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    used = Counter(node.id if isinstance(node, ast.Name) else node.attr for node in loads)
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    return sum(names[name] == 1 and used[name] == 1 for name in private)


def kind_tests(trees: dict[Path, ast.Module]) -> int:
    """Calls of isinstance and issubclass with a section of the configuration, in modules outside of `roundhouse/config/`."""
    config = Path("roundhouse/config")
    declared = [node for path, tree in trees.items() if path.parent == config for node in tree.body]
    bases = {
        node.name: {each.id for each in node.bases if isinstance(each, ast.Name)}
        for node in declared
        if isinstance(node, ast.ClassDef)
    }

    def is_section(name: str) -> bool:
        return name == "Section" or any(is_section(base) for base in bases.get(name, ()))

    calls = (
        node
        for path, tree in trees.items()
        if path.parent != config
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
    )
    names = ({node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)} for call in calls)
    return sum(any(is_section(name) for name in each) for each in names)


def cycles(trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Sets of packages that reach each other through imports at module level."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if in_plugin(path):  # imports of the core only, by a contract
            continue
        here = path.parts[1].removesuffix(".py")
        for name in (name for node in tree.body for name in imported(node)):
            parts = name.split(".")
            if parts[0] == "roundhouse" and len(parts) > 1 and parts[1] != here:
                arrows[here].add(parts[1])
    reach = {package: reachable(package, arrows) for package in arrows}
    groups = {tuple(sorted({a, *(b for b in reach[a] if a in reach.get(b, ()))})) for a in reach if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def imported(node: ast.stmt) -> list[str]:
    """Names of modules that a statement imports, or may: `from roundhouse import errors` is one too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "roundhouse" else [node.module]
    return []


def reachable(package: str, arrows: dict[str, set[str]]) -> set[str]:
    """Packages that an import of this one also imports; itself, where it lies on a cycle."""
    seen: set[str] = set()
    pending = list(arrows[package])
    while pending:
        if (one := pending.pop()) not in seen:
            seen.add(one)
            pending.extend(arrows.get(one, ()))
    return seen


if __name__ == "__main__":
    found = measures(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for name, value in found.items():
        print(f"{name:48} {value}")
    print(json.dumps(found))
