"""The target against reference data: expanded form, absorbed form over a cache, INT4, positions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model.golden_model import GoldenModel, golden_model

from k26jax.checkpoint.reader import open_checkpoint
from k26jax.model.layers import rope_tables
from k26jax.pallas.int4_moe.reference import decode_int4

# By argument: the file that a golden folder must have to be tested.
NEEDED = {
    "golden": "expected.npz",
    "batch_golden": "batch2.npz",
    "far_golden": "positions.npz",
    "int4_golden": "dequantized.npz",
}


def pytest_generate_tests(metafunc):
    for name in set(NEEDED) & set(metafunc.fixturenames):
        models = Path(metafunc.config.getoption("--golden-dir")) / "models"
        found = sorted(path.parent for path in models.glob(f"*/{NEEDED[name]}"))
        ids = [path.name for path in found]
        metafunc.parametrize(name, found, ids=ids, indirect=True, scope="session")


def _open(request) -> GoldenModel:
    return golden_model(request.param)


for _name in NEEDED:
    globals()[_name] = pytest.fixture(scope="session", name=_name)(_open)


def close(found, expected, atol: float) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=atol)


def all_close(found, expected, atol: float) -> None:
    """Compares layer by layer, so that a failure names the first wrong layer."""
    assert len(found) == len(expected)
    for layer, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=f"at {layer}")


def rope_layout(model_type: str, k_rope: np.ndarray) -> np.ndarray:
    """The golden rotary keys with the first components of all pairs in front."""
    if model_type == "deepseek_v2":
        return np.concatenate([k_rope[..., 0::2], k_rope[..., 1::2]], axis=-1)
    return k_rope


def test_expanded_logits_and_states(golden):
    probe, expected = golden.own["prompt"], golden.expected
    close(probe.logits, expected["logits"], 1e-4)
    close(probe.hidden, expected["final_hidden"], 5e-5)
    all_close(probe.outputs, expected["hidden_states"], 1e-4)


def test_expanded_attention(golden):
    probe, debug = golden.own["prompt"], golden.debug
    all_close(probe.c_kv, debug["kv_latent"], 2e-5)
    all_close(probe.k_pe, rope_layout(golden.config.model_type, debug["k_rope"]), 2e-5)
    all_close(probe.attn_out, debug["attn_out"], 1e-4)
    all_close(probe.mlp_out, debug["mlp_out"], 1e-4)


def test_routing(golden):
    probe, expected = golden.own["prompt"], golden.expected
    assert golden.config.moe_layer_ids == tuple(expected["moe_layer_ids"])
    all_close(probe.router_logits, expected["router_logits"], 5e-5)
    ids, weights = np.array(probe.topk_ids), np.array(probe.topk_weights)
    order = np.argsort(ids, axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(ids, order, axis=-1), expected["router_indices"]
    )
    close(np.take_along_axis(weights, order, axis=-1), expected["router_weights"], 2e-5)


def test_absorbed_logits_through_the_cache(golden):
    decoded = golden.from_nan
    close(decoded.logits[0], golden.expected["logits"], 1e-4)
    close(decoded.c_kv[0], golden.debug["kv_latent"], 2e-5)
    k_rope = rope_layout(golden.config.model_type, golden.debug["k_rope"])
    close(decoded.k_pe[0], k_rope, 2e-5)


def test_absorbed_taps(golden):
    """Tap i is the stream after layer i, in the order asked for; the last layer's is normed."""
    hidden = golden.config.hidden_size
    features = golden.from_nan.features[0]
    assert features.shape[-1] == len(golden.taps) * hidden
    for place, layer in enumerate(golden.taps):
        found = features[:, place * hidden : (place + 1) * hidden]
        if layer == golden.config.num_hidden_layers - 1:
            close(found, golden.expected["final_hidden"], 5e-5)
        else:
            close(found, golden.expected["hidden_states"][layer], 1e-4)


def test_greedy_decoding(golden):
    decoded, expected = golden.from_nan, golden.expected
    np.testing.assert_array_equal(decoded.greedy_ids, expected["greedy_ids"])
    close(decoded.greedy_logits, expected["greedy_logits"], 1e-4)
    close(decoded.greedy_logits[-1], expected["greedy_last_logits"], 1e-4)


