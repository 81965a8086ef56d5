"""The GPUs that programs are compiled for without having one."""

from __future__ import annotations

from dataclasses import dataclass

from k26jax.errors import ConfigError, nearest


@dataclass(frozen=True)
class Gpu:
    """What XLA asks of a GPU before it compiles; public specifications.

    capability: CUDA compute capability.
    shared_bytes_per_core, shared_bytes_per_block: of a multiprocessor; the most of one block.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    threads_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_second: int
    clock_ghz: float

    @property
    def architecture(self) -> str:
        """sm_90, sm_100 or sm_120: the column of the tile table."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


_KIB, _GIB = 1 << 10, 1 << 30

GPUS = {
    "h200": Gpu(
        "NVIDIA H200", (9, 0), 132, 2048, 228 * _KIB, 227 * _KIB, 50 << 20, 141 * _GIB,
        4_800_000_000_000, 1.98,
    ),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 148, 2048, 228 * _KIB, 227 * _KIB, 126 << 20, 178 * _GIB,
        7_700_000_000_000, 1.96,
    ),
    "rtx-pro-6000": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 1536, 128 * _KIB, 99 * _KIB,
        128 << 20, 96 * _GIB, 1_792_000_000_000, 2.6,
    ),
}  # fmt: skip


def gpu(name: str) -> Gpu:
    """Returns a GPU by its short name.

    Raises: ConfigError for another name.
    """
    if name not in GPUS:
        raise ConfigError(
            f"no GPU {name!r} is described here, only {', '.join(GPUS)}{nearest(name, GPUS)}"
        )
    return GPUS[name]


def target_config(target: Gpu) -> str:
    """Returns XLA's GpuTargetConfigProto of a GPU, in text form."""
    major, minor = target.capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_core": target.shared_bytes_per_core,
        "shared_memory_per_block_optin": target.shared_bytes_per_block,
        "threads_per_core_limit": target.threads_per_core,
        "core_count": target.cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": (1 << 31) - 1,
        "block_dim_limit_y": (1 << 16) - 1,
        "block_dim_limit_z": (1 << 16) - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": target.memory_bytes_per_second,
        "l2_cache_size": target.l2_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": target.memory_bytes,
        "registers_per_core_limit": 1 << 16,
        "registers_per_block_limit": 1 << 16,
        "device_address_bits": 64,
        "device_vendor": '"NVIDIA Corporation"',
        "platform_version": f'"Compute Capability {major}.{minor}"',
        "name": f'"{target.name}"',
        "driver_version": '"13.0.0"',
        "runtime_version": '"13.0.0"',
        "compile_time_toolkit_version": '"13.0.0"',
        "dnn_version": '"9.10.0"',
    }
    body = "".join(f"  {name}: {value}\n" for name, value in fields.items())
    capability = f"major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES"
    return (
        f"gpu_device_info {{\n{body}  cuda_compute_capability {{ {capability} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        f'device_description_str: "{target.name}"\n'
    )
