"""Resolve custom calls by their tag, the registry, XLA's own targets, or the kernel's text."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

from shardrules import errors
from shardrules.hlo.known import mosaic
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.values import Values
from shardrules.hlo.proof.collectives import KINDS
from shardrules.hlo.reader.module import Instruction, Metadata, Module
from shardrules.registry import axistypes
from shardrules.registry.shipped import JAXLIB
from shardrules.registry.table import PROVEN, Registration

LOCAL = "a function of its operands on each device"

# Targets that XLA emits itself, or that JAX emits for its own numerical routines, with their
# effects. A wrong entry makes wrong proofs: the description must hold for every use of the target.
OWN_TARGETS: dict[str, str] = {
    "AssumeGatherIndicesInBound": "passes its operand on (TPU: a promise about gather indices)",
    "GatherScatterIndicesBitpacked": "packs gather or scatter indices (TPU)",
    "ConcatBitcast": "places its operands side by side in one buffer (TPU)",
    "ZeroCrop": "passes its operand on, with zeros in what pads its tiles (TPU)",
    "MoveToHost": "copies its operand to host memory",
    "MoveToDevice": "copies its operand to device memory",
    "annotate_device_placement": "passes its operand on; names a memory space",
    "LayoutConstraint": "passes its operand on; fixes a layout",
    "X64SplitLow": "takes the low words of 64-bit numbers",
    "X64SplitHigh": "takes the high words of 64-bit numbers",
    "X64Combine": "joins low and high words",
    "PadToStatic": "pads a dynamic array to its bound",
    "SliceToDynamic": "cuts an array to a dynamic size",
    "TopK": "the largest elements and their places",
    "ApproxTopK": "approximately largest elements, chosen by the operands alone",
    "PartialReduce": "a reduction in bins (TPU: approximate top-k)",
    "__gpu$TopK": "the largest elements and their places",
    "__cub$DeviceRadixSort": "sorts; radix sort is stable",
    "Cholesky": "a matrix factorization",
    "LuDecomposition": "a matrix factorization",
    "Qr": "a matrix factorization",
    "QrDecomposition": "a matrix factorization",
    "Eigh": "an eigendecomposition",
    "ProductOfElementaryHouseholderReflectors": "a product of its operands",
    # The TPU compiler replaces some of the above, and triangular-solve, by calls for single blocks.
    "QrDecompositionBlock": "a QR factorization of a block of columns (TPU)",
    "CompactWyHelper": "a triangular factor of a block's Householder reflectors (TPU)",
    "EighTpu": "a Jacobi eigendecomposition, from four quadrants of its operand (TPU)",
    "LuDecompositionBlock": "an LU factorization of a block, with row pivots (TPU)",
    "LuRealDecompositionBlock": "the same of real numbers, by libtpu from 0.0.50 (TPU)",
    "InvertDiagBlocksLowerTriangular": "inverses of the triangular blocks on a diagonal (TPU)",
    "InvertDiagBlocksUpperTriangular": "inverses of the triangular blocks on a diagonal (TPU)",
}
_OWN_PREFIXES: dict[str, str] = {
    "__cublas$": "a matrix product by cuBLAS",
    "__cudnn$": "a convolution, norm or attention by "
    "cuDNN; dropout takes its seed from the operands or the configuration",
    "__onednn$": "a matrix product by oneDNN",
}
# Targets that return uninitialised memory, which differs between devices until it is overwritten.
UNINITIALISED = frozenset(["AllocateBuffer"])
FILLED = hs.Support(
    "an uninitialised buffer",
    "table",
    "built in",
    "assumed to be overwritten, by a loop or a kernel that writes to it, before it is read",
)

# A TPU collective may be spread over fusions: a start, optional steps, and a done. Each contains a
# copy of the collective with the same `chain_id`; the program uses only the done's result.
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"

# Targets that many kernels share: the target alone does not identify a kernel.
SHARED_TARGETS = frozenset(
    "tpu_custom_call __gpu$xla.gpu.triton triton_kernel_call triton_kernel_call_ffi mosaic_gpu_v2 "
    "mosaic_gpu xla_python_cpu_callback xla_ffi_python_cpu_callback "
    "xla_ffi_partitioned_python_cpu_callback xla_python_gpu_callback xla_ffi_python_gpu_callback "
    "xla_ffi_partitioned_python_gpu_callback".split()
)

_ATTRIBUTE = re.compile(
    r'(?<![\w.\-])([\w.\-]++)\s*=\s*("[^"\\]*(?:\\.[^"\\]*)*"|\{[^{}]*\}|'
    r'[^",{}]+(?:,(?!\s*[\w.\-]+\s*=)[^",{}=]*)*)'
)
_NAME = re.compile(r'(?<![\w.])(?:kernel_name|name)"?\s*[=:]\s*"((?:[^"\\]|\\.)*)"')
_ALIASED = re.compile(r":\s*\(\s*(\d+)")  # {{}: (1, {})}, {0}: (2, {})
_PALLAS = re.compile(r"\bname=([\w.<>\-]+)")


def frontend_attributes(text: str | None) -> dict[str, str]:
    """Return the keys and values of ``{a="x",b=y}``; values may be quoted or bare."""
    if not text:
        return {}
    attributes: dict[str, str] = {}
    inner = text[1:-1] if text.startswith("{") else text
    for key, value in _ATTRIBUTE.findall(inner):
        value = value.strip()
        if value[:1] == '"':
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        attributes[key] = value
    return attributes


def kernel_name(
    config: str | None, target: str, tag: dict[str, str], metadata: Metadata
) -> str | None:
    """Return the kernel's name from the tag, the backend config or the op_name."""
    if tag.get("shardrules.kernel"):
        return tag["shardrules.kernel"]
    if target not in SHARED_TARGETS:
        return target
    if config:
        if config.startswith('"'):
            config = re.sub(r"\\(.)", r"\1", config[1:-1])
        # A kernel's quoted body may contain any text: take a name only from a key outside of it.
        outside = re.sub(
            r'((?:\bir|"?body"?|\bmodule|\bopaque)\s*[=:]\s*)"[^"\\]*(?:\\.[^"\\]*)*"',
            r'\1""',
            config,
        )
        match = _NAME.search(outside)
        if match and match[1]:
            return match[1]
    for key in ("kernel_name", "name"):
        if tag.get(key):
            return tag[key]
    match = _PALLAS.search(metadata.op_name.partition("pallas_call[")[2])
    return match[1] if match else None


