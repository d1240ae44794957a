"""Files of prompts: good rows come through, bad ones are named."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpost.data.file import FileSource, FileSourceConfig
from rlpost.errors import DataError

CHAT = [{"role": "user", "content": "1+1?"}]


def source(path, **changes):
    fields = {
        "path": str(path),
        "name": "set",
        "prompt_key": "q",
        "answer_key": "a",
        "completion_key": None,
        "id_key": None,
        "metadata_keys": [],
    }
    return FileSource(FileSourceConfig(**fields | changes), seed=1)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def by_id(prompts):
    return {prompt.prompt_id: prompt for prompt in (prompts.get(0, i) for i in range(len(prompts)))}


def test_rows_carry_every_configured_field(tmp_path):
    row = {"q": "1+1=", "a": 2, "id": "x", "work": "1+1=2", "level": 3}
    path = write_jsonl(tmp_path / "s.jsonl", [row])
    prompt = source(path, id_key="id", completion_key="work", metadata_keys=["level"]).get(2, 0)
    assert (prompt.key, prompt.text, prompt.answer) == ("set/x@2", "1+1=", "2")
    assert (prompt.completion, prompt.metadata) == ("1+1=2", {"level": 3})


def test_chat_prompts_and_row_numbers(tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"q": CHAT, "a": "2"}, {"q": "x", "a": "y"}])
    prompts = by_id(source(path))
    assert prompts["set/1"].messages == tuple(CHAT) and prompts["set/1"].text is None
    assert prompts["set/2"].text == "x"


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path):
    rows = [{"q": CHAT, "a": "2"}, {"q": CHAT, "a": "3"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "s.parquet")
    write_jsonl(tmp_path / "s.jsonl", rows)
    assert by_id(source(tmp_path / "s.parquet")) == by_id(source(tmp_path / "s.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", r"s\.jsonl, line 2: not valid JSON"),
        ("", r"line 2: not valid JSON"),
        ("[1]", r"line 2: a JSON object is wanted"),
        ("\udcff", r"line 2: not valid JSON"),
        ('{"a": "1"}', r"line 2: field 'q' is missing; the row has \['a'\]"),
        ('{"q": "", "a": "1"}', r"line 2: field 'q' must be a non-empty string"),
        ('{"q": [{"role": "user"}], "a": "1"}', r"line 2: field 'q' must be"),
        ('{"q": "x", "a": true}', r"line 2: field 'a' must be a string or number"),
    ],
)
def test_a_malformed_row_is_named_not_skipped(tmp_path, line, message):
    path = tmp_path / "s.jsonl"
    text = '{"q": "1", "a": "1"}\n' + line + "\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        source(path)


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "s.parquet").write_bytes(b"nope")
    with pytest.raises(DataError, match=r"s\.parquet: not a readable Parquet file"):
        source(tmp_path / "s.parquet")


def test_ids_must_be_unique(tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"q": "1", "a": "1", "id": 7}] * 2)
    with pytest.raises(DataError, match="'id' holds '7' twice"):
        source(path, id_key="id")
