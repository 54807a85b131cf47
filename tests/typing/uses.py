"""A user's file with every public name. Each line that ends in ``# wrong`` must be an error for a
type checker, and no other line may be: ``check.py`` compares. It is never run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import shardrules
import shardrules as sr
from shardrules import aot, errors, hlo, registry, report, testing

# --- rules -----------------------------------------------------------------------------------------

one: sr.Rule = sr.all_gather("model")
many: list[sr.Rule] = [
    sr.all_gather("model"),
    sr.all_gather_invariant("model"),
    sr.all_reduce("data", "model"),
    sr.all_to_all("model"),
    sr.linear(sr.no_communication),
    sr.outputs(sr.no_communication, lambda ctx: [ctx.union]),
    sr.per_device("data"),
    sr.permute("data"),
    sr.reduce_scatter("data"),
    sr.unreduced("data"),
]
sr.all_gather(1)  # wrong
sr.linear("no_communication")  # wrong
sr.no_such_rule("model")  # wrong


def answer(ctx: sr.RuleContext) -> list[sr.AxisType]:
    name: str = ctx.name
    return [ctx.inputs[0], ctx.union.drop("model").vary(name)]


def wrong_answer(ctx: sr.RuleContext) -> list[sr.AxisType]:
    return [ctx.input[0]]  # wrong


axis_type = sr.AxisType("data", unreduced=["model"])
axes: frozenset[str] = axis_type.varying | axis_type.axes
axis_type.varies  # wrong
effect = sr.Effect("exchange", ("model",))
kind: str = effect.kind
number: int = effect.kind  # wrong

# --- declarations keep the type of what they declare -------------------------------------------------


@sr.no_communication
def kernel(x_ref: Any, o_ref: Any) -> None: ...


@sr.all_gather("model")
def op(x: float, scale: int = 1) -> str:
    return str(x * scale)


text: str = op(1.0, scale=2)
same: Callable[[Any, Any], None] = kernel
op("x", scale="y")  # wrong
length: int = op(1.0)  # wrong
sr.no_communication(3)  # wrong


class Attention:
    """An op of one's own kind of object, as ``jax.custom_vjp`` makes."""

    def __call__(self, x: float) -> float:
        return x

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None: ...


attention = sr.no_communication(Attention())
attention.defvjp(print, print)
attention.defjvp(print)  # wrong

# --- the registry ------------------------------------------------------------------------------------

entry: sr.Registration = sr.register("splash_*", sr.no_communication, replace=True)
where: str = entry.where
sr.register("k", answer)
sr.register("k", lambda ctx: [ctx.union])
sr.register("k", 3)  # wrong
sr.register("k", sr.no_communication, overwrite=True)  # wrong
sr.register("k")  # wrong
with sr.rules({"k": sr.per_device("data"), "l": answer}):
    pass
with sr.rules(["k"]):  # wrong
    pass
own: sr.Registry = sr.Registry()
own.register("k", one)
found: sr.Registration | None = own.find("k")
shipped: registry.Registry = registry.default
table: tuple[type[Any], ...] = (registry.Registration, registry.Rule, registry.Overlay)
types: tuple[type[Any], ...] = (registry.AxisType, registry.Effect, registry.RuleContext)
registry.register(registry.normalise("jit(f)"), one)
with registry.rules({"k": one}):
    pass
registry.unregister("k")  # wrong

# --- the hooks ---------------------------------------------------------------------------------------

with sr.install(unknown="warn", prove=False) as handle:
    handle.uninstall()
sr.install("warn")  # wrong
handle.remove()  # wrong
x: Any = sr.vary(1.0, "data")
ct: Any = sr.already_summed(1.0, "data")
sr.vary(1.0, axis_name=3)  # wrong
placed: float = sr.place_casts(lambda a: 2.0 * a)(1.0)
sr.place_casts(1.0)  # wrong
sr.install(casts=1)  # wrong
sr.install(casts="soon")  # wrong
sr.install(unknown="ignore")  # wrong
sr.install(unchecked="checked")  # wrong
print(sr.explain(op, 1.0).calls, sr.scan_calls(op, 1.0, scale=2))
sr.explain()  # wrong
print(sr.explain(op, 1.0).kernels)  # wrong
sr.assert_same_rules(timeout_s=30)
sr.assert_same_rules("30")  # wrong
version: str = sr.__version__

# --- errors ------------------------------------------------------------------------------------------

try:
    sr.register("k", one)
except (sr.ShardrulesError, errors.RegistrationError) as error:
    message: str = error.message
    print(error.name)
known: list[type[sr.ShardrulesError]] = [
    errors.AnnotationWarning,
    errors.WholeCotangentWarning,
    errors.AotError,
    errors.ArgumentError,
    errors.AxisError,
    errors.BudgetError,
    errors.CollectiveAssertionError,
    errors.CostAssertionError,
    errors.CotangentError,
    errors.HloError,
    errors.HloSyntaxError,
    errors.MissingProcessError,
    errors.NotInstalledError,
    errors.ProfileError,
    errors.RefError,
    errors.RegistrationError,
    errors.ReplicationAssertionError,
    errors.RuleCheckError,
    errors.RuleError,
    errors.RulesDifferError,
    errors.ShardrulesError,
    errors.SteadyStateError,
    errors.UnknownKernelError,
    errors.UnsupportedJaxError,
    errors.UntestedJaxWarning,
]
errors.NoSuchError  # wrong

