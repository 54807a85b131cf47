"""A test of train.py: ``pytest --shardrules`` also judges what it compiles."""

import jax
import numpy as np
import train
from jax.sharding import PartitionSpec as P


def test_a_step_lowers_the_loss():
    w = jax.device_put(np.full((128, 128), 0.01, np.float32), jax.NamedSharding(train.mesh, P()))
    x = jax.device_put(np.ones((64, 128), np.float32), jax.NamedSharding(train.mesh, P("data")))
    assert abs(train.step(w, x)).sum() < abs(w).sum()
