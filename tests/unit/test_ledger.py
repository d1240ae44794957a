"""The prompt ledger: no prompt is lost, none is trained twice."""

import json

import pytest

from rlpost.data.ledger import Ledger
from rlpost.errors import CheckpointError
from rlpost.types import Prompt


class Numbers:
    """Prompts n/0 .. n/(size-1), in the same order in each epoch."""

    def __init__(self, size, name="n"):
        self.size, self.name = size, name

    def __len__(self):
        return self.size

    def get(self, epoch, index):
        return Prompt(f"{self.name}/{index}", epoch=epoch, index=index, text=str(index))


class Backwards(Numbers):
    def get(self, epoch, index):
        return super().get(epoch, self.size - 1 - index)


PATH = ("leased", "generated", "scored", "admitted", "trained")


def advance(ledger, key, until):
    for state in PATH[: PATH.index(until) + 1]:
        ledger.move(key, state)


def drain(ledger):
    keys = []
    while prompt := ledger.draw():
        keys.append(prompt.key)
    return keys


def test_asking_more_than_an_epoch_holds_goes_on_in_the_next():
    ledger = Ledger(Numbers(3), num_epochs=None, num_prompts=5)
    assert drain(ledger) == ["n/0@0", "n/1@0", "n/2@0", "n/0@1", "n/1@1"]
    assert ledger.exhausted


def test_num_epochs_ends_the_drawing():
    assert len(drain(Ledger(Numbers(3), num_epochs=2, num_prompts=None))) == 6


def test_every_outcome_is_counted_by_id():
    ledger = Ledger(Numbers(9), num_epochs=1, num_prompts=None)
    keys = drain(ledger)
    advance(ledger, keys[0], "trained")
    advance(ledger, keys[1], "scored")
    ledger.move(keys[1], "filtered")
    advance(ledger, keys[2], "generated")
    ledger.move(keys[2], "evicted")
    advance(ledger, keys[3], "leased")
    ledger.move(keys[3], "failed")
    ledger.check()
    assert ledger.counts == {"trained": 1, "filtered": 1, "evicted": 1, "failed": 1}
    assert sorted(ledger.in_flight()) == keys[4:]


def test_a_lost_prompt_is_named():
    ledger = Ledger(Numbers(3), num_epochs=1, num_prompts=None)
    drain(ledger)
    del ledger._states["n/1@0"], ledger._ordinals["n/1@0"]
    with pytest.raises(AssertionError, match="n/1@0"):
        ledger.check()


@pytest.mark.parametrize("state", ["trained", "scored", "drawn"])
def test_an_illegal_transition_is_an_error(state):
    ledger = Ledger(Numbers(3), num_epochs=1, num_prompts=None)
    key = ledger.draw().key
    with pytest.raises(ValueError, match=f"'drawn' to '{state}'.*leased"):
        ledger.move(key, state)


def test_training_twice_is_an_error():
    ledger = Ledger(Numbers(3), num_epochs=1, num_prompts=None)
    key = ledger.draw().key
    advance(ledger, key, "trained")
    with pytest.raises(ValueError, match="finished already"):
        ledger.move(key, "trained")


def test_resume_draws_in_flight_prompts_first_and_loses_none():
    before = Ledger(Numbers(4), num_epochs=2, num_prompts=None)
    keys = [before.draw().key for _ in range(6)]
    for key in (keys[1], keys[4]):
        advance(before, key, "trained")
    advance(before, keys[5], "generated")
    saved = json.loads(json.dumps(before.state_dict()))

    after = Ledger(Numbers(4), num_epochs=2, num_prompts=None)
    after.load_state_dict(saved)
    drawn = drain(after)
    assert drawn == [keys[0], keys[2], keys[3], keys[5], "n/2@1", "n/3@1"]
    for key in drawn:
        advance(after, key, "trained")
    after.check()
    assert after.counts["trained"] == 8 and not after.in_flight()


def test_saving_a_resumed_ledger_before_it_draws_keeps_its_in_flight_prompts():
    before = Ledger(Numbers(4), num_epochs=1, num_prompts=None)
    before.draw()
    middle = Ledger(Numbers(4), num_epochs=1, num_prompts=None)
    middle.load_state_dict(before.state_dict())
    assert middle.state_dict() == before.state_dict()


def test_resume_with_other_data_is_refused():
    ledger = Ledger(Numbers(4), num_epochs=1, num_prompts=None)
    with pytest.raises(CheckpointError, match=r"size 3.*has 4"):
        ledger.load_state_dict(Ledger(Numbers(3), num_epochs=1, num_prompts=None).state_dict())


def test_resume_in_another_order_is_refused_also_with_nothing_in_flight():
    before, after = (
        Ledger(source, num_epochs=1, num_prompts=None) for source in (Numbers(4), Backwards(4))
    )
    advance(before, before.draw().key, "trained")
    with pytest.raises(CheckpointError, match=r"place 0 held prompt 'n/0@0'.*same data and seed"):
        after.load_state_dict(before.state_dict())