# --- every program of a process ---------------------------------------------------------------------

with sr.watch(strict=True, allow={"redundant all-reduce(model)": "issue 12"}) as seen:
    op(1.0)
for program in seen:
    program_judgement: hlo.Judgement = program.judgement
    program_text: bytes = program.text  # wrong
print(seen, seen.clean, len(seen))
sr.watch(alow={})  # wrong
profiled = sr.profile("trace", mesh={"data": 4, "model": 2}, strict=True)
milliseconds: float = profiled.avoidable_seconds * 1e3
sr.profile()  # wrong

# --- testing -----------------------------------------------------------------------------------------

mesh: Mapping[str, int] = {"data": 4, "model": 2}
judgement: hlo.Judgement = testing.assert_no_defensive_psum(op, 1.0, mesh=mesh, strict=True)
testing.assert_no_defensive_psum(op, 1.0, mesh=8)  # wrong
testing.assert_collectives(op, 1.0, expect={"all-reduce(data)": 1}, level="logical")
testing.assert_collectives(op, 1.0)  # wrong
testing.assert_collectives(op, expect=testing.at_most({"all-reduce(data)": {"bytes": 8}}))
testing.assert_collectives(op, expect=testing.exactly({"all-reduce(data)": {"count": 8}}))
testing.at_most(8)  # wrong
testing.assert_outputs_replicated(op, 1.0, output_shardings=["{replicated}"])
testing.assert_same_unchecked(op, 1.0)
testing.assert_budget(op, 1.0, "budgets/train.toml")
testing.assert_cheapest_casts(op, 1.0)
testing.assert_donated(op, 1.0, paths=["state"])
testing.assert_no_host_transfers(op, 1.0, allow={"callback": "issue 12"})
testing.assert_offloaded(op, 1.0, names=["block_in"], min_bytes=1024)
testing.assert_offloaded(op, 1.0, names=8)  # wrong
testing.assert_loop(op, 1.0, max_launches_per_iteration=3, trip_count="static", at="op.py:1")
testing.assert_loop(op, 1.0, max_launches_per_iteration="3")  # wrong
testing.assert_no_large_constants(op, 1.0, max_bytes=1024)
testing.assert_no_large_constants(op, 1.0, max_bytes="1 kB")  # wrong
testing.assert_output_sharding(op, 1.0, expect={"['w']": None})
print(testing.named_values(op, 1.0))
flags: str = testing.verify_flags(op, 1.0)
with testing.steady_state(warmup_count=1) as steady:
    steady.tick()
testing.steady_state(warmup=1)  # wrong
testing.check_replicated_inputs(1.0, state=2.0)
testing.check_rule(op, None, 1.0, gradients=False, seed=1)
testing.check_rule(op)  # wrong
account = testing.account(op, 1.0, level="logical")
total: int = account.total.wire_bytes
account.totals  # wrong
judged: hlo.Judgement = testing.judge(op, 1.0)
testing.assert_no_such_thing(op)  # wrong

# --- hlo, report, aot --------------------------------------------------------------------------------

module: hlo.Module = hlo.parse("HloModule m", name="m.hlo")
verdict: hlo.Verdict = hlo.judge(module, mesh=mesh).verdicts[0]
hlo.judge(8)  # wrong
collective: hlo.Collective = verdict.collective
bytes_: int = verdict.bytes
name: str = verdict.bytes  # wrong
supports: tuple[hlo.Support, ...] = verdict.rests_on
blockers: tuple[hlo.Blocker, ...] = verdict.blockers
part: hlo.Range | None = verdict.range
frame: hlo.Frame | None = collective.source
output: hlo.Output = judged.outputs[0]
output.equal_over("data")
computation: hlo.Computation = module.entry
instruction: hlo.Instruction = computation.instructions[0]
shape: hlo.Shape = instruction.shape
metadata: hlo.Metadata = module.metadata(instruction)
print(hlo.VERDICTS)

content: report.Content = report.content(judged, title="step")
pages: list[str] = [report.as_json(content), report.markdown(content), report.page(content)]
pages += [report.github([content]), report.sarif([content])]
pages += [report.plain(content), report.over(verdict)]
pages += [report.table([("a", "b"), (1, 2)])]
pages += [report.describe_finding(finding) for finding in content.findings]
pages += report.listed(list(content.account))
pages.append(report.DIFFS["markdown"](content, content, []))
table_rows: tuple[report.Row, ...] = content.rows
blocks: tuple[report.Block, ...] = content.changes
items: list[report.Item] = [item for block in blocks for item in block.items]
pages += [report.size(row.total.wire_bytes) for row in table_rows]
report.page(judged)  # wrong
pages += [report.compared(content, content, [])]

devices: tuple[Any, ...] = aot.tpu("v5e:2x4") + aot.gpu("h100", 8)
aot.gpu("h100", "8")  # wrong
command: str | None = aot.missing_plugin("tpu")
names: tuple[str, ...] = aot.gpu_names()

# Modules by attribute, as after `import shardrules` alone.
shardrules.testing.judge(os.devnull)
context: contextlib.AbstractContextManager[Any] = shardrules.rules({})
shardrules.nonexistent_thing  # wrong
