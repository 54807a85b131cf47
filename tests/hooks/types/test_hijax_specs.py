"""Values of hijax types in a shard_map, whose specs are no PartitionSpecs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from core import versions
from jax.sharding import PartitionSpec as P

has_specs = versions.has("jax.experimental.hijax", "HiPspec")
pytestmark = versions.where(has_specs)

if has_specs():
    from jax.experimental import hijax

    Base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive

    @dataclasses.dataclass
    class Box:
        """An array of a type of its own."""

        value: Any

    @dataclasses.dataclass(frozen=True)
    class BoxSpec(hijax.HiPspec):
        spec: Any

        def to_lo(self):
            return (self.spec,)

    @dataclasses.dataclass(frozen=True)
    class BoxType(hijax.HiType):
        of: Any

        def lo_ty(self):
            return [self.of]

        def lower_val(self, box):
            return [box.value]

        def raise_val(self, value):
            return Box(value)

        def normalize(self):
            return BoxType(self.of.normalize())

        def shard(self, mesh, manual_axes, check, spec):
            return BoxType(self.of.shard(mesh, manual_axes, check, spec.spec))

        def unshard(self, mesh, check, spec):
            return BoxType(self.of.unshard(mesh, check, spec.spec))

    hijax.register_hitype(Box, lambda box: BoxType(jax.typeof(box.value)))

    class Thrice(Base):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, box):
            return Box(3 * box.value)


X = jnp.arange(8.0)


def test_a_box_goes_through(cpu_mesh, hooks):
    spec = BoxSpec(P("data"))
    f = jax.shard_map(
        lambda box: Thrice(jax.typeof(box))(box), mesh=cpu_mesh, in_specs=spec, out_specs=spec
    )
    out = jax.jit(f)(Box(X))  # JAX runs none without jit
    np.testing.assert_array_equal(out.value, 3 * X)
