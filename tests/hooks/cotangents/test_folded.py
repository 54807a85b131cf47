"""What the folds over jaxprs say of random programs, held against what eight devices compute."""

import pytest
from core import versions

from shardrules.hooks.cotangents import linearity, origins
from shardrules.jaxprs import fold

from . import folded

pytestmark = versions.where(versions.types_values)


@pytest.mark.one_lane
@pytest.mark.parametrize("first", [0, 20, 40])
def test_the_claims_are_those_of_the_devices(first, cpu_mesh):
    assert [w for seed in range(first, first + 20) if (w := folded.wrong(seed, cpu_mesh))] == []


def anything_is_linear(monkeypatch):
    monkeypatch.setattr(linearity.Linearity, "chosen", lambda fold, by, value: value)


def a_ref_is_not_stored_to(monkeypatch):
    monkeypatch.setattr(fold.Fold, "store", lambda fold, cell, value: None)


def a_loop_is_read_once(monkeypatch):
    monkeypatch.setattr(fold.Fold, "_either", lambda fold, values: values[0])


def the_devices_place_is_equal(monkeypatch):
    monkeypatch.setattr(origins.Origin, "along", lambda origin, axes: origin)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [anything_is_linear, a_ref_is_not_stored_to, a_loop_is_read_once, the_devices_place_is_equal],
)
def test_a_planted_fault_is_found(fault, monkeypatch, cpu_mesh):
    fault(monkeypatch)
    assert any(folded.wrong(seed, cpu_mesh) for seed in range(60))