def test_unwritten_cache_rows_do_not_matter(golden):
    jax.tree.map(np.testing.assert_array_equal, golden.from_nan, golden.from_zeros)


def test_sequences_side_by_side(batch_golden):
    cases = batch_golden.plain_cases
    assert len(cases) == 1 + len(batch_golden.read("batch2")["lengths"])
    for i, (name, case) in enumerate(cases.items()):
        close(batch_golden.own[name].logits, case.logits, 1e-4)
        close(batch_golden.from_nan.logits[i], case.logits, 1e-4)


def test_far_positions_with_stored_frequencies(far_golden):
    arrays = far_golden.read("positions")
    assert far_golden.position_cases
    np.testing.assert_array_equal(arrays["inv_freq"], far_golden.debug["inv_freq"])
    for name, case in far_golden.position_cases.items():
        probe = far_golden.stored[name]
        close(probe.logits, case.logits, 1e-4)
        all_close(probe.outputs, arrays[f"{name}.hidden_states"], 1e-4)


def test_far_positions_with_own_frequencies(far_golden):
    for name, case in far_golden.position_cases.items():
        probe = far_golden.own[name]
        atol = 2e-2 if case.positions.max() <= 30_000 else 0.3
        close(probe.logits, case.logits, atol)
        all_close(probe.outputs, far_golden.read("positions")[f"{name}.hidden_states"], atol)


def test_far_angles(far_golden):
    """Cosines and sines of the golden data; beside 262143 one float32 step of an angle is 0.016."""
    arrays, config = far_golden.read("positions"), far_golden.config
    for name, case in far_golden.position_cases.items():
        if f"{name}.cos" not in arrays:
            continue
        positions = jnp.asarray(case.positions)
        cos, sin = rope_tables(positions, config.rope, config.qk_rope_head_dim)
        atol = 3e-7 * max(case.positions.max(), 1) + 1e-6
        close(cos, arrays[f"{name}.cos"], atol)
        close(sin, arrays[f"{name}.sin"], atol)


def unpacked(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 weights of INT4 words, one nibble at a time."""
    words = packed.astype(np.int64) & 0xFFFFFFFF
    values = np.stack([(words >> 4 * j & 15) - 8 for j in range(8)], axis=-1)
    values = values.reshape(*packed.shape[:-1], -1)
    return values * np.repeat(scale.astype(np.float32), 32, axis=-1)


def test_int4_values_of_the_golden_experts(int4_golden):
    dequantized = int4_golden.read("dequantized")
    names = [name for name in dequantized if name.endswith(".weight")]
    assert names
    n_layers = int4_golden.config.num_hidden_layers
    with open_checkpoint(int4_golden.folder, num_hidden_layers=n_layers) as checkpoint:
        for name in names:
            packed = jnp.asarray(checkpoint.read(f"{name}_packed"))
            scale = jnp.asarray(checkpoint.read(f"{name}_scale"))
            width = dequantized[name].shape[-1]
            exact = decode_int4(packed, scale, width, jnp.float32)
            np.testing.assert_array_equal(exact, dequantized[name])
            np.testing.assert_array_equal(
                unpacked(*map(np.asarray, (packed, scale))), dequantized[name]
            )
            rounded = decode_int4(packed, scale, width, jnp.bfloat16)
            np.testing.assert_array_equal(rounded, dequantized[name].astype(ml_dtypes.bfloat16))


def test_int4_dequantized_to_bfloat16(int4_golden):
    """The same model with float experts that hold the products rounded to bfloat16."""
    params = dict(int4_golden.params)
    moe = dict(params["moe"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        stack = {key: np.asarray(value) for key, value in moe[name].items()}
        weight = unpacked(stack["weight_packed"], stack["weight_scale"])
        moe[name] = {"weight": weight.astype(ml_dtypes.bfloat16).astype(np.float32)}
    found = int4_golden.expanded_logits(int4_golden.unquantized(), params | {"moe": moe})
    expected = int4_golden.expected["logits_bf16_dequant"]
    close(found, expected, 1e-4)
    # The two meanings differ, so neither test can pass with the other's numbers.
    assert np.abs(expected - int4_golden.expected["logits"]).max() > 1e-3
