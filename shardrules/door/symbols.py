"""JAX's private names: each with the versions that it was read in, what it takes, and its reason.

Nothing in shardrules names ``jax._src`` but this folder; what acts on JAX is looked up here.
"""

from __future__ import annotations

from shardrules.door.lookup import Symbol
from shardrules.door.transposition import TRANSPOSITION

__all__ = ["SET_SYMBOLS", "SYMBOLS", "TYPE_SYMBOLS"]


_PALLAS = "jax._src.pallas.pallas_call"
_MESH = "jax._src.pallas"
_STATE = "jax._src.state"
_LAX = "jax._src.lax.parallel"
_HI = "jax._src.hijax"
_VJP = "jax._src.custom_derivatives"
_SHARD_MAP = "jax.experimental.shard_map"
_CONTROL = "jax._src.lax.control_flow"
_BATCHING = "jax._src.interpreters.batching"
_AVAL = "avals that carry axis types"
_OUT_SHAPE = "raises on an output without annotation"
_WRAP = "wraps a custom_vjp's functions without losing their debug info"
_KERNEL = "the one place where kernel function and jaxpr meet"
_SHARD = "jax._src.shard_map"
_REFUSALS = "JAX raises its errors about types in it"
_RECAST = "a user's cast of what varies by then"
_CORE = "jax._src.core"
_REPLAY = "runs a jaxpr with values that vary more than it was traced with"
_OUT = "runs under the check what was traced outside of shard_map"
_REF = "a ref that is written must vary where what is written does"
_CHECK = "whether shard_map's check is on where we are"
_SPMD = "a custom_vjp's cotangents under vmap(..., spmd_axis_name=...)"
_OPAQUE = "an opaque primitive"
_PSUM = "JAX 0.8.3 can't batch a psum of shard_map's check"
_TYPED = "a primitive whose author types its results"
_STALE = "puts the registry's version into jit's trace key"

