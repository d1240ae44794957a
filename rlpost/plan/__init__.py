"""The numbers that follow from a configuration: what a run will do, before anything starts."""

from rlpost.plan.run_plan import RunPlan

__all__ = ["RunPlan"]
