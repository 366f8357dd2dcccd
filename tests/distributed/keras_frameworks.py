"""The versions of Keras on which ranks run, and the cases of each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

KERAS_3, TF_KERAS = "Keras 3", "tf_keras"


def by_framework(keras_3: Iterable[str], tf_keras: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each ``case`` on ranks of its framework, which the fixture ``outcomes`` takes as its parameter."""
    pairs = [(KERAS_3, case) for case in keras_3] + [(TF_KERAS, case) for case in tf_keras]
    ids = [f"{framework}, {case}" for framework, case in pairs]
    return pytest.mark.parametrize(("outcomes", "case"), pairs, indirect=["outcomes"], ids=ids, scope="module")
