"""``migrate`` that is interrupted ends the script that it runs."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import shardrules
from shardrules.commands import trial

ROOT = pathlib.Path(shardrules.__file__).parents[1]
SCRIPT = """
import os, time
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_handler_that_python_did_not_install_is_left(monkeypatch):
    """Its ``getsignal`` is None, which ``signal`` returns, but doesn't take."""
    before, install = signal.getsignal(signal.SIGTERM), signal.signal
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *to: [install(*to)] and None)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    trial._wait(process, look=False)
    monkeypatch.undo()
    assert process.returncode == 3 and signal.getsignal(signal.SIGTERM) is before


def test_sigint_to_migrate_alone_ends_its_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardrules", "migrate", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,  # no terminal sends the script a signal
        # What a shell starts in the background ignores SIGINT, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        script = int(process.stdout.readline())
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert time.monotonic() - began < 20 and "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT
    try:
        os.kill(script, 0)
    except ProcessLookupError:
        return
    raise AssertionError("the script still runs")
