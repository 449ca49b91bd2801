#!/usr/bin/env python3
"""Packed attention as a PyTorch user runs it on an NVIDIA GPU, in bf16 and without a causal mask: what
`attention_varlen` is measured against.

needs: pip install torch (2.10 or later for varlen)
usage: torch_gpu.py [--json FILE] [--repeats N]

Prints a line for each of
  varlen  torch.nn.attention.varlen.varlen_attn over cu_seqlens: FlashAttention-2, or in later releases
          cuDNN where that is eligible; the backward pass alone, too
  loop    a loop over segments through scaled_dot_product_attention
  padded  one batch through scaled_dot_product_attention; no segment of the grid needs padding
and, first, the device's rate of a matrix product and of a copy. FILE holds the results so far after each
line. FLOPs are those that have to be done: 4 * sum(length^2) * heads * head_dim forward, 2.5 times that
backward. A time is that of one call, or of up to 16 in a row over their number, as long as they take 5 ms
together: the median of all repeats.
"""
import argparse
import json
import os
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    sys.exit(f"no torch: {error}")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no CUDA device")
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError as error:
    varlen_attn = None
    print(f"torch {torch.__version__} has no varlen_attn ({error})", flush=True)

# The cases that have targets come first, in case there is no time for the rest.
HEADS = [(12, 128), (24, 64), (16, 80), (16, 72)]
# Segments and the tokens of each.
LAYOUTS = [(1, 16384), (16, 1024), (256, 64), (4, 4096), (64, 256), (1, 8836), (24, 729)]
SIZE = 8192
COPIED = 1 << 30
DEVICE, DTYPE = "cuda", torch.bfloat16


def milliseconds(call, repeats):
    """The median time of a call."""

    def timed(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        # What a call gives lives as long as the others.
        results = [call() for _ in range(count)]
        end.record()
        torch.cuda.synchronize()
        del results
        return start.elapsed_time(end) / count

    for _ in range(3):
        warm = timed(1)
    count = max(1, min(16, int(5 / warm)))
    return statistics.median(timed(count) for _ in range(repeats))


def machine(repeats):
    """Rates of the device itself."""
    a = torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE)
    source = torch.ones(COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    product, copy = milliseconds(lambda: a @ a, repeats), milliseconds(lambda: target.copy_(source), repeats)
    return {"matmul_tflops": 2 * SIZE**3 / product / 1e9, "copy_gbs": 2 * COPIED / copy / 1e6}


def variants(q, k, v, segments, length):
    def varlen():
        return varlen_attn(q, k, v, boundaries, boundaries, length, length)

    def loop():
        parts = zip(*(tensor.split(length) for tensor in (q, k, v)))
        return [F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in part)) for part in parts]

    def padded():
        shape = (segments, length, *q.shape[1:])
        return F.scaled_dot_product_attention(*(t.view(shape).transpose(1, 2) for t in (q, k, v)))

    boundaries = torch.arange(segments + 1, device=DEVICE, dtype=torch.int32) * length
    return {**({"varlen": varlen} if varlen_attn else {}), "loop": loop, "padded": padded}


def rows(repeats):
    for heads, head_dim in HEADS:
        for segments, length in LAYOUTS:
            shape = (segments * length, heads, head_dim)
            q, k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in "qkv")
            gradient = torch.randn(shape, device=DEVICE, dtype=DTYPE)
            flops = 4 * segments * length**2 * heads * head_dim
            for name, call in variants(q, k, v, segments, length).items():
                row = {"heads": heads, "head_dim": head_dim, "layout": f"{segments}x{length}", "variant": name}
                try:
                    with torch.no_grad():
                        row["forward_ms"] = milliseconds(call, repeats)
                    row["forward_tflops"] = flops / row["forward_ms"] / 1e9
                    if name == "varlen":
                        out = call()

                        def backward():
                            return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

                        row["backward_ms"] = milliseconds(backward, repeats)
                        row["backward_tflops"] = 2.5 * flops / row["backward_ms"] / 1e9
                except Exception as error:  # out of memory, or not implemented for the shape
                    row["error"] = str(error).splitlines()[0][:200]
                yield row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", metavar="N", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), **machine(arguments.repeats)}
    report["rows"] = []
    print("matrix product {matmul_tflops:.0f} TFLOP/s, copy {copy_gbs:.0f} GB/s".format(**report), flush=True)
    for row in rows(arguments.repeats):
        report["rows"].append(row)
        words = (f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items())
        print(*words, flush=True)
        if arguments.json:
            # Whoever ends this program meanwhile leaves the last whole file.
            with open(arguments.json + ".part", "w") as file:
                json.dump(report, file, indent=1)
            os.replace(arguments.json + ".part", arguments.json)


main()
