"""A small engine for a worker process of its own."""

import numpy as np

from rlpost.types import Generation


class EchoEngine:
    """Answers every request with "1" and the end token `eos`."""

    def __init__(self, one, eos):
        self.answer = np.array([one, eos], np.int32)

    async def submit(self, requests):
        pass

    async def collect(self, request_ids):
        return [
            Generation(
                name,
                token_ids=self.answer,
                logprobs=np.array([-0.5, -0.25], np.float32),
                policy_versions=np.array([2, 2], np.int32),
                finish_reason="stop",
            )
            for name in request_ids
        ]
