"""Conversations -> token ids and loss mask, every row accounted for."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.conversations import Conversation, Refused, conversation_of
from data.prompts import Prompt, split_of
from data.rendering import Renderer, Span

_BATCH_ROWS = 1024  # tokenized in one call, on all cores


@dataclass
class Account:
    """in = kept + refused: where every row of the file went."""

    rows: int = 0
    kept: int = 0
    cut: int = 0
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)  # reason -> count, first_rows

    def refuse(self, row: int, reason: str) -> None:
        entry = self.refused.setdefault(reason, {"count": 0, "first_rows": []})
        entry["count"] += 1
        entry["first_rows"] += [row] * (len(entry["first_rows"]) < 5)

    @property
    def num_refused(self) -> int:
        return sum(entry["count"] for entry in self.refused.values())

    def lines(self) -> list[str]:
        """One line a reason, most frequent first."""
        entries = sorted(self.refused.items(), key=lambda item: -item[1]["count"])
        return [
            f"refused {e['count']}: {reason} (row {', '.join(map(str, e['first_rows']))}{', ...' * (e['count'] > 5)})"
            for reason, e in entries
        ]


class Tokenizing:
    """Rows of a conversation file -> prompts, in the order of the file.

    tokenizer            of the target            vocab_size  of the target: ids must be below it
    max_tokens           longest conversation     cut_long    cut what is longer instead of refusing it
    min_supervised       fewest supervised tokens
    validation_fraction  by the hash of the id

    `account` says where every row went. Raises ValueError if a row has messages and the tokenizer no
    chat template.
    """

    def __init__(
        self, tokenizer: Any, *, vocab_size: int, max_tokens: int, cut_long: bool, min_supervised: int,
        validation_fraction: float, rewritten_history: str, template_options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.max_tokens, self.cut_long, self.min_supervised = max_tokens, cut_long, min_supervised
        self.validation_fraction = validation_fraction
        self.account = Account()
        self._renderer_options = {"options": template_options, "rewritten_history": rewritten_history}
        self._renderer: Renderer | None = None
        self._ids: set[str] = set()

    def run(self, rows: Iterable[tuple[int, Any]], *, file_name: str) -> Iterator[Prompt]:
        batch: list[tuple[Conversation, str, list[Span] | None]] = []
        for row, value in rows:
            self.account.rows += 1
            try:
                conversation = conversation_of(row, value, file_name=file_name)
                if conversation.id in self._ids:
                    raise Refused("duplicate id")
                self._ids.add(conversation.id)
                batch.append((conversation, *self._text_of(conversation)))
            except Refused as reason:
                self.account.refuse(row, str(reason))
            if len(batch) == _BATCH_ROWS:
                yield from self._tokenize(batch)
                batch = []
        yield from self._tokenize(batch)

    def _text_of(self, conversation: Conversation) -> tuple[str, list[Span] | None]:
        """Text to tokenize, and the assistant's spans in it; "" where the row has tokens, None for plain text."""
        if conversation.tokens is not None:
            return "", None
        if conversation.text is not None:
            return conversation.text, None
        if self._renderer is None:
            self._renderer = Renderer(self.tokenizer, **self._renderer_options)
        return self._renderer.render(conversation)

    def _tokenize(self, batch: list[tuple[Conversation, str, list[Span] | None]]) -> Iterator[Prompt]:
        rendered = [(text, spans) for _, text, spans in batch if spans is not None]
        masked = iter(tokenize_spans(self.tokenizer, [t for t, _ in rendered], [s for _, s in rendered]))
        for conversation, text, spans in batch:
            try:
                if spans is not None:
                    tokens, loss_mask = next(masked)
                    self._check_mask(tokens[loss_mask == 1], [text[start:end] for start, end in spans])
                elif conversation.tokens is not None:
                    tokens, loss_mask = np.array(conversation.tokens), np.array(conversation.loss_mask)
                else:
                    tokens = np.array(self.tokenizer(text)["input_ids"], dtype=np.int64)
                    loss_mask = (np.arange(len(tokens)) > 0).astype(np.uint8)
                yield self._prompt(conversation, tokens, loss_mask)
            except Refused as reason:
                self.account.refuse(conversation.row, str(reason))

    def _check_mask(self, supervised: np.ndarray, written: list[str]) -> None:
        """Decodes the supervised tokens back: what the assistant wrote must stand there, in order."""
        decoded = _folded(self.tokenizer.decode(supervised.tolist()))
        position = 0
        for part in map(_folded, written):
            position = decoded.find(part, position)
            if position < 0:
                raise Refused("the supervised tokens do not decode to what the assistant said")
            position += len(part)

    def _prompt(self, conversation: Conversation, tokens: np.ndarray, loss_mask: np.ndarray) -> Prompt:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise Refused(f"a token id outside the target's vocabulary of {self.vocab_size}")
        cut = len(tokens) > self.max_tokens
        if cut and not self.cut_long:
            raise Refused(f"longer than {self.max_tokens} tokens (cut_long=true would cut it)")
        tokens, loss_mask = tokens[: self.max_tokens], loss_mask[: self.max_tokens]
        num_supervised = int(loss_mask.sum())
        if num_supervised < self.min_supervised:
            few = f"fewer than {self.min_supervised} supervised tokens"
            raise Refused(few if num_supervised else "empty loss mask")
        self.account.kept += 1
        self.account.cut += cut
        return Prompt(
            id=conversation.id,
            source=conversation.source,
            split=split_of(conversation.id, validation_fraction=self.validation_fraction),
            tokens=tokens.astype(np.int32),
            loss_mask=loss_mask.astype(np.uint8),
        )


def tokenize_spans(
    tokenizer: Any, texts: list[str], spans: list[list[Span]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids [T] and mask [T] (1 where a token has a character of a span) of each text, tokenized once."""
    if not texts:
        return
    if tokenizer.is_fast:
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
        for ids, offsets, inside in zip(encoded["input_ids"], encoded["offset_mapping"], spans):
            yield np.array(ids, dtype=np.int64), _mask_by_offsets(np.array(offsets).reshape(-1, 2), inside)
    else:
        for text, inside in zip(texts, spans):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            yield np.array(ids, dtype=np.int64), _mask_by_prefix(tokenizer, text, ids, inside)


def _mask_by_offsets(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    ends = offsets[:, 1]
    # tokenizers may trim white space off an offset: a token begins where the one before it ended
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]])) if len(ends) else ends
    mask = np.zeros(len(ends), dtype=np.uint8)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def _mask_by_prefix(tokenizer: Any, text: str, ids: list[int], spans: list[Span]) -> np.ndarray:
    """For tokenizers without offsets (Kimi's): a span begins after the tokens of all the text before it.

    Where a token straddles the edge there is no such place, and the mask stays empty: refused later.
    """
    mask = np.zeros(len(ids), dtype=np.uint8)
    for span in spans:
        edges = []
        for position in span:
            before = tokenizer(text[:position], add_special_tokens=False)["input_ids"]
            if ids[: len(before)] != before:
                return np.zeros(len(ids), dtype=np.uint8)
            edges.append(len(before))
        mask[edges[0] : edges[1]] = 1
    return mask


def _folded(text: str) -> str:
    """Without white space and in one Unicode form: what decoding may change without harm."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def load_tokenizer(path: Path | str, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a target's folder. Raises ValueError if it cannot be loaded."""
    from data.hugging_face import transformers  # seconds: not for a run that has nothing to do

    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the tokenizer in {path} cannot be loaded ({reason}): download the target again") from error
