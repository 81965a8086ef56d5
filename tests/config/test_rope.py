"""Rotary settings: both spellings, published tables, YaRN's two amplitudes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from config.published import k2_instruct, k25_drafter, k26, k26_text, without, yarn

from k26jax.config import DraftConfig, ModelConfig, RopeConfig
from k26jax.config.rope import parse_rope
from k26jax.errors import ConfigError

K26_INV_FREQ = """
1.000000e+00 7.131111e-01 5.085274e-01 3.626365e-01 2.586001e-01 1.844106e-01 1.315053e-01 9.377786e-02
6.687403e-02 4.377665e-02 2.842796e-02 1.828296e-02 1.161916e-02 7.274120e-03 4.465849e-03 2.670204e-03
1.537297e-03 8.346551e-04 4.086461e-04 1.583750e-04 1.807023e-05 1.288608e-05 9.189210e-06 6.552927e-06
4.672965e-06 3.332343e-06 2.376331e-06 1.694588e-06 1.208429e-06 8.617444e-07 6.145195e-07 4.382206e-07
"""  # noqa: E501 - the published table
DRAFTER_INV_FREQ = {
    0: 1,
    1: 0.844459057,
    15: 0.0791915581,
    16: 0.0668740347,
    20: 0.0294423811,
    24: 0.0118770907,
    28: 0.00446584867,
    31: 0.00197842461,
    32: 0.00147059583,
    40: 1.80702336e-05,
    63: 3.70059382e-07,
}
D16_INV_FREQ = [
    1, 0.25860015, 0.06687403, 0.01161916,
    0.0015372967, 1.8070234e-05, 4.6729651e-06, 1.2084294e-06,
]  # fmt: skip


def pytest_generate_tests(metafunc):
    if "golden_debug" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden-dir"))
        found = [path for path in sorted(folder.glob("*/*/debug.npz"))]
        metafunc.parametrize("golden_debug", found, ids=[path.parent.name for path in found])
    if "golden_drafter" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden-dir"))
        found = [path for path in sorted(folder.glob("drafter*/rounds.npz"))]
        metafunc.parametrize("golden_drafter", found, ids=[path.parent.name for path in found])


def yarn_by_definition(theta, factor, fast, slow, original, dim) -> np.ndarray:
    """The frequencies in float64, one at a time."""
    bounds = [
        dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (fast, slow)
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    result = []
    for i in range(dim // 2):
        plain = 1 / theta ** (2 * i / dim)
        share = min(max((i - low) / ((high - low) or 0.001), 0), 1)
        result.append(plain / factor * share + plain * (1 - share))
    return np.array(result)


def test_k26_frequencies_and_scale():
    config = ModelConfig.from_dict(k26())
    table = np.array(K26_INV_FREQ.split(), np.float64)
    found = config.rope.inv_freq(config.qk_rope_head_dim)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, table, rtol=6e-7)
    assert config.softmax_scale == pytest.approx(0.144679625803, abs=5e-13)
    assert config.rope.amplitude == 1.0


def test_k2_instruct_frequencies_and_scale():
    config = ModelConfig.from_dict(k2_instruct())
    assert config.softmax_scale == pytest.approx(0.130860800, abs=5e-10)
    found = config.rope.inv_freq(64)
    k26_found = ModelConfig.from_dict(k26()).rope.inv_freq(64)
    assert np.flatnonzero(found != k26_found).tolist() == list(range(9, 32))
    # One octave of the ramp, from 19 to 20.
    plain = 50000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(found, np.where(np.arange(32) <= 19, plain, plain / 32), rtol=3e-7)


def test_k2_thinking_differs_from_k26_in_the_ramp():
    thinking = ModelConfig.from_dict(k26_text(rope_scaling=yarn(beta_fast=1.0)))
    changed = thinking.rope.inv_freq(64) != ModelConfig.from_dict(k26()).rope.inv_freq(64)
    assert np.flatnonzero(changed).tolist() == list(range(9, 20))
    assert thinking.softmax_scale == pytest.approx(0.144679625803, abs=5e-13)


def test_drafter_frequencies():
    rope = DraftConfig.from_dict(k25_drafter()).rope
    found = rope.inv_freq(128)
    for index, value in DRAFTER_INV_FREQ.items():
        assert found[index] == pytest.approx(value, rel=3e-7)
    plain = 50000.0 ** (-np.arange(64) / 64)
    differs = np.abs(found / plain - 1) > 1e-6
    assert np.flatnonzero(differs)[0] == 18
    np.testing.assert_allclose(found[39:], plain[39:] / 64, rtol=3e-7)
    np.testing.assert_allclose(rope.inv_freq(16), D16_INV_FREQ, rtol=3e-7)


def test_drafter_amplitudes():
    assert DraftConfig.from_dict(k25_drafter()).rope.amplitude == 1.0
    stated = k25_drafter(rope_scaling=yarn(attention_factor=1.4158883083359672))
    assert DraftConfig.from_dict(stated).rope.amplitude == 1.4158883083359672
    silent = k25_drafter(rope_scaling=without(yarn(), "mscale", "mscale_all_dim"))
    amplitude = DraftConfig.from_dict(silent).rope.amplitude
    assert amplitude == pytest.approx(1.4158883083359672, rel=1e-15)
    assert DraftConfig.from_dict(k25_drafter(rope_scaling=None)).rope.amplitude == 1.0
    one = k25_drafter(rope_scaling={"type": "default", "attention_factor": 1.5})
    assert DraftConfig.from_dict(one).rope.amplitude == 1.5


@pytest.mark.parametrize(
    ("mscale", "all_dim", "amplitude", "softmax_factor"),
    [
        (1.0, 1.0, 1.0, 1.4158883083359672**2),
        (0.707, 0.707, 1.0, (0.0707 * math.log(64) + 1) ** 2),
        (1.0, 0.5, 1.4158883083359672 / (0.05 * math.log(64) + 1), (0.05 * math.log(64) + 1) ** 2),
        (1.0, 0.0, 1.4158883083359672, 1.0),
        (0.0, 1.0, 1.4158883083359672, 1.4158883083359672**2),
    ],
)
def test_amplitudes_of_the_mscales(mscale, all_dim, amplitude, softmax_factor):
    rope = parse_rope(
        {"rope_theta": 1e4, "rope_scaling": yarn(mscale=mscale, mscale_all_dim=all_dim)}, "f"
    )
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-14)
    assert rope.softmax_factor == pytest.approx(softmax_factor, rel=1e-14)


@pytest.mark.parametrize(
    "numbers",
    [
        (10000.0, 40.0, 32.0, 1.0, 4096, 64),
        (50000.0, 32.0, 1.0, 1.0, 4096, 64),
        (50000.0, 4.0, 32.0, 1.0, 16, 4),
        (1e6, 2.0, 8.0, 2.0, 512, 24),
        (10000.0, 8.0, 32.0, 1.0, 100000000, 12),
        (10000.0, 8.0, 1.0, 1.0, 6, 8),
    ],
)
def test_yarn_by_definition(numbers):
    theta, factor, fast, slow, original, dim = numbers
    rope = RopeConfig(theta, factor, fast, slow, original_max_position_embeddings=original)
    np.testing.assert_allclose(rope.inv_freq(dim), yarn_by_definition(*numbers), rtol=2e-7)


def test_old_and_new_spelling_agree():
    old = k26_text()
    assert old["rope_scaling"] == yarn()
    new = without(old, "rope_theta", "rope_scaling")
    block = {**without(yarn(), "type"), "rope_type": "yarn", "rope_theta": 50000.0}
    new["rope_parameters"] = block
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(old)
    plain_old = k26_text(rope_scaling=None)
    plain_new = without(plain_old, "rope_theta", "rope_scaling")
    plain_new["rope_parameters"] = {"rope_theta": 50000.0, "rope_type": "default"}
    expected = RopeConfig(50000.0)
    assert ModelConfig.from_dict(plain_new).rope == expected
    assert ModelConfig.from_dict(plain_old).rope == expected
    deepseek = k26_text(rope_scaling=yarn(type="deepseek_yarn"))
    assert ModelConfig.from_dict(deepseek) == ModelConfig.from_dict(old)


@pytest.mark.parametrize(
    ("block", "mentions"),
    [
        (yarn(type="linear"), ("'linear'",)),
        (yarn(type="longrope"), ("'longrope'",)),
        (yarn(type="llama3"), ("'llama3'",)),
        (without(yarn(), "factor"), ("'factor'",)),
        (without(yarn(), "original_max_position_embeddings"), ("original_max_position",)),
        (yarn(factor="64"), ("'factor'", "'64'")),
        (yarn(factor=0.5), ("factor = 0.5",)),
        (yarn(beta_fast=[1]), ("'beta_fast'",)),
        (yarn(truncate=False), ("truncate = False",)),
        (yarn(partial_rotary_factor=0.5), ("partial_rotary_factor = 0.5",)),
        (yarn(attention_factor="1"), ("'attention_factor'",)),
        ({"type": "default", "attention_factor": "1"}, ("'attention_factor'",)),
        (yarn(original_max_position_embeddings=0), ("original_max_position_embeddings", "0")),
        ([1], ("rope block", "[1]")),
    ],
)
def test_refused_blocks(block, mentions):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(k26(rope_scaling=block), "the-file.json")
    for mention in ("the-file.json", *mentions):
        assert mention in str(caught.value)


@pytest.mark.parametrize("theta", [0, 1.0, -5])
def test_theta_that_spans_nothing(theta):
    with pytest.raises(ConfigError, match="rope_theta"):
        ModelConfig.from_dict(k26(rope_theta=theta))


def test_golden_target(golden_debug):
    config = ModelConfig.from_folder(golden_debug.parent)
    with np.load(golden_debug) as debug:
        found = config.rope.inv_freq(config.qk_rope_head_dim)
        np.testing.assert_allclose(found, debug["inv_freq"], rtol=3e-7, atol=0)
        assert config.softmax_scale == pytest.approx(float(debug["softmax_scale"]), rel=1e-7)
        assert config.rope.amplitude == pytest.approx(float(debug["rope_attention_scaling"]))


def test_golden_drafter(golden_drafter):
    configs = [
        DraftConfig.from_dict(json.loads(path.read_text()))
        for path in golden_drafter.parent.glob("config*.json")
    ]
    assert configs
    with np.load(golden_drafter) as rounds:
        for config in configs:
            found = config.rope.inv_freq(config.head_dim)
            np.testing.assert_allclose(found, rounds["inv_freq"], rtol=3e-7, atol=0)
            amplitude = float(rounds["rope_attention_scaling"])
            assert config.rope.amplitude == pytest.approx(amplitude, rel=1e-7)
