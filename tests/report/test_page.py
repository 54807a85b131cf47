"""The HTML report: read by an HTML parser, its colours measured, its script never trusted."""

import html.parser
import pathlib
import re

import pytest
from hlo import text as T

from shardrules import hlo, report, units
from shardrules.costs import comparing, timings
from shardrules.report import drawn, several, treemap

FILES = {
    name: pathlib.Path(drawn.__file__).with_name(name).read_text()
    for name in ("page.css", "page.js")
}
VOID = {"meta", "input", "br"}


class Tree(html.parser.HTMLParser):
    """Each element with its attributes and the text right inside of it; closed as they open."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.ids = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.found.append(element)
        if "id" in element:
            self.ids.append(element["id"])
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1]["text"] += data

    def all(self, tag, **attributes):
        return [
            e
            for e in self.found
            if e["tag"] == tag and all(e.get(k.strip("_")) == v for k, v in attributes.items())
        ]

    @property
    def text(self):
        return " ".join(e["text"] for e in self.found if e["tag"] not in ("script", "style"))


def content(text, title="step.hlo", mesh=T.MESH, **options):
    return report.content(hlo.judge(hlo.parse(text), mesh=mesh), title=title, **options)


def program(count, extra=""):
    """A program of so many all-reduces, in three kinds."""
    lines = [T.parameter(T.DATA)]
    last = "%x"
    for n in range(count):
        groups = (T.OVER_MODEL, T.OVER_DATA, T.ALL)[n % 3]
        lines.append(T.all_reduce(last, groups, name=f"r{n}", extra=extra))
        last = f"%r{n}"
    return T.module("\n".join(lines))


@pytest.mark.parametrize("count", [0, 1, 30, 300])
def test_a_page_is_well_formed_and_holds_each_collective(count):
    what = content(program(count) if count else T.module(T.parameter(T.BOTH)))
    tree = Tree(report.page(what))
    assert len(tree.ids) == len(set(tree.ids))
    bars = [r for r in tree.all("rect") if "data-row" in r]
    assert len(bars) == count
    assert {b["data-row"] for b in bars} <= set(tree.ids)
    rows = [r for r in tree.all("tr") if "data-groups" in r]
    assert len(rows) == len(what.rows) and (len(rows) <= 6)
    for row in rows:  # what a row points at is drawn
        assert row["data-groups"] and set(row["data-groups"].split()) <= set(tree.ids)


def test_what_is_to_be_typed_is_shown_as_code():
    extra = ', metadata={op_name="jit(f)/transpose(jvp())/shard_map/psum" source_file="a.py"}'
    tree = Tree(report.page(content(program(30, extra))))
    typed = [code["text"] for code in tree.all("code")]
    assert "shardrules migrate --diff on.patch SCRIPT" in typed and "`" not in tree.text
    # names of a program in between stay text
    assert drawn.prose("`<b>` or `") == "<code>&lt;b&gt;</code> or `"


def test_300_collectives_make_no_large_page():
    assert len(report.page(content(program(300)))) < 150_000


def test_every_table_says_what_it_is_and_headings_descend():
    tree = Tree(report.page(content(program(3))))
    assert len(tree.all("caption")) == len(tree.all("table")) >= 2
    assert all("scope" in th for th in tree.all("th"))
    assert len(tree.all("h1")) == 1 and len(tree.all("main")) == 1
    levels = [int(e["tag"][1]) for e in tree.found if re.fullmatch(r"h\d", e["tag"])]
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:]))
    assert all(e.get("aria-label") for e in tree.all("svg"))
    assert all(e.get("aria-label") for e in tree.all("div", role="region"))


def test_what_all_needed_programs_send_is_apart_from_that():
    lines = [T.parameter(T.DATA), T.all_reduce("%x", T.OVER_DATA)]
    page = report.page(content(T.module("\n".join(lines))))
    assert "on the wire per device; all needed; the most: " in page


def test_nothing_is_fetched_and_no_other_script_runs():
    page = report.page(content(program(3)))
    tree = Tree(page)
    for element in tree.found:
        assert not {"src", "srcset", "action", "formaction"} & set(element)
        assert not any(key.startswith("on") for key in element)
        assert element.get("href", "#").startswith("#")
    assert len(tree.all("script")) == 1 and not tree.all("link")
    assert "url(" not in FILES["page.css"] and "@import" not in FILES["page.css"]
    assert not re.search(r"fetch|XMLHttp|innerHTML|eval|import\(", FILES["page.js"])
    (policy,) = (m for m in tree.all("meta") if "http-equiv" in m)
    assert policy["content"].startswith("default-src 'none'; ")
    assert re.search(r"script-src 'sha256-[\w+/]{43}='$", policy["content"])


HOSTILE = "</style></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x07\u202e"


def test_hostile_names_stay_text():
    quoted = HOSTILE.replace("\\", "\\\\").replace('"', '\\"')
    extra = f', metadata={{op_name="{quoted}" source_file="{quoted}" source_line=3}}'
    what = content(program(3, extra), title=HOSTILE, mesh={"data": 4, "<b>model": 2})
    allow = report.content(what.judgement, title=HOSTILE)
    other = content(program(2, extra), title=HOSTILE, mesh={"data": 4, "<b>model": 2})
    changes = comparing.compare(comparing.grouped(what.account), comparing.grouped(other.account))
    clean = Tree(report.page(content(program(3))))
    for page in (report.page(allow), report.compared(what, other, changes)):
        tree = Tree(page)
        assert {e["tag"] for e in tree.found} <= {"br", "g", *(e["tag"] for e in clean.found)}
        assert len(tree.all("script")) == 1
        assert not any(key.startswith("on") for e in tree.found for key in e)
        assert "<script>alert(1)" in tree.text  # as text, and whole
        assert "\x07" not in page and "\u202e" not in page
    assert any("<b>model" in e["text"] for e in tree.all("b"))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    """The ratio of WCAG 2.1, section 1.4.3."""
    a, b = sorted((luminance(one), luminance(other)))
    return (b + 0.05) / (a + 0.05)


LIGHT, DARK = (
    dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))
    for block in re.findall(r":root \{(.*?)\}", FILES["page.css"], re.DOTALL)
)
GROUPS = [f"g{n}" for n in range(8)]
VERDICTS = ("needed", "overwide", "redundant", "unproven", "internal")
TEXT = [
    *(("ink", back) for back in ("bg", "cell", *GROUPS)),
    *(("dim", back) for back in ("bg",)),
    ("link", "bg"),
    *(("badge", verdict) for verdict in VERDICTS),
]


@pytest.mark.parametrize("colours", [LIGHT, {**LIGHT, **DARK}], ids=["light", "dark"])
def test_contrast(colours):
    for ink, back in TEXT:
        assert contrast(colours[ink], colours[back]) >= 4.5, (ink, back)
    for verdict in VERDICTS:  # bars: WCAG 2.1, section 1.4.11
        assert contrast(colours[verdict], colours["bg"]) >= 3
    assert contrast(colours["on"], colours["line"]) >= 3


def test_both_schemes_have_each_colour_and_no_other_is_used():
    assert set(LIGHT) == set(DARK)
    rest = re.sub(r":root \{.*?\}", "", FILES["page.css"], flags=re.DOTALL)
    assert not re.search(r"#[0-9a-f]{3,6}\b", rest)
    assert set(re.findall(r"var\(--(\w+)\)", rest)) <= set(LIGHT)


def test_the_measure_of_contrast_is_right():
    assert round(contrast("#000000", "#ffffff"), 2) == 21
    assert round(contrast("#767676", "#ffffff"), 2) == 4.54


LOOP = """%cond (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n.1 = s32[] constant(12)
  ROOT %lt = pred[] compare(%i.1, %n.1), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %w = f32[8] get-tuple-element(%p), index=1
  INSIDE
  ROOT %t = (s32[], f32[8]) tuple(%next, %w)
}

