"""Compare the rules of a job's processes, through JAX's key-value store."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import threading
import time
from typing import Any

from shardrules.arguments import checked
from shardrules.door import internals
from shardrules.door.internals import Door
from shardrules.errors import MissingProcessError, RulesDifferError, ShardrulesError
from shardrules.hooks.install import state as hook_state
from shardrules.registry import fingerprint
from shardrules.registry.fingerprint import ComparedRule
from shardrules.unchecked.hooks import UncheckedHooks

_ROOT = "shardrules/same_rules"
_SHOWN = 8  # lines about one process in a message
_lock = threading.Lock()


@checked
def assert_same_rules(*, timeout_s: float = 60.0) -> None:
    """Assert that all processes of this job hold the same rules; each process must call it.

    Processes with different rules trace different programs, and the job hangs in the first
    collective. This compares rules by name, pattern and primitive in the order of registration, the
    scopes of this thread, rules that libraries ship, declared functions, how ``install`` was
    called, and the versions of JAX and shardrules. It compares a rule that is a function by its
    code, its defaults, and what it closes over or reads from its module.

    It returns at once if ``jax.distributed.initialize`` was not called, since a single process has
    nothing to compare.

    Args:
      timeout_s: how many seconds to wait for the other processes.

    Raises:
      RulesDifferError: in every process, naming each rule that differs and in which process.
      MissingProcessError: if some processes didn't call this in time, with their numbers.
      ShardrulesError: if ``timeout_s`` is not a positive number.
      UnsupportedJaxError: if this JAX has no such store.

    Example:
      >>> shardrules.assert_same_rules(timeout_s=60)  # in each process, before the first step
    """
    if not 0 < timeout_s < math.inf:
        raise ShardrulesError(
            f"assert_same_rules(timeout_s={timeout_s!r}): pass a number of seconds above zero",
            timeout_s=timeout_s,
        )
    import jax

    door = internals.load()
    job = door.job
    if job.client is None:
        if door.has_devices() and jax.process_count() > 1:
            raise MissingProcessError(
                f"this job has {jax.process_count()} processes, which can't be compared: call "
                "jax.distributed.initialize() in each, before anything else of JAX",
                processes=tuple(range(jax.process_count())),
            )
        return
    if job.num_processes > 1:
        with _lock:
            _compare(job, _listed(door), float(timeout_s))


def _listed(door: Door) -> list[ComparedRule]:
    """Return everything that can make a program's trace differ from another process's."""
    import shardrules

    state = hook_state()
    scope, options = state.scope, "not installed"
    sites: dict[str, set[str]] = {}  # a site may have several decisions
    if scope.active:
        options = (
            f"unknown={scope.policy!r}, prove={scope.prove}, casts={scope.casts!r}, "
            f"unchecked={scope.unchecked!r}"
        )
        for decision in state.of(UncheckedHooks).decisions.values():
            place = f"{os.path.basename(decision.file)}:{decision.line} ({decision.function})"
            check = f"off ({decision.reason})" if decision.reason else "on"
            sites.setdefault(f"{place} {decision.arguments}".strip(), set()).add(check)
    return [
        ComparedRule("version of", "shardrules", shardrules.__version__),
        ComparedRule("version of", "jax", door.version),
        ComparedRule("options of", "install", options),
        *(ComparedRule("check of", site, ", ".join(sorted(sites[site]))) for site in sorted(sites)),
        *fingerprint.entries(state.registry),
    ]


def _compare(job: Any, mine: list[ComparedRule], timeout_s: float) -> None:
    """Compare with the other processes; raise if one is missing, or differs."""
    # Each process stores a digest of its list, and waits for the others at a barrier. Only if the
    # digests differ, each stores its whole list, and all of them read the lists that differ.
    client, me = job.client, str(job.process_id)
    calls = f"{_ROOT}/calls/{me}/"
    # Count this process's calls in the store, since jax.distributed may have been restarted.
    round_ = len(client.key_value_dir_get(calls))
    digests, lists = f"{_ROOT}/digests/{round_}/", f"{_ROOT}/lists/{round_}/"
    client.key_value_set(digests + me, fingerprint.digest(mine))
    client.key_value_set(f"{calls}{round_}", "")
    started = time.monotonic()
    try:
        client.wait_at_barrier(f"{_ROOT}/{round_}", max(1, int(1000 * timeout_s)))
    except Exception as error:  # a timeout, or a process that is gone  # noqa: BLE001
        _missing(job, digests, time.monotonic() - started, error)
    groups: dict[str, list[int]] = {}
    for process, digest in sorted(_stored(job, digests).items()):
        groups.setdefault(digest, []).append(process)
    if len(groups) == 1:
        return
    client.key_value_set(lists + me, json.dumps([dataclasses.astuple(e) for e in mine]))

    def read(process: int) -> list[ComparedRule]:
        text = client.blocking_key_value_get(f"{lists}{process}", max(1, int(1000 * timeout_s)))
        return [ComparedRule(*fields) for fields in json.loads(text)]

    # Compare the list that most processes hold with each other list.
    (_, most), *rest = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))
    names, lines = [], []
    for _, processes in rest:
        lists_of_both = read(most[0]), read(processes[0])
        called = _called(most), _called(processes)
        differences = list(fingerprint.differences(*lists_of_both, *called))
        names += [name for name, _ in differences]
        lines += [f"  {line}" for _, line in differences[:_SHOWN]]
        if len(differences) > _SHOWN:
            lines.append(f"  ... and {len(differences) - _SHOWN} more of {_called(processes)}")
    raise RulesDifferError(
        "the processes of this job hold different rules; they would trace different programs, and "
        "hang in the first collective that one of them does not have:\n" + "\n".join(lines) + "\n"
        "register the same rules in the same order in every process, outside of any "
        "`if jax.process_index() == 0`, before what is traced; if a shard_map is listed, trace "
        "it with the same arguments in every process",
        names=tuple(dict.fromkeys(names)),
        processes=tuple(itertools.chain.from_iterable(processes for _, processes in rest)),
    )


def _stored(job: Any, folder: str) -> dict[int, str]:
    entries = job.client.key_value_dir_get(folder)
    return {int(key.rsplit("/", 1)[1]): value for key, value in entries}


def _called(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:_SHOWN])) + (", ..." if len(processes) > _SHOWN else "")
    return f"process{'es' if len(processes) > 1 else ''} {shown}"


def _missing(job: Any, digests: str, waited_s: float, error: Exception) -> None:
    try:
        arrived = {*_stored(job, digests)}
    except Exception:  # the service is gone, and so is the process that ran it  # noqa: BLE001
        arrived = {job.process_id}
    missing = [process for process in range(job.num_processes) if process not in arrived]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    who = (
        f"{_called(missing)} of {job.num_processes} did not call shardrules.assert_same_rules()"
        if missing
        else "a process left after it had called shardrules.assert_same_rules()"
    )
    raise MissingProcessError(
        f"{who} while process {job.process_id} waited, {waited_s:.0f} s ({reason[:200]}); every "
        "process calls it, as often as the others: look into its log for the error that ended it, "
        "or pass a longer timeout_s",
        processes=tuple(missing),
    ) from error
