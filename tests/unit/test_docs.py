"""The pages name only what is there."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rlpost.arguments import recipe_in_its_place
from rlpost.overrides import CommandLine

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/*.md")})
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
LINES = [line for text in TEXT.values() for line in text.replace("\\\n", "").splitlines()]
# Those with -cp take a saved run's configuration: see tests/integration/test_debug_runs.py.
COMMANDS = sorted({line for line in LINES if re.match(r"[\w./]*python launch\.py (?!-cp)\S", line)})


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", TEXT[page])
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_named_make_targets_exist():
    named = set(re.findall(r"^(?:- )?`?make ([a-z-]+)", "\n".join(LINES), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_every_make_target_is_explained_by_help():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony and set(phony[1].split()) == set(re.findall(r"^([a-z-]+):.* ## \S", text, re.M))


@pytest.mark.parametrize("command", COMMANDS)
def test_launch_commands_compose(command):
    overrides = recipe_in_its_place(shlex.split(command, comments=True)[2:])
    if "-m" in overrides:  # each job composes for itself: see tests/config/test_sweep_files.py
        assert CommandLine(overrides).problems == []
        return
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        compose("config", overrides=overrides, return_hydra_config=True)