"""


def looping(inside):
    return T.module(
        f"""{T.parameter(T.DATA)}
        %zero = s32[] constant(0)
        {T.all_reduce("%x", name="before")}
        %init = (s32[], f32[8]) tuple(%zero, %before)
        %loop = (s32[], f32[8]) while(%init), condition=%cond, body=%body
        %out = f32[8] get-tuple-element(%loop), index=1
        {T.all_reduce("%out", name="after")}""",
        before=LOOP.replace("INSIDE", inside),
    )


def test_the_timeline_is_in_program_order():
    judged = hlo.judge(hlo.parse(looping(T.all_reduce("%w", name="inside"))), mesh=T.MESH)
    said = [
        judged.verdicts[e.number].collective.name if e.kind == "collective" else (e.kind, e.label)
        for e in drawn.events(judged)
    ]
    assert said == ["before", ("loop", "loop, 12 times"), "inside", ("end", ""), "after"]
    page = report.page(report.content(judged))
    assert "loop, 12 times" in page


def test_branches_are_told_apart():
    data = pathlib.Path(__file__).parent.parent / "hlo" / "data" / "gpu_misc.hlo"
    judged = hlo.judge(hlo.parse(data.read_text()), mesh=T.MESH)
    said = [e.label or e.kind for e in drawn.events(judged)]
    assert said == ["collective"] * 4 + ["branch 0", "collective", "end"] + ["collective"] * 2


def test_a_loop_without_collectives_is_left_out():
    judged = hlo.judge(hlo.parse(looping("%v = f32[8] negate(%w)")), mesh=T.MESH)
    assert [e.kind for e in drawn.events(judged)] == ["collective", "collective"]


def test_groups_are_drawn_on_the_mesh():
    picture = drawn.groups_on_mesh([[0, 2], [1, 3]], None, {"data": 2, "model": 2}, 4, "over data")
    cells = Tree(picture).all("rect")
    assert [c["data-g"] for c in cells] == ["0", "1", "0", "1"]
    assert [c["x"] for c in cells] == [cells[0]["x"], cells[1]["x"]] * 2
    assert len({c["y"] for c in cells}) == 2
    titles = [t["text"] for t in Tree(picture).all("title")]
    assert titles[2] == "device 2 (data=1, model=0): group 0 of 2: 0, 2"


def test_a_permute_is_drawn_as_arrows_and_a_large_mesh_in_part():
    ring = [(n, (n + 1) % 4) for n in range(4)]
    picture = drawn.groups_on_mesh([[0, 1, 2, 3]], ring, {"x": 4}, 4, "ring")
    assert len(Tree(picture).all("path")) == 4
    picture = drawn.groups_on_mesh([list(range(4096))], None, None, 4096, "all")
    assert len(Tree(picture).all("rect")) == 256 and "the first 256 of 4,096" in picture


def test_source_lines_are_quoted_where_a_python_file_is_at_hand(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("one\ntwo\nthree <b>\nfour\n")
    other = tmp_path / "secret.txt"
    other.write_text("hidden\n" * 5)
    for file, shown in ((path, "three &lt;b&gt;"), (other, None)):
        extra = f', metadata={{op_name="f" source_file="{file}" source_line=3}}'
        page = report.page(content(program(1, extra)))
        assert ("<pre>" in page) is (shown is not None)
        assert shown is None or f"<mark>    3  {shown}</mark>" in page
        assert "hidden\n" not in page


def test_two_programs_beside_each_other():
    before, after = content(program(3), "a.hlo"), content(program(1), "b.hlo")
    changes = comparing.compare(comparing.grouped(before.account), comparing.grouped(after.account))
    tree = Tree(report.compared(before, after, changes))
    assert "3 \N{RIGHTWARDS ARROW} 1" in [b["text"] for b in tree.all("b")]
    assert len(tree.all("svg", class_="strip")) == 2
    assert len([s for s in tree.all("span") if s["text"] == "went"]) == 2
    assert len(tree.ids) == len(set(tree.ids))
    same = report.compared(before, before, [])
    assert "The same collectives." in same


def test_narrow_spans_of_the_timeline_say_their_phase():
    """A loss combined with gradients is one bar wide: a letter, and the word on pointing at it."""
    names = ["jit(f)/jvp(g)/psum", "jit(f)/transpose(jvp(g))/psum"] * 20
    lines = [T.parameter(T.DATA)]
    for n, name in enumerate(names):
        extra = f', metadata={{op_name="{name}"}}'
        lines.append(T.all_reduce(f"%r{n - 1}" if n else "%x", name=f"r{n}", extra=extra))
    tree = Tree(report.page(content(T.module("\n".join(lines)))))
    words = [e["text"] for e in tree.all("text") if e["text"] in ("f", "b", "forward", "backward")]
    assert words == ["f", "b"] * 20
    titles = [e["text"] for e in tree.all("title") if e["text"] in ("forward", "backward")]
    assert titles == [t for phase in ("forward", "backward") * 20 for t in (phase, phase)]
    assert "or their first letters (forward, backward)" in tree.text


LINES = {
    "a.py:1 (f)": {"needed": 600, "redundant": 0},
    "a.py:9 (g)": {"needed": 100, "redundant": 200},
    "b.py:3": {"needed": 300, "redundant": 0},
    "(no source line)": {"needed": 0, "redundant": 0},
}


def boxes(tree, **attributes):
    for element in tree.all("div", **attributes):
        if "style" in element:
            pairs = (part.split(":") for part in element["style"].split(";"))
            yield {name: float(value.rstrip("%")) for name, value in pairs}


def test_a_treemap_has_areas_as_large_as_its_bytes():
    tree = Tree(treemap.treemap(LINES))
    files = list(boxes(tree, class_="file"))
    assert [round(f["width"] * f["height"]) for f in files] == [7500, 2500]
    assert sum(b["width"] * b["height"] for b in boxes(tree, class_="needed")) == pytest.approx(
        2 / 3 * 10_000 + 10_000, rel=1e-3
    )
    (mixed,) = tree.all("div", class_="redundant")  # most of its bytes are
    assert mixed["title"] == "a.py, line 9, g: 300 B, 25% (needed 100 B, redundant 200 B)"
    for box in boxes(tree):
        assert 0 <= box["left"] <= box["left"] + box["width"] <= 100.02
        assert 0 <= box["top"] <= box["top"] + box["height"] <= 100.02
    assert treemap.treemap({"a.py:1": {"needed": 0}}) == ""
    many = {f"a.py:{n}": {"needed": 1 + n} for n in range(500)}
    assert len(Tree(treemap.treemap(many)).all("span")) == 61  # and one for the others


@pytest.mark.parametrize("large", [1, 10**3, 10**15, 10**16, 10**17, 10**30])
@pytest.mark.parametrize("small", [[1], [1, 1], [3, 2, 1, 1], [10**9, 1]])
def test_tiny_areas_beside_a_large_one_are_inside_of_the_box(large, small):
    sizes = dict(enumerate([large, *small]))
    placed = dict(treemap._placed(sizes))
    assert placed.keys() == sizes.keys()
    for name, (left, top, width, height) in placed.items():
        assert 0 <= left <= left + width <= 100.000001
        assert 0 <= top <= top + height <= 100.000001
        assert width * height == pytest.approx(sizes[name] / sum(sizes.values()) * 10_000)


def test_a_measured_step_has_a_lane_for_each_kind_of_collective():
    marks = [
        drawn.BarLabel("", "needed", kind, kind) for kind in ("psum(a)", "gather(b)", "psum(a)")
    ]
    runs = [(marks[0], 0.0, 2.0), (marks[1], 1.0, 3.0), (marks[2], 1.5, 4.0)]
    tree = Tree(drawn.timed(runs, [(0.0, 1.0)]))
    assert [t["text"] for t in tree.all("text")][:3] == ["psum(a)", "gather(b)", "anything else"]
    tops = {r["y"] for r in tree.all("rect")}
    assert len(tops) == 3  # two of a kind overlap


def test_of_many_findings_the_first_is_open_and_most_are_folded():
    lines = [T.parameter(T.DATA)]
    for n in range(50):
        extra = f', metadata={{op_name="jit(f)/psum" source_file="a.py" source_line={n + 1}}}'
        lines.append(T.all_reduce("%x", name=f"r{n}", extra=extra))
    page = report.page(content(T.module("\n".join(lines))))
    findings = page.partition("Findings</h2>")[2].partition("</section>")[0]
    assert findings.count("<details open>") == 1 and "<summary>30 more</summary>" in findings
    assert findings.index("<details open>") < findings.index("a.py:1<")


def classes(page, column):
    """Give the CSS classes of a column's heading."""
    buttons = [b for b in Tree(page).all("button", type="button") if b["text"] == column]
    (heading,) = buttons and re.findall(rf'<th scope="col"([^>]*)><button[^>]*>{column}<', page)
    return re.findall(r"[a-z]+", heading.removeprefix(" class="))


