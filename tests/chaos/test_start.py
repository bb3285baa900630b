"""What a start imports before its first useful act is most of what a restart costs."""

from __future__ import annotations

import json
import subprocess
import sys

from roundhouse.spared_imports import spared

_TOLD = "import sys, json; print(json.dumps([name for name in %r if name in sys.modules]))"
HEAVY = ("torch", "transformers", "mlflow", "pandas", "sklearn", "ray", "vllm", "scipy")


def imported_by(code: str) -> list[str]:
    """Heavy packages that are there after the code ran in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {_TOLD % (HEAVY,)}"], capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_train_flow_imports_none_of_the_heavy_libraries_before_a_stage_needs_them() -> None:
    assert imported_by("import roundhouse.cli, flows.economy, flows.train") == []
    assert imported_by("import flows.economy, flows.train, pandas") == ["pandas"]


def test_spared_packages_are_importable_again_and_those_there_already_stay() -> None:
    import json as present

    with spared("json", "wave"):
        assert sys.modules["json"] is present
        try:
            import wave
        except ImportError:
            hidden = True
        else:
            hidden = False
    assert hidden
    import wave  # noqa: F401
