"""The queue between the data pipeline and the training: rounds are cut once, in order, and no earlier than known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

from hvd_hetero.balancer import Balancer
from hvd_hetero.columns import COLUMNS
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.errors import RoundStateError
from hvd_hetero.policies import BSP, NonBlocking, StaticAllocation
from keras_callbacks.data import indices_of
from keras_callbacks.pipeline.queue import RoundQueue


def queue_of(policy=None, *, rank=0, workers=2, samples=26, batch=8, lead=0, shuffle=False, **options):
    balancer = Balancer(policy or BSP(), rank, workers, batch, clock=itertools.count().__next__)
    balancer.set_lead(lead)
    order = SharedPermutation(samples, shuffle=shuffle, seed=3)
    return RoundQueue(order, balancer, indices_of, **options), balancer


def finish(queue, balancer, cut, done=None):
    """What training does with a round that was taken; the other ranks have done their plans, or what is said."""
    for work in cut.micro_batches():
        balancer.begin(work)
        if not work.last:
            balancer.pause()
    table = balancer.report()
    columns = len(table) // balancer.workers
    for rank in range(balancer.workers):
        if rank != balancer.rank:
            table[rank * columns : (rank + 1) * columns] = table[balancer.rank * columns :][:columns]
            table[rank * columns] = (done or cut.plan.samples)[rank]
    balancer.agree(table)
    queue.finish(balancer.finished.table)


def epoch(queue, balancer):
    parts = []
    for index in range(queue.rounds):
        samples = queue.prepare(new=index == 0)
        parts.append(queue.part(index).tolist())
        cut = queue.take()
        assert cut.plan.samples[balancer.rank] == samples
        finish(queue, balancer, cut)
    return parts


def test_the_first_column_of_a_report_is_the_samples():
    """``finish`` above relies on it."""
    assert next(iter(COLUMNS)) == "samples"


def test_an_epoch_is_cut_into_rounds_and_the_last_one_is_short():
    queue, balancer = queue_of()
    assert queue.rounds == 4
    assert epoch(queue, balancer) == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24]]
    assert queue.at_end


def test_both_ranks_together_get_every_sample_of_an_epoch_once():
    parts = [epoch(*queue_of(StaticAllocation([3, 1]), rank=rank, shuffle=True)) for rank in (0, 1)]
    assert sorted(i for rank in parts for part in rank for i in part) == list(range(26))


def test_every_epoch_has_an_order_of_its_own_and_the_same_on_every_rank():
    (first, a), (second, b) = queue_of(shuffle=True), queue_of(shuffle=True)
    epochs = [epoch(first, a) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [epoch(second, b) for _ in range(2)] == epochs


def test_a_rank_without_samples_gets_one_to_stand_in():
    queue, _ = queue_of(StaticAllocation([0, 1]))
    assert queue.part(0).tolist() == [0]
    assert queue.prepare(new=True) == 0
    assert [work.samples for work in queue.take().micro_batches()] == [0]


def test_asking_again_for_a_batch_that_is_not_used_gives_the_same_one():
    """As Keras does, which draws a batch to build a model, and then begins again."""
    queue, balancer = queue_of(shuffle=True)
    assert queue.part(0).tolist() == queue.part(0).tolist() == epoch(queue, balancer)[0]


def test_a_new_iteration_in_the_middle_of_an_epoch_begins_the_next_one():
    queue, balancer = queue_of(shuffle=True)
    first = queue.part(0).tolist()
    queue.prepare(new=True)
    finish(queue, balancer, queue.take())
    queue.prepare(new=True)
    assert queue.part(0).tolist() != first
    assert queue.take().epoch == 1


def test_the_epoch_that_fit_starts_with_decides_the_order():
    """Training that is resumed at epoch 1 sees the samples as training that came there."""
    queue, balancer = queue_of(shuffle=True)
    epoch(queue, balancer)
    resumed, other = queue_of(shuffle=True)
    resumed.wanted_epoch = 1
    resumed.prepare(new=True)
    assert epoch(resumed, other) == epoch(queue, balancer)


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_batches_are_known_as_far_ahead_as_plans_are_and_no_further(lead):
    queue, balancer = queue_of(lead=lead)
    queue.part(lead)
    with pytest.raises(RoundStateError, match=r"LoadBalance.*model\.fit\(batches, "):
        queue.part(lead + 1)
    queue.prepare(new=True)
    with pytest.raises(RoundStateError, match=r"size.*resize_batches\(…, prefetch=…\)"):
        queue.part(lead + 1)
    finish(queue, balancer, queue.take())
    if lead < 3:
        queue.part(lead + 1)


def test_what_is_known_is_shown_before_every_round_and_no_more_at_the_end():
    shown = []
    queue, balancer = queue_of(lead=2, show=lambda first, parts: shown.append((first, [p.tolist() for p in parts])))
    whole = [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24]]
    assert shown == [(0, whole[:1])], "one when it is made, so that fit without the callback fails at the second"
    epoch(queue, balancer)
    assert shown[1:] == [(0, whole[:3]), (1, whole[1:4]), (2, whole[2:4]), (3, whole[3:4])]


def test_during_a_round_no_more_is_known_than_before_it():
    queue, balancer = queue_of(lead=1)
    queue.prepare(new=True)
    with queue.lock:
        balancer.begin(queue.take().micro_batches()[0])
    queue.part(1)
    with pytest.raises(RoundStateError, match=r"size.*prefetch"):
        queue.part(2)


def test_a_batch_that_was_not_cut_is_refused():
    queue, _ = queue_of()
    queue.take()
    with pytest.raises(RoundStateError, match=r"model\.fit\(resize_batches"):
        queue.take()


def test_what_a_round_that_ended_early_left_undone_comes_next():
    queue, balancer = queue_of(NonBlocking(2))
    assert queue.rounds is None, "not known beforehand"
    assert queue.part(0).tolist() == [0, 1, 2, 3]
    queue.prepare(new=True)
    finish(queue, balancer, queue.take(), done=(4, 2))  # rank 1 left 6 and 7
    assert queue.part(1).tolist() == [6, 7, 8, 9]
    assert not queue.at_end


@pytest.mark.parametrize("lead", [0, 2])
def test_another_queue_goes_on_where_one_stood(lead):
    """As after a failure: rounds that were cut ahead are cut again, and the next epoch follows."""
    queue, balancer = queue_of(lead=lead, shuffle=True)
    for _ in range(2):
        queue.prepare(new=not queue._used)
        finish(queue, balancer, queue.take())
    place = queue.place()
    later = [queue.part(2).tolist()]
    other, another = queue_of(lead=lead, shuffle=True)
    other.go_on(place)
    other.wanted_epoch = 7
    for index in range(2):
        other.prepare(new=index == 0)
        assert not other.at_end
        assert index or [other.part(0).tolist()] == later
        finish(other, another, other.take())
    assert other.at_end
    assert other.place() is None, "the next epoch begins at its beginning"


def test_indices_are_what_tensorflow_gathers_by():
    queue, _ = queue_of()
    assert queue.part(0).dtype == np.int64
