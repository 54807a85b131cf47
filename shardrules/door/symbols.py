"""List JAX's private names in one table, each with its purpose, its versions and its path.

Only this folder names ``jax._src``; functions that act on JAX are looked up here. No name depends
on other installed software (Triton, a compiler): JAX's own modules hold all of them.
"""

from __future__ import annotations

from shardrules.door.lookup import Symbol, read

# Each reason is followed by its rows: our name, the first and last JAX that has it (a plus means
# all newer ones too), its module and name (a leading dot means ``jax._src.``), and the parameters
# that the hooks pass or read. Several rows of one name are for different versions.
SYMBOLS: tuple[Symbol, ...] = read("""
the aval of a tracer
    typeof                 0.4.28-0.5.2   .core:get_aval
    typeof                 0.5.3+         .core:typeof
refs count as inputs and can't be cast
    AbstractRef            0.4.28+        .state:AbstractRef(inner_aval)
wraps a custom_vjp's functions without losing their debug info
    generator              0.4.28-0.4.35  .linear_util:transformation(gen, fun)
    transformation         0.4.36+        .linear_util:transformation2(gen, fun)
    wrap_init              0.4.28+        .linear_util:wrap_init(f)
a custom_vjp's functions, on their way to the primitive; bwd's cotangents are checked there
    flatten_primal         0.4.28+        .custom_derivatives:_flatten_fun_nokwargs
    flatten_fwd            0.4.28+        .custom_derivatives:_flatten_fwd
    flatten_bwd            0.4.28+        .custom_derivatives:_flatten_bwd
a bwd that adds to accumulators of gradients, and returns none
    BwdWithAccums          0.12.0+        .custom_derivatives:_FlatBwdWithAccums
cotangents that are known to be zero keep their form; for None, bwd's cotangent is one
    SymbolicZero           0.4.28+        .ad_util:SymbolicZero(aval)
    Zero                   0.4.28+        .ad_util:Zero(aval)
the part of a bwd that one cotangent depends on
    dce_jaxpr              0.4.28+
        .interpreters.partial_eval:dce_jaxpr(jaxpr, used_outputs, instantiate)
the primitive of a Pallas kernel
    pallas_call_p          0.4.28+        .pallas.pallas_call:pallas_call_p
the one place where kernel function and jaxpr meet
    trace_kernel           0.4.28-0.4.30  .pallas.pallas_call:_trace_to_jaxpr(fun, grid_spec)
    trace_kernel           0.4.31+
        .pallas.pallas_call:_trace_kernel_to_jaxpr(fun, grid_mapping)
    core_map_tracing       0.6.0+         .pallas.core:pe
    mpmd_tracing           0.9.1+         .pallas.mpmd:pe
an opaque primitive
    ffi_call_p             0.4.31-0.4.38  .extend.ffi:ffi_call_p
    ffi_call_p             0.5.0+         .ffi:ffi_call_p
    pure_callback_p        0.4.28+        .callback:pure_callback_p
    io_callback_p          0.4.28+        .callback:io_callback_p
    tpu_custom_call_p      0.4.28+        .tpu_custom_call:tpu_custom_call_p
    buffer_callback_p      0.6.1+         .buffer_callback:buffer_callback_p
    call_exported_p        0.4.29+        .export._export:call_exported_p
    core_map_p             0.6.0-0.11.0   .pallas.core:core_map_p
    name_p                 0.4.28-0.5.3   .ad_checkpoint:name_p
    platform_p             0.4.28-0.5.3   .lax.control_flow.conditionals:platform_index_p
lowers each equation by tables, for all platforms or one: opaque calls are tagged here
    lower_per_platform     0.4.28+
        .interpreters.mlir:lower_per_platform(
        ctx, description, platform_rules, default_rule, effects)
    lowerings              0.4.28+        .interpreters.mlir:_lowerings
    platform_lowerings     0.4.28+        .interpreters.mlir:_platform_specific_lowerings
an entry of the table of lowering rules, where it isn't the rule itself
    LoweringRuleEntry      0.7.0+         .interpreters.mlir:LoweringRuleEntry(rule, inline)
binds in the trace that an operation is bound in, not in the one around it
    set_current_trace      0.5.0+         .core:set_current_trace(trace)
makes a shard_map of a function
    make_shard_map         0.4.28-0.6.0   jax.experimental.shard_map:_shard_map(f)
    make_shard_map         0.6.1+         .shard_map:_shard_map(f)
whether anything is being traced
    at_top                 0.4.28+        .core:trace_state_clean
users' primitives
    Primitive              0.4.28+        .core:Primitive
writes the tag on the lowered call
    ir                     0.4.28+        .lib.mlir:ir
the hooks stand between JAX's frames, which it hides
    exclude_from_tracebacks 0.4.28+       .traceback_util:register_exclusion(path)
the user's line behind an equation
    summarize              0.4.28+        .source_info_util:summarize(source_info)
    user_frames            0.4.28+        .source_info_util:user_frames
    current_source         0.4.28+        .source_info_util:current
puts the registry's version into jit's trace key
    config                 0.4.28-0.7.1   .config
    make_user_context      0.7.2+         jax:make_user_context
the key-value store and the barriers that the processes of a job share
    job                    0.4.28+        .distributed:global_state
asks for the number of processes only where that opens no device
    has_devices            0.4.28+        .xla_bridge:backends_are_initialized
whether shard_map's check is on where we are
    check_vma              0.6.0          .config:_check_rep
    check_vma              0.6.1+         .config:_check_vma
whether axis types are part of avals, which this one JAX can be told that they are not
    varying_axes_in_types  0.6.0          .config:varying_axes_in_types
avals that carry axis types
    ShapedArray            0.6.0-0.9      .core:ShapedArray(shape, dtype, sharding, vma)
    ShapedArray            0.10+
        .core:ShapedArray(shape, dtype, sharding, manual_axis_type)
JAX's own form of AxisType
    ManualAxisType         0.10+          .core:ManualAxisType(varying, unreduced, reduced)
an aval without a mesh can't carry an axis type
    current_mesh_sharding  0.6.0+         .core:get_cur_mesh_sharding
which mesh axes are manual where we are
    abstract_mesh          0.6.0+         .mesh:get_abstract_mesh
where a primal meets its tangent, or its series
    jvp_tracer             0.6.0+
        .interpreters.ad:maybe_jvp_tracer(trace, primal, tangent)
    JetTracer              0.6.0+         jax.experimental.jet:JetTracer
a primitive whose author types its results
    HiPrimitive            0.7.1-0.11.1   .hijax:HiPrimitive(name)
    hi_primitive_p         0.8.0+         .hijax:call_hi_primitive_p
types a primitive's result as varying as its operands, which it asks to be alike
    standard_vma_rule      0.6.0+         .core:standard_vma_rule
raises on an output without annotation
    convert_out_shape      0.6.0-0.9.0
        .pallas.pallas_call:_convert_out_shape_to_aval(out_shape)
    convert_out_shape      0.9.1+         .pallas.core:_convert_out_shape_to_aval(out_shape)
a loop's body, before its carry's types are compared
    trace_body             0.6.0-0.8.1
        .lax.control_flow.loops:_initial_style_jaxpr(fun, in_tree, in_avals, debug_info)
    trace_scan_body        0.6.0-0.6.2
        .lax.control_flow.loops:_initial_style_jaxpr_attrs(fun, in_tree, in_avals, debug_info)
    trace_to_jaxpr         0.8.2+
        .interpreters.partial_eval:trace_to_jaxpr(fun, in_avals, debug_info)
where loops take what traces their bodies; jit takes it elsewhere, and is not to wait for a hook
    loop_tracing           0.8.2+         .lax.control_flow.loops:pe
an initial carry, once its body was traced
    promote_carries        0.6.0-0.8.1
        .lax.control_flow.loops:_promote_weak_typed_inputs(in_vals, in_avals, out_avals)
    promote_carry          0.8.2+
        .lax.control_flow.loops:_promote_weak_typed_input(in_val, in_aval, out_aval)
all branches of a cond or switch, and what raises where their types differ
    trace_branches         0.6.0-0.8.1
        .lax.control_flow.conditionals:_initial_style_jaxprs_with_common_consts
    merge_branches         0.8.2+
        .lax.control_flow.conditionals:_merge_common_consts(jaxprs, all_consts)
    check_branches         0.8.2+
        .lax.control_flow.conditionals:_check_branch_outputs(out_avals1, out_avals2)
JAX raises its errors about types in it
    specs_error            0.6.1+         .shard_map:_inout_vma_error
    shard_map_p            0.6.1+         .shard_map:shard_map_p
a user's cast of what varies by then
    pcast_from             0.8.2+         .lax.parallel:_get_from(aval)
    pcast_steps            0.8.2+         .lax.parallel:_pcast_funcs
casts an operand
    pcast                  0.6.0-0.8.1    jax.lax:pvary(axis_name)
    pcast                  0.8.2+         jax.lax:pcast(axis_name, to)
JAX 0.8.3 can't batch a psum of shard_map's check
    psum_invariant_p       0.6.0+         .lax.parallel:psum_invariant_p
    batchers               0.6.0+         .interpreters.batching:fancy_primitive_batchers
a custom_vjp's cotangents under vmap(..., spmd_axis_name=...)
    BatchTrace             0.6.0+         .interpreters.batching:BatchTrace
    vjp_in_jaxpr_p         0.6.0          .custom_derivatives:custom_vjp_call_jaxpr_p
    axis_env               0.6.0+         .core:get_axis_env
    batch_bwd              0.6.0+
        .interpreters.batching:batch_custom_vjp_bwd(bwd, tag, axis_data, in_dims, out_dim_dests)
what pl.kernel binds
    mpmd_map_p             0.9.1+         .pallas.mpmd:mpmd_map_p
plgpu.kernel calls it with the check switched off
    mpmd_map               0.10.1+        .pallas.mpmd:_mpmd_map(meshes_and_fns, out_types)
stands around plgpu.kernel where the check is still on
    custom_vmap            0.6.0+         .custom_batching:custom_vmap(fun)
a ref that is written must vary where what is written does
    run_state_p            0.6.0+         .state.discharge:run_state_p
    trace_run_state        0.6.0+
        .state.discharge:initial_style_jaxpr(fun, in_tree, in_avals, dbg)
    swap_p                 0.6.0+         .state.primitives:swap_p
    addupdate_p            0.6.0+         .state.primitives:addupdate_p
    WriteEffect            0.6.0+         .state.types:WriteEffect
    AccumEffect            0.6.0+         .state.types:AccumEffect
    cond_p                 0.4.28+        .lax.control_flow.conditionals:cond_p
    while_p                0.6.0+         .lax.control_flow.loops:while_p
runs a jaxpr with values that vary more than it was traced with
    eval_jaxpr             0.6.0+         .core:eval_jaxpr(jaxpr, consts)
    auto_pcast             0.10.1+        .config:auto_pcast
    custom_vjp_call_p      0.6.0+         .custom_derivatives:custom_vjp_call_p
runs under the check what was traced outside of shard_map
    use_abstract_mesh      0.6.0+         .mesh:use_abstract_mesh(mesh)
    JaxprEqnContext        0.6.0+         .core:JaxprEqnContext
    JaxprEqnContextManager 0.6.0+         .core:JaxprEqnContextManager
fails on an annotated result (JAX 0.8.3 to 0.12)
    result_avals           0.6.0+         .ffi:_result_avals
a derivative that may depend on what is differentiated is no evidence for another
    primitive_jvps         0.6.0+         .interpreters.ad:primitive_jvps
    primitive_linearizations 0.6.0+
        .interpreters.ad:primitive_linearizations
looks up a primitive's transpose rule: a user's is held to its operands' types
    transpose_of           0.6.0+         .interpreters.ad:get_primitive_transpose(p)
a transposed cond, whose branches may sum what only some devices reach
    primitive_transposes   0.6.0+         .interpreters.ad:primitive_transposes
    fancy_transposes       0.7.1+         .interpreters.ad:fancy_transposes
    vjp_node               0.12.0+        .interpreters.ad:vjp_node(prim)
a linear program before it is transposed, when its casts are placed
    older_backward_pass    0.6.0-0.8.1
        .interpreters.ad:backward_pass(jaxpr, transform_stack, consts, primals_in, cotangents_in)
    backward_pass          0.8.2+
        .interpreters.ad:backward_pass(jaxpr, transform_stack, consts, primals_in)
    backward_pass3         0.7.1+
        .interpreters.ad:backward_pass3(jaxpr, transform_stack, consts, primals_in)
    GradAccum              0.7.1+         .interpreters.ad:GradAccum
what of a program is known before it is transposed
    partial_eval_jaxpr     0.6.0+
        .interpreters.partial_eval:partial_eval_jaxpr_nounits(jaxpr, unknowns, instantiate)
    close_jaxpr            0.6.0+         .interpreters.partial_eval:close_jaxpr(jaxpr)
    jaxpr_as_fun           0.6.0+         .core:jaxpr_as_fun
an input of a linear program that is a tangent
    UndefinedPrimal        0.6.0+         .interpreters.ad:UndefinedPrimal
traces what will be transposed later: also a gradient that is differentiated again
    linearize              0.6.0+         .interpreters.ad:linearize(traceable)
a cast's transpose, which sums what is known to be zero, too
    transpose_cast         0.6.0-0.6.1    .interpreters.ad:_pvary_transpose_rule(cts, axes)
traces a bwd to a jaxpr and puts that into the one being traced, as jit(inline=True) does
    stage_jaxpr            0.7.0+
        .interpreters.partial_eval:trace_to_jaxpr_dynamic(fun, in_avals, auto_dce)
    inline_jaxpr           0.7.0+
        .interpreters.partial_eval:inline_jaxpr_into_trace(trace, src, jaxpr, consts)
    constants_as_inputs    0.7.0+         .interpreters.partial_eval:convert_constvars_jaxpr(jaxpr)
    JaxprTrace             0.7.0+         .interpreters.partial_eval:DynamicJaxprTrace
    trace_here             0.6.0+         .core:trace_ctx
    debug_info             0.7.0+         .api_util:debug_info(traced_for, fun, args, kwargs)
from the inputs' replication sets to the outputs', and to casts
    check_rules            0.4.28-0.5.3   jax.experimental.shard_map:_check_rules
    rewrite_rules          0.4.28-0.5.3   jax.experimental.shard_map:_rewrite_rules
what is done about a primitive that has no rule for replication sets
    rule_missing           0.4.28-0.5.3   jax.experimental.shard_map:_rule_missing(prim)
a custom_vjp's bwd under the check of replication sets
    rewrite_bwd            0.4.28-0.5.3
        jax.experimental.shard_map:_rewrite_bwd(bwd, mesh, in_reps, reps_dst)
sums a cotangent that varies where its primal doesn't
    match_replication      0.4.28-0.5.3
        jax.experimental.shard_map:_match_replication(src, dst, x)
casts an operand where axes of replication are kept beside values
    broadcast              0.4.28-0.5.3   jax.experimental.shard_map:pbroadcast(x, axis_name)
""")

