#!/usr/bin/env bash
# Build the images and try each: images/build.sh [cpu|cuda] [role …]     REGISTRY=…  VERSION=…  PUSH=1
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cpu}
shift || true
roles=("${@:-gym flow trainer engine}")
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
prefix=${REGISTRY:+$REGISTRY/}roundhouse
engine=$(command -v docker || command -v podman) || { echo "build.sh: neither docker nor podman is here" >&2; exit 2; }
for role in ${roles[*]}; do
    # gym and flow are the same on both devices: they run no GPU
    case $role in gym | flow) name="$prefix/$role:$version" ;; *) name="$prefix/$role:$version-$device" ;; esac
    "$engine" build -f images/Dockerfile --target "$role" --build-arg DEVICE="$device" --build-arg VERSION="$version" \
        --build-arg REVISION="$(git rev-parse HEAD)" ${PYTHON_IMAGE:+--build-arg PYTHON_IMAGE="$PYTHON_IMAGE"} -t "$name" .
    "$engine" run --rm -i --read-only --tmpfs /scratch --user 10001:10001 --network none "$name" sh -s "$role" <images/smoke.sh
    if [ -n "${PUSH:-}" ]; then "$engine" push "$name"; fi
done
