"""Made-up weights: what must not be alike in them."""

import jax.numpy as jnp
import numpy as np

from k26jax.bench.dummy import _values


def test_int4_weights_have_no_mean_of_their_own():
    words = np.asarray(_values("experts.weight_packed", (4, 64, 64), jnp.int32)).view(np.uint32)
    weights = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(int) - 8
    assert weights.min() == -7
    assert weights.max() == 7
    # Sixteen values of which 0 counts twice: standard deviation 4.2 over 131,072 weights.
    assert abs(weights.mean()) < 5 * 4.2 / weights.size**0.5