def test_a_narrow_screen_shows_what_can_be_avoided_first():
    """Not a count of devices, which would push it out of sight."""
    both = [content(program(30), title="jit_step"), content(program(3), title="jit_loss")]
    whole = report.page(several.gather(both, [1, 1]))
    table = whole[whole.index("<table>") : whole.index("</table>")]
    heads = {e["text"]: e.get("class", "") for e in Tree(table + "</table>").all("th")}
    shown = [column for column, kind in heads.items() if kind != "less"]
    assert shown == ["program", "wire bytes", "avoidable", "findings"]
    cells = [e.get("class", "") for e in Tree(table + "</table>").all("td")]
    assert cells == list(heads.values()) * 2


def test_a_measured_page_has_a_short_tile_and_three_columns_on_a_narrow_screen():
    judgement = hlo.judge(hlo.parse(program(2)), mesh=T.MESH)
    each = timings.Timing(2.5e-3, 2e-3, 2.5e-3, 1, "a", "b")
    measured = timings.Timings(0.05, (each,) * len(judgement.verdicts), "/host:CPU")
    timed = report.content(judgement, title="step.hlo", timings=measured)
    page = report.page(timed)
    first = Tree(page).all("b")[0]["text"], Tree(page).all("li")[0]["text"]
    assert first[1] == "avoidable of 50 ms a step, measured on CPU"
    saved = timed.avoidable.exposed_seconds
    assert first[0] == f"{units.milliseconds(saved)}, {units.percent(saved, 0.05)}"
    assert "untimed" in classes(page, "share") and "untimed" in classes(page, "exposed")
    assert "untimed" not in classes(page, "measured, a step")
    narrow = [p["text"] for p in Tree(page).all("p", class_="narrow")]
    assert narrow and all("share: " in text and "exposed: " in text for text in narrow)


