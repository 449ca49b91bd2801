#!/usr/bin/env bash
# Runs a program where Vulkan has cooperative matrices, without a GPU: on lavapipe of Mesa 26, which
# multiplies f16 matrices of 8x8 with sums in f16 or f32.
#
# Older releases of Debian have no such Mesa. On first use it is unpacked from the unstable suite, with
# every library that it needs, to a folder of its own, and the program is started by the loader found there:
# that takes neither root nor a container.
#
# usage: tools/coopmat-run.sh PROGRAM [ARGUMENT ...]       on Debian, amd64; for cargo by
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tools/coopmat-run.sh cargo test ...
set -euo pipefail

cache="${XDG_CACHE_HOME:-$HOME/.cache}/burn-vision-attention"
root="$cache/coopmat"
libraries="$root/usr/lib/x86_64-linux-gnu"

fail() {
    echo "error: $*" >&2
    exit 1
}

provision() {
    command -v apt-get >/dev/null && [ "$(dpkg --print-architecture)" = amd64 ] ||
        fail "lavapipe with cooperative matrices is only unpacked on Debian, amd64"
    # shellcheck source=tools/sid.sh
    . "$(dirname "$0")/sid.sh"
    mkdir -p "$cache"
    # Two programs may be started at once; the second one finds what the first has unpacked.
    exec 9>"$cache/coopmat.lock"
    flock 9
    [ ! -e "$root" ] || return 0
    local deb
    work=$(mktemp -d "$cache/coopmat.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    sid_apt "$work" install --download-only --no-install-recommends --yes \
        mesa-vulkan-drivers libvulkan1 libgcc-s1 libstdc++6 >/dev/null
    for deb in "$work"/cache/archives/*.deb; do dpkg -x "$deb" "$work/root"; done
    [ -e "$work/root${libraries#"$root"}/libvulkan_lvp.so" ] || fail "mesa-vulkan-drivers has no lavapipe"
    mv "$work/root" "$root"
    rm -rf "$work"
    trap - EXIT
    exec 9>&-
}

(($#)) || fail "usage: $0 PROGRAM [ARGUMENT ...]"
[ -e "$root" ] || provision
program=$(command -v -- "$1") || fail "$1: no such program"
shift
export VK_DRIVER_FILES="$root/usr/share/vulkan/icd.d/lvp_icd.json"
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$program" "$@"
