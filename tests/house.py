"""Who imports whom in the package. ``python tests/house.py`` prints it; exit 1 if it is not so.

Reads the sources and imports nothing of them: it runs with any Python and no packages.
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "shardrules"
FILES = sorted(PACKAGE.rglob("*.py"))

# From each part of the package to the parts that it may import. A part
# is a file or folder at the top, or a folder's folder where it has arrows of its own.
ARROWS = {
    "errors": {"fitting"},
    "arguments": {"errors"},
    "fitting": set(),
    "paths": set(),
    "units": {"arguments"},
    "registry": {"arguments", "errors", "paths"},
    "door": {"errors", "registry", "paths"},
    "jaxprs": {"errors", "registry", "door"},
    # Inside of hooks, from what is below to what installs all of it.
    "hooks": {"door", "hooks.install"},
    "hooks.notes": set(),
    "hooks.frames": {"registry"},
    "hooks.state": set("door errors registry hooks.frames hooks.notes".split()),
    "hooks.types": set(
        "door jaxprs errors paths registry hooks.frames hooks.notes hooks.state".split()
    ),
    "hooks.retyping": set(
        "door jaxprs errors registry hooks.frames hooks.notes hooks.state hooks.types".split()
    ),
    "hooks.cotangents": set(
        "door jaxprs errors paths registry hooks.frames hooks.notes hooks.state hooks.types hooks.retyping".split()
    ),
    "hooks.casts": set(
        "door jaxprs errors registry hooks.notes hooks.state hooks.types hooks.retyping hooks.cotangents".split()
    ),
    "hooks.sets": set(
        "door errors registry hooks.notes hooks.state hooks.types hooks.cotangents".split()
    ),
    "hooks.selftest": set("door errors jaxprs registry hooks.state".split()),
    "hooks.order": set(
        "hooks.state hooks.types hooks.retyping hooks.cotangents hooks.casts hooks.sets "
        "unchecked.hooks".split()
    ),
    "hooks.install": set(
        "arguments door errors registry hooks.state hooks.order hooks.selftest unchecked.sites unchecked.hooks".split()
    ),
    "hooks.explain": set(
        "arguments door jaxprs errors fitting paths registry hooks.notes hooks.state hooks.types unchecked.sites unchecked.hooks hooks.install".split()
    ),
    "hooks.user_casts": set(
        "arguments door errors registry hooks.notes hooks.types hooks.install".split()
    ),
    "hooks.processes": set("arguments door errors registry hooks.install unchecked.hooks".split()),
    # What becomes of shard_maps whose check is off, from what is seen of one to the patch.
    "unchecked.code": set(),
    "unchecked.undo": set(),
    "unchecked.python_state": {"unchecked.code", "unchecked.undo"},
    "unchecked.outside": {"unchecked.undo"},
    "unchecked.unseen": {"unchecked.outside", "unchecked.python_state", "unchecked.retrace"},
    "unchecked.retrace": {"door", "jaxprs", "errors"},
    "unchecked.sites": {"door", "unchecked.retrace"},
    "unchecked.hooks": set(
        "door jaxprs errors hooks.frames hooks.notes hooks.state hooks.cotangents "
        "unchecked.retrace unchecked.python_state unchecked.unseen unchecked.sites".split()
    ),
    "unchecked.switched": set(
        "program costs door errors registry hooks unchecked.python_state unchecked.unseen unchecked.sites".split()
    ),
    "unchecked.check_off": set("door errors hooks unchecked.hooks unchecked.sites".split()),
    "unchecked": set(
        "paths arguments errors units costs report door jaxprs hooks watching unchecked.python_state "
        "unchecked.retrace unchecked.sites unchecked.hooks".split()
    ),
    "pallas": {"errors", "registry", "door", "jaxprs"},
    "hlo.reader": {"arguments", "errors"},
    "hlo.known": {"errors", "hlo.reader"},
    "hlo.proof": {"arguments", "errors", "registry", "hlo.reader", "hlo.known"},
    "hlo": set(),
    "costs": {"arguments", "errors", "registry", "hlo"},
    "report": {"arguments", "errors", "paths", "units", "hlo", "costs"},
    "program": {"arguments", "errors", "registry", "hlo", "door", "hooks", "units"},
    "watching": set(
        "arguments errors fitting paths units registry hlo costs report program door jaxprs hooks "
        "unchecked.switched unchecked.check_off".split()
    ),
    "checks": set(
        "arguments errors fitting paths units registry hlo costs report program door jaxprs hooks watching unchecked".split()
    ),
    "testing": set(
        "arguments errors units registry hlo costs report program checks unchecked door hooks".split()
    ),
    "aot": {"arguments", "errors", "door"},
    "commands": set(
        "aot arguments errors fitting paths units registry hlo costs report program watching unchecked unchecked.sites door hooks".split()
    ),
    "__main__": {"errors", "commands"},
    # The roof: it names all for type checkers, and tells what is below what calls it.
    "__init__": {
        "errors",
        "registry",
        "hooks",
        "pallas",
        "hlo",
        "costs",
        "report",
        "checks",
        "testing",
        "watching",
        "aot",
    },
}
NO_JAX = {
    "arguments",
    "errors",
    "fitting",
    "paths",
    "units",
    "registry",
    "hlo",
    "hlo.reader",
    "hlo.known",
    "hlo.proof",
    "costs",
    "report",
    "__init__",
    "commands",
    "__main__",
}
# Of checks/, which may use jax and hooks, these do without.
NO_JAX_FILES = {"budget.py", "expectations.py", "updates.py", "pytest_plugin.py", "watched.py"}


def imports(source):
    """Yield each module that a source file imports, ``from x import y`` as x.y too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path):
    """The name in ARROWS of a file of the package."""
    pieces = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(pieces[:2]) if ".".join(pieces[:2]) in ARROWS else pieces[0]


