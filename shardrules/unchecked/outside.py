"""Detect changes outside of Python's objects: files, processes, connections, threads."""

from __future__ import annotations

import os
import types
from typing import Any

from shardrules.unchecked import undo

# Python raises an audit event before each of these changes. The functions of shutil, tempfile and
# http end in calls that are listed here. Changes of environment variables aren't listed, since the
# retrace undoes them.
_CHANGES = {
    event: f"calls {event}"
    for event in """
    os.chdir os.chflags os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link
    os.lockf os.mkdir os.posix_spawn os.remove os.removexattr os.rename os.rmdir os.setxattr
    os.spawn os.startfile os.symlink os.system os.truncate os.utime fcntl.fcntl fcntl.flock
    fcntl.ioctl fcntl.lockf subprocess.Popen pty.spawn _winapi.CreateProcess _winapi.CreateFile
    _winapi.CreateJunction socket.bind socket.connect socket.sendmsg socket.sendto
    socket.sethostname http.client.send ftplib.sendcmd smtplib.send imaplib.send poplib.putline
    sqlite3.connect syslog.syslog syslog.openlog syslog.closelog syslog.setlogmask winreg.CreateKey
    winreg.DeleteKey winreg.DeleteValue winreg.SetValue signal.pthread_kill resource.setrlimit
    resource.prlimit webbrowser.open
    """.split()
} | {
    "builtins.input": "asks for input",
    "builtins.breakpoint": "calls breakpoint",
    "pdb.Pdb": "starts a debugger",
    "_thread.start_new_thread": "starts a thread",
    "_thread.start_joinable_thread": "starts a thread",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_BETWEEN = frozenset({"etils", "fsspec"})  # JAX writes its cache through these, too


def change(event: str, args: tuple[Any, ...]) -> str:
    """Say what an audit event is about to change outside of Python; empty if it changes nothing."""
    if event != "open":
        return _CHANGES.get(event, "")
    path, mode, flags = (*args, None, None, None)[:3]
    writes = type(mode) is str and not {*"wax+"}.isdisjoint(mode)
    writes |= type(flags) is int and bool(flags & _WRITES)
    return "opens a file to write to it" if writes and path != os.devnull else ""


def is_asked_for(frame: types.FrameType | None) -> bool:
    """Return whether the program, rather than JAX, asked for the change that a frame makes.

    Three kinds of changes are allowed. JAX may write to its compilation cache. An import may change
    something, but only once, since the module stays imported. And finalizers may, since the garbage
    collector can call them at any time.
    """
    # Walk outwards, up to the start of the retrace. The change was asked for by the innermost
    # package that is JAX's or the program's (so skip Python's and NumPy's).
    asks: str | None = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("shardrules.unchecked."):  # the retrace starts here
            break
        if module.startswith(("importlib._", "_frozen_importlib")):
            return False
        if frame.f_code.co_name == "__del__" or module == "weakref":
            return False
        package = module.partition(".")[0]
        if asks is None and package not in _BETWEEN:
            if package in ("jax", "jaxlib") or not undo.is_others(package):
                asks = package
        frame = frame.f_back
    return asks not in ("jax", "jaxlib")
