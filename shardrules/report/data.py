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

__all__ = ["SCHEMA", "as_json"]

SCHEMA = 1  # it grows when a field changes its meaning or goes


@checked
def as_json(what: Content) -> str:
    """Return a report as JSON, one object; bytes are per device.

    ``collectives`` are single runs, ``totals`` are over all runs of one execution.
    """
    on, on_profile = what.target, what.timings
    numbers = {id(verdict): n for n, verdict in enumerate(what.judgement.verdicts)}
    by_axes = what.account.by("over").items()

    def saves(one: Finding | Hint) -> dict[str, Any]:
        worth = what.ledger.worth(one)
        return {
            "collective": numbers[id(one.verdict)],
            "saves": {**worth._asdict(), "share": what.ledger.share(worth)},
        }

    data = {
        "schema": SCHEMA,
        "title": what.title,
        "module": what.judgement.module.name,
        "mesh": what.account.mesh,
        "device_count": what.account.device_count,
        "convention": accounts.CONVENTION,
        "estimated_on": on and {"name": on.name, "source": on.source},
        "clean": what.clean,
        "avoidable": {
            **what.avoidable._asdict(),
            "share": what.ledger.share(what.avoidable),
            "at_most_unproven": what.in_doubt._asdict(),
        },
        "measured": on_profile
        and {
            "step_seconds": on_profile.step_seconds,
            "avoidable_seconds": what.avoidable.exposed_seconds,
            "device": on_profile.device,
            "ran": on_profile.ran,
            "busy": on_profile.busy,
        },
        "unequal_outputs": [dataclasses.asdict(one) for one in what.unequal],
        "unequal_outputs_allowed": [
            {**dataclasses.asdict(one), "allowed_because": reason}
            for one, reason in what.unequal_allowed
        ],
        "total": dataclasses.asdict(what.account.total),
        "by_axes": {over: dataclasses.asdict(total) for (over,), total in by_axes},
        "collectives": _collectives(what),
        "findings": [{"kind": f.kind, "advice": f.advice, **saves(f)} for f in what.findings],
        "allowed": [{"kind": f.kind, "reason": reason, **saves(f)} for f, reason in what.allowed],
        "unused_allowances": list(what.unused),
        "hints": [
            {
                "kind": h.kind,
                "bytes_before": h.bytes_before,
                "bytes_after": h.bytes_after,
                "advice": h.advice,
                **saves(h),
            }
            for h in what.hints
        ],
        "outputs": _outputs(what),
        "costs": [
            {"title": b.title, "note": b.note, "columns": b.columns, "rows": b.rows}
            for b in what.costs
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _collectives(what: Content) -> list[dict[str, Any]]:
    collectives: list[dict[str, Any]] = []
    for number, (entry, verdict) in enumerate(zip(what.account, what.judgement.verdicts)):
        collectives.append(
            {
                **{f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)},
                "group_size": verdict.collective.group_size,
                "needed_axes": verdict.needed_axes,
                "range": [verdict.range.start, verdict.range.stop] if verdict.range else None,
                "rests_on": [
                    {"what": s.what, "source": s.source, "status": s.status, "detail": s.detail}
                    for s in verdict.rests_on
                ],
            }
        )
        if what.target is not None:
            collectives[-1]["estimated_seconds"] = what.ledger.seconds[number]
        if what.timings is not None:
            timing = what.timings.of[number]
            collectives[-1]["measured"] = timing and timing._asdict()
    return collectives


def _outputs(what: Content) -> list[dict[str, Any]]:
    """Write what is proven of each output, and what its sharding promises."""
    promises = what.judgement.promises or (None,) * len(what.judgement.outputs)
    return [
        {
            "path": list(o.path),
            "name": None if promise is None else outputs.name(promise[0]),
            "sharding": None if promise is None else promise[1],
            "shape": str(o.shape),
            "equal": o.equal,
            "varying": o.varying,
            "reason": o.reason,
        }
        for o, promise in zip(what.judgement.outputs, promises)
    ]
