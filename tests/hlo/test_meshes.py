"""Meshes: told, or not known; groups compared by themselves."""

import numpy as np
import pytest

from shardrules import errors, hlo
from shardrules.costs import accounts, comparing
from shardrules.hlo.reader import annotate, devices, notations

from . import text as T


def program(*groups, sharding=T.DATA, extra=""):
    lines = [T.parameter(sharding)]
    lines += [T.all_reduce("%x", g, name=f"r{n}") for n, g in enumerate(groups)]
    return T.module("\n".join(lines) + extra)


WRONG = {"model": 2, "data": 4}


@pytest.mark.parametrize("groups", [T.OVER_MODEL, T.OVER_DATA, "[4,2]<=[8]", "[2,4]<=[4,2]T(1,0)"])
def test_a_mesh_of_another_order_is_refused(groups):
    assert hlo.judge(program(groups), mesh=T.MESH).verdicts[0].collective.axes
    with pytest.raises(errors.HloError) as caught:
        hlo.judge(program(groups), mesh=WRONG)
    assert "the mesh (model=2, data=4) contradicts the program: the groups of 'r0', " in str(
        caught.value
    )
    assert "pass --mesh=data=4,model=2 or mesh={'data': 4, 'model': 2}, or no mesh" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "groups, mesh",
    [
        ([T.ALL], WRONG),  # of all devices: along both axes in any order
        (["{{0},{1},{2},{3},{4},{5},{6},{7}}"], WRONG),
        ([T.OVER_MODEL, "{{0,3},{1,2},{4,7},{5,6}}"], T.MESH),  # axis_index_groups explain nothing
        (["{{0,3},{1,2},{4,7},{5,6}}"], WRONG),
        ([T.OVER_MODEL, "{{0,4},{1,5},{2,6},{3,7}}"], T.MESH),  # ... though one order would
        ([T.OVER_MODEL], {"data": 8}),
        (["{{0,2},{1,3},{4,6},{5,7}}"], {"a": 2, "b": 2, "c": 2}),
    ],
)
def test_groups_that_contradict_nothing(groups, mesh):
    sharding = "{replicated}" if mesh is WRONG else T.DATA
    assert len(hlo.judge(program(*groups, sharding=sharding), mesh=mesh).verdicts) == len(groups)


def test_a_programs_own_mesh_is_not_doubted():
    assert hlo.judge(program(T.OVER_MODEL), own_mesh=WRONG).verdicts[0].collective.axes is None


NAMED = "mesh['a'=2,'b'=4] {'a'}"


@pytest.mark.parametrize(
    "other, axes, over",
    [(T.OVER_MODEL, None, "4 groups of 2: [4,2]<=[8]"), ("{{0,1,2,3},{4,5,6,7}}", ("b",), "b")],
)
def test_the_mesh_of_one_collective_names_the_axes_of_others(other, axes, over):
    judgement = hlo.judge(program(NAMED, other))
    first, second = (v.collective for v in judgement.verdicts)
    assert first.axes == ("a",) and second.axes == axes
    assert [e.over for e in accounts.of(judgement)] == ["a", over]


def test_of_two_meshes_each_collective_has_its_own_names():
    other = "mesh['a'=4,'b'=2] {'b'}"
    judgement = hlo.judge(program(NAMED, other))
    first, second = (v.collective for v in judgement.verdicts)
    assert judgement.mesh is None
    assert first.axes == ("a",) and second.axes == ("b",)
    assert [e.over for e in accounts.of(judgement)][0] == "a: [4,2]<=[2,4]T(1,0)"


INVENTED = NAMED.replace("'a'", "'axis_0'").replace("'b'", "'axis_1'")


@pytest.mark.parametrize(
    "groups, axes",
    [
        ([NAMED, "[4,2]<=[2,4]T(1,0)", INVENTED, "{{0,4},{1,5},{2,6},{3,7}}"], ("a",)),
        ([INVENTED, "[4,2]<=[2,4]T(1,0)"], None),  # these are nobody's names
        ([NAMED, NAMED.replace("'a'", "'c'"), "[4,2]<=[2,4]T(1,0)"], None),  # or which one is it?
    ],
)
def test_one_set_of_groups_has_one_name(groups, axes):
    judgement = hlo.judge(program(*groups))
    assert [v.collective.axes for v in judgement.verdicts] == [axes] * len(groups)
    assert len({entry.over for entry in accounts.of(judgement)}) == 1


