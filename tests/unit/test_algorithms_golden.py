"""Each algorithm as its YAML ships it, on the fixed batch, against tests/golden/algorithms.json.

A change of a default or of the maths shows here. When it is meant, rewrite the file with
`python tests/unit/test_algorithms_golden.py` and explain the new numbers in the commit.
"""

import json
from pathlib import Path

import pytest
from algorithm_cases import NAMES, build, run

GOLDEN = Path(__file__).parents[1] / "golden" / "algorithms.json"


def digits(value):
    return float(f"{value:.7g}")


def numbers(name):
    advantages, inputs, _, metrics = run(build(name))
    return {
        "advantages": [digits(value) for value in advantages.tolist()],
        "gradient": [digits(value) for value in inputs.logprobs_M.grad.tolist()],
        "metrics": {key: digits(metric.result()) for key, metric in sorted(metrics.items())},
    }


@pytest.mark.parametrize("name", NAMES)
def test_shipped_algorithm_gives_the_golden_numbers(name):
    golden, actual = json.loads(GOLDEN.read_text())[name], numbers(name)
    for key in ("advantages", "gradient", "metrics"):
        assert actual[key] == pytest.approx(golden[key], rel=1e-5, abs=1e-9)


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(numbers(name))}" for name in NAMES)
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
