#!/usr/bin/env bash
# Checks and measures burn-vision-attention on a GPU, in under 8 minutes.
#
# usage: ./run.sh
#   needs the NVIDIA driver and a CUDA toolkit, of which libdevice is read; for ratios to PyTorch's
#   varlen_attn also a Python with torch 2.10 or later. Built on Debian 12: glibc 2.36 or later.
#   Where `features` lists cuda-cpp, CubeCL's C++ compiler compiles every kernel, those of flash_attention_2
#   as well: of the toolkit NVRTC, no newer than the driver, and CUDA's headers are read instead, and on
#   compute capability 9.0 and later flash_attention_3 is checked and measured, too.
# Variables:
#   OUT=./results   where results.json, table.txt and the log of each step go
#   DEVICE=cuda     wgpu, flex, ...: as far as it is built in; other devices than cuda get a small grid
#                   that proves this script and measures nothing
#   CUDA_PATH       the toolkit; else CUDA_HOME, /usr/local/cuda, /opt/cuda, /usr/lib/cuda, /usr
#   PYTHON=python3  the Python that has torch
#   BUDGET=460      seconds for everything
#   DTYPE, HEADS, LAYOUTS, GEMM, COPY   what is measured; see `bin/xtask bench --help`
#
# No step stops the others; one that takes too long is ended and recorded. The exit status is 0 if parity,
# gradients and conformance hold, 1 if not, and 2 if something is missing.
set -uo pipefail
unset CDPATH
export RUST_BACKTRACE=0
SECONDS=0
here=$(cd "$(dirname "$0")" && pwd)

DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-460}
if [ "$DEVICE" = cuda ]; then
    # The grid of torch_gpu.py, in its order.
    grid_heads="12x128 24x64 16x80 16x72"
    grid_layouts="1x16384 16x1024 256x64 4x4096 64x256 1x8836 24x729"
    defaults=(bf16 8192 1024 20)
else
    grid_heads="12x128 24x64"
    grid_layouts="1x128 2x64"
    defaults=(f32 256 16 3)
fi
DTYPE=${DTYPE:-${defaults[0]}}
GEMM=${GEMM:-${defaults[1]}}
COPY=${COPY:-${defaults[2]}}
HEADS=${HEADS:-$grid_heads}
LAYOUTS=${LAYOUTS:-$grid_layouts}

# The share of the budget, in hundredths, that each step can count on. What one leaves goes to those after it.
declare -A share=(
    [parity]=14 [gradients]=14 [conformance]=20 [attention]=27 [rope_qk_norm]=7 [torch]=14
    [parity-composed]=2 [gradients-composed]=2
)
# The same where flash_attention_3 runs.
declare -A share_async=(
    [parity]=10 [gradients]=10 [parity-async]=6 [gradients-async]=6 [conformance]=18 [attention]=22
    [attention-async]=10 [rope_qk_norm]=5 [torch]=9 [parity-composed]=2 [gradients-composed]=2
)

# Whether CubeCL's C++ compiler compiles for CUDA, instead of LLVM.
cpp=
! grep -qx cuda-cpp "$here/features" 2>/dev/null || cpp=1

OUT=${OUT:-results}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || { echo "error: cannot make the folder OUT" >&2; exit 2; }
# What an earlier run left.
rm -f "$OUT"/{steps.tsv,facts.tsv,results.json,table.txt}
rm -f "$OUT"/{attention,attention-async,rope_qk_norm,torch}.json
for name in "${!share_async[@]}"; do rm -f "$OUT/$name.log"; done
fact() { printf '%s\t%s\n' "$1" "$2" >>"$OUT/facts.tsv"; }
missing() {
    echo "missing: $*" >&2
    incomplete=1
}
incomplete=0

