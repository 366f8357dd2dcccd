"""Every kind of round trains in Keras as its recurrence says, and visits every sample once.

Self-adaptive rounds are compared with one process in test_keras_elastic.py.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
NEIGHBOURS = ("d-psgd, every round another", "non-blocking, matcha")
FEWER = ("fewer samples than planned", "fewer samples than planned, d-psgd")
TOGETHER = ("lb-non-blocking", "elastic-bsp, local")
# On tf_keras ranks that average with neighbours; gradients are in test_keras_exactness.py, local updates in
# test_keras_elastic.py.
OF_TF_KERAS = ("d-psgd, every round another",)


@pytest.fixture(scope="module", params=["Keras 3", "tf_keras"])
def ranks(request, pool):
    with pool("keras_schemes.py", 3, request.param) as ranks:
        yield ranks


class Schemes:
    def test_weights_are_those_of_the_recurrence_and_alike_on_all_ranks(self, ranks, scheme):
        assert ranks[0][scheme]["difference"] < 1e-10
        for rank in ranks:
            outcome = rank[scheme]
            assert outcome["spread"] == 0.0
            assert outcome["moved"] > 1e-2
            assert outcome["rate"] == 0.05, "averages of state leave it alone"

    def test_every_sample_is_visited_once_an_epoch_unless_the_test_drops_some(self, ranks, scheme):
        for rank in ranks:
            assert rank[scheme]["once"] == (scheme not in FEWER)

    def test_ranks_that_average_with_neighbours_held_different_models_and_others_did_not(self, ranks, scheme):
        assert (ranks[0][scheme]["apart"] > 1e-4) == (scheme not in TOGETHER and scheme != FEWER[0])

    def test_rounds_did_end_early_or_had_several_micro_batches_where_the_scheme_is_about_that(self, ranks, scheme):
        outcome = ranks[0][scheme]
        early = outcome["rounds"] > 18 and outcome["least"] < outcome["most"]  # more rounds than of whole ones
        assert early or "non-blocking" not in scheme
        assert outcome["most"] == 3 or not ("non-blocking" in scheme or "elastic" in scheme)


@pytest.mark.parametrize("ranks", ["Keras 3"], indirect=True)
@pytest.mark.parametrize("scheme", [*TOGETHER, *NEIGHBOURS, *FEWER])
class TestOnKeras3(Schemes):
    pass


@pytest.mark.parametrize("ranks", ["tf_keras"], indirect=True)
@pytest.mark.parametrize("scheme", OF_TF_KERAS)
class TestOnTfKeras(Schemes):
    pass