def test_two_notations_with_the_same_names_are_told_apart():
    other = "mesh['a'=4,'b'=2] {'b'}"
    account = accounts.of(hlo.judge(program(NAMED.replace("{'a'}", "{'b'}"), other)))
    assert len(account.by("over")) == 2


@pytest.mark.parametrize(
    "name, found", [("data", {"data": 4, "model": 2}), ("axis_0", None), ("_axis_0", None)]
)
def test_shardings_name_the_mesh_if_the_names_are_the_programs(name, found):
    sharding = f"{{mesh['{name}'=4,'model'=2], [{{'{name}'}}]}}".replace(
        "'model'", "'axis_1'" if found is None else "'model'"
    )
    assert hlo.judge(program(T.OVER_MODEL, sharding=sharding)).mesh == found


def test_shardings_that_disagree_name_none():
    one = "{mesh['data'=4,'model'=2], [{'data'}]}"
    other = "{mesh['x'=8], [{'x'}]}"
    text = T.module(
        f"{T.parameter(one)}\n{T.parameter(other, name='y', number=1)}\n{T.all_reduce('%x')}"
    )
    assert hlo.judge(text).mesh is None


@pytest.mark.parametrize(
    "groups, found",
    [
        ([NAMED], {"a": 2, "b": 4}),
        ([NAMED, "mesh['axis_0'=8] {'axis_0'}"], {"a": 2, "b": 4}),
        (["mesh['axis_0'=2,'axis_1'=4] {'axis_0'}"], None),  # XLA's names
        ([NAMED, "mesh['a'=4,'b'=2] {'b'}"], None),
        (["mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"], None),
    ],
)
def test_collectives_name_the_mesh_where_no_sharding_does(groups, found):
    """JAX 0.12 prints no shardings in compiled text."""
    reductions = [T.all_reduce("%x", each, name=f"r{n}") for n, each in enumerate(groups)]
    lines = "\n".join(['%x = f32[8] parameter(0), metadata={op_name="x"}', *reductions])
    assert hlo.judge(T.module(lines)).mesh == found


def test_shardings_name_the_mesh_before_collectives_do():
    sharding = "{mesh['data'=4,'model'=2], [{'data'}]}"
    assert hlo.judge(program(NAMED, sharding=sharding)).mesh == {"data": 4, "model": 2}


def differences(before, after, mesh=None):
    return comparing.compare(
        *(
            comparing.grouped(accounts.of(hlo.judge(t, mesh=mesh)), groups=True)
            for t in (before, after)
        )
    )


HALF = "{{0,1,2,3},{4,5,6,7}}"


@pytest.mark.parametrize(
    "one, other",
    [
        (T.OVER_MODEL, "{{0,4},{1,5},{2,6},{3,7}}"),
        (T.OVER_DATA, HALF),
        (NAMED, NAMED.replace("2", "4", 1).replace("4]", "2]")),  # one name, two meshes
        ("{{0,7},{1,6},{2,5},{3,4}}", "{{0,6},{1,7},{2,5},{3,4}}"),
    ],
)
def test_swapped_groups_are_a_difference(one, other):
    assert len(differences(program(one), program(other))) == 2
    assert differences(program(one), program(one)) == []


def test_groups_in_another_notation_are_the_same_groups():
    assert differences(program(T.OVER_DATA), program("[2,4]<=[4,2]T(1,0)")) == []
    assert differences(program(T.OVER_MODEL), program("{{3,2},{1,0},{6,7},{5,4}}")) == []


@pytest.mark.parametrize(
    "groups, changes", [("{{1,0},{3,2},{5,4},{7,6}}", 2), ("{{6,7},{2,3},{0,1},{4,5}}", 0)]
)
def test_the_order_within_a_group_is_a_difference_where_it_orders_parts(groups, changes):
    gather = (
        "%r = f32[16] all-gather(%x), channel_id=1, replica_groups={}, dimensions={{0}}, "
        "use_global_device_ids=true"
    )
    texts = [
        T.module(T.parameter(T.BOTH) + "\n" + gather.format(rows))
        for rows in (T.OVER_MODEL, groups)
    ]
    assert len(differences(*texts)) == changes


NEGATED = """%least (a.9: f32[], b.9: f32[]) -> f32[] {
  %a.9 = f32[] parameter(0)
  %b.9 = f32[] parameter(1)
  %na = f32[] negate(%a.9)
  %nb = f32[] negate(%b.9)
  %m = f32[] ROOT_OF(%na, %nb)
  ROOT %n = f32[] negate(%m)
}

"""


