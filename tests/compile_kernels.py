"""Compiles what the launchers launch, for sm_80, sm_90 and sm_100, on a machine without a GPU.

Prints registers, spills and shared memory of every kernel; exit code 1 if one spills in its loop over tiles, or
more than SPILLS bytes anywhere, or takes more shared memory than its card has. Run: python tests/compile_kernels.py;
with --all more dtypes, batch sizes and head dims.
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"                                        # import the kernels, but to compile them
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from triton.backends.compiler import GPUTarget

import kernels
from selector import SelectorConfig

SPILLS = 512                                                                # bytes, outside loops over tiles: rare work
CARDS = {80: (108, 166912), 90: (132, 232448), 100: (148, 232448)}          # A100, H200, B200
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoGPU:
    """Stands in for Triton's driver: names the card to compile for, and never runs anything."""
    capability = 90

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability                                              # one cache of kernels per card

    def get_current_stream(self, device):
        return 0


compiled = []                                                               # (name, kernel), most recent last
run = triton.JITFunction.run


def compile_only(kernel, *args, grid, warmup, **options):
    compiled.append((kernel.__name__, run(kernel, *args, grid=grid, warmup=True, **options)))


def step(dtype, heads, kv_heads, dim, hidden, mlp, queries=1, rows=1):
    """Call every operation of a step as the decoder does. Tensors are only looked at: their contents do not matter."""
    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype)
    ops, C, K, norm = kernels.TRITON, 4096, 2048, empty(hidden)
    x, R = empty(rows, hidden), queries * heads // kv_heads
    ops.rms_norm(x, norm, 1e-6)
    ops.linear(x, empty((heads + 2 * kv_heads) * dim, hidden), norm, 1e-6)
    ops.linear(empty(rows, heads * dim), empty(hidden, heads * dim), residual=x)
    ops.swiglu(x, empty(2 * mlp, hidden), norm, 1e-6)
    ops.swiglu(empty(16, hidden), empty(2 * mlp, hidden), norm, 1e-6)       # many rows
    ops.linear(empty(rows, mlp), empty(hidden, mlp), residual=x)
    ops.linear(x, empty(151936, hidden), norm, 1e-6)
    ops.qk_norm_rope(empty(rows, (heads + 2 * kv_heads) * dim), kv_heads, empty(dim), empty(dim), empty(C, dim // 2),
                     empty(C, dim // 2), empty(rows, dtype=torch.int64), 1e-6)
    q, k, v = empty(rows, heads, dim), empty(rows, kv_heads, dim), empty(rows, kv_heads, dim)
    keys, values = empty(1, rows, kv_heads, C, dim), empty(1, rows, kv_heads, C, dim)
    compact = empty(1, rows, kv_heads, 4 + K, dim), empty(1, rows, kv_heads, 4 + K, dim)
    plan, norms = empty(rows, 4, dtype=torch.int32), empty(1, rows, kv_heads, C, dtype=torch.float32)
    logits, lse = empty(1, rows, kv_heads, R, C), empty(1, rows, kv_heads, R, dtype=torch.float32)
    packed, ring = [x[0] for x in compact], empty(rows, 16, heads, dim) if queries > 1 else None
    for their_compact, evidence in (((None, None), ()), (packed, ()), (packed, (logits[0], lse[0], 4, 256))):
        ops.attend(q, k, v, keys[0], values[0], *their_compact, plan, 1.0, norms[0], ring, queries, *evidence)
    config = SelectorConfig(spread=8, alpha=2.0) if queries > 1 else SelectorConfig()
    ops.publish(logits, lse, norms, keys, values, plan, 4, 256, config, empty(1, rows, kv_heads, K, dtype=torch.int64),
                *compact)


def cuobjdump(kernel, what):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout


def spills_in_loops(code):
    """Loads and stores of spilled registers in the innermost loops that use the matrix units.

    A loop is what lies between a branch and an earlier place that it goes to. Rare cases stand behind all else and also
    go back, but into the middle of loops: what crosses a shorter such piece is no loop.
    """
    code = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", code)]
    branches = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)) for at, line in code]
    loops = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) < at]
    loops = [(a, z) for a, z in loops if not any((a < b < z < y or b < a < y < z) and y - b < z - a for b, y in loops)]
    innermost = [(a, z) for a, z in loops if not any(a <= b and y <= z and (a, z) != (b, y) for b, y in loops)]
    bodies = (" ".join(line for at, line in code if a <= at <= z) for a, z in innermost)
    return sum(len(re.findall(r"\b(?:LDL|STL)\b", body)) for body in bodies if "MMA" in body)


def usage(kernel):
    """(registers, bytes spilled, spills in loops over tiles, bytes of shared memory) of a compiled kernel."""
    line = cuobjdump(kernel, "-res-usage")
    parts = dict(part.split(":") for part in line.split() if part.count(":") == 1 and part.split(":")[1].isdigit())
    spilled = int(parts["STACK"]) + int(parts["LOCAL"])
    return int(parts["REG"]), spilled, spilled and spills_in_loops(cuobjdump(kernel, "-sass")), kernel.metadata.shared


def main():
    driver = NoGPU()
    triton.runtime.driver.set_active(driver)
    triton.JITFunction.run = compile_only
    bad, seen = 0, set()
    for capability, limits in CARDS.items():
        driver.capability, kernels.card = capability, lambda _: limits
        kernels.early = lambda _: dict(EARLY=capability >= 90, launch_pdl=capability >= 90)
        few = dict(heads=16, kv_heads=8, dim=128, hidden=1024, mlp=3072)
        step(torch.bfloat16, **few)
        step(torch.bfloat16, heads=32, kv_heads=8, dim=128, hidden=2560, mlp=9728, rows=4, queries=8)
        for heads, kv_heads in (40, 8), (64, 4):                            # Qwen3-14B, 235B-A22B
            step(torch.bfloat16, heads, kv_heads, dim=128, hidden=4096, mlp=1536, queries=8)
        if "--all" in sys.argv:
            step(torch.bfloat16, **few, rows=4, queries=8)
            step(torch.bfloat16, **few, rows=8)
            step(torch.float32, **few, rows=2, queries=8)
            step(torch.float16, heads=10, kv_heads=2, dim=80, hidden=800, mlp=2000, queries=2)
            step(torch.bfloat16, heads=32, kv_heads=8, dim=256, hidden=2560, mlp=9728, queries=8)
        for name, kernel in compiled:
            if kernel.hash in seen:
                continue
            seen.add(kernel.hash)
            registers, spilled, in_loops, shared = usage(kernel)
            bad += spilled > SPILLS or in_loops > 0 or shared > limits[1]
            print(f"sm_{capability:<4} {name:24} {registers:4} registers {spilled:5} spilled {in_loops:3} in loops "
                  f"{shared:7} shared")
        compiled.clear()
    print(f"{bad} of {len(seen)} kernels spill in a loop or more than {SPILLS} bytes, or do not fit")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
