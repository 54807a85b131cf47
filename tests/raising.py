"""Errors told apart by their class and their data, which are stable; their texts may change."""

import contextlib

import pytest


@contextlib.contextmanager
def raises(kind, **data):
    """Expect an error of this class with these attributes; a function is asked about its value."""
    with pytest.raises(kind) as caught:
        yield caught
    for name, value in data.items():
        own = getattr(caught.value, name)
        assert value(own) if callable(value) else own == value, (name, own, str(caught.value))


def wrong_out_specs():
    """Expect JAX's own refusal of out_specs: in each version it is a ValueError without data."""
    return pytest.raises(ValueError, match="out_specs")


def refused():
    """Expect JAX's refusal of out_specs, or to JAX 0.5.3 of a primitive without a rule."""
    why = "out_specs|No replication rule|no rule"
    return pytest.raises((ValueError, NotImplementedError), match=why)


def not_inferred():
    """Expect JAX's refusal of outputs whose replication its check can't tell."""
    return pytest.raises(ValueError, match="can't be statically inferred")