@pytest.mark.parametrize("one, other", [("add", "least"), ("least", "most")])
def test_reductions_of_several_operations_are_told_apart(one, other):
    regions = NEGATED.replace("ROOT_OF", "minimum")
    regions += NEGATED.replace("%least", "%most").replace("ROOT_OF", "maximum")
    texts = [
        T.module(T.parameter(T.BOTH) + "\n" + T.all_reduce("%x", apply=apply), regions)
        for apply in (one, other)
    ]
    assert len(differences(*texts)) == 2
    renamed = texts[1].replace("%a.9", "%c.4").replace("%na", "%first")
    assert differences(texts[1], renamed) == []


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[{}] all-gather(%x), channel_id=1, replica_groups={}, dimensions={{{}}}, "
        "use_global_device_ids=true",
        "%r = f32[{}] reduce-scatter(%x), channel_id=1, replica_groups={}, dimensions={{{}}}, "
        "use_global_device_ids=true, to_apply=%add",
        "%r = f32[{}] all-to-all(%x), channel_id=1, replica_groups={}, dimensions={{{}}}",
    ],
    ids=["all-gather", "reduce-scatter", "all-to-all"],
)
def test_another_dimension_is_a_difference(line):
    sizes = {"all-gather": "16,8 8,16", "reduce-scatter": "4,8 8,4", "all-to-all": "8,8 8,8"}
    shapes = sizes[line.split("] ")[1].partition("(")[0]].split()
    texts = [
        T.module(
            T.parameter("{replicated}", shape="f32[8,8]")
            + "\n"
            + line.format(size, T.OVER_MODEL, along)
        )
        for along, size in enumerate(shapes)
    ]
    assert len(differences(*texts)) == 2
    assert differences(texts[0], texts[0]) == []