SYMBOLS = (
    Symbol("typeof", "jax._src.core:typeof", "0.6.0-0.12", (), "the aval of a tracer"),
    Symbol("typeof", "jax._src.core:get_aval", "0.4.28-0.5.3", (), "the aval of a tracer"),
    Symbol(
        "AbstractRef",
        "jax._src.state:AbstractRef",
        "0.4.28-0.12",
        ("inner_aval",),
        "refs count as inputs and can't be cast",
    ),
    Symbol(
        "transformation",
        "jax._src.linear_util:transformation2",
        "0.5.3-0.12",
        ("gen", "fun"),
        _WRAP,
        optional=True,
    ),
    Symbol(
        "generator", "jax._src.linear_util:transformation", "0.4.28-0.12", ("gen", "fun"), _WRAP
    ),
    Symbol("wrap_init", "jax._src.linear_util:wrap_init", "0.4.28-0.12", ("f",), _WRAP),
    Symbol(
        "flatten_primal",
        f"{_VJP}:_flatten_fun_nokwargs",
        "0.4.28-0.12",
        (),
        "a custom_vjp's primal function, on its way to the primitive",
    ),
    Symbol(
        "flatten_fwd",
        f"{_VJP}:_flatten_fwd",
        "0.4.28-0.12",
        (),
        "a custom_vjp's fwd, on its way to the primitive",
    ),
    Symbol(
        "flatten_bwd",
        f"{_VJP}:_flatten_bwd",
        "0.4.28-0.12",
        (),
        "a custom_vjp's bwd: its cotangents are checked against the primals' types here",
    ),
    Symbol(
        "SymbolicZero",
        "jax._src.ad_util:SymbolicZero",
        "0.4.28-0.12",
        ("aval",),
        "cotangents that are known to be zero keep their form",
    ),
    Symbol(
        "Zero",
        "jax._src.ad_util:Zero",
        "0.4.28-0.12",
        ("aval",),
        "the cotangent of an argument for which bwd returned None",
    ),
    Symbol(
        "dce_jaxpr",
        "jax._src.interpreters.partial_eval:dce_jaxpr",
        "0.4.28-0.12",
        ("jaxpr", "used_outputs", "instantiate"),
        "the part of a bwd that one cotangent depends on",
    ),
    Symbol("pallas_call_p", f"{_PALLAS}:pallas_call_p", "0.4.28-0.12", (), "the primitive"),
    Symbol(
        "trace_kernel",
        f"{_PALLAS}:_trace_kernel_to_jaxpr",
        "0.4.35-0.12",
        ("fun", "grid_mapping"),
        _KERNEL,
    ),
    Symbol("trace_kernel", f"{_PALLAS}:_trace_to_jaxpr", "0.4.28", ("fun", "grid_spec"), _KERNEL),
    Symbol("ffi_call_p", "jax._src.ffi:ffi_call_p", "0.5.3-0.12", (), _OPAQUE, optional=True),
    Symbol("ffi_call_p", "jax._src.extend.ffi:ffi_call_p", "0.4.35", (), _OPAQUE, optional=True),
    Symbol("pure_callback_p", "jax._src.callback:pure_callback_p", "0.4.28-0.12", (), _OPAQUE),
    Symbol("io_callback_p", "jax._src.callback:io_callback_p", "0.4.28-0.12", (), _OPAQUE),
    Symbol(
        "tpu_custom_call_p",
        "jax._src.tpu_custom_call:tpu_custom_call_p",
        "0.4.28-0.12",
        (),
        _OPAQUE,
        optional=True,
    ),
    Symbol(
        "buffer_callback_p",
        "jax._src.buffer_callback:buffer_callback_p",
        "0.6.2-0.12",
        (),
        _OPAQUE,
        optional=True,
    ),
    Symbol(
        "call_exported_p",
        "jax._src.export._export:call_exported_p",
        "0.4.35-0.12",
        (),
        _OPAQUE,
        optional=True,
    ),
    Symbol(
        "lower_per_platform",
        "jax._src.interpreters.mlir:lower_per_platform",
        "0.4.28-0.12",
        ("ctx", "description", "platform_rules", "default_rule", "effects"),
        "lowers each equation: opaque calls are tagged here",
    ),
    Symbol(
        "lowerings",
        "jax._src.interpreters.mlir:_lowerings",
        "0.4.28-0.12",
        (),
        "the table of lowering rules",
    ),
    Symbol(
        "platform_lowerings",
        "jax._src.interpreters.mlir:_platform_specific_lowerings",
        "0.4.28-0.12",
        (),
        "the tables for one platform each",
        optional=True,
    ),
    Symbol(
        "set_current_trace",
        "jax._src.core:set_current_trace",
        "0.5.3-0.12",
        ("trace",),
        "binds in the trace that an operation is bound in, not in the one around it",
        optional=True,
    ),
    Symbol("Primitive", "jax._src.core:Primitive", "0.4.28-0.12", (), "users' primitives"),
    Symbol(
        "LoweringRuleEntry",
        "jax._src.interpreters.mlir:LoweringRuleEntry",
        "0.7.2-0.12",
        ("rule", "inline"),
        "an entry of that table, where it isn't the rule itself",
        optional=True,
    ),
    Symbol("ir", "jax._src.lib.mlir:ir", "0.4.28-0.12", (), "writes the tag on the lowered call"),
    Symbol(
        "exclude_from_tracebacks",
        "jax._src.traceback_util:register_exclusion",
        "0.4.28-0.12",
        ("path",),
        "the hooks stand between JAX's frames, which it hides",
    ),
    Symbol(
        "summarize",
        "jax._src.source_info_util:summarize",
        "0.4.28-0.12",
        ("source_info",),
        "the user's line behind an equation",
    ),
    Symbol(
        "user_frames",
        "jax._src.source_info_util:user_frames",
        "0.4.28-0.12",
        (),
        "the user's line behind an equation of a library",
    ),
    Symbol(
        "current_source",
        "jax._src.source_info_util:current",
        "0.4.28-0.12",
        (),
        "the user's line behind what the hooks put in",
    ),
    Symbol("make_user_context", "jax:make_user_context", "0.7.2-0.12", (), _STALE, optional=True),
    Symbol(
        "config",
        "jax._src.config",
        "0.4.28-0.6.2",
        (),
        f"{_STALE}, before there was a way to",
        optional=True,
    ),
)

