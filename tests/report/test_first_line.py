"""The first line says what to do first; where nothing is, what a program spends most."""

import os

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import report, testing
from shardrules.commands import closing
from shardrules.costs import findings, timings
from shardrules.paths import here
from shardrules.report import items, several
from shardrules.report.grouping import connected


def told(f, mesh, *pairs, **how):
    content = report.content(testing.judge(f, *programs.structs(mesh, *pairs)), title="it", **how)
    return content, content.headline.rpartition("; ")[2]


def sharded(f, mesh, *specs):
    args, out = specs[:-1], specs[-1]
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=args, out_specs=out, check_vma=False))


def stacked(x):
    """Two statistics of each trip, which are only stacked."""

    def layer(h, _):
        h = jnp.tanh(h)
        return h, (lax.pmean(h.mean(), "data"), lax.pmax(h.max(), "data"))

    return lax.scan(layer, x, None, length=8)


def test_what_could_be_cheaper_is_named_in_place_of_no_findings(cpu_mesh):
    f = sharded(stacked, cpu_mesh, P("data"), (P("data"), P()))
    content, end = told(f, cpu_mesh, ((64, 128), P("data")))
    assert content.clean and content.worth.startswith("14 round trips can be avoided")
    assert end.startswith("could be cheaper: after the loop at ") and end.endswith(" and 1 more")
    assert "test_first_line.py:" in end
    both = several.gather([content], [1])
    assert end in both.about and "findings" not in both.about
    assert closing.counted(both) == end
    row = dict(zip(both.programs.columns, both.programs.rows[0]))
    assert (row["findings"], row["cheaper"]) == ("none", "2")  # as the exit code says
    for text in (report.plain(both), report.markdown(both), report.page(both)):
        assert "could be cheaper" in text and text.count("no findings") == 0


def test_what_costs_most_is_named_beside_a_hint_that_saves_little(cpu_mesh):
    """States at places that the program computes are gathered; a mean of each trip is stacked."""

    def body(x, t):
        x = x[(jnp.arange(64) + t) % 64]
        return x, x.mean()

    f = jax.jit(lambda x: lax.scan(body, x, jnp.arange(8)))
    content, end = told(f, cpu_mesh, ((64, 128), P("data")))
    assert end.startswith("the most: forward all-") and end.endswith("partitioner for gather")
    assert content.cheaper.startswith("could be cheaper: after the loop at ")


def test_most_of_the_bytes_for_which_no_line_asks(cpu_mesh):
    f = jax.jit(jax.grad(lambda w, x: ((x @ w) ** 2).mean()))
    args = ((128, 128), P()), ((64, 128), P("data"))
    content, end = told(f, cpu_mesh, *args)
    by = "by XLA's partitioner for dot_general"
    assert end == f"the most: backward all-reduce(data), 100%, {by}"
    assert content.headline.endswith(f"; all needed; {end}")


def test_what_the_program_asks_for_is_no_finding(cpu_mesh):
    f = sharded(lambda x: lax.psum(x, "data"), cpu_mesh, P("data"), P())
    content, end = told(f, cpu_mesh, ((64, 128), P("data")))
    assert end == "the most: forward all-reduce(data), 100%"
    assert several.gather([content], [1]).about.endswith(f"all needed; {end}")
    whole = NamedSharding(cpu_mesh, P())
    g = jax.jit(lambda x: lax.with_sharding_constraint(jnp.tanh(x), whole) @ x.T)
    assert "by XLA's partitioner" not in told(g, cpu_mesh, ((64, 128), P("data")))[1]
    twice = sharded(lambda x: lax.psum(x, "data"), cpu_mesh, P(), P())
    content, end = told(twice, cpu_mesh, ((64, 128), P()))
    assert [finding.kind for finding in content.findings] == ["redundant"]
    assert end.startswith("the costliest: redundant forward all-reduce(data) at ")
    allow = findings.Allowances({"redundant all-reduce(data)": "to be seen"})
    content, end = told(twice, cpu_mesh, ((64, 128), P()), allow=allow)
    assert end == "the most: forward all-reduce(data), 100%" and "all needed" not in content.about


