"""select: "auto" takes the first, a name takes exactly that one or fails."""

import pytest

from k26jax.errors import KernelError
from k26jax.pallas.dispatch import select

FORMS = {"pallas": lambda: 1, "reference": lambda: 2}


def test_choices():
    assert select("operation", FORMS, "auto")() == 1
    assert select("operation", FORMS, "pallas")() == 1
    assert select("operation", FORMS, "reference")() == 2


@pytest.mark.parametrize("choice", ["palas", "mosaic", "", "AUTO"])
def test_a_named_choice_never_falls_back(choice):
    with pytest.raises(KernelError) as caught:
        select("the_operation", FORMS, choice)
    for mention in ("the_operation", repr(choice), "pallas, reference"):
        assert mention in str(caught.value)
    assert ("did you mean 'pallas'" in str(caught.value)) == (choice == "palas")


def test_missing_kernel_is_named_even_where_the_reference_would_do():
    with pytest.raises(KernelError, match="'pallas'"):
        select("operation", {"reference": FORMS["reference"]}, "pallas")
