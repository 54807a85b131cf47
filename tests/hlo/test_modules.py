"""The proof against random modules that run; and the generator against faults put into the proof."""

import functools

import numpy as np
import pytest

from shardrules import errors
from shardrules.hlo.known import exact, ranges, values
from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import collectives, control, customcalls, evaluation, loops
from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import parser

from .modules import coverage, run
from .modules.generate import Generator

pytestmark = pytest.mark.one_lane

COUNT, SEARCHED = 25, 150

execute = functools.lru_cache(maxsize=None)(run.execute)


def test_no_claim_is_false():
    outcomes = [run.hold(execute(seed)) for seed in range(COUNT)]
    assert [claim for o in outcomes for claim in o.wrong] == []
    assert sum(o.probed for o in outcomes) > 15 * COUNT
    assert sum(o.redundant for o in outcomes) > COUNT
    # What is equal by chance, as small integers are, is not proven.
    assert sum(o.proven for o in outcomes) > 0.8 * sum(o.equal for o in outcomes)


def test_all_that_the_proof_reads_is_generated():
    opcodes, attributes, report = coverage.missing(Generator(k).judged() for k in range(500))
    assert not opcodes and not attributes, report


def test_coverage_tells_what_is_missing():
    opcodes, attributes, _ = coverage.missing([Generator(0).judged().replace(", index=", ", k=")])
    assert "index" in attributes and opcodes


def elided_constants_are_one(monkeypatch):
    original = control._origin

    def origin(*args):
        found = original(*args)
        return ("elided",) if found and found[0] == "elided" else found

    monkeypatch.setattr(control, "_origin", origin)


def bitcasts_keep_the_order(monkeypatch):
    monkeypatch.setattr(ranges, "keeps_order", lambda before, after: True)


def broadcasts_do_not_transpose(monkeypatch):
    original = exact.evaluate

    def evaluate(instruction, arrays, shapes):
        rows = original(instruction, arrays, shapes)
        if instruction.opcode != "broadcast" or rows is None or rows[0].size == 1:
            return rows
        sizes = [1] * len(instruction.shape.dimensions)
        for place in ranges.read_ints(instruction.attribute("dimensions")):
            sizes[place] = instruction.shape.dimensions[place]
        kept = arrays[0].reshape([-1, *sizes])
        return np.broadcast_to(kept, (len(kept), *instruction.shape.dimensions))

    monkeypatch.setattr(exact, "evaluate", evaluate)


def wide_indices_wrap(monkeypatch):
    monkeypatch.setattr(
        exact,
        "clamped_index",
        lambda rows, last: np.clip(rows.reshape(-1).astype(np.int64), 0, last),
    )


def unfollowed_paths_count_for_nothing(monkeypatch):
    monkeypatch.setattr(evaluation.CallGraph, "abandon", lambda self, names, why: hs.Blocker(why))


def attributes_end_at_metadata(monkeypatch):
    original = hm.Instruction.attributes

    def attributes(self):
        for key, start, end in original(self):
            if key == "metadata":
                return
            yield key, start, end

    monkeypatch.setattr(hm.Instruction, "attributes", attributes)


def a_fusions_tuple_is_the_carry(monkeypatch):
    original = loops._Counter._side

    def side(self, computation, position, around=None):
        place = loops._behind(self._module, computation, position, around)
        index = place and hm.parameter_element(*place[:2])
        if index is None:
            return original(self, computation, position, around)
        return "element", index

    monkeypatch.setattr(loops._Counter, "_side", side)


def an_empty_buffer_is_equal(monkeypatch):
    monkeypatch.setattr(customcalls, "empty_buffer", lambda values, filling: 0)


def any_buffer_holds_a_kernels_result(monkeypatch):
    monkeypatch.setattr(customcalls, "aliased", lambda instruction: range(9))


def what_is_chosen_is_the_first(monkeypatch):
    monkeypatch.setattr(values.Values, "choose", lambda self, which, options: options[0])


def positions_do_not_matter(monkeypatch):
    monkeypatch.setattr(collectives, "result_how", lambda instruction, channel: "join")


def ids_are_always_replicas(monkeypatch):
    original = collectives._groups
    monkeypatch.setattr(
        collectives, "_groups", lambda text, channel, *rest: original(text, False, *rest)
    )


def devices_take_the_same_branch(monkeypatch):
    monkeypatch.setattr(values.Values, "with_state", lambda self, value, state: value)


def branches_swap(monkeypatch):
    first, second = "true_computation", "false_computation"
    swapped = {first: second, second: first}
    monkeypatch.setattr(parser, "_CALL_KEYS", [swapped.get(k, k) for k in parser._CALL_KEYS])


def loops_stop_together(monkeypatch):
    monkeypatch.setattr(control, "_diverged", lambda values, value, predicate: value)


def what_is_applied_is_a_function(monkeypatch):
    monkeypatch.setattr(evaluation.CallGraph, "applied", lambda self, instruction: "")


# Each with a seed that shows it; where the generator has changed since, another is looked for.
FAULTS = {
    elided_constants_are_one: 18,
    bitcasts_keep_the_order: 16,
    broadcasts_do_not_transpose: 31,
    wide_indices_wrap: 36,
    unfollowed_paths_count_for_nothing: 8,
    attributes_end_at_metadata: 0,
    a_fusions_tuple_is_the_carry: 20,
    an_empty_buffer_is_equal: 43,
    any_buffer_holds_a_kernels_result: 212,
    what_is_chosen_is_the_first: 4,
    positions_do_not_matter: 2,
    ids_are_always_replicas: 0,
    devices_take_the_same_branch: 40,
    loops_stop_together: 40,
    branches_swap: 13,
    what_is_applied_is_a_function: 38,
}


def shows(seed) -> bool:
    """Tell whether a module shows a fault: by a false claim, or by an error over valid text."""
    try:
        return bool(run.hold(execute(seed)).wrong)
    except errors.HloSyntaxError:
        return True
    except run._jax.JaxRuntimeError:  # what XLA's CPU compiler doesn't take shows nothing
        return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault, monkeypatch):
    fault(monkeypatch)
    assert any(shows(seed) for seed in (FAULTS[fault], *range(SEARCHED)))
