"""The plan of passes: order, several teachers, and what must have come back."""

import dataclasses

import pytest
from test_batches import batch_of, group, view

from rlpost.errors import ConfigError, TrainerError
from rlpost.loops.passes import check_delivered, plan_passes, rounds, teacher_passes
from rlpost.types import PassResult, StoredBlock


def planned(needs):
    return plan_passes(
        ("old_logprobs", "ref_logprobs", "old_logprobs", "teacher_logprobs"),
        teacher_passes(["math", "code"], needs),
    )


def result(*names):
    return PassResult(StoredBlock(None, names) if names else None, {}, 0.0)


def test_teachers_that_need_the_students_ids_come_after_the_actor():
    together = [[item.role for item in ready] for ready in rounds(planned(("old_logprobs",)))]
    assert together == [["actor", "reference"], ["teacher.math", "teacher.code"]]


def test_teachers_that_read_rollouts_alone_start_with_the_batch():
    (ready,) = rounds(planned(()))
    assert [item.role for item in ready if not item.needs] == [
        "actor",
        "reference",
        "teacher.math",
        "teacher.code",
    ]


def test_unknown_passes_and_columns_that_nothing_makes_are_errors():
    with pytest.raises(ConfigError, match="unknown pass 'old_logprob'; known: old_logprobs"):
        plan_passes(["old_logprob"])
    with pytest.raises(ConfigError, match="teacher_logprobs wait for columns that no pass makes"):
        plan_passes([], teacher_passes(["math"], ("old_logprobs",)))


def routed():
    groups = [group(key) for key in ("a", "b", "c")]
    teachers = ("math", "code", "math")
    return batch_of(
        *(dataclasses.replace(g, teacher=t) for g, t in zip(groups, teachers, strict=True))
    )


def test_each_teacher_gets_the_groups_routed_to_it_and_no_others():
    keys = [
        [g.prompt_key for g in routed().routed_to(name).groups] for name in ("math", "code", "law")
    ]
    assert keys == [["a", "c"], ["b"], []]


@pytest.mark.parametrize(
    ("delivered", "message"),
    [
        ([("a#0", "a#1", "c#0"), ()], r"1 samples missing \(c#1\)"),
        ([("a#0", "a#1", "c#0", "c#1"), ("c#1",)], r"not asked for, or twice \(c#1\)"),
        ([("a#0", "a#1", "c#0", "c#1"), ("b#0",)], r"not asked for, or twice \(b#0\)"),
    ],
)
def test_a_teacher_that_delivers_too_little_or_too_much_is_named(delivered, message):
    """Also when what is too much belongs to another teacher."""
    item = teacher_passes(["math"], ())[0]
    asked = view(routed().routed_to("math"))
    whole = [result("a#0", "a#1"), result("c#0", "c#1")]
    check_delivered(item, whole, asked)
    with pytest.raises(TrainerError, match=r"teacher_logprobs of teacher\.math: .*" + message):
        check_delivered(item, [result(*names) for names in delivered], asked)
