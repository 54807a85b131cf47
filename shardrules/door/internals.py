"""Give access to JAX's internals: look up and check every private name once.

``load`` finds every symbol of ``symbols.py`` that this version must have, and checks its parameters
before it changes anything, so the hooks are installed completely or not at all. The version decides
only which symbols must exist; all other code tests whether a symbol exists.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardrules.door import versions
from shardrules.door.audit_names import Primitives
from shardrules.door.lookup import find, is_cached, look, unsupported
from shardrules.door.patching import MeshKey
from shardrules.door.protocols import Aval, JaxMesh
from shardrules.door.symbols import SYMBOLS
from shardrules.errors import RuleError, UnsupportedJaxError
from shardrules.paths import is_library
from shardrules.registry.axistypes import AxisType

_INVARIANT = AxisType()


@functools.lru_cache(maxsize=64)
def _manual_axes(mesh: JaxMesh) -> tuple[str, ...]:
    manual = frozenset(mesh.manual_axes)
    return tuple(a for a in mesh.axis_names if a in manual)


_ARRAYS = inspect.signature(lambda *arrays: arrays)


class Door:
    """JAX's private symbols as attributes, and the operations that are built from them."""

    def __init__(self, version: str, symbols: dict[str, Any], owners: dict[str, tuple[Any, str]]):
        self.__dict__.update(symbols)
        self.version = version
        self.untested = ""  # why the hooks must test themselves, or empty
        if versions.is_untested(version):
            self.untested = f"newer than {versions.NEWEST}, the newest that was tested"
        self.typed = symbols["check_vma"] is not None  # whether axis types are on avals
        self._owners = owners
        self._here = threading.local()
        # In these versions, Primitive.bind_with_trace does nothing but call process_primitive if
        # the trace takes hijax types. A direct call saves two calls per equation. A test in
        # tests/core/test_install.py reads bind_with_trace. In other versions, call bind_with_trace.
        self.binds_by_processing = versions.release(version) >= (0, 9) and not self.untested
        self._caches_kernels = is_cached(symbols["trace_kernel"])
        # Cache these, since a program repeats the same few types and avals.
        self._types: dict[Any, AxisType] = {}
        self._retyped = functools.lru_cache(maxsize=1024)(self._retype)

    if TYPE_CHECKING:  # the symbols are JAX's and have no types

        def __getattr__(self, name: str) -> Any: ...

    def owner(self, key: str) -> tuple[Any, str]:
        return self._owners[key]

    # Axis types.

    def axis_type(self, aval: Any) -> AxisType:
        """Return an aval's axis type; invariant if it carries no type (tokens, keys' bases)."""
        try:
            return self._types[aval.manual_axis_type]  # a ref has the axis type of its contents
        except (AttributeError, KeyError):
            pass
        if isinstance(aval, self.AbstractRef):
            aval = aval.inner_aval
        mat = getattr(aval, "manual_axis_type", None)
        if mat is not None:
            return self._types.setdefault(mat, AxisType(mat.varying, mat.unreduced, mat.reduced))
        varying = getattr(aval, "vma", None)
        if varying is None:
            return _INVARIANT
        # JAX 0.6.1 to 0.9 keep unreduced and reduced axes in the sharding's spec.
        spec = getattr(getattr(aval, "sharding", None), "spec", None)
        return AxisType(
            varying,
            getattr(spec, "unreduced", frozenset()) or frozenset(),
            getattr(spec, "reduced", frozenset()) or frozenset(),
        )

    def axis_types(self, avals: Iterable[Any]) -> tuple[AxisType, ...]:
        return tuple(map(self.axis_type, avals))

    def axes_of(self, aval: Aval) -> frozenset[str] | None:
        """Return the axes over which an aval may differ; None if JAX's avals have no axis types."""
        have = self.axis_type(aval)
        return have.varying | have.unreduced if self.typed else None

    def need_types(self, what: str) -> None:
        if not self.typed:
            raise UnsupportedJaxError(
                f"{what} needs JAX 0.6 or newer, where values carry axis types, and this is JAX "
                f"{self.version}",
                version=self.version,
            )

    def with_axis_type(self, aval: Aval, axis_type: AxisType) -> Any:
        """Return ``aval`` with another axis type, or ``aval`` itself if it can't carry one."""
        if not self.typed or self.axis_type(aval) == axis_type:
            return aval
        if isinstance(aval, self.AbstractRef):
            return aval.update(inner_aval=self.with_axis_type(aval.inner_aval, axis_type))
        if not isinstance(aval, self.ShapedArray):
            return aval
        if aval.sharding.mesh.empty and axis_type.axes:
            # The aval of an array passed as out_shape names no mesh (JAX 0.10.2).
            aval = aval.update(sharding=self.current_mesh_sharding())
        return self._retyped(aval, axis_type)

    def _retype(self, aval: Any, axis_type: AxisType) -> Any:
        have = self.axis_type(aval)
        partial = {"unreduced": axis_type.unreduced, "reduced": axis_type.reduced}
        if self.ManualAxisType is not None:
            mat = self.ManualAxisType(varying=axis_type.varying, **partial)
            return aval.update(manual_axis_type=mat)
        changes: dict[str, Any] = {"vma": axis_type.varying}
        if (have.unreduced, have.reduced) != (axis_type.unreduced, axis_type.reduced):
            spec = type(aval.sharding.spec)(*aval.sharding.spec, **partial)
            changes["sharding"] = aval.sharding.update(spec=spec)
        return aval.update(**changes)

    def cotangent_type(self, primal: Aval) -> AxisType:
        return self.axis_type(self.cotangent_aval(primal))

    def cotangent_aval(self, primal: Aval) -> Any:
        for name in ("to_ct_aval", "to_cotangent_aval", "to_tangent_aval"):
            if hasattr(primal, name):
                return getattr(primal, name)()
        return primal

    def annotation(self, shape: Any) -> AxisType | None:
        """Return the axis type that the user wrote on an output, or None."""
        import jax

        if not isinstance(shape, jax.ShapeDtypeStruct):
            return None  # the type of an array is not an annotation
        if self.ManualAxisType is not None:
            mat = shape.manual_axis_type
            return None if mat is None else AxisType(mat.varying, mat.unreduced, mat.reduced)
        varying = getattr(shape, "vma", None)  # JAX 0.6.0 has no such annotation
        return None if varying is None else AxisType(varying)

    def unannotated(self, shape: Any) -> Any:
        return shape.update(**{"vma" if self.ManualAxisType is None else "manual_axis_type": None})

    def can_cast(self, aval: Aval) -> bool:
        """Return whether a value of this aval can be cast: arrays can, refs and tokens can't."""
        return isinstance(aval, self.ShapedArray)

    def manual_axes(self) -> tuple[str, ...]:
        """Return the manual mesh axes here, in the mesh's order; empty outside shard_map."""
        if not self.typed:
            return getattr(self._here, "axes", ())
        mesh = self.abstract_mesh()
        return () if mesh is None or mesh.empty else _manual_axes(mesh)

    def spmd_axes(self) -> frozenset[str]:
        """Return the mesh axes that enclosing vmaps name by ``spmd_axis_name``."""
        return frozenset(self.axis_env().spmd_axis_names)

    def manual_sizes(self) -> dict[str, int]:
        """Return the number of devices along each manual axis; needs a JAX with axis types."""
        shape = self.abstract_mesh().shape
        return {axis: shape[axis] for axis in self.manual_axes()}

    @contextlib.contextmanager
    def over_axes(self, axes: tuple[str, ...]) -> Iterator[None]:
        """Let ``manual_axes`` return ``axes`` on a JAX whose avals have no mesh."""
        before = getattr(self._here, "axes", ())
        self._here.axes = axes
        try:
            yield
        finally:
            self._here.axes = before

    def checking(self) -> bool:
        return self.typed and bool(self.check_vma.value) and bool(self.manual_axes())

    def why_casts_do_nothing(self) -> str:
        """Say why values have no axis types here; empty if they do, and up to JAX 0.5.3."""
        if not self.typed or self.checking():
            return ""
        return "unchecked" if self.manual_axes() else "outside"

    def unchecked(self) -> Any:
        return self.check_vma(False) if self.typed else contextlib.nullcontext()

    def cast(self, value: Any, want: AxisType) -> Any:
        """Cast an array from its own axis type to a type that varies over more axes."""
        have = self.axis_type(self.typeof(value))
        if have == want:
            return value
        # Cast once per state of the axes, since jax.lax.pcast rejects a mixture (JAX 0.10.2).
        for axes, to in (
            (have.reduced & want.varying, "varying"),
            (want.varying - have.axes, "varying"),
            (have.varying & want.unreduced, "unreduced"),
        ):
            order = tuple(sorted(axes))
            if order and self.owner("pcast")[1] == "pcast":
                value = self.pcast(value, order, to=to)
            elif order and to == "varying":
                value = self.pcast(value, order)
            elif order:
                raise RuleError(
                    f"JAX {self.version} has no cast to {to} over {{{', '.join(order)}}}; rules "
                    "that make a value unreduced need JAX 0.8 or newer",
                    axes=axes,
                )
        return value

    def cast_bound(self, trace: Any, values: Any, wants: Any) -> list[Any]:
        """Cast operands that are bound in ``trace``, as ``cast_arrays`` does."""
        with self.set_current_trace(trace):
            return self.cast_arrays(values, wants)

    def cast_arrays(self, values: Iterable[Any], wants: Iterable[AxisType | None]) -> list[Any]:
        """Cast the arrays among values in the current trace; return refs and tokens as they are."""
        return [
            self.cast(x, want) if want is not None and self.can_cast(self.typeof(x)) else x
            for x, want in zip(values, wants)
        ]

    # Kernels.

    @functools.cached_property
    def primitives(self) -> Primitives:
        """Return the table that maps each primitive to its name and the part of JAX defining it."""
        return Primitives(self.Primitive)

    def kernel_jaxpr(self, traced: Any) -> tuple[Any, Any]:
        """Return the kernel's jaxpr from the result of ``trace_kernel``, and that result."""
        index = next(i for i, part in enumerate(traced) if hasattr(part, "eqns"))
        jaxpr = traced[index]
        if self._caches_kernels:
            # JAX up to 0.6.2 caches the jaxpr. Give each call its own copy. Otherwise two calls of
            # one function would share annotations and scopes.
            jaxpr = jaxpr.replace()
            traced = (*traced[:index], jaxpr, *traced[index + 1 :])
        return jaxpr, traced

    def source_line(self, source_info: Any, of_libraries: bool = False) -> str:
        """Return the user's ``file:line`` of an equation; empty if JAX keeps none."""
        # Skip lines of libraries that the user's code called, unless ``of_libraries``.
        for info in (getattr(source_info, "traceback", None), source_info):
            with contextlib.suppress(AttributeError, TypeError):  # up to JAX 0.6, pass the info
                for frame in self.user_frames(info):
                    if of_libraries or not is_library(frame.file_name):
                        return f"{frame.file_name}:{frame.start_line}"
                break
        # The summary is "file:line:column (function)", without the column up to JAX 0.4.
        match = re.match(r"(.+?):(\d+)(:\d+)?( \(|$)", self.summarize(source_info))
        return f"{match[1]}:{match[2]}" if match else ""

    # Loops.

    def is_loop_body(self, debug_info: Any) -> bool:
        """Return whether our caller is tracing the body of a loop that a user wrote."""
        # ``scan`` and ``while_loop`` trace their bodies in a local function (JAX 0.6 to 0.12). This
        # function calls others that transformations of loops call too, with the same debug info. So
        # no argument shows who calls. Compare the code of the calling frame with the code of the
        # local function; a test in tests/core/test_install.py looks that up in each JAX.
        is_condition = debug_info.traced_for == "while_cond"
        return sys._getframe(2).f_code in self.body_tracers and not is_condition

    @functools.cached_property
    def body_tracers(self) -> frozenset[Any]:
        key = "promote_carries" if self.promote_carry is None else "promote_carry"
        loops = self.owner(key)[0]
        try:
            return frozenset(map(_body_tracer, (loops.scan, loops.while_loop)))
        except (AttributeError, LookupError) as error:
            raise unsupported(
                self.version,
                f"{error}. It tells the body of a loop from what is made of it.",
                symbol=f"{loops.__name__}:scan",
            ) from None

    # Functions of a custom_vjp.

    def scoped(self, fun: Any, enter: Any, scope: Any, see: Any = None) -> Any:
        """Return a WrappedFun that runs inside ``enter(scope)``, after ``see(*args)``."""
        if self.transformation is not None:
            return self.transformation(_run_scoped)(fun, enter, scope, see)
        return self.generator(_yield_scoped)(fun, enter, scope, see)

    def wrapped(self, function: Any, like: Any) -> Any:
        """Return ``function`` as a WrappedFun if ``like`` is one, else as it is."""
        if not hasattr(like, "call_wrapped"):
            return function
        info = getattr(like, "debug_info", None)
        options = {"debug_info": info} if self._takes_info and info is not None else {}
        return self.wrap_init(function, **options)

    @functools.cached_property
    def _takes_info(self) -> bool:
        return "debug_info" in inspect.signature(self.wrap_init).parameters

    def _wrapped_bwd(self, function: Any, arguments: Sequence[Any]) -> Any:
        # Pass a signature. Otherwise JAX would look up the function's signature each time.
        info = self.debug_info("bwd", function, tuple(arguments), {}, signature=_ARRAYS)
        return self.wrap_init(function, debug_info=info)

    def staged(
        self, function: Any, arrays: Sequence[Any]
    ) -> tuple[Any, Sequence[Any], Callable[[Sequence[Any]], list[Any]]] | None:
        """Return a function's jaxpr, its constants, and a function that inlines it here."""
        # This does the same as ``jax.jit(function, inline=True)``, and for a small function in a
        # fifth of the time. Return None if no jaxpr is being traced, for HiJAX equations, and up to
        # JAX 0.6; the caller then uses jit.
        if self.stage_jaxpr is None:
            return None
        if type(self.trace_here.trace) is not self.JaxprTrace:
            return None
        wrapped = self._wrapped_bwd(function, arrays)
        jaxpr, _, constants = self.stage_jaxpr(wrapped, [*map(self.typeof, arrays)])
        if getattr(jaxpr, "is_high", False):  # HiJAX's equations: jit lowers them
            return None

        def put(arrays: Sequence[Any]) -> list[Any]:
            trace, source = self.trace_here.trace, self.current_source()
            # The function may close over values of the jaxpr being traced. They aren't constants of
            # the new jaxpr, so make them inputs.
            whole = self.constants_as_inputs(jaxpr)
            if type(trace) is not self.JaxprTrace:  # it was staged for a jaxpr, but runs eagerly
                import jax

                run = jax.jit(self.jaxpr_as_fun(self.close_jaxpr(whole)), inline=True)
                results: list[Any] = run(*constants, *arrays)
                return results
            tracers = [trace.to_jaxpr_tracer(x, source) for x in (*constants, *arrays)]
            results = self.inline_jaxpr(trace, source, whole, (), *tracers)
            return [trace.to_jaxpr_tracer(x, source) for x in results]

        return jaxpr, constants, put

    def jaxpr_of(self, function: Any, avals: Sequence[Aval]) -> Any:
        """Return the jaxpr of a function that takes arrays of these types and returns a list."""
        import jax

        if self.stage_jaxpr is not None:
            return self.stage_jaxpr(self._wrapped_bwd(function, avals), [*avals])[0]
        types = [self.axis_type(aval) for aval in avals]
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return jax.make_jaxpr(lambda *xs: function(*map(self.cast, xs, types)))(*structs).jaxpr

    def function_name(self, fun: Any) -> str:
        name = getattr(getattr(fun, "debug_info", None), "func_name", None)
        return name or getattr(fun, "__name__", None) or "<unnamed>"

    def function_place(self, fun: Any) -> str:
        """Return ``file:line`` of a function or WrappedFun; empty if unknown."""
        said = getattr(getattr(fun, "debug_info", None), "func_src_info", None) or ""
        if " at " in said:
            return said.rpartition(" at ")[2]
        code = getattr(getattr(fun, "f", fun), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    # Lowering.

    def lowering_rule(self, entry: Any) -> Any:
        return entry if self.LoweringRuleEntry is None else entry.rule

    def lowering_entry(self, entry: Any, rule: Any) -> Any:
        if self.LoweringRuleEntry is None:
            return rule
        return self.LoweringRuleEntry(rule, entry.inline)

    # jit's trace key.

    def trace_key(self) -> Any:
        """Return an object that puts a value into JAX's trace key, for one thread or for all."""
        if self.make_user_context is None:
            return MeshKey(self.config)
        context = self.make_user_context()
        if not hasattr(context, "set_global"):  # JAX 0.7.2 to 0.9
            context.set_global = context._obj.set_global
        return context


def _body_tracer(function: Any) -> types.CodeType:
    function = inspect.unwrap(function)
    for code in function.__code__.co_consts:
        if isinstance(code, types.CodeType) and code.co_name == "_create_jaxpr":
            return code
    raise LookupError(f"{function.__module__}.{function.__name__} has no _create_jaxpr inside")


def _run_scoped(fun: Any, enter: Any, scope: Any, see: Any, *args: Any, **kwargs: Any) -> Any:
    with enter(scope):
        if see is not None:
            see(*args)
        return fun(*args, **kwargs)


def _yield_scoped(enter: Any, scope: Any, see: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    # Up to JAX 0.4.36, transformations are generators.
    with enter(scope):
        if see is not None:
            see(*args)
        result = yield args, kwargs
    yield result


@functools.lru_cache(maxsize=1)
def load() -> Door:
    """Look up every private symbol of the installed JAX."""
    try:
        import jax
    except ModuleNotFoundError as error:
        raise UnsupportedJaxError(
            f"shardrules hooks into JAX, which can't be imported here: {error}. "
            "python -m pip install jax",
            version=None,
        ) from error
    version = jax.__version__
    if problem := versions.too_old(version):
        raise unsupported(version, f"{problem}.", symbol=None)
    values, owners = find(version, SYMBOLS)
    switch = values["varying_axes_in_types"]
    if switch is not None and not switch.value:
        raise unsupported(version, "its option jax_varying_axes_in_types is off.", symbol=None)
    return Door(version, values, owners)


def names() -> list[tuple[str, str, str]]:
    """Return our name, path and problem of each private name that this JAX must have."""
    import jax

    if versions.too_old(jax.__version__):
        return []
    here = [symbol for symbol in SYMBOLS if symbol.exists_in(jax.__version__)]
    return [(symbol.key, symbol.path, look(symbol)[2]) for symbol in here]
