"""The contract of a distillation mode: what the teacher is asked, and how its answer is trained on.

Letters: M loss tokens of a micro-batch, K ids of a support, T tokens of a batch.

Columns of the passes, each per token:
    student_ids           [T, K] the student's own top ids, from the old_logprobs pass
    teacher_logprobs      [T]    the teacher's log-prob of the sampled token
    teacher_ids           [T, K] the ids that the teacher answered for; -1: no id
    teacher_top_logprobs  [T, K] its log-probs at these ids
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from rlpost.distillation.context import TeacherContext, check_template
from rlpost.distillation.divergence import Kind

if TYPE_CHECKING:
    import torch

NO_ID = -1


@dataclass(frozen=True)
class DistillationConfig:
    """Keys of every mode. `context` hint: the teacher reads `hint_template` as its prompt."""

    coef: PositiveFloat
    policy_coef: NonNegativeFloat
    teacher_temperature: PositiveFloat
    context: Literal["same", "hint"]
    hint_template: str | None
    route_by: str | None

    def __post_init__(self) -> None:
        if self.context == "hint":
            if self.hint_template is None:
                raise ValueError(
                    'hint_template is null, but context: hint needs it; try "{solution}\\n{prompt}"'
                )
            check_template(self.hint_template)
        elif self.hint_template is not None:
            raise ValueError(
                f"hint_template ({self.hint_template!r}) has no effect with context: same; set "
                "context: hint, or hint_template: null"
            )

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        names = list(run.teachers)
        if not names:
            yield "distillation: needs a teacher, but teachers is empty; add one: teacher=chain"
        elif len(names) > 1 and self.route_by is None:
            yield (
                f"distillation.route_by: null, but there are {len(names)} teachers "
                f"({', '.join(names)}); name the metadata field that chooses between them"
            )
        algorithm = run.algorithm.target(run.algorithm.config)
        if "old_logprobs" not in algorithm.passes:
            yield (
                f"distillation: joins the policy-gradient loss, but {type(algorithm).__name__} has "
                "none; choose algorithm=grpo or another of its kind"
            )


class Distillation:
    """Base of the modes.

    `asks_student`: size K of the student's own top ids that the old_logprobs pass adds, 0 for none.
    `asks_teacher`: size K of the teacher's own top ids, 0 for none.
    `columns`: what the trainer reads beside the algorithm's columns.
    `in_actor`: the teacher lives in the actor's ranks; there is no teacher pass.
    """

    asks_student: int = 0
    asks_teacher: int = 0
    columns: tuple[str, ...] = ()
    in_actor: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes it needs before training."""
        return ("old_logprobs",) if self.in_actor else ("old_logprobs", "teacher_logprobs")

    @property
    def teacher_needs(self) -> tuple[str, ...]:
        """The passes that the teacher's waits for; without any it may start with the batch."""
        return ("old_logprobs",) if self.asks_student else ()

    def context(self, teachers: Mapping[str, Any]) -> TeacherContext:
        """`teachers` as in RunConfig."""
        return TeacherContext(
            hint_template=self.config.hint_template,
            route_by=self.config.route_by,
            teachers=tuple(teachers),
            max_length=min(role.model.config.max_length for role in teachers.values()),
        )

    def advantages(
        self, advantages_M: torch.Tensor, old_M: torch.Tensor, teacher_M: torch.Tensor | None
    ) -> torch.Tensor:
        """The policy loss is linear in the advantages, so policy_coef scales it through them."""
        return advantages_M * float(self.config.policy_coef)


class Divergent(Distillation):
    """A mode with a loss term of its own."""

    @property
    def kind(self) -> Kind:
        return self.config.divergence  # type: ignore[no-any-return]

    @property
    def beta(self) -> float | None:
        return self.config.beta  # type: ignore[no-any-return]


def check_beta(kind: Kind, beta: float | None) -> None:
    """Raises ValueError unless beta is given exactly for jsd."""
    if kind == "jsd" and beta is None:
        raise ValueError("beta is null, but divergence: jsd needs it; try beta: 0.5")
    if kind != "jsd" and beta is not None:
        raise ValueError(f"beta ({beta}) has no effect with divergence: {kind}; set beta: null")
