#!/usr/bin/env bash
# What building for CUDA and `cargo xtask audit` need beyond Rust, none of it a GPU or a driver: LLVM
# where the build looks for it, and ptxas, nvdisasm and libdevice. Does only what is missing.
#
# With --nvrtc also the compiler of CUDA C++ and its headers, for kernels that need CubeCL's C++ compiler:
# 52 MB to download, 139 MB installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Where `tracel-llvm-bundler` 23.1.0-4 keeps LLVM, and the mark by which it knows that it is complete.
llvm="${XDG_DATA_HOME:-$HOME/.local/share}/tracel/tracel-llvm-23.1.0-4"
llvm_mark="$llvm/.tracel-llvm-installed"
# All three wheels of one release: libdevice is in nvidia-nvvm, ptxas in nvidia-cuda-nvcc.
cuda_version=13.2.78
cuda="${XDG_CACHE_HOME:-$HOME/.cache}/burn-vision-attention/cuda"
cuda_mark="$cuda/version"
# Of the same release, but these have numbers of their own.
nvrtc_version=13.2.78
headers_version=13.2.75
nvrtc_mark="$cuda/nvrtc"

with_nvrtc=
case "$*" in
"") ;;
--nvrtc) with_nvrtc=1 ;;
*)
    echo "usage: $0 [--nvrtc]" >&2
    exit 2
    ;;
esac

fail() {
    echo "error: $*" >&2
    exit 1
}

on_debian() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }

install_packages() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Debian's static LLVM 23, laid out as the bundler's own download would be.
provision_llvm() {
    on_debian && [ "$(dpkg --print-architecture)" = amd64 ] || fail \
        "LLVM is only installed on Debian, amd64, as root; elsewhere build once with" \
        "\`cargo build -p kernel-audit --features llvm\`, which downloads it to $llvm"
    # shellcheck source=tools/sid.sh
    . "$(dirname "$0")/../tools/sid.sh"
    mkdir -p "$work"/{debs,root}
    (cd "$work/debs" && sid_apt "$work/sid" download llvm-23-dev llvm-23 libllvm23 libpolly-23-dev)
    # What LLVM's static libraries link against, and a compiler for the build's own C++.
    install_packages build-essential libz3-dev zlib1g-dev libzstd-dev libxml2-dev

    local deb
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
    local found="$work/root/usr/lib/llvm-23"
    rm -f "$found/include/llvm" "$found/include/llvm-c"
    mv "$work/root/usr/include/llvm-23/llvm" "$work/root/usr/include/llvm-c-23/llvm-c" "$found/include/"

    # glibc before 2.38 has no C23 names for strtol and its kin.
    cat >"$work/c23.c" <<'C'
#include <stdlib.h>
long __isoc23_strtol(const char *s, char **end, int base) { return strtol(s, end, base); }
long long __isoc23_strtoll(const char *s, char **end, int base) { return strtoll(s, end, base); }
unsigned long __isoc23_strtoul(const char *s, char **end, int base) { return strtoul(s, end, base); }
unsigned long long __isoc23_strtoull(const char *s, char **end, int base) { return strtoull(s, end, base); }
C
    cc -std=c11 -O2 -fPIC -c "$work/c23.c" -o "$work/c23.o"
    ar r "$found/lib/libLLVMSupport.a" "$work/c23.o" 2>/dev/null
    # `llvm-config --system-libs` names libz3 by path, which the bundler turns into `-llibz3`.
    ln -sf "$(find /usr/lib -name libz3.so | head -1)" "$found/lib/liblibz3.so"

    mkdir -p "$(dirname "$llvm")"
    rm -rf "$llvm"
    mv "$found" "$llvm"
    "$llvm/bin/llvm-config" --version >/dev/null
    touch "$llvm_mark"
}

# Installs wheels in a folder of their own, since they share folders that pip does not merge.
install_wheels() {
    local to="$work/$1"
    shift
    command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1 || {
        on_debian || fail "pip is missing: install Python 3 with pip"
        install_packages python3-pip
    }
    python3 -m pip install --quiet --no-deps --disable-pip-version-check --root-user-action=ignore \
        --target "$to" "$@" 2>"$work/pip.log" ||
        fail "pip cannot install $*: $(grep -m 1 '^ERROR' "$work/pip.log" || tail -n 1 "$work/pip.log")"
}

# The three files that are used of some 300 MB, laid out as a CUDA toolkit has them.
provision_cuda() {
    install_wheels wheels "nvidia-cuda-nvcc==$cuda_version" "nvidia-cuda-nvdisasm==$cuda_version" \
        "nvidia-nvvm==$cuda_version"
    local from="$work/wheels/nvidia/cu13" to="$work/cuda"
    mkdir -p "$to/bin" "$to/nvvm/libdevice"
    mv "$from/bin/ptxas" "$from/bin/nvdisasm" "$to/bin/"
    mv "$from/nvvm/libdevice/libdevice.10.bc" "$to/nvvm/libdevice/"
    mv "$work"/wheels/nvidia_cuda_nvcc-*.dist-info/licenses "$to/"
    "$to/bin/ptxas" --version >/dev/null
    echo "$cuda_version" >"$to/version"
    mkdir -p "$(dirname "$cuda")"
    # What else was asked for before is asked for again.
    [ ! -e "$nvrtc_mark" ] || with_nvrtc=1
    rm -rf "$cuda"
    mv "$to" "$cuda"
}

# Beside the other tools, where CubeCL's CUDA runtime looks for headers as well.
provision_nvrtc() {
    install_wheels nvrtc "nvidia-cuda-nvrtc==$nvrtc_version" \
        "nvidia-cuda-runtime==$headers_version" "nvidia-cuda-cccl==$headers_version"
    local from="$work/nvrtc/nvidia/cu13"
    mkdir -p "$cuda/lib" "$cuda/licenses/nvrtc"
    rm -rf "$cuda/include"
    mv "$from/include" "$cuda/"
    mv "$from"/lib/libnvrtc.so.13 "$from"/lib/libnvrtc-builtins.so.* "$cuda/lib/"
    mv "$work"/nvrtc/nvidia_cuda_nvrtc-*.dist-info/licenses/* "$cuda/licenses/nvrtc/"
    echo "$nvrtc_version $headers_version" >"$nvrtc_mark"
}

if [ -e "$llvm_mark" ]; then
    echo "LLVM: present in $llvm"
else
    provision_llvm
    echo "LLVM: installed in $llvm"
fi
if [ "$(cat "$cuda_mark" 2>/dev/null)" = "$cuda_version" ]; then
    echo "ptxas, nvdisasm, libdevice: present in $cuda"
else
    provision_cuda
    echo "ptxas, nvdisasm, libdevice: installed in $cuda"
fi
if [ "$(cat "$nvrtc_mark" 2>/dev/null)" = "$nvrtc_version $headers_version" ]; then
    echo "NVRTC: present in $cuda"
elif [ -n "$with_nvrtc" ]; then
    provision_nvrtc
    echo "NVRTC: installed in $cuda"
fi
echo "builds for CUDA find them by: export CUDA_PATH=$cuda"
