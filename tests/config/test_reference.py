"""The configuration reference is what conf/ says now."""

from rlpost.config_reference import OUTPUT, reference, rows


def test_the_page_is_fresh() -> None:
    assert OUTPUT.read_text() == reference(), "run: python -m rlpost.config_reference"


def test_rows_carry_path_default_and_comment() -> None:
    text = "# The optimizer.\noptimizer:\n  # Step\n  # size.\n  lr: 1e-5\n# Last.\nend: x\n"
    assert [(row.key, row.value, row.comment) for row in rows(text)] == [
        ("optimizer", "", "The optimizer."),
        ("optimizer.lr", "1e-5", "Step size."),
        ("end", "x", "Last."),
    ]
