"""Translate pip's configuration into uv's: prints one argument or `NAME=value` a line.

Invariant: uv is used only where it may do what pip would do. A setting that has no sure counterpart ends this with exit code 3,
and the caller stays with pip. Further indexes are left out: every package is on the default one, by the hash that the lock has,
and where it is not, pip looks. Runs in a bare environment: standard library only.
"""

import ast
import subprocess
import sys

VALUED = {"index-url": "--default-index", "find-links": "--find-links"}
HARMLESS = {
    "break-system-packages",
    "cache-dir",
    "config-file",
    "constraint",  # cannot matter: each line of the lock names one version by its hash
    "default-timeout",
    "disable-pip-version-check",
    "extra-index-url",
    "no-cache-dir",
    "no-color",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "retries",
    "root-user-action",
    "timeout",
    "upgrade",
    "user",
    "verbose",
}


def main() -> int:
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    lines = []
    for setting in listing.splitlines():
        key, _, quoted = setting.partition("=")
        name = key.rpartition(".")[2].replace("_", "-").lower()
        value = ast.literal_eval(quoted)
        if name in VALUED:
            for entry in value.split():
                lines += [VALUED[name], entry]
        elif name == "cert":
            lines.append(f"SSL_CERT_FILE={value}")
        elif name == "no-index" and value.lower() in ("1", "true", "yes", "on"):
            lines.append("--no-index")
        elif name not in HARMLESS:
            sys.stderr.write(f"pip's setting {key} has no sure counterpart in uv\n")
            return 3
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