def read_mesh(text: str) -> dict[str, int] | None:
    """Return the mesh of a tag's ``data=4,model=2``; None if the text has another form."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name or not re.fullmatch(r"[1-9]\d{0,8}", size) or name in axes:
            return None
        axes[name] = int(size)
    return axes or None


def empty_buffer(values: Values, filling: bool) -> int:
    """Return the state of an uninitialised buffer, which a loop around it fills if ``filling``."""
    loop = ", in a loop that fills it" if filling else ""
    state = values.states.blocked(
        hs.Blocker(f"an uninitialised buffer that nothing is shown to fill{loop}")
    )
    if state not in values.unwritten:
        written = values.states.intern(hs.ValueState(supports=(FILLED,)))
        values.unwritten[state] = written if filling else state
    return state


def target_of(instruction: Instruction) -> str:
    """Return a custom call's target; "" for any other instruction."""
    if instruction.opcode != "custom-call":
        return ""
    return (instruction.attribute("custom_call_target") or "").strip('"')


def aliased(instruction: Instruction) -> set[int]:
    """Return the numbers of the operands whose memory a custom call's results reuse."""
    table = instruction.attribute("output_to_operand_aliasing") or ""
    return {int(number) for number in _ALIASED.findall(table)}


def spread_steps(module: Module) -> set[tuple[str, int]]:
    """Return the places of a spread collective's copies whose done is in another fusion."""
    # Only the copy in the done counts: the other copies with its chain_id are the same collective.
    steps: dict[str, list[tuple[str, int]]] = {}
    done: set[str] = set()
    if not module.mentions(ASYNC_DONE):
        return set()
    fused: set[str] = set()
    for computation in module.computations.values():
        for instruction, names in computation.calls():
            if instruction.opcode == "fusion":
                fused.update(names)
    for name in fused:
        if module.opcodes[name].isdisjoint(KINDS):
            continue
        instructions = module.computations[name].instructions
        dones = (i.operands for i in instructions if target_of(i) == ASYNC_DONE)
        ended = {*itertools.chain.from_iterable(dones)}
        for position, instruction in enumerate(instructions):
            if instruction.opcode in KINDS:
                hints = frontend_attributes(instruction.attribute("frontend_attributes"))
                if position in ended and "chain_id" in hints:
                    done.add(hints["chain_id"])
                elif "chain_id" in hints:
                    steps.setdefault(hints["chain_id"], []).append((name, position))
    return {*itertools.chain.from_iterable(steps.get(chain, ()) for chain in done)}


class CallEffects(NamedTuple):
    """The effects of one custom call, and the evidence for them."""

    effects: tuple[axistypes.Effect, ...] | None  # one for each output; None: see ``blocker``
    support: hs.Support | None  # the evidence for the effects
    mesh: dict[str, int] | None  # the tag's mesh
    blocker: Any  # the hs.Blocker for outputs whose effect or mesh isn't known


