"""A report as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from shardrules.arguments import checked
from shardrules.costs import accounts, outputs
from shardrules.costs.findings import Finding
from shardrules.costs.waste import Hint
from shardrules.report.content import Content

__all__ = ["SCHEMA", "as_dict", "as_json"]

SCHEMA = 1  # it grows when a field changes its meaning or goes


@checked
def as_json(what: Content) -> str:
    """Return a report as JSON, one object; bytes are per device.

    ``collectives`` are single runs, ``totals`` are over all runs of one execution.
    """
    return json.dumps(as_dict(what), indent=1) + "\n"


def as_dict(what: Content) -> dict[str, Any]:
    """Return a report as JSON's types."""
    target, timings, ledger = what.target, what.timings, what.ledger
    numbers = {id(verdict): n for n, verdict in enumerate(what.judgement.verdicts)}
    by_axes = what.account.by("over").items()
    measured = timings and {
        "step_seconds": timings.step_seconds,
        "avoidable_seconds": what.avoidable.exposed_seconds,
        "device": timings.device,
        "ran": timings.ran,
        "busy": timings.busy,
    }

    def saves(one: Finding | Hint) -> dict[str, Any]:
        worth = ledger.worth(one)
        saved = {**worth._asdict(), "share": ledger.share(worth)}
        return {"collective": numbers[id(one.verdict)], "saves": saved}

    return {
        "schema": SCHEMA,
        "title": what.title,
        "module": what.judgement.module.name,
        "mesh": what.account.mesh,
        "device_count": what.account.device_count,
        "convention": accounts.CONVENTION,
        "estimated_on": target and {"name": target.name, "source": target.source},
        "clean": what.clean,
        "avoidable": {
            **what.avoidable._asdict(),
            "share": ledger.share(what.avoidable),
            "at_most_unproven": what.in_doubt._asdict(),
        },
        "measured": measured,
        "unequal_outputs": [dataclasses.asdict(output) for output in what.unequal],
        "unequal_outputs_allowed": [
            {**dataclasses.asdict(output), "allowed_because": reason}
            for output, reason in what.unequal_allowed
        ],
        "total": dataclasses.asdict(what.account.total),
        "by_axes": {over: dataclasses.asdict(total) for (over,), total in by_axes},
        "collectives": [_collective(what, n) for n in range(len(what.account.entries))],
        "findings": [{"kind": f.kind, "advice": f.advice, **saves(f)} for f in what.findings],
        "allowed": [{"kind": f.kind, "reason": reason, **saves(f)} for f, reason in what.allowed],
        "unused_allowances": list(what.unused),
        "hints": [
            {
                **{n: getattr(h, n) for n in ("kind", "bytes_before", "bytes_after", "advice")},
                **saves(h),
            }
            for h in what.hints
        ],
        "outputs": _outputs(what),
        "costs": [
            {name: getattr(block, name) for name in ("title", "note", "columns", "rows")}
            for block in what.costs
        ],
    }


def _collective(what: Content, number: int) -> dict[str, Any]:
    verdict = what.judgement.verdicts[number]
    part = verdict.range
    data = {
        **dataclasses.asdict(what.account.entries[number]),
        "group_size": verdict.collective.group_size,
        "needed_axes": verdict.needed_axes,
        "range": [part.start, part.stop] if part else None,
        "rests_on": [
            {name: getattr(support, name) for name in ("what", "source", "status", "detail")}
            for support in verdict.rests_on
        ],
    }
    if what.target is not None:
        data["estimated_seconds"] = what.ledger.seconds[number]
    if what.timings is not None:
        timing = what.timings.of[number]
        data["measured"] = timing and timing._asdict()
    return data


def _outputs(what: Content) -> list[dict[str, Any]]:
    """Write what is proven of each output, and what its sharding promises."""
    promises = what.judgement.promises or (None,) * len(what.judgement.outputs)
    return [
        {
            "path": list(output.path),
            "name": promise and outputs.name(promise[0]),
            "sharding": promise and promise[1],
            "shape": str(output.shape),
            "equal": output.equal,
            "varying": output.varying,
            "reason": output.reason,
        }
        for output, promise in zip(what.judgement.outputs, promises)
    ]
