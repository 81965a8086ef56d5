"""Compiles every kernel case and the step for three GPUs, with no GPU, and fails past its limits.

JAX_PLATFORMS=cpu XLA_FLAGS=--xla_gpu_enable_libnvjitlink=false python scripts/check_gpu_programs.py
needs `pip install 'k26jax[cuda13]' nvidia-cuda-nvdisasm` (Python 3.12, JAX 0.11.2).
"""

from __future__ import annotations

import argparse
import sys
import time

import jax

from k26jax.bench.compile_only import Compiler, Kernel, Program, compiler, target_mesh
from k26jax.bench.programs import Candidate, kernel_programs, plain_step, prompt_chunk
from k26jax.bench.targets import GPUS, Gpu, gpu
from k26jax.errors import K26Error
from k26jax.pallas.tiles import TILES

MOST_INSTRUCTIONS_A_WEIGHT = 3.3
MOST_KERNELS_A_LAYER = 16  # the goal is 12: docs/kernels.md
MOST_COPIED_BYTES = 1 << 20
# Bytes of registers that a kernel may lose to local memory, where that is not none.
# int4_moe_up: once before and once behind its loop.
SPILLS = {("sm_100", "tree_mla"): 152, ("sm_90", "int4_moe_up"): 8}


def main() -> int:
    """Returns 1 if a program does not compile or passes a limit."""
    parser = argparse.ArgumentParser(description="Compiles every program for GPUs.")
    parser.add_argument("--gpu", nargs="+", default=list(GPUS), metavar="NAME", help=str([*GPUS]))
    parser.add_argument(
        "--kernel", nargs="+", metavar="NAME", help="only these; step, prefill: the programs"
    )
    args = parser.parse_args()
    faults: list[str] = []
    with compiler() as tool:
        for target in map(gpu, args.gpu):
            faults += check(tool, target, args.kernel)
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


def check(tool: Compiler, target: Gpu, only: list[str] | None) -> list[str]:
    """Prints a line a program; returns what is wrong with them."""
    faults = []
    with target_mesh(target):
        candidates = list(kernel_programs())
    for candidate in candidates:
        if only is None or candidate.kernel in only:
            program, found = _compiled(tool, target, candidate)
            faults += found
            if program:
                faults += _kernel_faults(target, candidate, program)
    if only is None or "step" in only:
        faults += _check_step(tool, target)
    if only is None or "prefill" in only:
        faults += _check_prefill(tool, target)
    return faults


def _compiled(
    tool: Compiler, target: Gpu, candidate: Candidate
) -> tuple[Program | None, list[str]]:
    begun = time.monotonic()
    where = f"{target.architecture} {candidate.kernel}, {candidate.case}"
    try:
        with target_mesh(target):
            program = tool.compile(
                target, candidate.function, *candidate.arguments, donate=candidate.donate
            )
    except K26Error as error:
        return None, [f"{where}: does not compile: {error}"]
    print(f"{where}: {time.monotonic() - begun:.1f} s", flush=True)
    return program, []


def _kernel_faults(target: Gpu, candidate: Candidate, program: Program) -> list[str]:
    faults = []
    shared = {launch.name: launch.shared_bytes for launch in program.launches}
    for kernel in program.kernels:
        line = f"    {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} B spilled"
        line += f", {shared.get(kernel.name, 0)} B shared"
        if per_weight := instructions_a_weight(target, candidate, kernel):
            line += f", {per_weight:.2f} instructions a weight"
            if per_weight > MOST_INSTRUCTIONS_A_WEIGHT:
                faults.append(f"{kernel.name}: {per_weight:.2f} instructions a weight")
        print(line, flush=True)
        if kernel.spill_bytes > SPILLS.get((target.architecture, kernel.name), 0):
            faults.append(
                f"{target.architecture} {candidate.case}: {kernel.name} spills "
                f"{kernel.spill_bytes} B"
            )
    return faults


def instructions_a_weight(target: Gpu, candidate: Candidate, kernel: Kernel) -> float | None:
    """Returns the instructions of a product's inner loop over the INT4 weights of one turn."""
    is_product = kernel.name.startswith(("int4_moe_up", "int4_moe_down"))
    if not is_product or "HMMA" not in kernel.instructions:
        return None
    name = kernel.name if kernel.name in TILES else kernel.name.rsplit("_", 1)[0]
    cut = TILES[name][target.architecture]
    weights = candidate.arguments[-1]
    tiles = weights.gate_up if name.endswith("up") else weights.down
    steps = tiles.steps if tiles.steps <= 4 else 1
    return kernel.instructions.total() / (tiles.columns * 128 * steps / (cut.warps * 32))


def _check_step(tool: Compiler, target: Gpu) -> list[str]:
    counts, faults = [], []
    for n_layers in (2, 3):
        with target_mesh(target):
            candidate = plain_step(n_layers)
        program, found = _compiled(tool, target, candidate)
        faults += found
        if program is None:
            return faults
        # A kernel of Mosaic GPU is a custom call to XLA.
        kernels = [x for x in program.launches if x.kind.endswith(("Kernel", "CustomCall"))]
        counts.append(len(kernels))
        large = [size for size in program.copied_bytes if size > MOST_COPIED_BYTES]
        print(
            f"    {counts[-1]} kernels, {program.command_buffers} command buffers, "
            f"{program.alias_bytes} B aliased, {program.temp_bytes} B temporary, "
            f"copies above 1 MB: {large}"
        )
        if large:
            faults.append(f"{target.architecture} step copies {large} B")
    a_layer = counts[1] - counts[0]
    print(f"    {a_layer} kernels a MoE layer")
    if a_layer > MOST_KERNELS_A_LAYER:
        limit = MOST_KERNELS_A_LAYER
        faults.append(f"{target.architecture} step: {a_layer} kernels a MoE layer, limit {limit}")
    return faults


def _check_prefill(tool: Compiler, target: Gpu) -> list[str]:
    """The cache is written in every layer, in place: none of its size may be copied."""
    with target_mesh(target):
        candidate = prompt_chunk(2)
    program, faults = _compiled(tool, target, candidate)
    if program is None:
        return faults
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(candidate.arguments[2].cache))
    print(
        f"    {len(program.launches)} launches, {program.alias_bytes} B aliased, "
        f"{program.temp_bytes} B temporary, largest copy {max(program.copied_bytes, default=0)} B"
    )
    if program.alias_bytes < cache:
        faults.append(
            f"{target.architecture} prefill: {program.alias_bytes} B of {cache} B in place"
        )
    if any(size >= cache // 2 for size in program.copied_bytes):
        faults.append(f"{target.architecture} prefill copies {max(program.copied_bytes)} B")
    return faults


if __name__ == "__main__":
    sys.exit(main())