class _CustomCall:
    """A custom call as its text describes it."""

    def __init__(self, module: Module, instruction: Instruction):
        given = {key: instruction.text[a:b] for key, a, b in instruction.attributes()}
        parts = instruction.shape.elements
        metadata = module.frames.metadata(given.get("metadata", ""))
        self.target = given.get("custom_call_target", "").strip('"')
        self.config = given.get("backend_config")
        self.tag = frontend_attributes(given.get("frontend_attributes"))
        self.outputs = 1 if parts is None else len(parts)  # number of arrays
        self.op_name = self.where = metadata.op_name  # with the source line, for messages
        self.kernel = kernel_name(self.config, self.target, self.tag, metadata)
        if metadata.frames:
            line = str(metadata.frames[0])
            self.where = f"{self.op_name} ({line})" if self.op_name else line

    def blocker(self, why: str) -> hs.Blocker:
        name = "" if self.kernel == self.target else f" (kernel {self.kernel!r})"
        shown = f"custom call {self.target!r}{name if self.kernel else ' (kernel without a name)'}"
        return hs.Blocker(f"{shown} {why}", self.kernel, self.target, self.where)

    def unknown(self, why: str, mesh: dict[str, int] | None = None) -> CallEffects:
        return CallEffects(None, None, mesh, self.blocker(why))

    def local(self, support: hs.Support | None = None) -> CallEffects:
        return CallEffects((axistypes.Effect("local"),) * self.outputs, support, None, None)


def resolve(module: Module, instruction: Instruction, registry: Any) -> CallEffects:
    """Resolve a call by its tag, the registry, the table or the kernel's text, in this order."""
    # The tag comes first: shardrules wrote it at the kernel's own call, when types were known. The
    # registry's rules are by name. The table and the text only serve kernels that have neither.
    call = _CustomCall(module, instruction)
    resolution = _by_tag(call) or _by_rule(call, registry) or _by_table(call) or _by_text(call)
    return resolution or call.unknown("has no rule")


def _by_tag(call: _CustomCall) -> CallEffects | None:
    text = call.tag.get("shardrules.effects")
    if text is None:
        return None
    mesh_text = call.tag.get("shardrules.mesh", "")
    mesh = read_mesh(mesh_text) if mesh_text else None
    try:
        effects = axistypes.parse_effects(text)
    except errors.ShardrulesError:
        return call.unknown(f"has a tag that can't be read, {text!r}", mesh)
    if len(effects) != call.outputs:
        why = f"has a tag for {len(effects)} outputs, not {call.outputs}"
        return call.unknown(why, mesh)
    axes = {*itertools.chain.from_iterable(e.axes for e in effects)}
    needs = any(e.kind in ("join", "exchange", "typed") for e in effects)
    if needs and mesh is None:
        return call.unknown(f"has a tag with mesh axes but no usable mesh, {mesh_text!r}")
    if mesh is not None and not axes <= set(mesh):
        why = f"has a tag for axes that its mesh {mesh_text!r} lacks, {text!r}"
        return call.unknown(why, mesh)
    if any(e.kind == "unknown" for e in effects) and len(effects) == 1:
        return call.unknown("is tagged 'unknown': it has no rule", mesh)
    status = "audited" if call.tag.get("shardrules.status") == "audited" else "declared"
    detail = f"{text}, {PROVEN}" if status == "audited" else text
    support = hs.Support(repr(call.kernel or call.target), "tag", status, detail)
    return CallEffects(effects, support, mesh, call.blocker("is tagged 'unknown' for an output"))


def _by_rule(call: _CustomCall, registry: Any) -> CallEffects | None:
    if registry is None:
        return None
    for name in dict.fromkeys(n for n in (call.kernel, call.target) if n):
        if name in SHARED_TARGETS and name != call.kernel:
            continue  # such a rule would apply to all kernels of the target
        registration = registry.find(name)
        # The table describes jaxlib's own targets.
        if registration is not None and not (
            registration.library == "jaxlib" and call.target in JAXLIB.targets
        ):
            return _ruled(call, registration, repr(name))
    if not call.kernel and call.op_name:
        registration = registry.find_by_op_name(call.op_name)
        if registration is not None:
            return _ruled(call, registration, f"the kernel at {call.op_name}")
    return None


def _ruled(call: _CustomCall, registration: Registration, name: str) -> CallEffects:
    effects = registration.rule.effects(call.outputs)
    if effects is None:
        return call.unknown(
            "has a rule that needs the operands' types, which the text lacks; compile it with "
            "shardrules installed"
        )
    if len(effects) != call.outputs:
        return call.unknown(f"has a rule for {len(effects)} outputs, not {call.outputs}")
    detail = f"{axistypes.format_effects(effects)}, {registration.status} at {registration.where}"
    support = hs.Support(name, "rule", registration.status, detail)
    return CallEffects(
        tuple(effects), support, None, call.blocker("has a rule that says 'unknown'")
    )


def _by_table(call: _CustomCall) -> CallEffects | None:
    own = call.target in OWN_TARGETS or call.target in JAXLIB.targets
    return call.local() if own or call.target.startswith(tuple(_OWN_PREFIXES)) else None


def _by_text(call: _CustomCall) -> CallEffects | None:
    """Return the effects of a kernel from its text; XLA for TPU writes some kernels as text."""
    if call.target != "tpu_custom_call" or not mosaic.is_local(call.config or ""):
        return None
    name = repr(call.kernel) if call.kernel else f"the kernel at {call.op_name or 'no op_name'}"
    return call.local(hs.Support(name, "text", "audited", f"its own MLIR, {PROVEN}"))