def test_a_page_says_why_what_can_be_avoided_takes_no_time():
    judgement = hlo.judge(hlo.parse(program(2)), mesh=T.MESH)
    whys = {}
    for exposed in (2e-3, 0.0, None):
        each = None if exposed is None else timings.Timing(2.5e-3, exposed, 2e-3, 1, "a", "b")
        measured = timings.Timings(0.05, (each,) * len(judgement.verdicts), "/device:TPU:0")
        page = report.page(report.content(judgement, title="step.hlo", timings=measured))
        whys[exposed] = [e["text"] for e in Tree(page).all("p", class_="dim")][0]
    assert "avoidable: " not in whys.pop(2e-3)  # the tile has it
    for why in whys.values():
        assert why.startswith("avoidable: none of the 50 ms of a step (no device waits for the ")
        assert "that can be avoided: other work hides them, or" in why


def test_a_column_that_no_program_fills_is_left_out():
    plain = content(program(2), title="jit_step")
    columns = several.gather([plain], [1]).programs.columns
    assert "other" not in columns and "findings" in columns
    loops = content(looping("%v = f32[8] negate(%w)"), title="jit_loop")
    assert "other" in several.gather([plain, loops], [1, 1]).programs.columns


def test_a_mesh_of_one_axis_is_one_row():
    for count, rows in ((8, 1), (16, 1), (64, 8)):
        picture = drawn.groups_on_mesh([list(range(count))], None, {"data": count}, count, "all")
        assert len({cell["y"] for cell in Tree(picture).all("rect")}) == rows


