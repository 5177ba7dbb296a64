"""The global stream of rows: every data rank reads the same one, whatever the topology."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hp_core.data.documents import Document, Encode, Tokens
from hp_core.data.packing import Row, make_row
from hp_core.data.records import Records
from hp_core.errors import DataError

logger = logging.getLogger(__name__)

_READ_AHEAD = 16  # documents that a background process sends at a time
_SKIPS_LOGGED = 10  # bad lines that are logged one by one, then every thousandth


@dataclass(frozen=True)
class Position:
    """The next token of the stream: token `token` of the document that is number `record` in the order of `epoch`."""

    epoch: int = 0
    record: int = 0
    token: int = 0


@dataclass(frozen=True)
class StreamOptions:
    """How records become rows. `num_epochs` None never ends; `skip_bad_lines` counts them and goes on."""

    seq_length: int
    pad_id: int
    vocab_size: int
    seed: int
    shuffle: bool
    packing: bool
    skip_bad_lines: bool
    num_epochs: int | None
    num_workers: int


@dataclass(frozen=True)
class _Key:
    """A record to read: number `record` in the order of `epoch`, which is line `index` of the files."""

    epoch: int
    record: int
    index: int


@dataclass(frozen=True)
class _Read:
    """What reading a record gave: a document, nothing, or what is wrong with it."""

    key: _Key
    document: Document | None
    fault: str | None = None


class _Records(Dataset[_Read]):
    """Reads and tokenises, in this process or a background one. Faults are values: they are raised in their turn."""

    def __init__(self, lines: Records, encode: Encode) -> None:
        self._lines = lines
        self._encode = encode

    def __getitem__(self, key: _Key) -> _Read:
        try:
            record = self._lines.read(key.index)
            return _Read(key, None if record is None else self._encode(record))
        except DataError as error:
            return _Read(key, None, f"{self._lines.where(key.index)}: {error}")


class RowStream:
    """Rows of exactly `seq_length` tokens, one after the other, from any position."""

    def __init__(self, lines: Records, encode: Encode, options: StreamOptions) -> None:
        self.options = options
        self.num_skipped = 0
        self._lines = lines
        self._records = _Records(lines, encode)
        self.seek(Position())

    def seek(self, position: Position) -> None:
        """Go on from `position`."""
        self.position = position
        self._document: Document | None = None
        self._reads: Iterator[_Read] | None = None
        self._num_fruitless = 0

    @property
    def epoch(self) -> float:
        """Epochs read so far, with the fraction of the current one, in records."""
        return self.position.epoch + self.position.record / len(self._lines)

    def next_row(self) -> Row | None:
        """The next row; None at the end of the last epoch. A document that is cut goes on in the next row."""
        pieces, room = [], self.options.seq_length
        while room and (document := self._current_document()) is not None:
            start = self.position.token
            piece = document.part(start, start + room)
            pieces.append(piece)
            room -= len(piece)
            if start + len(piece) < len(document):
                self.position = replace(self.position, token=start + len(piece))
            else:
                self.position = Position(self.position.epoch, self.position.record + 1)
                self._document = None
            if not self.options.packing:
                break
        return make_row(pieces, self.options.seq_length, self.options.pad_id) if pieces else None

    def _current_document(self) -> Document | None:
        """The document at the position, which moves over records that hold none."""
        if self._reads is None:
            self._reads = self._read_from(self.position)
        while self._document is None and (read := next(self._reads, None)) is not None:
            key = read.key
            if (key.epoch, key.record) != (self.position.epoch, self.position.record):
                self.position = Position(key.epoch, key.record)
            if read.fault is not None:
                self._skip(read.fault)
            elif read.document is not None:
                self._check_vocabulary(read)
                self._document = read.document
                self._num_fruitless = 0
                break
            self.position = Position(key.epoch, key.record + 1)
            self._num_fruitless += 1
            if self._num_fruitless >= len(self._lines):
                raise DataError(f"{self._lines.paths[0]} and what follows: no record gives a document")
        return self._document

    def _skip(self, fault: str) -> None:
        if not self.options.skip_bad_lines:
            raise DataError(f"{fault}. Correct it, or set dataset.on_bad_line: skip")
        self.num_skipped += 1
        if self.num_skipped <= _SKIPS_LOGGED or self.num_skipped % 1000 == 0:
            logger.warning("%s (skipped; %d so far)", fault, self.num_skipped)

    def _check_vocabulary(self, read: _Read) -> None:
        assert read.document is not None
        largest = int(max(read.document.tokens.max(), read.document.labels.max()))
        if largest >= self.options.vocab_size:
            raise DataError(
                f"{self._lines.where(read.key.index)}: token id {largest} is outside the model's vocabulary of "
                f"{self.options.vocab_size}. Use the model's own tokenizer, or a model with a larger embedding"
            )

    def _read_from(self, position: Position) -> Iterator[_Read]:
        workers = self.options.num_workers
        batches = DataLoader(
            self._records,
            batch_sampler=_grouped(self._keys(position), _READ_AHEAD if workers else 1),
            collate_fn=list,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
            generator=torch.Generator(),  # else it draws from the generator that the model's dropout uses
        )
        for batch in batches:
            yield from batch

    def _keys(self, position: Position) -> Iterator[_Key]:
        epoch, start = position.epoch, position.record
        while self.options.num_epochs is None or epoch < self.options.num_epochs:
            order = record_order(len(self._lines), self.options.seed, epoch) if self.options.shuffle else None
            for record in range(start, len(self._lines)):
                yield _Key(epoch, record, record if order is None else int(order[record]))
            epoch, start = epoch + 1, 0


def record_order(num_records: int, seed: int, epoch: int) -> Tokens:
    """The order of the records in `epoch`: a permutation `[num_records]` that only these three decide.

    RandomState's streams are frozen, those of numpy's newer generators may change with a release.
    """
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch)))).permutation(num_records)


def _grouped(keys: Iterator[_Key], size: int) -> Iterator[list[_Key]]:
    group = []
    for key in keys:
        group.append(key)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
