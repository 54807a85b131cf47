"""Write the transcripts of this folder: every command of shardrules on train.py.

    pip install '.[libraries]'; python -m shardrules.aot | sh
    python docs/training/transcripts.py             all of them
    python docs/training/transcripts.py tpu         one

tests/test_transcripts.py writes them anew and compares. Paths are as seen from this folder.
"""

import contextlib
import io
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
MESH = "--mesh=data=4,model=2"
COMPILED = ("cpu", "tpu", "gpu")
RUN = {"run": ["--steps=2"], "migrate": ["--steps=1"]}
SCRIPT = "train.py"


def plain(text):
    """Leave out of a text the folders that every machine has its own of."""
    text = text.replace(f"{HERE}/", "").replace(f"{HERE.resolve()}/", "")
    text = re.sub(r"[^\s\"'(]*/site-packages/", "", text)
    return re.sub(r"(?<=-\+-)-{41,}$", "-" * 40, text, flags=re.MULTILINE)  # under paths


def trained(*flags):
    """Run the training script in this process."""
    arguments, sys.argv = sys.argv, [SCRIPT, *flags]
    try:
        runpy.run_path(str(HERE / SCRIPT), run_name="__main__")
    finally:
        sys.argv = arguments


def shardrules(*arguments):
    """Return what the command line prints."""
    from shardrules import __main__ as command_line

    with contextlib.redirect_stdout(io.StringIO()) as out:
        command_line.main(list(arguments))
    return out.getvalue()


@contextlib.contextmanager
def taken_back():
    """Take back what is installed inside: one process compiles all of the programs."""
    import shardrules as package

    handles, install = [], package.install
    package.install = lambda: handles.append(install())
    try:
        yield
    finally:
        package.install = install
        for handle in handles:
            handle.uninstall()


def compiled(platform, folder):
    """Return the transcript of what a platform's programs are judged to be."""
    where = "here" if platform == "cpu" else platform
    lines = []
    for name, check in ((platform, []), (f"{platform}_checked", ["--check"])):
        path = pathlib.Path(folder, f"{name}.hlo")
        with taken_back():
            trained(f"--compile-for={where}", f"--hlo={path}", *check)
        path.write_text(plain(path.read_text()))
        flags = " ".join([f"--compile-for={where}", f"--hlo={path.name}", *check])
        lines += [f"$ python train.py {flags}", f"$ shardrules verify {path.name} {MESH}"]
        lines.append(shardrules("verify", str(path), MESH))
    one, other = f"{platform}.hlo", f"{platform}_checked.hlo"
    lines.append(f"$ shardrules diff {one} {other} {MESH}")
    lines.append(shardrules("diff", f"{folder}/{one}", f"{folder}/{other}", MESH))
    return plain("\n".join(lines).replace(f"{folder}/", ""))


def ran(command):
    """Return the transcript of a command that runs the script itself, in a process of its own."""
    shown = ["--diff=-"] if command == "migrate" else []
    done = subprocess.run(
        [sys.executable, "-m", "shardrules", command, *shown, SCRIPT, *RUN[command]],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    noise = re.compile(r"^(WARNING: All log|[IWE]\d{4} ).*\n", re.MULTILINE)
    said = done.stdout + noise.sub("", done.stderr)
    return plain(f"$ shardrules {' '.join([command, *shown, SCRIPT, *RUN[command]])}\n{said}")


def written(name, folder):
    """Return a transcript."""
    return compiled(name, folder) if name in COMPILED else ran(name)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or (*RUN, *COMPILED):
            (HERE / f"{name}.txt").write_text(written(name, folder))


if __name__ == "__main__":
    main()