def test_the_most_is_of_the_bytes_where_the_rows_stand_by_their_times(cpu_mesh):
    """It said of the slowest which part of the bytes it moves."""
    f = sharded(lambda x: (lax.psum(x, "data"), lax.pmax(x[0], "data")), cpu_mesh, P("data"), P())
    judgement = testing.judge(f, *programs.structs(cpu_mesh, ((64, 128), P("data"))))
    each = [1e-3 if v.bytes > 512 else 5e-3 for v in judgement.verdicts]
    timed = timings.Timings(0.1, tuple(timings.Timing(s, s, s, 1, "0", "0") for s in each))
    content = report.content(judgement, timings=timed)
    assert content.rows[0].first.bytes == 512
    assert content.about.endswith("the most: forward all-reduce(data), 94% of the bytes")


def test_the_costliest_of_findings_and_of_what_could_be_cheaper(cpu_mesh):
    """A sum for nothing of 4 bytes beside a gather that is only summed up."""

    def f(x, small):
        return lax.all_gather(x, "data", tiled=True).sum(0), lax.psum(small, "data")

    args = ((64, 128), P("data")), ((), P())
    f = sharded(f, cpu_mesh, P("data"), P(), (P(), P()))
    content, end = told(f, cpu_mesh, *args)
    assert [finding.kind for finding in content.findings] == ["redundant"]
    assert end.startswith("the costliest: reduce instead forward all-gather(data) at ")
    assert several.gather([content], [1]).about.endswith(end)


def test_a_program_without_collectives_has_no_findings(cpu_mesh):
    assert told(jax.jit(jnp.tanh), cpu_mesh, ((64, 128), P("data")))[1] == "no findings"


def cheaper(content):
    return next(block for block in content.changes if block.title == "Could be cheaper")


def test_parts_of_one_combined_collective_are_one_change(cpu_mesh):
    """Without the other, a part that leaves the loop saves no round trip."""

    def statistics(x):
        def layer(h, _):
            h = jnp.tanh(h)
            mean = lax.pmean(h.mean(), "data")
            return h, (mean, lax.pmean((h**2).mean(), "data"))

        return lax.scan(layer, x, None, length=8)

    f = sharded(statistics, cpu_mesh, P("data"), (P("data"), P()))
    content, end = told(f, cpu_mesh, ((64, 128), P("data")))
    first, second = content.hints
    names = [hint.verdict.collective.name for hint in content.hints]
    assert names[0] == names[1] and first.entry.source != second.entry.source
    assert end.startswith("could be cheaper: after the loop at ") and not end.endswith("more")
    block = cheaper(content)
    (said,) = block.items
    lines = dict(said.lines)
    assert lines["saves"] == "7 round trips, together with 1 other" and not block.rest
    assert second.entry.what in lines["likewise"] and "test_first_line.py:" in lines["likewise"]


def test_an_item_does_not_list_its_own_title_as_likewise(cpu_mesh):
    def statistics(x):
        def layer(h, _):
            h = jnp.tanh(h)
            a, b = h.mean(), (h**2).mean()
            a, b = lax.pmean((a, b), "data")
            return h, (a, b, lax.pmean(h.max(), "data"))

        return lax.scan(layer, x, None, length=8)

    f = sharded(statistics, cpu_mesh, P("data"), (P("data"), P()))
    content, _ = told(f, cpu_mesh, ((64, 128), P("data")))
    first = content.hints[0].entry
    assert len(content.hints) == 3 and len({hint.entry.source for hint in content.hints}) == 2
    (said,) = cheaper(content).items
    (likewise,) = (text for label, text in said.lines if label == "likewise")
    assert "forward all-reduce(data) at " in likewise and here(first.place) not in likewise


