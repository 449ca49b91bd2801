#!/usr/bin/env python3
"""The layers of this workspace as a PyTorch user runs them on a CPU: qkv, per-head RMSNorm, RoPE, packed
attention, projection.

needs: pip install torch
usage: torch_cpu.py < requests

Prints a line of JSON that says which torch it is, then reads requests, one JSON object a line, and answers
each with a line: {"times_ms": [...]} or {"error": "..."}. A request has
  op              layer, attention_varlen, rope_qk_norm or gemm (the product of two square matrices)
  implementation  eager     a dense block-diagonal mask over all tokens
                  eager_v2  a loop over segments with explicit softmax
                  sdpa      a loop over segments through scaled_dot_product_attention
  heads, head_dim, lengths, qk_norm, backward, dtype (f32, f16, bf16), threads, repeats, max_seconds;
for gemm: size, dtype, threads, repeats, max_seconds.
Example: echo '{"op": "layer", "implementation": "sdpa", "heads": 24, "head_dim": 64, "lengths": [1024],
  "qk_norm": true, "backward": false, "dtype": "f32", "threads": 2, "repeats": 5, "max_seconds": 60}'
"""
import json
import math
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(1)

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    wide = x.float()
    turned = torch.cat((-wide[..., half:], wide[..., :half]), -1)
    return (wide * cos + turned * sin).to(x.dtype)


def attention(q, k, v, lengths, implementation):
    """q, k, v: [tokens, heads, head_dim]."""
    scale = 1 / math.sqrt(q.shape[-1])
    if implementation == "eager":
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        other = segment[:, None] != segment[None]
        mask = torch.zeros(other.shape, dtype=q.dtype).masked_fill(other, torch.finfo(q.dtype).min)
        scores = q.transpose(0, 1) @ k.permute(1, 2, 0) * scale + mask
        return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)
    parts = []
    for q, k, v in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        if implementation == "sdpa":
            out = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        else:
            out = (q @ k.transpose(1, 2) * scale).softmax(-1) @ v
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def workload(request):
    """A function of no arguments, and the tensors that get gradients."""
    dtype = DTYPES[request["dtype"]]
    if request["op"] == "gemm":
        a, b = (torch.randn(request["size"], request["size"]).to(dtype) for _ in "ab")
        return lambda: a @ b, []
    heads, head_dim, lengths = request["heads"], request["head_dim"], request["lengths"]
    dim, tokens, learns = heads * head_dim, sum(lengths), request["backward"]

    def random(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_(learns)

    angles = torch.randn(tokens, 1, head_dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    weights = [torch.ones(head_dim, dtype=dtype, requires_grad=learns) for _ in "qk"]
    weights = weights if request["qk_norm"] else []

    def positioned(q, k):
        if weights:
            q, k = norm(q, weights[0]), norm(k, weights[1])
        return rotate(q, cos, sin), rotate(k, cos, sin)

    if request["op"] == "rope_qk_norm":
        q, k = random(tokens, heads, head_dim), random(tokens, heads, head_dim)
        return lambda: positioned(q, k), [q, k, *weights]
    if request["op"] == "attention_varlen":
        qkv = [random(tokens, heads, head_dim) for _ in "qkv"]
        return lambda: attention(*qkv, lengths, request["implementation"]), qkv
    x = random(tokens, dim)
    projections = [torch.nn.Linear(dim, out, bias=False).to(dtype) for out in (3 * dim, dim)]

    def layer():
        q, k, v = projections[0](x).reshape(tokens, 3, heads, head_dim).unbind(1)
        q, k = positioned(q, k)
        out = attention(q, k, v, lengths, request["implementation"])
        return projections[1](out.reshape(tokens, dim))

    return layer, [x, *weights, *(p.weight for p in projections)]


def answer(request):
    torch.set_num_threads(request["threads"])
    work, leaves = workload(request)

    def call():
        start = time.perf_counter()
        if request.get("backward"):
            for leaf in leaves:
                leaf.grad = None
            out = work()
            out = out if isinstance(out, tuple) else (out,)
            sum(o.sum() for o in out).backward()
        else:
            with torch.no_grad():
                work()
        return (time.perf_counter() - start) * 1e3

    call()
    warm = call()
    affordable = int(request["max_seconds"] * 1e3 / warm)
    return {"times_ms": [call() for _ in range(max(1, min(request["repeats"], affordable)))]}


def main():
    torch.manual_seed(0)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except RuntimeError as error:  # out of memory, or not implemented for the dtype
            reply = {"error": str(error).splitlines()[0]}
        print(json.dumps(reply), flush=True)


main()
