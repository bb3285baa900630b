"""For a process that Ray gave a GPU which is not there: the engine's model goes to "cuda", and stays on the processor."""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENGINE = "roundhouse.generation.transformers_engine"


class DeclaredGpu(importlib.abc.MetaPathFinder):
    """Patches the engine's module when it is imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_stay(module: ModuleType) -> None:
            import torch

            execute(module)
            move = torch.nn.Module.to
            torch.nn.Module.to = lambda model, *to, **keys: model if to == ("cuda",) else move(model, *to, **keys)

        spec.loader.exec_module = execute_and_stay  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, DeclaredGpu())
