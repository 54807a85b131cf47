"""Write a report as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from shardrules.arguments import checked
from shardrules.costs import accounts, outputs
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint
from shardrules.report.content import Content

SCHEMA = 1  # increase it when a field changes its meaning or is removed


@checked
def as_json(content: Content) -> str:
    """Return a report as JSON, one object; bytes are per device.

    ``collectives`` are single runs; ``total`` and ``by_axes`` are over all runs of one execution.
    """
    return json.dumps(as_dict(content), indent=1) + "\n"


def as_dict(content: Content) -> dict[str, Any]:
    """Return a report as the dictionary that becomes JSON."""
    target, timings, ledger = content.target, content.timings, content.ledger
    by_axes = content.account.by("over").items()

    def saves(change: Finding | Hint) -> dict[str, Any]:
        worth = ledger.worth(change)
        saved = {**worth._asdict(), "share": ledger.share(worth)}
        return {"collective": change.entry.number, "saves": saved}

    return {
        "schema": SCHEMA,
        "title": content.title,
        "module": content.judgement.module.name,
        "mesh": content.account.mesh,
        "device_count": content.account.device_count,
        "convention": accounts.CONVENTION,
        "estimated_on": target and _picked(target, "name source"),
        "compiled": content.judgement.is_compiled,
        "clean": content.clean,
        "avoidable": {
            **content.avoidable._asdict(),
            "share": ledger.share(content.avoidable),
            "at_most_unproven": content.in_doubt._asdict(),
        },
        "measured": timings
        and {
            "step_seconds": timings.step_seconds,
            "avoidable_seconds": content.avoidable.exposed_seconds,
            **_picked(timings, "device ran busy"),
        },
        "unequal_outputs": [_output(output) for output in content.unequal],
        "unequal_outputs_allowed": [
            {**_output(output), "allowed_because": reason}
            for output, reason in content.unequal_allowed
        ],
        "total": asdict(content.account.total),
        "by_axes": {over: asdict(total) for (over,), total in by_axes},
        "collectives": [_collective(content, entry) for entry in content.account],
        "findings": [
            {**_picked(f, "kind advice gradient_of"), **saves(f)} for f in content.findings
        ],
        "allowed": [
            {"kind": f.kind, "reason": reason, **saves(f)} for f, reason in content.allowed
        ],
        "unused_allowances": list(content.unused),
        "hints": [
            {**_picked(h, "kind bytes_before bytes_after advice"), **saves(h)}
            for h in content.hints
        ],
        "outputs": _outputs(content),
        "costs": [_picked(block, "title note columns rows") for block in content.costs],
    }


def _picked(value: Any, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def _output(output: outputs.Unequal) -> dict[str, Any]:
    data = asdict(output)
    del data["unreduced"]  # the advice has it in words
    return data


def _collective(content: Content, entry: accounts.Entry) -> dict[str, Any]:
    verdict, number = entry.judged, entry.number
    part = verdict.range
    own = dict(vars(entry))
    del own["judged"], own["number"]  # the number is its place in the list
    data = {
        **own,
        "group_size": verdict.collective.group_size,
        "needed_axes": verdict.needed_axes,
        "range": [part.start, part.stop] if part else None,
        "rests_on": [_picked(s, "what source status detail") for s in verdict.rests_on],
    }
    if content.target is not None:
        data["estimated_seconds"] = content.ledger.seconds[number]
    if content.timings is not None:
        timing = content.timings.of[number]
        data["measured"] = timing and timing._asdict()
    return data


def _outputs(content: Content) -> list[dict[str, Any]]:
    promises = content.judgement.promises or (None,) * len(content.judgement.outputs)
    return [
        {
            "path": list(output.path),
            "name": promise and outputs.name(promise[0]),
            "sharding": promise and promise[1],
            "shape": str(output.shape),
            **_picked(output, "equal varying reason"),
        }
        for output, promise in zip(content.judgement.outputs, promises)
    ]
