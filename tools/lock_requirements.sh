#!/usr/bin/env bash
# Resolve requirements.lock from pyproject.toml, for CPU with the development tools.
#
# Left out: torch's CUDA packages (the CPU build needs none) and the companions of torch that vLLM names but text needs not.
# Versions already in the lock stay where they can; UPGRADE=1 takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
torch=$(sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
printf '%s\n' "torchvision ; sys_platform == 'never'" "torchaudio ; sys_platform == 'never'" \
    "torchcodec ; sys_platform == 'never'" "$torch" >"$work/override.txt"

arguments=() environment=()
while read -r line; do
    case $line in
        SSL_CERT_FILE=*) environment+=("$line") ;;
        *) arguments+=("$line") ;;
    esac
done < <(.venv/bin/python tools/uv_sources.py)

cp requirements.lock "$work/lock.txt"
env ${environment[@]+"${environment[@]}"} .venv/bin/uv pip compile pyproject.toml --extra cpu --extra dev --extra tinker --python-version 3.11 \
    --override "$work/override.txt" --no-header --no-annotate ${UPGRADE:+--upgrade} "${arguments[@]}" \
    --quiet -o "$work/lock.txt"
grep -vE '^(nvidia-|cuda-|triton==)' "$work/lock.txt" | sed 's/^\(torch==[0-9.]*\)+cpu$/\1/' >"$work/new.txt"
mv "$work/new.txt" requirements.lock
echo "lock: $(wc -l <requirements.lock) packages; look at \`git diff requirements.lock\`"
