"""Print every key of a run's configuration from the models: type, default, range, meaning.

python -m roundhouse.config.reference > docs/configuration-reference.md
python -m roundhouse.config.reference --schema > configs/run.schema.json     for editors
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from roundhouse.config.models import RunConfig

Schema = dict[str, Any]

INTRODUCTION = """\
# Configuration, key by key

Printed from the code; what the sections are for: [configuration](configuration.md). Keys with ° may change between two starts
of one run: they steer how it is carried out, not what it is. `kind` chooses among the forms of a section."""
SHARED = 5
"""If two forms of a section share at least so many keys, the second is described by its differences."""

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "pattern": "`{}`",
}


def page() -> str:
    """docs/configuration-reference.md."""
    schema = RunConfig.model_json_schema()
    defs = schema["$defs"]
    lines, first_forms = [INTRODUCTION, ""], dict[str, tuple[str, Schema]]()
    places = list(_sections("", schema, defs))
    outermost: dict[str, str] = {}
    for title, section, _ in places:
        known = outermost.setdefault(section["title"], title)
        if title.count(" / ") < known.count(" / "):
            outermost[section["title"]] = title
    for title, section, operational in places:
        if outermost.get(section["title"]) != title:
            continue  # the same section at another place
        del outermost[section["title"]]
        like, first = first_forms.setdefault(title.rsplit(" (", 1)[0], (title, section))
        lines += [f"## {title}", ""]
        if description := " ".join(section.get("description", "").split()):
            lines += [description, ""]
        keys = section.get("properties", {})
        same = [key for key, value in keys.items() if first["properties"].get(key) == value]
        if like != title and len(same) >= SHARED:
            anchor = "".join(each for each in like.lower() if each.isalnum() or each in " -_").replace(
                " ", "-"
            )  # GitHub's
            lines += [f"Keys as in [{like}](#{anchor}), but:", ""]
            keys = {key: value for key, value in keys.items() if key not in same}
        if keys:
            lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
            for name, value in keys.items():
                mark = "°" if operational or "operational" in value else ""
                meaning = " ".join(value.get("description", "").split())
                cells = (f"`{name}`{mark}", _type(value, defs), _default(value), meaning)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _sections(
    path: str, schema: Schema, defs: dict[str, Schema], operational: bool = False
) -> Iterator[tuple[str, Schema, bool]]:
    """Each section with its path, a form with its kind in brackets, and whether all of it is operational; outer ones first."""
    yield path or "A run", schema, operational
    for name, key in schema.get("properties", {}).items():
        marked = operational or "operational" in key
        inner = f"{path} / {name}" if path else name
        variants = _forms(key, defs)
        named = [value for each in variants for value in each.get("patternProperties", {}).values()]
        for form in (form for each in named for form in _forms(each, defs) if "properties" in form):
            yield from _sections(f"{inner} / <name>", form, defs, marked)
        forms = [form for form in variants if "properties" in form]
        for form in forms:
            kind = form["properties"].get("kind", {}).get("const")
            yield from _sections(f"{inner} ({kind})" if kind and len(forms) > 1 else inner, form, defs, marked)


def schema_text() -> str:
    """Return the JSON schema of a run's configuration, with the kinds of the installed plug-ins."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | RunConfig.model_json_schema(), indent=1, ensure_ascii=False) + "\n"


def _forms(key: Schema, defs: dict[str, Schema]) -> list[Schema]:
    """Return the possible forms of a key: its resolved schema, or each of its alternatives."""
    if "$ref" in key:
        return _forms(defs[key["$ref"].rsplit("/", 1)[1]], defs)
    for choice in ("oneOf", "anyOf"):
        if choice in key:
            return [form for each in key[choice] for form in _forms(each, defs)]
    return [key]


def _type(key: Schema, defs: dict[str, Schema]) -> str:
    forms = _forms(key, defs)
    sections = [form for form in forms if "properties" in form]
    types = [_plain(form, defs) for form in forms if "properties" not in form]
    if sections:
        kinds = [form["properties"].get("kind", {}).get("const") for form in sections]
        named = " or ".join(f"`{kind}`" for kind in kinds if kind)
        types.insert(0, f"section, kind {named}" if len(sections) > 1 and named else "section")
    return " or ".join(dict.fromkeys(types))


def _plain(form: Schema, defs: dict[str, Schema]) -> str:
    if "enum" in form:
        return ", ".join(f"`{value}`" for value in form["enum"])
    if "const" in form:
        return f"`{form['const']}`"
    kind = form.get("type", "any")
    if kind == "array":
        items = form.get("items") or (form.get("prefixItems") or [{}])[0]
        return f"list of {_type(items, defs)}" if items else "list"
    if kind == "object":
        return "mapping"
    bounds = [text.format(form[name]) for name, text in _BOUNDS.items() if name in form]
    return " ".join([kind, *bounds])


def _default(key: Schema) -> str:
    if "default" not in key:
        return ""
    value = key["default"]
    if isinstance(value, dict) and value:
        return f"kind `{value['kind']}`" if "kind" in value else ""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


if __name__ == "__main__":
    sys.stdout.write(schema_text() if "--schema" in sys.argv else page())
