"""`debug.limits`: which keys of a configuration they lower, and which they leave alone."""

from rlpost.debug import limited


def run(limits, command_line=(), **values):
    debug = {"limits": limits, "command_line": list(command_line)}
    return limited({**values, "debug": debug})


def test_numbers_are_lowered_and_never_raised():
    limits = {"group_size": 2, "eval": {"num_prompts": 4, "interval": 9}}
    values = run(limits, group_size=8, eval={"num_prompts": None, "interval": 5})
    assert values["group_size"] == 2
    assert values["eval"] == {"num_prompts": 4, "interval": 5}


def test_keys_that_a_run_lacks_are_not_made():
    values = run({"engine": {"num_engines": 1}, "prm": {"engine": {"num_engines": 1}}}, engine=None)
    assert values["engine"] is None
    assert "prm" not in values


def test_what_the_command_line_sets_is_kept():
    limits = {"group_size": 2, "eval": {"num_prompts": 4}}
    line = ["+recipe=x", "++group_size=6", "eval.num_prompts=50"]
    values = run(limits, line, group_size=6, eval={"num_prompts": 50})
    assert (values["group_size"], values["eval"]["num_prompts"]) == (6, 50)


def test_a_star_stands_for_any_name_and_a_switch_takes_the_limit():
    teachers = {"one": {"ranks": 4, "fast": True}, "two": {"ranks": 1}}
    values = run({"teachers": {"*": {"ranks": 2, "fast": False}}}, teachers=teachers)
    assert values["teachers"] == {"one": {"ranks": 2, "fast": False}, "two": {"ranks": 1}}
