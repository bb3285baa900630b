#!/usr/bin/env bash
# Build the images and try each: images/build.sh [cpu|cuda] [role …]
#
#   REGISTRY=registry.example.org/team VERSION=0.1.0 PUSH=1    where they go
#   PYTHON_IMAGE=python@sha256:…                               another base, such as one by its digest
#   BUILDER=docker|podman|buildah                              unset: the first of them that works here
#   BUILD_ARGS="--network host --volume …"                     more arguments of `build`, such as a mirror's pip.conf
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cpu}
shift || true
roles=("${@:-gym flow trainer engine}")
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
prefix=${REGISTRY:+$REGISTRY/}roundhouse
# that the client is here says nothing of docker's daemon, or of user namespaces for podman
for builder in ${BUILDER:-docker podman buildah}; do "$builder" info >/dev/null 2>&1 && break; done
"$builder" info >/dev/null 2>&1 ||
    { echo "build.sh: none of ${BUILDER:-docker, podman and buildah} works here: see what \`$builder info\` says" >&2; exit 2; }

# docker and podman try an image as a pod runs it; buildah can neither make the root read-only nor take the network away
try() {
    if [ "${builder##*/}" != buildah ]; then
        "$builder" run --rm -i --read-only --tmpfs /scratch --user 10001:10001 --network none "$1" sh -s "$2" <images/smoke.sh
        return
    fi
    local container status=0
    container=$("$builder" from --pull-never "$1")
    "$builder" run --user 10001:10001 "$container" -- sh -s "$2" <images/smoke.sh || status=$?
    "$builder" rm "$container" >/dev/null
    return "$status"
}

layers=
[ "${builder##*/}" != buildah ] || layers="--layers --format docker" # a layer of packages is made once for many builds
for role in ${roles[*]}; do
    # gym and flow are the same on both devices: they run no GPU
    case $role in gym | flow) name="$prefix/$role:$version" ;; *) name="$prefix/$role:$version-$device" ;; esac
    # shellcheck disable=SC2086 # arguments, not one
    "$builder" build -f images/Dockerfile --target "$role" --build-arg DEVICE="$device" --build-arg VERSION="$version" \
        --build-arg REVISION="$(git rev-parse HEAD)" ${PYTHON_IMAGE:+--build-arg PYTHON_IMAGE="$PYTHON_IMAGE"} \
        $layers ${BUILD_ARGS:-} -t "$name" .
    try "$name" "$role"
    if [ -n "${PUSH:-}" ]; then "$builder" push "$name"; fi
done
