"""Our reader against XLA's own, on training steps and on the oracle's programs."""

import itertools
import re

import pytest

from shardrules import testing

from . import corpus, oracle
from . import text as T
from .test_parser import compare

pytestmark = pytest.mark.one_lane

bindings = pytest.importorskip("jaxlib._hlo")

# XLA prints this attribute of an all-reduce-start, and can't read it (JAX 0.12.0.1).
_UNREADABLE = re.compile(
    r"(?<=to_apply=)(%[\w.\-]+), output_to_operand_aliasing=\{\{1\}: "
    r"\(0, \{\}\)\}"
)


# Layers, element type, whether it is a gradient, whether it is checked: nine modules a program.
VARIANTS = [
    (layers, "float32", grad, check)
    for layers, grad, check in itertools.product((1, 3), (True, False), (True, False))
] + [(2, "bfloat16", True, False)]


def test_there_are_two_hundred_modules():
    assert len(corpus.PROGRAMS) * len(VARIANTS) * 3 == 216  # on each of three platforms


@pytest.mark.sampled
@pytest.mark.parametrize("name", corpus.PROGRAMS)
def test_training_steps(name, platform):
    """Nothing is unproven, and what out_specs call replicated over model is proven so."""
    for layers, dtype, grad, check in VARIANTS:
        program = corpus.compile_program(name, platform[1], check, layers, dtype, grad)
        compare(_UNREADABLE.sub(r"\1", program.as_text()), bindings)
        judgement = testing.judge(program)
        assert judgement.verdicts, (layers, dtype, grad, check)
        assert {v.verdict for v in judgement.verdicts} <= {"redundant", "overwide", "needed"}
        # out_specs=P() for a loss, P(data) and P() for the gradients
        assert all("model" not in o.varying for o in judgement.outputs)


@pytest.mark.tpu
def test_a_collective_spread_over_fusions_counts_once(tpu_mesh):
    """Backward of three gathers along model: TPU overlaps two of them with products."""
    program = corpus.compile_program("sequence", tpu_mesh, check_vma=False)
    text = program.as_text()
    assert text.count('custom_call_target="AsyncCollectiveDone"') == 2
    assert text.count(" all-gather(") == 10
    gathers = [v for v in testing.judge(program).verdicts if v.collective.kind == "all-gather"]
    assert len(gathers) == 6  # three forward, three backward
    assert {v.verdict for v in gathers} <= {"needed", "redundant"}


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    compare(oracle.run_program(seed).text, bindings)


def test_the_comparison_can_fail():
    text = T.module(T.parameter("{replicated}", "f32[]") + "\n" + T.all_reduce("%x", shape="f32[]"))
    compare(text, bindings)

    class Bindings:
        """XLA's answer for a module with two operands exchanged."""

        @staticmethod
        def hlo_module_from_text(source):
            return bindings.hlo_module_from_text(source.replace("add(%a, %b)", "add(%b, %a)"))

    with pytest.raises(AssertionError):
        compare(text, Bindings)