def wrong_arrows(part, source, no_jax=False):
    """The imports of a source file that its part may not have."""
    allowed = ARROWS[part] | {part}
    for name in imports(source):
        pieces = name.split(".")
        if pieces[0] in ("jax", "jaxlib") and (no_jax or part in NO_JAX):
            yield f"{part} -> {name}"
        if pieces[0] != "shardrules" or len(pieces) == 1:
            continue
        if not {pieces[1], ".".join(pieces[1:3])} & allowed and not any(
            one.startswith(f"{pieces[1]}.") and len(pieces) == 2 for one in allowed
        ):
            yield f"{part} -> {name}"


def wrong_arrows_of(path):
    """The imports of a file that it may not have."""
    no_jax = path.parent.name == "checks" and path.name in NO_JAX_FILES
    return list(wrong_arrows(part_of(path), path.read_text(), no_jax))


def circles(arrows):
    """The files that import each other, however indirectly: from each to those it imports."""
    reached = {name: set(direct) for name, direct in arrows.items()}
    for middle in arrows:
        for name in arrows:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return sorted(name for name in arrows if name in reached[name])


def file_arrows():
    """From each module of the package to those that it imports, wherever the import stands."""
    names = {}
    for path in FILES:
        pieces = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)] = path
    return {
        name: {one for one in imports(path.read_text()) if one in names and one != name}
        - {name.rpartition(".")[0]}
        for name, path in names.items()
        if name != "shardrules"
    }


def part_arrows():
    """From each part to the parts that its files import."""
    found = {part: set() for part in ARROWS}
    for path in FILES:
        part = part_of(path)
        for name in imports(path.read_text()):
            pieces = name.split(".")
            if pieces[0] == "shardrules" and len(pieces) > 1:
                one = ".".join(pieces[1:3])
                one = one if one in ARROWS else pieces[1]
                if one in ARROWS and one != part:
                    found[part].add(one)
    return found


def map_of(text):
    """The paths of the map in CONTRIBUTING.md."""
    drawn = text[text.index("```\nshardrules/\n") :].split("```")[1]
    paths, folders = set(), []
    for line in drawn.splitlines()[2:]:
        depth = (len(line) - len(line.lstrip())) // 2
        path = line.split()[0] if depth else ""
        if path.endswith("/") or path.endswith(".py"):
            folders = [*folders[: depth - 1], path]
            paths.add("".join(folders))
            folders = folders if path.endswith("/") else folders[:-1]
    return paths


# Names that two classes share: two public ones of different modules, or a public one and a row of
# the hooks' table.
SHARED = {
    "Blocker": "hlo.Blocker and pallas.Blocker are both public",
    "Program": "a program of any form, and one whose cheaper collectives are looked for",
    "Row": "report.Row is public; the hooks' says which law a primitive has",
    "Site": "a shard_map whose check is off, and a collective that could be cheaper",
}


def shared_names(sources):
    """Yield each class name that two of the sources define, a leading underscore left out."""
    homes = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(path)
    yield from ((name, paths) for name, paths in homes.items() if len(paths) > 1)


def shared_in_package():
    """From each class name that two files of the package share to these files."""
    return dict(shared_names({str(p.relative_to(PACKAGE)): p.read_text() for p in FILES}))


def main():
    """Print each part's arrows, the files on a circle, and the classes that share a name."""
    wrong = []
    for part, ones in part_arrows().items():
        print(f"{part:12} -> {', '.join(sorted(ones)) or '(nothing)'}")
    for path in FILES:
        wrong += [f"{path.relative_to(ROOT)}: {one}" for one in wrong_arrows_of(path)]
    for one in wrong:
        print(f"not allowed: {one}")
    around = circles(file_arrows())
    print("in a circle: " + ", ".join(around) if around else "no circle")
    shared = {name: paths for name, paths in shared_in_package().items() if name not in SHARED}
    for name, paths in shared.items():
        print(f"one name for two classes: {name} in {' and '.join(paths)}")
    return 1 if wrong or around or shared else 0


if __name__ == "__main__":
    sys.exit(main())
