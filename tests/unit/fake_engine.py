"""An engine in plain Python behind a worker handle, an object store in a dict."""

import asyncio

import numpy as np

from rlpost.errors import DeadlineError, EngineError, WorkerDiedError
from rlpost.types import Generation

EOS = 1


class FakeEngine:
    """Answers "1", or what `answer(request)` gives: (token ids, finish reason)."""

    def __init__(self, answer=None):
        self.answer = answer or (lambda request: ([ord("1"), EOS], "stop"))
        self.version = 0
        self.submissions = []  # one list of requests per submit call
        self.aborted = []
        self.queued = {}

    async def submit(self, requests):
        self.submissions.append(list(requests))
        self.queued.update((request.request_id, request) for request in requests)

    async def collect(self, request_ids):
        unknown = [name for name in request_ids if name not in self.queued]
        if unknown:
            raise EngineError(f"no such requests: {unknown}")
        return [self.generate(self.queued.pop(name)) for name in request_ids]

    async def abort(self, request_ids):
        self.aborted.extend(request_ids)

    def generate(self, request):
        token_ids, reason = self.answer(request)
        count = len(token_ids)
        return Generation(
            request.request_id,
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.full(count, -0.5, np.float32),
            policy_versions=np.full(count, self.version, np.int32),
            finish_reason=reason,
        )


class FakeWorker:
    """The `call` of a worker handle, in this process."""

    def __init__(self, hosted, rank=0):
        self.hosted, self.rank, self.dead = hosted, rank, False

    async def call(self, method, *args, deadline_s, **kwargs):
        if self.dead:
            raise WorkerDiedError(f"engine[{self.rank}] died during {method}()")
        try:
            return await asyncio.wait_for(getattr(self.hosted, method)(*args, **kwargs), deadline_s)
        except TimeoutError as error:
            raise DeadlineError(f"engine[{self.rank}] did not answer {method}()") from error


class FakeTokenizer:
    """One id per character (its code point); id 1 ends a text, id 0 is unknown ("~")."""

    eos_token_id, unk_token_id, chat_template = EOS, 0, None

    def encode(self, text, add_special_tokens=True):
        return [0 if character == "~" else ord(character) for character in text]

    def decode(self, ids, skip_special_tokens=False, **_):
        return "".join(
            chr(token) if token > 1 else "" if skip_special_tokens else "<eos>" for token in ids
        )


class ChatTokenizer(FakeTokenizer):
    """Its template is not prefix-stable: a finished conversation drops the system turn."""

    chat_template = "yes"

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        turns = [turn for turn in messages if add_generation_prompt or turn["role"] != "system"]
        text = "".join(f"[{turn['role']}]{turn['content']}" for turn in turns)
        return self.encode(text + "[assistant]" if add_generation_prompt else text)


class FakeStore:
    """References are numbers."""

    def __init__(self):
        self.values = {}

    def put(self, value):
        self.values[len(self.values)] = value
        return len(self.values) - 1

    def fetch(self, ref, timeout_s=60.0):
        return self.values[ref]
