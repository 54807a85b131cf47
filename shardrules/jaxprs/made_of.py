"""Compare programs by what each value is computed from.

Each variable gets a key: a hash of the primitive that makes it, of the parameters, and of the
operands' keys. So a key stands for the whole computation of a value. Casts pass on their operand's
key, so a program has the same keys with the check off and on. Two programs are the same if they
have the same multiset of keys and the same results.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardrules.door.jaxprs import (
    CASTS,
    KERNELS,
    NEW_REFS,
    READS,
    SUMS,
    inner_jaxprs,
    name_of,
    named_axes,
    opened,
)
from shardrules.door.protocols import ClosedJaxpr, Eqn, Jaxpr
from shardrules.jaxprs.walk import Inside, visited

_LOOPS = frozenset({"scan", "while"})
_FILLS = frozenset({"empty", "empty2"})
_RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
_LARGE_BYTES = 1 << 20  # larger constants are compared by identity, or else by digest
_MOST_BYTES = 1 << 28  # larger constants are compared by identity alone


class _Inner(NamedTuple):
    """A jaxpr's constants, and the keys of its inputs."""

    consts: Sequence[Any]
    inputs: Sequence[Any]


class _Around(NamedTuple):
    """The facts known around a jaxpr."""

    makes: dict[Any, Any]  # each variable's key
    left: list[_Inner]  # an equation's jaxprs that are still to be read
    read: list[tuple[Jaxpr, dict[Any, Any]]]  # the jaxprs read so far, with their variables' keys
    large: Callable[[Any], object]  # returns a stand-in by which large constants are compared

    def of(self, atom: Any) -> Any:
        if hasattr(atom, "val"):
            # NumPy reads a literal that is a Python number as a float64 or an int64.
            return _converted(_constant(atom.val, self.large), atom)
        return self.makes.get(atom, "constant")


