"""List all hooks in the order of their installation."""

from __future__ import annotations

from shardrules.hooks.casts.placing import CastHooks
from shardrules.hooks.cotangents.batching import BatchedVjpHooks
from shardrules.hooks.cotangents.custom_vjp import CustomVjpHooks
from shardrules.hooks.cotangents.forward import ForwardHooks
from shardrules.hooks.retyping.divergent import Divergent
from shardrules.hooks.retyping.replay import ReplayHooks
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.sets.rep import SetHooks, SetPrimitiveHooks, SetVjpHooks
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.calls.mesh_kernels import MeshKernelHooks
from shardrules.hooks.types.calls.pallas_call import PallasHooks
from shardrules.hooks.types.calls.primitives import PrimitiveHooks
from shardrules.hooks.types.control import ControlHooks
from shardrules.hooks.types.funnel import Funnel
from shardrules.hooks.types.identities import RedundantCastHooks
from shardrules.hooks.types.join_law import HijaxHooks, JoinLawHooks
from shardrules.hooks.types.refs import RefHooks
from shardrules.hooks.types.type_notes import TypeNoteHooks
from shardrules.unchecked.hooks import UncheckedHooks

# All hooks, in the order of installation. If two of them replace the same function of JAX, the
# later one calls the earlier one's replacement. A class gets earlier hooks from ``state.of``.
TYPES: tuple[type[Hooks], ...] = (  # JAX 0.6 and newer: avals carry axis types
    Funnel,
    TypeNoteHooks,
    PallasHooks,
    CustomVjpHooks,
    ForwardHooks,
    JoinLawHooks,
    HijaxHooks,
    PrimitiveHooks,
    RedundantCastHooks,
    Retyping,
    BatchedVjpHooks,
    Divergent,
    ReplayHooks,
    ControlHooks,
    MeshKernelHooks,
    RefHooks,
    CastHooks,
    UncheckedHooks,
)
SETS: tuple[type[Hooks], ...] = (  # JAX 0.5.3 and older: replication sets beside values
    Funnel,
    PallasHooks,
    SetVjpHooks,
    SetPrimitiveHooks,
    SetHooks,
    UncheckedHooks,
)