def test_parts_that_leave_a_combined_collective_in_two_ways_are_one_change(cpu_mesh):
    """Neither way alone saves a round trip; the parts' sums may go on as one or as two."""

    def statistics(x):
        def layer(carry, _):
            h, total = carry
            h = jnp.tanh(h)
            total = total + lax.pmean(h.mean(), "data")
            return (h, total), lax.pmean((h**2).mean(), "data")

        # Beside it they are too small to be findings.
        return lax.scan(layer, (x, 0.0), None, length=8), lax.psum(x.T @ x, "data")

    f = sharded(statistics, cpu_mesh, P("data"), (((P("data"), P()), P()), P()))
    content, _ = told(f, cpu_mesh, ((64, 128), P("data")))
    first, second = content.hints
    assert first.verdict.collective.name == second.verdict.collective.name
    (said,) = cheaper(content).items
    lines = dict(said.lines)
    assert lines["saves"] == "42 B and 7 round trips (<0.1%), together with 1 other"
    assert "likewise" not in lines
    one, other = lines["to do:"].split("; and ")
    assert "no trip of the loop reads its results" in one + other
    assert "its results are only added up" in one + other
    assert other.startswith("forward all-reduce(data) at ") and "test_first_line.py:" in other


def test_a_small_part_of_a_large_combined_collective_is_no_less_a_finding(cpu_mesh):
    """They go together, so that they stand in one list, with the round trips that both save."""

    def statistics(x):
        def layer(carry, _):
            h, total = carry
            h = jnp.tanh(h)
            return (h, total + lax.psum(h.T @ h, "data")), lax.pmean((h**2).mean(), "data")

        return lax.scan(layer, (x, jnp.zeros((128, 128))), None, length=8)

    f = sharded(statistics, cpu_mesh, P("data"), ((P("data"), P()), P()))
    content, _ = told(f, cpu_mesh, ((64, 128), P("data")))
    large, small = content.findings
    assert not content.hints and large.entry.bytes > 100 * small.entry.bytes
    assert large.verdict.collective.name == small.verdict.collective.name
    (block,) = (block for block in content.changes if block.items)
    (said,) = block.items
    lines = dict(said.lines)
    assert "together with 1 other finding" in lines["saves"]
    assert "; and forward all-reduce(data) at " in lines["to do:"]
    with pytest.raises(AssertionError):
        testing.assert_no_defensive_psum(f, *programs.structs(cpu_mesh, ((64, 128), P("data"))))


def test_what_shares_anything_is_one_group():
    keys = {"a": [1], "b": [2, 3], "c": [4], "d": [3, 1], "e": [5, 4], "f": [6]}
    groups = connected(keys, lambda name: keys[name])
    assert groups == [("a", "b", "d"), ("c", "e"), ("f",)]
    assert connected("ba", lambda name: keys[name]) == [("b",), ("a",)]


def test_the_first_line_names_what_the_list_begins_with(cpu_mesh):
    """Two gathers of one line save more together than a larger one of another line."""

    def f(x, y, z):
        def total(a):
            return lax.all_gather(a, "data", tiled=True).sum(0)

        small = [total(a) for a in (x, jnp.tanh(y))]
        return *small, lax.all_gather(z, "data", tiled=True).sum(0)

    rows = P("data")
    sizes = [((64, 128), rows), ((64, 128), rows), ((96, 128), rows)]
    content, end = told(sharded(f, cpu_mesh, rows, rows, rows, (P(),) * 3), cpu_mesh, *sizes)
    first = cheaper(content).items[0]
    assert first.what.startswith("2 x ")
    assert end == f"could be cheaper: reduce instead at {first.source} and 1 more"


def test_advice_of_other_sizes_is_other_advice():
    """Of two arrays on one line, to pad to 12 and to 16, each is told its own."""
    assert items.words("it sends 896 B, kept, 64 B") == items.words("it sends 917504 B, kept, 8 B")
    assert items.words("pad it to 12") != items.words("pad it to 16")


def test_a_reason_names_a_file_as_it_is_named_elsewhere():
    call = f"no rule at jit(f)/callback ({os.path.join(os.getcwd(), 'a.py')}:8 (f))"
    assert here(call) == "no rule at jit(f)/callback (a.py:8 (f))"
    assert here("https://a.b (/elsewhere/a.py:8)") == "https://a.b (/elsewhere/a.py:8)"