# From JAX 0.6.0: an aval says over which axes its value varies.
TYPE_SYMBOLS = (
    *TRANSPOSITION,
    Symbol("check_vma", "jax._src.config:_check_vma", "0.6.2-0.12", (), _CHECK),
    Symbol("check_vma", "jax._src.config:_check_rep", "0.6.0", (), _CHECK),
    Symbol(
        "ShapedArray",
        "jax._src.core:ShapedArray",
        "0.10-0.12",
        ("shape", "dtype", "sharding", "manual_axis_type"),
        _AVAL,
    ),
    Symbol(
        "ShapedArray",
        "jax._src.core:ShapedArray",
        "0.6.0-0.9",
        ("shape", "dtype", "sharding", "vma"),
        _AVAL,
    ),
    Symbol(
        "ManualAxisType",
        "jax._src.core:ManualAxisType",
        "0.10-0.12",
        ("varying", "unreduced", "reduced"),
        "JAX's own form of AxisType",
        optional=True,
    ),
    Symbol(
        "current_mesh_sharding",
        "jax._src.core:get_cur_mesh_sharding",
        "0.6.0-0.12",
        (),
        "an aval without a mesh can't carry an axis type",
    ),
    Symbol(
        "abstract_mesh",
        "jax._src.mesh:get_abstract_mesh",
        "0.6.0-0.12",
        (),
        "which mesh axes are manual where we are",
    ),
    Symbol(
        "jvp_tracer",
        "jax._src.interpreters.ad:maybe_jvp_tracer",
        "0.6.0-0.12",
        ("trace", "primal", "tangent"),
        "where a primal meets its tangent",
    ),
    Symbol(
        "JetTracer",
        "jax.experimental.jet:JetTracer",
        "0.6.0-0.12",
        (),
        "where a primal meets its series",
        optional=True,
    ),
    Symbol("hi_primitive_p", f"{_HI}:call_hi_primitive_p", "0.8-0.12", (), _TYPED, optional=True),
    Symbol("HiPrimitive", f"{_HI}:HiPrimitive", "0.8-0.11", ("name",), _TYPED, optional=True),
    Symbol(
        "standard_vma_rule",
        "jax._src.core:standard_vma_rule",
        "0.6.0-0.12",
        (),
        "types a primitive's result as varying as its operands, which it asks to be alike",
    ),
    Symbol(
        "convert_out_shape",
        "jax._src.pallas.core:_convert_out_shape_to_aval",
        "0.9-0.12",
        ("out_shape",),
        _OUT_SHAPE,
    ),
    Symbol(
        "convert_out_shape",
        f"{_PALLAS}:_convert_out_shape_to_aval",
        "0.6.0-0.8",
        ("out_shape",),
        _OUT_SHAPE,
    ),
    Symbol(
        "trace_to_jaxpr",
        "jax._src.interpreters.partial_eval:trace_to_jaxpr",
        "0.8-0.12",
        ("fun", "in_avals", "debug_info"),
        "a loop's body, before its carry's types are compared",
        optional=True,
    ),
    Symbol(
        "loop_tracing",
        f"{_CONTROL}.loops:pe",
        "0.8-0.12",
        (),
        "where loops take that from; jit takes it elsewhere, and is not to wait for a hook",
        optional=True,
    ),
    Symbol(
        "promote_carry",
        f"{_CONTROL}.loops:_promote_weak_typed_input",
        "0.8-0.12",
        ("in_val", "in_aval", "out_aval"),
        "an initial carry, once its body was traced",
        optional=True,
    ),
    Symbol(
        "trace_body",
        f"{_CONTROL}.loops:_initial_style_jaxpr",
        "0.6.0-0.7",
        ("fun", "in_tree", "in_avals", "debug_info"),
        "a loop's body",
        optional=True,
    ),
    Symbol(
        "trace_scan_body",
        f"{_CONTROL}.loops:_initial_style_jaxpr_attrs",
        "0.6.0-0.6.2",
        ("fun", "in_tree", "in_avals", "debug_info"),
        "a scan's body",
        optional=True,
    ),
    Symbol(
        "promote_carries",
        f"{_CONTROL}.loops:_promote_weak_typed_inputs",
        "0.6.0-0.7",
        ("in_vals", "in_avals", "out_avals"),
        "initial carries, once their body was traced",
        optional=True,
    ),
    Symbol(
        "trace_branches",
        f"{_CONTROL}.conditionals:_initial_style_jaxprs_with_common_consts",
        "0.6.0-0.7",
        ("funs", "in_tree", "in_avals", "debug_infos"),
        "all branches of a cond or switch",
        optional=True,
    ),
    Symbol(
        "merge_branches",
        f"{_CONTROL}.conditionals:_merge_common_consts",
        "0.8-0.12",
        ("jaxprs", "all_consts"),
        "all branches of a cond or switch, once traced",
        optional=True,
    ),
    Symbol(
        "check_branches",
        f"{_CONTROL}.conditionals:_check_branch_outputs",
        "0.8-0.12",
        ("out_avals1", "out_avals2"),
        "raises on branches whose types differ",
        optional=True,
    ),
    Symbol("specs_error", f"{_SHARD}:_inout_vma_error", "0.6.2-0.12", (), _REFUSALS, optional=True),
    Symbol("shard_map_p", f"{_SHARD}:shard_map_p", "0.6.2-0.12", (), _REFUSALS, optional=True),
    Symbol("pcast_from", f"{_LAX}:_get_from", "0.8-0.12", ("aval",), _RECAST, optional=True),
    Symbol("pcast_steps", f"{_LAX}:_pcast_funcs", "0.8-0.12", (), _RECAST, optional=True),
    Symbol("pcast", "jax.lax:pcast", "0.8-0.12", ("axis_name", "to"), "casts an operand"),
    Symbol("pcast", "jax.lax:pvary", "0.6.0-0.7", ("axis_name",), "casts an operand"),
    Symbol("psum_invariant_p", f"{_LAX}:psum_invariant_p", "0.8-0.12", (), _PSUM, optional=True),
    Symbol("batchers", f"{_BATCHING}:fancy_primitive_batchers", "0.6.0-0.12", (), _PSUM),
    Symbol("BatchTrace", f"{_BATCHING}:BatchTrace", "0.6.0-0.12", (), _SPMD),
    Symbol("vjp_in_jaxpr_p", f"{_VJP}:custom_vjp_call_jaxpr_p", "0.6.0", (), _SPMD, optional=True),
    Symbol(
        "batch_bwd",
        f"{_BATCHING}:batch_custom_vjp_bwd",
        "0.6.0-0.12",
        ("bwd", "tag", "axis_data", "in_dims", "out_dim_dests"),
        _SPMD,
    ),
    Symbol(
        "mpmd_map_p",
        f"{_MESH}.mpmd:mpmd_map_p",
        "0.9.2-0.12",
        (),
        "what pl.kernel binds",
        optional=True,
    ),
    Symbol(
        "mpmd_map",
        f"{_MESH}.mpmd:_mpmd_map",
        "0.10-0.12",
        ("meshes_and_fns", "out_types"),
        "plgpu.kernel calls it with the check switched off",
        optional=True,
    ),
    Symbol("mpmd_tracing", f"{_MESH}.mpmd:pe", "0.10-0.12", (), _KERNEL, optional=True),
    Symbol("core_map_p", f"{_MESH}.core:core_map_p", "0.6.0-0.12", (), _OPAQUE, optional=True),
    Symbol("core_map_tracing", f"{_MESH}.core:pe", "0.6.0-0.12", (), _KERNEL, optional=True),
    Symbol(
        "custom_vmap",
        "jax._src.custom_batching:custom_vmap",
        "0.6.0-0.12",
        ("fun",),
        "stands around plgpu.kernel where the check is still on",
    ),
    Symbol(
        "custom_vmap_p",
        "jax._src.custom_batching:custom_vmap_p",
        "0.6.0-0.12",
        (),
        "keeps the output types of its first trace",
    ),
    Symbol("run_state_p", f"{_STATE}.discharge:run_state_p", "0.6.0-0.12", (), _REF),
    Symbol(
        "trace_run_state",
        f"{_STATE}.discharge:initial_style_jaxpr",
        "0.8-0.12",
        ("fun", "in_tree", "in_avals", "dbg"),
        _REF,
        optional=True,
    ),
    Symbol("get_p", f"{_STATE}.primitives:get_p", "0.6.0-0.12", (), _REF),
    Symbol("swap_p", f"{_STATE}.primitives:swap_p", "0.6.0-0.12", (), _REF),
    Symbol("addupdate_p", f"{_STATE}.primitives:addupdate_p", "0.6.0-0.12", (), _REF),
    Symbol("WriteEffect", f"{_STATE}.types:WriteEffect", "0.6.0-0.12", (), _REF),
    Symbol("AccumEffect", f"{_STATE}.types:AccumEffect", "0.6.0-0.12", (), _REF),
    Symbol("cond_p", f"{_CONTROL}.conditionals:cond_p", "0.6.0-0.12", (), _REF),
    Symbol("while_p", f"{_CONTROL}.loops:while_p", "0.6.0-0.12", (), _REF),
    Symbol("eval_jaxpr", f"{_CORE}:eval_jaxpr", "0.6.0-0.12", ("jaxpr", "consts"), _REPLAY),
    Symbol("auto_pcast", "jax._src.config:auto_pcast", "0.10-0.12", (), _REPLAY, optional=True),
    Symbol("use_abstract_mesh", "jax._src.mesh:use_abstract_mesh", "0.6.0-0.12", ("mesh",), _OUT),
    Symbol("JaxprEqnContext", f"{_CORE}:JaxprEqnContext", "0.6.0-0.12", (), _OUT),
    Symbol("JaxprEqnContextManager", f"{_CORE}:JaxprEqnContextManager", "0.6.0-0.12", (), _OUT),
    Symbol("custom_vjp_call_p", f"{_VJP}:custom_vjp_call_p", "0.6.0-0.12", (), _REPLAY),
    Symbol(
        "result_avals",
        "jax._src.ffi:_result_avals",
        "0.6.0-0.12",
        (),
        "fails on an annotated result (JAX 0.8.3 to 0.12)",
        optional=True,
    ),
)

