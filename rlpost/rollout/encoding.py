"""Between text and token ids. The prompt's ids are a prefix of the sample's ids by construction:

prompt and response are never tokenised together, so no merge and no chat template can move the
border between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.errors import DataError
from rlpost.rollout.base import Tokenizer
from rlpost.types import Prompt


def load_tokenizer(model_path: str) -> Tokenizer:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Ids up to where the response begins. Raises DataError when the prompt has no such form."""
    if prompt.messages is None:
        ids = list(tokenizer.encode(prompt.text))
        _require_known(tokenizer, prompt, "prompt", prompt.text or "", ids)
    else:
        ids = _encode_chat(tokenizer, prompt)
    if not ids:
        raise DataError(f"prompt {prompt.prompt_id!r} has no tokens")
    if prompt.messages is None and ids[-1] == tokenizer.eos_token_id:
        raise DataError(
            f"prompt {prompt.prompt_id!r} ends in the end-of-text token: this tokenizer appends it "
            "to every text, so nothing could follow; use chat prompts (data.chat: true)"
        )
    return ids


def _encode_chat(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"prompt {prompt.prompt_id!r} is a chat, but the model's tokenizer has no chat "
            "template; set data.chat: false, or use an instruction-tuned model"
        )
    messages = [dict(turn) for turn in prompt.messages or ()]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


def encode_completion(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Ids of the worked answer and the end token. Raises DataError when there is none."""
    if prompt.completion is None:
        raise DataError(
            f"prompt {prompt.prompt_id!r} has no completion to imitate; use data with worked "
            "answers (data=worked_chain_sum, or data.completion_key of a file)"
        )
    ids = tokenizer.encode(prompt.completion, add_special_tokens=False)
    _require_known(tokenizer, prompt, "completion", prompt.completion, ids)
    return [*ids, tokenizer.eos_token_id]


def _require_known(
    tokenizer: Tokenizer, prompt: Prompt, field: str, text: str, ids: Sequence[int]
) -> None:
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise DataError(
            f"{field} of {prompt.prompt_id!r} holds characters that the model's vocabulary lacks: "
            f"{text!r}; change the data's form (data.prompt_template) or the model"
        )


def decode_response(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Text of the response without special tokens, exactly as its tokens spell it."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return str(text)