def is_same(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Return whether jaxprs compute the same values from the same operands, ignoring casts.

    They may differ with the check on if the body reads a value's type, and then sums over other
    axes or swaps operands.
    """
    # Compare large constants by identity first: mostly both programs hold the same object, and
    # reading one may copy it from the device.
    return any(_made_of(one, large) == _made_of(other, large) for large in (id, _digest))


def has_same_steps(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Return whether linear programs take the same steps, ignoring their constants.

    Programs may pass on saved values in different orders, and may pass a cast number to a loop. So
    compare operands only by the primitives that made them.
    """
    return _made_of(one, id, by_name=True) == _made_of(other, id, by_name=True)


def digest(closed: Any, left_out: Iterable[Eqn] = ()) -> int:
    """Return a number that is equal for jaxprs that compute the same, ignoring casts.

    The equations ``left_out`` are ignored too: each of their results stands for its operand.
    """
    return hash(frozenset(_made_of(closed, _digest, left_out=left_out).items()))


def _made_of(
    closed: ClosedJaxpr,
    large: Callable[[Any], object],
    by_name: bool = False,
    left_out: Iterable[Eqn] = (),
) -> collections.Counter[Any]:
    """Count a jaxpr's equations by their operands' keys, or by the operands' primitives."""
    # Read the equations in order, so that each operand has its key. For an equation with inner
    # jaxprs, read these first (``enter`` gives their inputs the operands' keys); its own key holds
    # the keys of their results. A write to a ref gives the ref a new key, so later reads differ.
    # With ``by_name``, a value's key is the primitive that made it, or "input" for saved values.
    counted: collections.Counter[Any] = collections.Counter()
    passed = {id(eqn) for eqn in left_out}

    def enter(jaxpr: Jaxpr, around: _Around) -> _Around:
        inner = around.left.pop(0)
        if by_name:
            return _Around(dict.fromkeys(jaxpr.constvars, "input"), [], [], large)
        makes = {v: _constant(held, large) for v, held in zip(jaxpr.constvars, inner.consts)}
        makes |= zip(jaxpr.invars, inner.inputs)
        around.read.append((jaxpr, makes))
        return _Around(makes, [], [], large)

    def visit(eqn: Eqn, around: _Around, inside: Inside[_Around, None]) -> Iterator[None]:
        name, operands = name_of(eqn), [around.of(atom) for atom in eqn.invars]
        if by_name:
            if name in _FILLS:  # stands, in the other branches, for a value that one branch saves
                around.makes.update(dict.fromkeys(eqn.outvars, "input"))
                return
            operands = [
                "input" if isinstance(operand, _Elements) or operand == "constant" else operand
                for operand in operands
            ]
            if name in _RESHAPES and all(v.aval.size == 1 for v in (*eqn.invars, *eqn.outvars)):
                # A saved scalar is passed on as an array of one element.
                around.makes.update(zip(eqn.outvars, operands))
                return
            if name == "broadcast_in_dim":  # a saved number is passed on with a dimension
                operands = ["input"]
            if name == "convert_element_type" and operands == ["input"]:
                around.makes.update(zip(eqn.outvars, operands))  # converts a number that was cast
                return
        if name in CASTS or id(eqn) in passed or _keeps_dtype(eqn):
            around.makes.update(zip(eqn.outvars, operands))
            return
        if name == "convert_element_type" and isinstance(operands[0], _Elements):
            # JAX converts a Python number after its cast, so convert the constant here.
            around.makes.update(zip(eqn.outvars, [_converted(operands[0], eqn.outvars[0])]))
            return
        inner = _Around({}, [*_inside(eqn, operands)], [], large)
        if name in SUMS:
            of_all: tuple[Any, ...] = ("psum",)
            results: list[Any] = [("psum", named_axes(eqn.params), operand) for operand in operands]
        elif inner.left:
            for found in inside(inner):
                yield from found
            if by_name:
                counted.update([_key((name, _plain(eqn)))] if _is_step(name) else ())
                around.makes.update(dict.fromkeys(eqn.outvars, "input"))
                return
            of_all = name, _plain(eqn), _results(inner), _taken(eqn, operands)
            results = [(*of_all, n) for n in range(len(eqn.outvars))]
        else:
            of_all = name, _plain(eqn), operands
            results = [(*of_all, n) for n in range(len(eqn.outvars))] or [of_all]
        keys = [_key(result) for result in results]
        counted.update(keys)
        if by_name:
            around.makes.update(dict.fromkeys(eqn.outvars, of_all[0]))
            return
        around.makes.update(zip(eqn.outvars, keys))
        if name in NEW_REFS:  # two refs of equal contents are still two refs
            around.makes[eqn.outvars[0]] = _key((keys[0], sum(map(_is_ref, around.makes))))
        elif name not in READS:  # from here on, the ref has the key of its new content
            written = [(n, atom) for n, atom in enumerate(eqn.invars) if _is_ref(atom)]
            around.makes.update((atom, _key((of_all, n))) for n, atom in written)

    jaxpr = opened(closed)
    # Since JAX 0.11, the constants of a bwd's trace are its leading inputs.
    leading = closed.consts[: max(0, len(closed.consts) - len(jaxpr.constvars))]
    read = [_constant(held, large) for held in leading]
    inputs: list[Any] = [n if made == "constant" else made for n, made in enumerate(read)]
    inputs += range(len(inputs), len(jaxpr.invars))
    whole = _Around({}, [_Inner(closed.consts, inputs)], [], large)
    visited(jaxpr, visit, whole, enter)
    if not by_name:
        (results,) = _results(whole)
        counted.update(enumerate(map(_key, results)))
    return counted


def _results(around: _Around) -> list[list[Any]]:
    """Return the keys of the results and refs of each jaxpr that was read."""
    results = []
    for jaxpr, makes in around.read:
        of = around._replace(makes=makes).of
        results.append([of(atom) for atom in (*jaxpr.outvars, *filter(_is_ref, jaxpr.invars))])
    return results


def _is_ref(atom: Any) -> bool:
    return hasattr(atom.aval, "inner_aval")


def _is_step(name: str) -> bool:
    """Return whether a primitive uses its jaxpr otherwise than to call it with its operands."""
    return name in KERNELS or name.startswith(("scatter", "reduce", "select_and_scatter"))


def _taken(eqn: Eqn, operands: list[Any]) -> Any:
    """Return the operands by which an equation with an inner jaxpr is compared."""
    name = name_of(eqn)
    if _is_step(name):
        return operands
    # With the check on there may be more operands: a value, and the same value cast. So compare
    # sets. JAX also moves the cast of a number out of a loop, and then the loop takes the number as
    # an operand. Leave such numbers out, since the body shows their use.
    numbers = operands[: _const_count(eqn)] if name in _LOOPS else ()
    return {*operands} - {number for number in numbers if isinstance(number, _Elements)}


def _const_count(eqn: Eqn) -> int:
    """Return the number of a loop's operands before its carry."""
    if name_of(eqn) == "while":
        return int(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"])
    return int(eqn.params.get("num_consts", 0))


def _inside(eqn: Eqn, operands: list[Any]) -> Iterator[_Inner]:
    """Yield constants and input keys of each jaxpr in an equation, in ``inner_jaxprs``' order."""
    name, params = name_of(eqn), eqn.params
    carried = _const_count(eqn)
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if (jaxpr := opened(each)) is None:
                continue
            count = len(jaxpr.invars)
            given: Sequence[Any] = operands[len(operands) - count :]
            if name in _LOOPS:
                # A carry may differ from its initial value later, so mark it as carried.
                later = [("carried", n, operand) for n, operand in enumerate(operands[carried:])]
                given = operands[:carried]
                if name == "while":
                    is_body = value is params["body_jaxpr"]
                    count_of_cond = params["cond_nconsts"]
                    given = given[count_of_cond:] if is_body else given[:count_of_cond]
                given = [*given, *map(_key, later)]
            if name in KERNELS or count != len(given):
                given = [("input", n) for n in range(count)]
            yield _Inner(getattr(each, "consts", ()), given)


@dataclasses.dataclass(frozen=True)
class _Elements:
    """A number or an array, without the casts and conversions that it went through."""

    dtype: str
    shape: tuple[int, ...]
    held: bytes


def _constant(value: Any, large: Callable[[Any], object]) -> Any:
    import jax
    import numpy as np

    if isinstance(value, jax.core.Tracer):
        return "constant"
    try:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return "constant"
        if (size := value.nbytes if hasattr(value, "nbytes") else 0) > _LARGE_BYTES:
            return "large", size, large(value)
        if not isinstance(kind := getattr(value, "dtype", None), (np.dtype, type(None))):  # a key
            with jax.ensure_compile_time_eval():
                return str(kind), _constant(jax.random.key_data(value), large)
        array = np.asarray(value)
    except Exception:  # it can't be read  # noqa: BLE001
        return "constant"
    return _Elements(str(array.dtype), array.shape, array.tobytes())


def _digest(value: Any) -> object:
    """Return a digest of a large constant; one that is too large to read equals only itself."""
    import numpy as np

    if value.nbytes > _MOST_BYTES:
        return id(value)
    return hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data).digest()


def _keeps_dtype(eqn: Eqn) -> bool:
    """Return whether an equation converts a value to the dtype that it already has.

    JAX does so in a loop whose carry starts as a Python number. With the check on, JAX may have
    converted the number earlier, with its cast.
    """
    if name_of(eqn) != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _converted(value: Any, to: Any) -> Any:
    """Return a constant converted to a variable's dtype; return any other value as it is."""
    import ml_dtypes  # noqa: F401  # its dtypes have names
    import numpy as np

    dtype = str(getattr(to.aval, "dtype", ""))
    if not isinstance(value, _Elements) or value.dtype == dtype:
        return value
    try:
        with np.errstate(all="ignore"):
            array = np.frombuffer(value.held, value.dtype).astype(dtype)
    except (TypeError, ValueError):
        return "constant"
    return _Elements(dtype, value.shape, array.tobytes())


def _key(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return hash((*map(_key, value),))
    if type(value) in (int, float):
        return hash(repr(value))  # hash(-1) is hash(-2)
    return hash(frozenset(map(_key, value)) if isinstance(value, (set, frozenset)) else value)


def _plain(eqn: Eqn) -> list[Any]:
    """Return an equation's parameters that are made of numbers, names and functions."""
    # Sort them, since their order may differ with the check on (JAX 0.5.3 and older).
    if any(inner_jaxprs(eqn.params)) and not _is_step(name_of(eqn)):
        # Parameters of an equation with jaxprs may count or mark its inputs, which may differ.
        return [
            (name, value)
            for name, value in sorted(eqn.params.items())
            if type(value) in (bool, int, str)
            and not name.endswith("consts")
            and not name.startswith("check_")
            and name != "rewrite"  # tells whether shard_map's check is on (JAX 0.5.3 and older)
        ]
    return [(name, _held(v)) for name, v in sorted(eqn.params.items()) if name != "weak_type"]


def _held(value: Any, depth: int = 6) -> Any:
    import jax
    import numpy as np

    if isinstance(value, (tuple, list)):
        return [_held(each, depth) for each in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.integer):
        return operator.index(value)
    if type(value) in (bool, int, float, str, complex, bytes):
        return value
    if isinstance(value, (np.dtype, type)):
        return str(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _constant(value, id)
    if isinstance(value, dict):
        return frozenset((str(key), _key(_held(each, depth))) for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_key(_held(each, depth)) for each in value)
    if depth and opened(value) is not None:
        return frozenset(_made_of(value, id).items()) if hasattr(value, "consts") else None
    if depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            _held(getattr(value, field.name, None), depth - 1)
            for field in dataclasses.fields(value)
        ]
    return _function(value, depth - 1) if depth else None


def _function(value: Any, depth: int) -> Any:
    """Return a form of a function, or of an object that holds one, to compare it by."""
    if isinstance(value, functools.partial):
        return _held([value.func, value.args, [*value.keywords.items()]], depth)
    if isinstance(value, types.FunctionType):
        cells: list[Any] = []
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                cells.append(cell.cell_contents)
        place = value.__module__, value.__qualname__, value.__code__.co_firstlineno
        return _held([place, cells, value.__defaults__, value.__kwdefaults__], depth)
    if isinstance(value, types.MethodType):
        return _held([value.__func__, value.__self__], depth)
    if callable(value) and not isinstance(value, type):
        if hasattr(value, "callback_func"):  # from JAX's pure_callback
            return _held(value.callback_func, depth)
        of = [getattr(value, "__name__", None), type(value)]
        # Look only two levels deep, since an object may hold many others.
        return _held([*of, getattr(value, "__dict__", None)], min(depth, 2))
    return None