# To JAX 0.5.3: sets of axes over which a value is replicated, kept beside the values.
SET_SYMBOLS = (
    Symbol("cond_p", f"{_CONTROL}.conditionals:cond_p", "0.4.28-0.5.3", (), _OPAQUE),
    Symbol("name_p", "jax._src.ad_checkpoint:name_p", "0.4.28-0.5.3", (), _OPAQUE),
    Symbol("platform_p", f"{_CONTROL}.conditionals:platform_index_p", "0.4.28-0.5.3", (), _OPAQUE),
    Symbol(
        "check_rules",
        f"{_SHARD_MAP}:_check_rules",
        "0.4.28-0.5.3",
        (),
        "from the inputs' replication sets to the outputs'",
    ),
    Symbol(
        "rewrite_rules",
        f"{_SHARD_MAP}:_rewrite_rules",
        "0.4.28-0.5.3",
        (),
        "from the inputs' replication sets to casts",
    ),
    Symbol(
        "rule_missing",
        f"{_SHARD_MAP}:_rule_missing",
        "0.4.28-0.5.3",
        ("prim",),
        "what is done about a primitive that neither table holds",
    ),
    Symbol(
        "rewrite_bwd",
        f"{_SHARD_MAP}:_rewrite_bwd",
        "0.4.28-0.5.3",
        ("bwd", "mesh", "in_reps", "reps_dst"),
        "a custom_vjp's bwd under the check",
    ),
    Symbol(
        "match_replication",
        f"{_SHARD_MAP}:_match_replication",
        "0.4.28-0.5.3",
        ("src", "dst", "x"),
        "sums a cotangent that varies where its primal doesn't",
    ),
    Symbol(
        "broadcast",
        f"{_SHARD_MAP}:pbroadcast",
        "0.4.28-0.5.3",
        ("x", "axis_name"),
        "casts an operand",
    ),
)