def test_what_to_change_stands_above_all_notes_and_the_headline_once():
    program_, other = content(program(30), title="jit_step"), content(program(3), title="jit_loss")
    notes = ["jit_step was compiled twice"]
    for both, part in (([program_], "<h2>Findings</h2>"), ([program_, other], "<iframe")):
        found = several.gather(both, [1] * len(both), notes=notes)
        for whole in map(html.unescape, (report.page(found), report.plain(found))):
            assert whole.count(program_.worth) == 1
            assert whole.count(program_.costliest) == 1 or other in both
        assert report.page(found).index(part) < report.page(found).index(notes[0])


def needed(name="jit_eval"):
    lines = [T.parameter(T.DATA), T.all_reduce("%x", T.OVER_DATA)]
    return content(T.module("\n".join(lines)), title=name)


def test_one_program_is_the_page_itself_and_needed_collectives_are_drawn_too():
    for one in (content(program(3)), needed()):
        page = report.page(several.gather([one, content(T.module(T.parameter(T.BOTH)))], [1, 1]))
        assert "<iframe" not in page and "<h2>In program order</h2>" in page
        assert page.count("on the wire") and Tree(page).text.count("all needed") <= 1
    page = report.page(several.gather([content(program(3)), needed()], [1, 1]))
    first, second = re.findall(r"<details( open)?><summary>[^<]*</summary><iframe", page)
    assert first and not second and "<summary>jit_eval: 48 B on the wire" in page


