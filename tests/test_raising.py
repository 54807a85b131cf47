"""The helper that asserts errors by their data can fail."""

import pytest
from raising import raises

from shardrules.errors import AxisError, CotangentError


def refuse():
    raise AxisError("text", axes={"data"})


def test_the_same_class_and_data_pass():
    with raises(AxisError, axes={"data"}) as caught:
        refuse()
    assert caught.value.axes == {"data"}
    with raises(AxisError, axes=lambda axes: "data" in axes):
        refuse()


@pytest.mark.parametrize("axes", [{"model"}, lambda axes: "model" in axes])
def test_other_data_fails(axes):
    with pytest.raises(AssertionError), raises(AxisError, axes=axes):
        refuse()


def test_another_class_and_a_missing_attribute_fail():
    with pytest.raises(AxisError), raises(CotangentError):
        refuse()
    with pytest.raises(AttributeError), raises(AxisError, problem="lost"):
        refuse()
