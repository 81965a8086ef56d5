"""Compiles programs for a GPU that is not there, and reads what came out.

Needs JAX's CUDA wheels, no GPU. XLA's assembler is wrapped to keep its report of every kernel, and
its dump tells the launches. Source: JAX's ahead-of-time compilation for described topologies.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax._src import lib as jax_lib
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from k26jax.bench.targets import Gpu, target_config
from k26jax.errors import KernelError

# What XLA must be started with: its own assembler library leaves no report.
XLA_FLAGS = "--xla_gpu_enable_libnvjitlink=false"
_WRAPPER = """#!/bin/sh
# Runs the assembler with a report, and keeps report and result.
out=; previous=
for word in "$@"; do [ "$previous" = "-o" ] && out=$word; previous=$word; done
report="{reports}/$$"
"{assembler}" "$@" -v 2> "$report.txt"; code=$?
cat "$report.txt" >&2
[ -f "$out" ] && cp "$out" "$report.cubin"
exit $code
"""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    spill_bytes: stored to local memory for want of registers.
    instructions: of its longest loop, by name; empty without a disassembler.
    """

    name: str
    registers: int
    spill_bytes: int
    instructions: collections.Counter[str] = field(default_factory=collections.Counter)


@dataclass(frozen=True)
class Launch:
    """One entry of XLA's launch list: kind of thunk, kernel, shared memory of a block."""

    kind: str
    name: str
    shared_bytes: int


@dataclass(frozen=True)
class Program:
    """A compiled program.

    launches: in order; loops and conditionals are listed with what they hold.
    command_buffers: graphs that XLA makes of the launches.
    copied_bytes: of every copy that the program makes.
    """

    kernels: list[Kernel]
    launches: list[Launch]
    command_buffers: int
    copied_bytes: list[int]
    temp_bytes: int
    alias_bytes: int


class Compiler:
    """Compiles for described GPUs; made once a process, before anything is compiled."""

    def __init__(self, folder: Path):
        self._reports, self._dump = folder / "reports", folder / "dump"
        tools = _cuda_folder()
        self._disassembler = tools / "bin" / "nvdisasm"
        wrapped = folder / "cuda"
        (wrapped / "bin").mkdir(parents=True)
        for path in [*tools.iterdir(), *(tools / "bin").iterdir()]:
            link = wrapped / path.relative_to(tools)
            if path.name not in ("bin", "ptxas"):
                link.symlink_to(path)
        script = wrapped / "bin" / "ptxas"
        script.write_text(_WRAPPER.format(reports=self._reports, assembler=tools / "bin" / "ptxas"))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        # JAX names the folder of its CUDA wheels to XLA in every compilation.
        jax_lib.cuda_path = str(wrapped)

    def compile(
        self, target: Gpu, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()
    ) -> Program:
        """Returns what a function of abstract arguments compiles to.

        Raises: KernelError with the compiler's words if it does not compile.
        """
        for path in (self._reports, self._dump):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        options = {"xla_dump_to": str(self._dump), "xla_dump_hlo_as_text": True}
        with target_mesh(target) as mesh:
            sharding = NamedSharding(mesh, PartitionSpec())
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
            )
            try:
                lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*shapes)
                compiled = lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                raise KernelError(f"{target.name}: {str(error).splitlines()[0]}") from error
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert text is not None
        return Program(
            kernels=list(self._kernels()),
            launches=self._launches("*.thunk_sequence.txt"),
            command_buffers=sum(
                launch.kind == "kCommandBuffer"
                for launch in self._launches("*thunk_sequence_after_thunk_passes.txt")
            ),
            copied_bytes=_copies(text),
            temp_bytes=memory.temp_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
        )

    def _kernels(self) -> Iterator[Kernel]:
        for report in sorted(self._reports.glob("*.txt")):
            text = report.read_text()
            loop = self._longest_loop(report.with_suffix(".cubin"))
            for name, body in re.findall(
                r"Compiling entry function '(\S+)'[^\n]*\n(.*?)(?=Compiling entry|\Z)", text, re.S
            ):
                registers = re.search(r"Used (\d+) registers", body)
                spills = re.search(r"(\d+) bytes spill stores", body)
                yield Kernel(
                    name,
                    int(registers[1]) if registers else 0,
                    int(spills[1]) if spills else 0,
                    loop,
                )

    def _longest_loop(self, cubin: Path) -> collections.Counter[str]:
        if not self._disassembler.exists() or not cubin.exists():
            return collections.Counter()
        command = [str(self._disassembler), "-c", str(cubin)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        labels: dict[str, int] = {}
        first = last = 0
        for number, line in enumerate(lines):
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = number
            branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if branch and number - labels.get(branch[1], number) > last - first:
                first, last = labels[branch[1]], number
        pattern = r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_]+)"
        found = (re.match(pattern, line) for line in lines[first : last + 1])
        return collections.Counter(match[1] for match in found if match)

    def _launches(self, pattern: str) -> list[Launch]:
        launches = []
        for path in sorted(self._dump.glob(pattern)):
            for line in path.read_text().splitlines():
                if entry := re.match(r"\s*\d+: (k\w+)\s*(?:\[[^\]]*\])?\s*(\S*)", line):
                    shared = re.search(r"shared_memory: (\d+)", line)
                    launches.append(Launch(entry[1], entry[2], int(shared[1]) if shared else 0))
        return launches


@contextmanager
def target_mesh(target: Gpu) -> Iterator[jax.sharding.Mesh]:
    """Makes a described GPU the one that programs are lowered for."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(target), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("model",))
    with jax.set_mesh(mesh):
        yield mesh


def _cuda_folder() -> Path:
    folder = jax_lib.cuda_path
    if folder is None or not (Path(folder) / "bin" / "ptxas").exists():
        raise KernelError(
            "JAX's CUDA wheels are not installed; install k26jax[cuda13] (no GPU is needed)"
        )
    return Path(folder)


def _copies(text: str) -> list[int]:
    """Returns the bytes of every copy in a compiled program."""
    sizes = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
    found = []
    for kind, dimensions in re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", text):
        elements = 1
        for size in filter(None, dimensions.split(",")):
            elements *= int(size)
        found.append(elements * sizes.get(kind, 4))
    return found


@contextmanager
def compiler() -> Iterator[Compiler]:
    """Yields a compiler whose files go when it is done.

    Raises: KernelError unless the process was started with XLA_FLAGS and JAX's CUDA wheels.
    """
    if XLA_FLAGS not in os.environ.get("XLA_FLAGS", ""):
        raise KernelError(f"start the process with XLA_FLAGS={XLA_FLAGS}")
    with tempfile.TemporaryDirectory(prefix="k26jax-") as folder:
        yield Compiler(Path(folder))