def test_findings_on_the_host_stand_above_the_programs_and_are_counted():
    found = several.gather([needed()], [1]).with_reads({"a.py:3": "a.py:3 read it"}, ())
    page = report.page(found)
    assert "<b>1</b>findings" in page and "<li>a.py:3 read it</li>" in page
    assert page.index("Findings on the host") < page.index("In program order")
    both = several.gather([needed(), content(program(3))], [1, 1])
    page = report.page(both.with_reads({"a.py:3": "a.py:3 read it"}, ()))
    assert page.index("Findings on the host") < page.index("<iframe")


def test_names_of_neighbouring_phases_stand_apart():
    """A letter of 11 pixels is at most some 6.9 wide."""
    marks = [drawn.BarLabel("", "needed", "")] * 2
    events = [drawn.Event("collective", n) for n in range(2)]
    labels = Tree(drawn.strip(events, marks, [1, 1], ["backward", "forward"])).all("text")
    names = [re.sub(r"\s", "", label["text"]) for label in labels]
    assert names == ["backward", "forward"]
    assert float(labels[0]["x"]) + 6.9 * len("backward") < float(labels[1]["x"])


def test_what_a_bar_says_names_its_file_as_the_table_does():
    file = pathlib.Path("step.py").absolute()
    metadata = f', metadata={{op_name="jit(f)/psum" source_file="{file}" source_line=3}}'
    (row,) = (e for e in Tree(report.page(content(program(1, metadata)))).all("tr") if "id" in e)
    assert row["data-says"].endswith(", step.py:3")