# Libraries that the system lacks are in lib/; those that it has are its own.
libraries() {
    local name
    for name in $(LC_ALL=C ldd "$here"/bin/* 2>&1 | sed -nE \
        -e 's/^[[:space:]]*([^ ]+) => not found$/\1/p' \
        -e 's#^.*/([^/ :]+): version .* not found .*$#\1#p' | sort -u); do
        if [ -e "$here/lib/$name" ]; then
            mkdir -p "$OUT/lib"
            ln -sf "$here/lib/$name" "$OUT/lib/"
            export LD_LIBRARY_PATH="$OUT/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        else
            missing "$name in the version that these programs need; they were built on Debian 12 (glibc 2.36)"
        fi
    done
}

# What the kernels' compiler reads of a toolkit.
reads="nvvm/libdevice/libdevice.10.bc"
[ -z "$cpp" ] || reads="CUDA's headers (include/cuda_fp16.h, cuda/barrier)"

# Whether a folder has that. Until CUDA 13 the headers of its C++ library were beside the others.
has_toolkit() { # FOLDER
    if [ -z "$cpp" ]; then
        [ -e "$1/$reads" ]
    else
        [ -e "$1/include/cuda_fp16.h" ] &&
            { [ -e "$1/include/cccl/cuda/barrier" ] || [ -e "$1/include/cuda/barrier" ]; }
    fi
}

toolkit() {
    local root
    for root in "${CUDA_PATH:-}" "${CUDA_HOME:-}" /usr/local/cuda /opt/cuda /usr/lib/cuda /usr; do
        [ -n "$root" ] && has_toolkit "$root" || continue
        export CUDA_PATH=$root
        local version
        version=$(sed -nE '/"cuda" *:/,/}/s/.*"version" *: *"([^"]+)".*/\1/p' "$root/version.json" 2>/dev/null | head -n 1)
        version=${version:-$(head -n 1 "$root/version" 2>/dev/null)}
        version=${version:-$("$root/bin/nvcc" --version 2>/dev/null | sed -nE 's/.*, V([0-9.]+).*/\1/p')}
        fact toolkit "${version:-of unknown release} in $root"
        return
    done
    missing "a CUDA toolkit with $reads; set CUDA_PATH to one"
}

# NVRTC under a name that the programs look for: they do not know every release's own.
nvrtc() {
    local library root=${CUDA_PATH:-/nonexistent}
    for library in "$root"/{lib64,lib,targets/*/lib}/libnvrtc.so{,.[0-9]*} \
        $(PATH=$PATH:/sbin ldconfig -p 2>/dev/null | sed -nE 's/^.*libnvrtc\.so[.0-9]* .*=> //p'); do
        [ -e "$library" ] || continue
        mkdir -p "$OUT/lib"
        ln -sf "$library" "$OUT/lib/libnvrtc.so"
        # It looks for a library of its own beside itself.
        export LD_LIBRARY_PATH="$OUT/lib:${library%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        fact compiler "C++ and $(basename "$(readlink -f "$library")")"
        return
    done
    missing "NVRTC: libnvrtc.so is neither in the toolkit's lib64 nor known to ldconfig; set CUDA_PATH to a toolkit that has it"
}

# What the driver says of the GPU; without libcuda the device would only say that a task of it panicked.
nvidia() {
    local index=${CUDA_VISIBLE_DEVICES:-0} answer name driver memory power
    if ! command -v nvidia-smi >/dev/null && ! { PATH=$PATH:/sbin ldconfig -p | grep -q 'libcuda\.so\.1'; }; then
        missing "the NVIDIA driver: there is neither nvidia-smi nor libcuda.so.1"
        return
    fi
    export CUDA_DEVICE_ORDER=PCI_BUS_ID
    answer=$(nvidia-smi -i "${index%%,*}" --query-gpu=name,driver_version,memory.total,power.limit \
        --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    IFS=, read -r name driver memory power <<<"$answer"
    fact gpu "${name:-}"
    fact driver "${driver# }"
    fact memory "${memory# }"
    fact power_limit "${power# }"
    # Not every driver knows this question.
    capability=$(nvidia-smi -i "${index%%,*}" --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
        sed -nE '1s/^ *([0-9]+)\.[0-9]+ *$/\1/p')
}

# Whether the device answers, and which kernels serve it.
device() {
    timeout 60 "$here/bin/xtask" devices >"$OUT/devices.log" 2>&1
    grep -q "^$DEVICE (" "$OUT/devices.log" && return
    missing "$(grep -m 1 "\`$DEVICE\`" "$OUT/devices.log" || echo "a device called $DEVICE; see $OUT/devices.log")"
}

# Whether flash_attention_3 is checked and measured: where the device says that it runs, and where it has to
# by what is known of programs and GPU, so that a device that denies it fails its checks.
capability=
async=
asynchronous() {
    local said reason
    said=$(sed -n "/^$DEVICE (/,/^[^ ]/p" "$OUT/devices.log")
    if grep -q 'kernel of flash_attention_3:' <<<"$said" ||
        { [ -n "$cpp" ] && [ "$DEVICE" = cuda ] && ((${capability:-0} >= 9)); }; then
        async=1
        for name in "${!share_async[@]}"; do share[$name]=${share_async[$name]}; done
        return
    fi
    reason=$(sed -nE 's/^.*\(flash_attention_3 cannot run: (.*)\)$/\1/p' <<<"$said" | tail -n 1)
    leave_out extra flash_attention_3 "${reason%%; flash_attention_2 cannot run:*}"
}

record() { # KIND NAME CODE SECONDS LIMIT DETAIL
    local IFS=$'\t'
    printf '%s\n' "$*" >>"$OUT/steps.tsv"
}

leave_out() { # KIND NAME REASON
    echo "$2: left out: $3"
    record "$1" "$2" - 0 0 "$3"
}

# Hundredths of the budget that are promised to steps to come.
later=100

# step KIND NAME SHARE COMMAND ...: `check` has to hold, `extra` has to hold as far as there is time for it,
# `measure` may fail. The limit is what the budget leaves beside the steps to come.
step() {
    local kind=$1 name=$2 code=0 start=$SECONDS limit detail
    later=$((later - $3))
    shift 3
    limit=$((BUDGET - SECONDS - (BUDGET - begun) * later / 100))
    if ((limit < 1)); then
        leave_out "$kind" "$name" "no time is left"
        return
    fi
    printf '%s: ' "$name"
    timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1 </dev/null || code=$?
    detail=
    # What a measurement says at its end is a table; its results are in a file.
    if [ "$kind" != measure ] || ((code)); then
        detail=$(grep -v '^[[:space:]]*$' "$OUT/$name.log" | tail -n 1 | tr '\t' ' ' |
            sed -E 's/^test result: (.*); 0 ignored.*$/\1/' | cut -c 1-120)
    fi
    echo "exit $code after $((SECONDS - start)) of at most $limit s"
    record "$kind" "$name" "$code" $((SECONDS - start)) "$limit" "$detail"
}

parity() { # KIND NAME ARGUMENT ...
    local kind=$1 name=$2
    shift 2
    step "$kind" "$name" "${share[$name]}" \
        "$here/bin/xtask" parity --fixtures "$here/fixtures" --device "$DEVICE" "$@"
}

# The kernels against plain Rust. Emulated instructions are for devices that lack them.
conformance() {
    case $DEVICE in
        cuda | wgpu | cpu)
            step check conformance "${share[conformance]}" env VISION_ATTENTION_TEST_DEVICE="$DEVICE" \
                VISION_ATTENTION_REQUIRE_GPU_TESTS=1 VISION_ATTENTION_REQUIRE_ASYNC_COPIES="${async:-0}" \
                "$here/bin/conformance" --skip Emulated
            ;;
        *)
            later=$((later - share[conformance]))
            leave_out extra conformance "these kernels are not those of $DEVICE"
            ;;
    esac
}

bench() { # NAME ARGUMENT ...
    local name=$1 value arguments=()
    shift
    for value in $HEADS; do arguments+=(--heads "$value"); done
    for value in $LAYOUTS; do arguments+=(--layout "$value"); done
    step measure "$name" "${share[$name]}" "$here/bin/xtask" bench --device "$DEVICE" \
        --dtype "$DTYPE" --gemm "$GEMM" --copy "$COPY" --repeats "${defaults[3]}" --max-seconds 1 \
        --json "$OUT/$name.json" "${arguments[@]}" "$@"
}

torch() {
    local find='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' reason=
    if [ "$DEVICE" != cuda ]; then
        reason="it measures NVIDIA GPUs alone"
    elif ! command -v "$PYTHON" >/dev/null; then
        reason="there is no $PYTHON; set PYTHON to one with torch for ratios to varlen_attn"
    elif ! "$PYTHON" -c "$find" 2>/dev/null; then
        reason="$PYTHON has no torch; set PYTHON to one with torch for ratios to varlen_attn"
    fi
    if [ -n "$reason" ]; then
        later=$((later - share[torch]))
        leave_out measure torch "$reason"
    else
        step measure torch "${share[torch]}" "$PYTHON" "$here/torch_gpu.py" --json "$OUT/torch.json"
    fi
}

fact device "$DEVICE"
fact dtype "$DTYPE"
libraries
if [ "$DEVICE" = cuda ]; then
    toolkit
    if [ -n "$cpp" ]; then nvrtc; else fact compiler LLVM; fi
    nvidia
fi
((incomplete)) || device
if ((incomplete)); then
    echo "nothing was checked and nothing measured" >&2
    exit 2
fi

# What looking around took is taken from all steps.
begun=$SECONDS
asynchronous
parity check parity --implementation flash_attention_2
parity check gradients --implementation flash_attention_2 --gradients
if [ -n "$async" ]; then
    parity check parity-async --implementation flash_attention_3
    parity check gradients-async --implementation flash_attention_3 --gradients
fi
conformance
bench attention --op attention_varlen --implementation flash_attention_2 --pass forward --pass backward
# Its backward pass is that of flash_attention_2.
[ -z "$async" ] ||
    bench attention-async --op attention_varlen --implementation flash_attention_3 --pass forward
bench rope_qk_norm --op rope_qk_norm
torch
composed=(--implementation eager --implementation eager_v2 --implementation sdpa)
parity extra parity-composed "${composed[@]}"
parity extra gradients-composed "${composed[@]}" --gradients

fact seconds "$SECONDS"
"$here/bin/xtask" device-report "$OUT"
