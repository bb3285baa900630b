"""Stages of the user between the built-in ones of an iteration."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, model_validator

from roundhouse import plugins
from roundhouse.config.section import Consent, Section


def hook_name(target: str) -> str:
    """Return the name of a stage of the user: that of its plug-in or its function."""
    return target.rpartition(":")[2].rpartition(".")[2]


def _known_hook(name: str) -> str:
    if ":" not in name and name not in (known := plugins.names("stage_hook")):
        listed = f"the plug-ins are {', '.join(known)}" if known else "no plug-in has one"
        raise ValueError(
            f"{name!r} is not a stage: {listed}. Name a function as module:function or path/to/file.py:function."
        )
    if not re.fullmatch(r"[A-Za-z][\w-]*", hook_name(name)):
        raise ValueError(
            f"{name!r} ends with {hook_name(name)!r}, which names no stage. End it with the name of a function."
        )
    return name


StageHooks = Annotated[
    tuple[Annotated[str, AfterValidator(_known_hook)], ...],
    Consent("code", role="stage_hook"),
]


class StagesConfig(Section):
    """Custom stages in each iteration. Each is a function of (run, iteration, reference of the stage before), whose metrics
    are kept as a stage of the function's name: a resumed run does not compute them again."""

    after_validate: StageHooks = ()
    """Before training, in this order: `module:function`, `path/to/file.py:function` or the name of a plug-in."""
    after_checkpoint: StageHooks = ()
    """The same after a version is published."""

    @model_validator(mode="after")
    def _names(self) -> StagesConfig:
        names = [hook_name(target) for target in (*self.after_validate, *self.after_checkpoint)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"stages has several functions with the name {repeated[0]}, which names the stage. Rename one."
            )
        return self
