"""Eight fake CPU devices, shape checks on, strict promotion, one compile cache for all tests."""

import importlib.util
import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
import hypothesis
import pytest
from jaxtyping import install_import_hook

# What tests compile stays out of the user's cache, and a test's program out of the next run's.
_CACHE = tempfile.TemporaryDirectory(prefix="k26jax-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Before any module of the package is imported: annotations there are checked on every call. Where
# the tests' requirements are not installed, as on a GPU host that has JAX and pytest, they are not.
if importlib.util.find_spec("beartype"):
    install_import_hook(["k26jax.model", "k26jax.pallas", "k26jax.spec"], "shape_checks.checked")

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=20, print_blob=True
)
hypothesis.settings.load_profile("ci")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--golden-dir",
        default=str(REPOSITORY / "tests" / "golden"),
        help="folder of reference data in the structure of tests/golden",
    )


@pytest.fixture(scope="session")
def golden_dir(request) -> Path:
    """The folder of reference data; tests find what it holds, they do not name it."""
    return Path(request.config.getoption("--golden-dir"))


@pytest.fixture(scope="session")
def small_pair(golden_dir, tmp_path_factory):
    """Folders of a golden target, with a tokenizer of its size, and of a drafter for it."""
    from fixtures.small_pair import write_small_pair

    return write_small_pair(golden_dir, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """Within the module, a program that this session compiled in such a module is not again."""
    from fixtures.small_pair import compile_cache

    with compile_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield
