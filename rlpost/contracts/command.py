"""`python -m rlpost check <dotted path>`: does a class keep the contract of its kind."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlpost.composition import CONF
from rlpost.contracts.algorithms import algorithm_findings
from rlpost.contracts.classifiers import classifier_findings
from rlpost.contracts.report import Finding
from rlpost.contracts.rewards import TEXTS, made_up_prompt, reward_findings, step_findings
from rlpost.contracts.sources import source_findings
from rlpost.contracts.subject import Subject, values_in_file

# The method that marks a kind.
MARKS = {
    "loss": "algorithm",
    "score_steps": "step program",
    "score": "reward",
    "get": "data source",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the class, such as my_package.rewards.Mine")
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        help="values of its Config, in YAML's syntax; those of a file under conf/ that names the "
        "class are taken first",
    )
    parser.add_argument("--yaml", type=Path, help="a file with the values of its Config")
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        help="fields of the prompt that a reward is asked about: text=..., answer=..., "
        "metadata.<key>=...",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=pool_timeout_s(),
        help="limit of one call of a reward (default: %(default)g, as reward.pool.timeout_s)",
    )


def pool_timeout_s() -> float:
    settings = yaml.safe_load((CONF / "reward" / "exact_match.yaml").read_text())
    return float(settings["pool"]["timeout_s"])


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each point. 0 all kept, 1 not all, 2 the question was wrong."""
    try:
        values = given_values(arguments)
        prompt = made_up_prompt(tree(arguments.prompt, texts=TEXTS))
    except (ValueError, OSError) as error:
        print(f"check: {error}")
        return 2
    found = []
    for finding in findings(arguments.path, values, prompt, arguments.timeout_s):
        print(finding, flush=True)
        found.append(finding)
    broken = sum(bool(finding.problem) for finding in found)
    print(f"{arguments.path}: {len(found) - broken} of {len(found)} points kept")
    return 1 if broken else 0


def findings(path: str, values: Any, prompt: Any, limit_s: float) -> Iterator[Finding]:
    subject = Subject(path, values)
    yield from subject.findings()
    if not subject.ready:
        return
    assert subject.section is not None
    kind = kind_of(subject.target)
    yield kind if isinstance(kind, Finding) else Finding(f"is a {kind}")
    section = subject.section
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "algorithm": lambda: algorithm_findings(section),
        "classifier's algorithm": lambda: classifier_findings(section),
        "step program": lambda: step_findings(section, prompt, limit_s=limit_s),
        "reward": lambda: reward_findings(section, prompt, limit_s=limit_s),
        "data source": lambda: source_findings(section),
    }
    if isinstance(kind, str):
        yield from checks[kind]()


def kind_of(target: type) -> str | Finding:
    for method, kind in MARKS.items():
        if callable(getattr(target, method, None)):
            trains_policy = getattr(target, "trains_policy", True)
            return kind if trains_policy else "classifier's algorithm"
    wanted = ", ".join(f"{method}() ({kind})" for method, kind in MARKS.items())
    return Finding("is of a known kind", f"{target.__name__} has none of {wanted}")


def given_values(arguments: argparse.Namespace) -> dict[str, Any]:
    base = values_in_file(arguments.path, arguments.yaml) if arguments.yaml else {}
    return {**base, **tree(arguments.config)}


def tree(pairs: Sequence[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """["a.b=1"] -> {"a": {"b": 1}}; keys in `texts` are strings as written. Raises ValueError."""
    made: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ValueError(f"{pair!r} is not of the form key=value, such as answer=42")
        *parents, last = key.split(".")
        node = made
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{pair!r}: {parent} ({node!r}) holds no keys")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{pair!r}: {error}") from error
        node[last] = value if key in texts and not isinstance(parsed, str) else parsed
    return made