# The names that a watch needs; ``install()`` needs none of them.
WATCHED: tuple[Symbol, ...] = read("""
all ways to a program end here, also where JAX takes it from a cache
    compile                0.4.28+        .interpreters.pxla:MeshComputation.compile
    compile_pmap           0.4.28-0.9     .interpreters.pxla:PmapComputation.compile
    lower                  0.4.28+        .interpreters.pxla:lower_sharding_computation
compiles, or reads from the cache on disk
    compile_or_load        0.4.28+        .compiler:compile_or_get_cached
compiles by XLA, which asks for the handlers of FFI targets
    compile_by_xla         0.4.28-0.9     .compiler:backend_compile
    compile_and_load       0.6.2+         .compiler:backend_compile_and_load
runs a compiled function
    run                    0.4.28+        .pjit:_pjit_call_impl_python
    run_compiled           0.4.28+        jax.stages:Compiled.__call__
lets C++ call a compiled function without any of these
    fast_path              0.4.28+        .pjit:_get_fastpath_data
    fast_paths             0.4.28-0.4.33  .pjit:_cpp_pjit_cache
    fast_paths             0.4.34+        .pjit:_cpp_pjit_cache_fun_only
    explicit_fast_paths    0.4.34+        .pjit:_cpp_pjit_cache_explicit_attributes
reads an array on the host
    read                   0.4.28+        .array:ArrayImpl._value
    read_asarray           0.4.28+        numpy:asarray
    read_array             0.4.28+        numpy:array
tells what jax.device_get reads from other reads
    guards                 0.4.28-0.4.34  .config:transfer_guard_lib
    guards                 0.4.35+        .config:guard_lib
traces a jit; with them it can be traced and compiled once more
    infer                  0.4.28+        .pjit:_infer_params
    make_jit               0.4.28+        .pjit:_cpp_pjit
    trace_context          0.4.28+        .config:trace_context
    thread_resources       0.4.28+        .mesh:thread_resources
    concrete_mesh          0.4.36+        .mesh:get_concrete_mesh
marks a step in a profile, from where the marker is made
    step_begins            0.4.28+        jax.profiler:StepTraceAnnotation.__init__
    step_ends              0.4.28+        jax.profiler:StepTraceAnnotation.__exit__
leaves this package's frames out of source lines; jax.extend may not be imported yet
    exclude_frames         0.4.28+        .source_info_util:register_exclusion
""")
