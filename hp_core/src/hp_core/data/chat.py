"""Conversations to documents: the tokenizer's own chat template, loss on what the assistant says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from hp_core.data.batch import IGNORE_INDEX
from hp_core.data.documents import Document, make_document
from hp_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]


@dataclass(frozen=True)
class ChatEncoder:
    """`messages` (and `tools`, if there are) as the tokenizer's chat template writes them.

    Targets are the tokens of assistant turns with their end-of-turn token. They are known by place, never by
    token id: from the template's `{% generation %}` marks, or else by rendering the conversation up to each turn.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, record: Mapping[str, Any]) -> Document | None:
        messages = _messages(record)
        tools = record.get("tools")
        if self.tokenizer.is_fast and _GENERATION.search(self.tokenizer.get_chat_template(tools=tools)):
            ids, spans = self._marked(messages, tools)
        else:
            ids, spans = self._rendered(messages, tools)
        tokens = np.array(ids, np.int64)
        labels = np.full_like(tokens, IGNORE_INDEX)
        for start, stop in spans:
            labels[start:stop] = tokens[start:stop]
        return make_document(tokens, labels)

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Mapping[str, list[int]]:
        try:
            return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                messages, tools=tools, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"the chat template of {self.tokenizer.name_or_path} refuses it: {reason}") from error

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[Span]]:
        """Spans inside `{% generation %}`; an EOS right behind one ends the turn and belongs to it."""
        rendered = self._render(messages, tools, return_assistant_tokens_mask=True)
        ids, mask = rendered["input_ids"], np.array([0, *rendered["assistant_masks"], 0])
        edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2)
        if not len(edges):
            raise DataError(f"the chat template of {self.tokenizer.name_or_path} marks no assistant token in it")
        return ids, [
            (start, stop + (ids[stop : stop + 1] == [self.tokenizer.eos_token_id])) for start, stop in edges.tolist()
        ]

    def _rendered(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[Span]]:
        """Spans between the tokens of the prompt to a turn and those of the conversation up to its end."""
        ids = self._render(messages, tools)["input_ids"]
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:i], tools, add_generation_prompt=True)["input_ids"]
            through = self._render(messages[: i + 1], tools)["input_ids"]
            start, stop = len(prompt), len(through)
            if not start < stop or ids[:start] != prompt or ids[:stop] != through:
                raise DataError(
                    f"the chat template of {self.tokenizer.name_or_path} writes message {i + 1} differently in the "
                    "whole conversation than at its end, so its tokens cannot be found. Mark them with "
                    "{% generation %} in the template"
                )
            spans.append((start, self._end_of_turn(ids, start, stop)))
        return ids, spans

    def _end_of_turn(self, ids: list[int], start: int, stop: int) -> int:
        """Where the turn ends: behind its last special token if only white space follows, which nobody has to say."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        for end in range(stop, start, -1):
            if ids[end - 1] in special:
                return end
            if self.tokenizer.decode(ids[end - 1 : end]).strip():
                break
        return stop


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError('expected a list of messages in the field "messages"')
    for i, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'message {i}: expected an object with a "role" and a "content"')
    if all(message["role"] != "assistant" for message in messages):
        raise DataError('no message has the role "assistant", so there is nothing to learn')
    return messages