@pytest.mark.parametrize(
    "channel, groups, found",
    [
        ("channel_id=1, ", "mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("channel_id=1, ", "mesh['a'=4] {'a'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("", "mesh['a'=2] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("channel_id=1, ", "mesh['a'=2,'b'=4] {'b'}", "a mesh of 8 devices in a module for 4"),
        ("", "mesh['a'=4] {'a'}", "a mesh of 4 devices in a module for 2"),
    ],
)
def test_a_mesh_is_one_of_the_ids_that_groups_hold(channel, groups, found):
    """Partitions by a channel, else replicas: as XLA for CPU runs it, and refuses the last two."""
    line = f"%r = f32[8] all-to-all(%x), {channel}replica_groups={groups}, dimensions={{0}}"
    header = "is_scheduled=true, num_partitions=4, replica_count=2"
    text = T.module(T.parameter("{replicated}") + "\n" + line, header=header)
    if isinstance(found, str):
        with pytest.raises(errors.HloSyntaxError, match=found):
            hlo.judge(text)
    else:
        assert hlo.judge(text).verdicts[0].collective.groups == found


def test_groups_are_named_where_only_they_differ():
    lines = [str(c) for c in differences(program(NAMED), program(T.OVER_DATA))]
    assert not any(" in [" in line for line in lines)
    permute = "%r = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={{{}}}"
    texts = [
        T.module(T.parameter(T.BOTH) + "\n" + permute.format(",".join(pairs)))
        for pairs in (
            [f"{{{i},{(i + 2) % 8}}}" for i in range(8)],
            [f"{{{(i + 2) % 8},{i}}}" for i in range(8)],
        )
    ]
    found = sorted(map(str, differences(*texts, T.MESH)), key=lambda line: line[0] != "-")
    assert found == [
        "- unknown collective-permute(data) f32 in "
        "{{0,2},{1,3},{2,4},{3,5},{4,6},{5,7},{6,0},{7,1}}: 1, 32 B",
        "+ unknown collective-permute(data) f32 in "
        "{{0,6},{1,7},{2,0},{3,1},{4,2},{5,3},{6,4},{7,5}}: 1, 32 B",
    ]


@pytest.mark.parametrize(
    "rows, written",
    [
        ([[0, 1], [2, 3]], "[2,2]<=[4]"),
        ([[3, 2], [0, 1]], "[2,2]<=[4]"),
        ([[0, 2], [1, 3]], "[2,2]<=[2,2]T(1,0)"),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], "[4,2]<=[2,2,2]T(0,2,1)"),
        ([[0, 3], [1, 2]], "{{0,3},{1,2}}"),
        ([[0], [1], [2]], "[3,1]<=[3]"),
        ([[0, 1, 2], [3]], "{{0,1,2},{3}}"),
        ([[0, 1, 2, 3]], "[1,4]<=[4]"),
        ([], "{}"),
    ],
)
def test_groups_are_written_one_way(rows, written):
    assert notations.notation(rows) == written
    if written.startswith("["):
        (members, sizes), _ = notations.read_groups(written)
        read = np.split(members, np.cumsum(sizes)[:-1])
        assert sorted(r.tolist() for r in read) == sorted(sorted(r) for r in rows)


@pytest.mark.parametrize("count", [5, 8, 100, 300])
def test_pairs_link_all_that_they_lead_to(count):
    """Circles, trees and devices alone, held against one step after the other."""
    rng = np.random.default_rng(count)
    for _ in range(50):
        targets = rng.permutation(count)[: rng.integers(count + 1)]
        ends = np.stack([rng.integers(count, size=len(targets)), targets])
        labels = np.arange(count)
        while (labels[ends[0]] != labels[ends[1]]).any():
            for source, target in ends.T:
                both = labels[[source, target]]
                labels[np.isin(labels, both)] = both.min()
        relations = devices.Relations(count)
        assert relations.labels(relations.linked(ends)).tolist() == labels.tolist()


def test_long_groups_are_cut_and_still_told_apart():
    rows = [[i, 99 - i] for i in range(50)]
    other = [*rows[:-2], [48, 50], [49, 51]]
    assert len(notations.notation(rows)) < 80
    assert notations.notation(rows) != notations.notation(other)


@pytest.mark.parametrize("header", ["", ', frontend_attributes={a="b",c="d=1"}'])
def test_what_is_told_is_read_again_and_is_hlo_to_xla(header):
    """The header's attributes hold the mesh, each parameter its sharding; what is there stays."""
    text = program(T.OVER_MODEL).replace(f", sharding={T.DATA}", "")
    text = text.replace("HloModule test", "HloModule test" + header, 1)
    assert header in text and "sharding=" not in text
    before = hlo.judge(text, own_mesh=T.MESH, parameter_shardings=[T.DATA])
    told = annotate.annotated(hlo.parse(text), T.MESH, [T.DATA])
    after = hlo.judge(told)
    assert after.mesh == before.mesh == T.MESH
    assert [str(v) for v in after.verdicts] == [str(v) for v in before.verdicts]
    assert after.redundant and header.removeprefix(", frontend_attributes={") in told
    assert annotate.annotated(hlo.parse(told), None, ["{replicated}"]) == told
    told = told.replace("() -> f32[]", "(x: f32[8]) -> f32[8]")
    pytest.importorskip("jaxlib._hlo").hlo_module_from_text(told)


@pytest.mark.parametrize("name", ['a"b', "a,b", "a=b", " a", "a "])
def test_a_mesh_that_would_be_read_as_another_one_is_not_told(name):
    """JAX takes these names; the text stays what XLA and the reader take."""
    text = program(T.OVER_MODEL)
    assert annotate.annotated(hlo.parse(text), {name: 4, "model": 2}, None) == text
    told = annotate.annotated(hlo.parse(text), {"a}b": 4, "\u00e9 (1)": 2}, None)
    assert hlo.judge(told).mesh == {"a}b": 4, "\u00e9 (1)": 2}


def test_a_sum_is_not_a_maximum():
    (came, went) = differences(
        *(
            T.module(f"{T.parameter(T.BOTH)}\n{T.all_reduce('%x', T.ALL, apply=apply)}")
            for apply in ("add", "max")
        )
    )
    assert {str(came), str(went)} == {
        "- unknown all-reduce(1 group of 8: [1,8]<=[8]) f32 in [1,8]<=[8]: 1, 32 B",
        "+ unknown all-reduce(1 group of 8: [1,8]<=[8]) f32 in [1,8]<=[8] by maximum: 1, 32 B",
    }


def test_what_may_run_is_not_what_runs():
    x = T.parameter("{replicated}")
    runs = T.module(f"{x}\n{T.all_reduce('%x', T.ALL)}")
    may = T.module(
        f"""{x}
        {T.parameter("{replicated}", "pred[]", "c", 1)}
        %y = f32[8] conditional(%c, %x, %x), true_computation=%yes, false_computation=%no""",
        f"""%yes (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT {T.all_reduce("%p", T.ALL)}
}}

%no (q: f32[8]) -> f32[8] {{
  ROOT %q = f32[8] parameter(0)
}}

""",
    )
    over = "unknown all-reduce(1 group of 8: [1,8]<=[8]) f32 in [1,8]<=[8]"
    assert [str(change) for change in differences(runs, may)] == [
        f"- {over}: 1, 32 B",
        f"+ {over} in a branch: at most 1, 32 B",
    ]
