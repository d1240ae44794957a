"""`python -m rlpost`: tools beside launch.py. Exit codes: 0 good, 1 not, 2 wrong usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlpost.contracts import command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlpost", description="Tools beside launch.py, which starts runs."
    )
    tools = parser.add_subparsers(dest="tool", metavar="tool")
    check = tools.add_parser(
        "check",
        help="whether a reward, algorithm, step program or data source keeps its contract",
        description=command.__doc__,
    )
    command.add_arguments(check)
    given = parser.parse_args(arguments)
    if given.tool is None:
        parser.print_help()
        return 2
    return command.run(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
