"""Where the tokens of one layer lie: a gyre.KvCache for one sequence, a gyre.KvPool for several."""

from __future__ import annotations

import copy
import hashlib
import struct
from dataclasses import dataclass

import gyre

from .config import refused

_FIRST_TOKENS = 1024  # that a growing store has memory for
_PAGE_TOKENS = 64  # with pages of 64 tokens, layers without a window have the bits of a KvCache


class Scratch:
    """The memory that layers attend with, one after the other: they share it, because on CUDA a prompt over a compressed layer needs
    more than the layer holds. Latent layers and others need one each."""

    def __init__(self):
        self._of: dict[tuple[str, bool], gyre.AttentionScratch] = {}

    def of(self, device: gyre.Device, latent: bool) -> gyre.AttentionScratch:
        key = (device.name, latent)
        if key not in self._of:
            self._of[key] = gyre.AttentionScratch(device)
        return self._of[key]


@dataclass(frozen=True)
class Shape:
    """What a layer's tokens look like, and how many there may be of a row."""

    device: gyre.Device
    layer: gyre.KvLayer
    kv_heads: int
    head_dim: int
    token_limit: int
    step_tokens: int
    grows: bool  # False: memory for token_limit is taken at once
    layer_calibration: tuple = ()  # a pair of gyre.KvCalibration, or none
    sharing: int = 0  # layers that attend to this one's tokens
    scratch: gyre.AttentionScratch | None = None

    @property
    def layers(self) -> list[gyre.KvLayer]:
        """The layer, then those that share its tokens."""
        return [self.layer] + [gyre.KvLayer(kv_shared_layer_index=0)] * self.sharing

    @property
    def calibration(self) -> list:
        return [*self.layer_calibration, *[(None, None)] * self.sharing] if self.layer_calibration else []

    def first_tokens(self, tokens: int) -> int:
        """Tokens of a row for which memory is taken first."""
        # The rings of windows and tails cannot grow; they are small.
        if not self.grows or self.layer.window:
            return self.token_limit
        ring = self.layer.tail + self.step_tokens if self.layer.tail else 0
        return min(self.token_limit, max(_FIRST_TOKENS, tokens, ring, self.layer.sink_tokens + 1))

    def more_tokens(self, now: int, tokens: int) -> int:
        return min(self.token_limit, max(2 * now, tokens))


class OneSequence:
    batch = 1
    paged = False

    def __init__(self, shape: Shape, tokens: int):
        self.shape = shape
        self.encoder = gyre.Encoder(shape.device)
        self.cache = gyre.KvCache(
            shape.device,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            capacity=shape.first_tokens(tokens),
            layers=shape.layers,
            step_tokens=min(shape.step_tokens, shape.token_limit),
            calibration=shape.calibration,
        )

    def attend(self, tokens: list[int], q, k, v, out, reader: int = 0, **how) -> gyre.Fence:
        """Stores the new tokens of the sequence, and attends. reader: from 1 on a layer that shares tokens which are stored."""
        if reader > 0:
            self.cache.attend(self.encoder, reader, q, out, scratch=self.shape.scratch, **how)
            return self.encoder.submit()
        (count,) = tokens
        needed = self.cache.length + count
        if needed > self.cache.capacity:
            self.cache = self.cache.fork(self.encoder, self.shape.more_tokens(self.cache.capacity, needed))
            self.encoder.submit()
        self.cache.begin_step(self.encoder, count)
        self.cache.append(self.encoder, 0, k, v)
        self.cache.attend(self.encoder, 0, q, out, scratch=self.shape.scratch, **how)
        return self.encoder.submit()

    def rollback(self, tokens: list[int]) -> None:
        if tokens[0]:
            self.cache.rollback(self.encoder, tokens[0])
            self.encoder.submit().wait()

    def clear(self) -> None:
        self.cache.clear(self.encoder)
        self.encoder.submit().wait()

    def copy(self) -> OneSequence:
        other = copy.copy(self)
        other.encoder = gyre.Encoder(self.shape.device)
        other.cache = self.cache.fork(self.encoder)
        self.encoder.submit().wait()
        return other

    def select(self, rows: list[int]) -> None:
        if rows != [0]:
            raise refused(
                f"rows {rows} of a batch of one: make the cache with paged=True, so that sequences can share what "
                "they begin with"
            )

    def save(self, paths) -> None:
        self.cache.save(next(paths))

    def load(self, paths) -> None:
        self.cache.load(next(paths))

    @property
    def tokens(self) -> int:
        """That there is memory for."""
        return self.cache.capacity

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def describe(self) -> list:
        return self.cache.describe()[:1]  # those that share store nothing


class Pages:
    """Sequences over a pool of one layer. Copies share the pool, and each other's pages until they write; a store that
    finds the pool full moves to one of its own."""

    paged = True

    def __init__(self, shape: Shape, batch: int, tokens: int):
        self.shape = shape
        self.encoder = gyre.Encoder(shape.device)
        self.row_tokens = shape.first_tokens(tokens)
        self._open(batch)
        self.sequences = [self.pool.sequence() for _ in range(batch)]

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def _open(self, batch: int) -> None:
        shape = self.shape
        self.pool = gyre.KvPool(
            shape.device,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            # One more for each row: what rows share is copied before what shared it is let go of.
            pages=batch * (-(-self.row_tokens // _PAGE_TOKENS) + 1),
            layers=shape.layers,
            page_tokens=_PAGE_TOKENS,
            sequences=batch + 1,
            step_tokens=min(shape.step_tokens, shape.token_limit),
            calibration=shape.calibration,
        )
        self._set_bounds(batch)

    def _set_bounds(self, batch: int) -> None:
        """Attention is planned for the bounds of a batch: one batch is for decoding, one for prompts."""
        step = min(self.shape.step_tokens, self.shape.token_limit)
        bounds = dict(max_sequences=batch, max_kv_length=self.row_tokens)
        self.decoding = gyre.KvBatch(self.pool, max_tokens=batch, max_query_length=1, **bounds)
        self.prompts = gyre.KvBatch(self.pool, max_tokens=batch * step, max_query_length=step, **bounds)

    def _move(self, batch: int) -> None:
        """To a pool of its own. Pages that rows share are shared there."""
        old, sequences = self.pool, self.sequences
        self._open(batch)
        moved = []
        for sequence in sequences:
            pages = [old.export_page(sequence, i) for i in range(-(-len(sequence) // _PAGE_TOKENS))]
            full = len(sequence) // _PAGE_TOKENS
            # The index finds pages by tokens; here their bytes stand for these.
            names = [name for page in pages[:full] for name in _named(page)]
            taken = self.pool.match(names)
            for page in pages[len(taken) // _PAGE_TOKENS :]:
                self.pool.import_page(taken, page)
            self.pool.publish(taken, names)
            moved.append(taken)
        self.pool.forget()
        self.sequences = moved

    def _begin(self, tokens: list[int]) -> gyre.KvBatch:
        batch = self.prompts if max(tokens) > 1 else self.decoding
        batch.begin_step(self.encoder, [(s, n, n > 1) for s, n in zip(self.sequences, tokens) if n])
        return batch

    def attend(self, tokens: list[int], q, k, v, out, reader: int = 0, **how) -> gyre.Fence:
        """Stores the new tokens of each sequence, and attends; rows of the first sequence, then of the next. reader: from 1 on a layer
        that shares tokens which are stored."""
        if reader > 0:
            batch = self.prompts if max(tokens) > 1 else self.decoding
            batch.attend(self.encoder, reader, q, out, **how)
            return self.encoder.submit()
        needed = max(len(s) + n for s, n in zip(self.sequences, tokens))
        if needed > self.row_tokens:
            self.row_tokens = self.shape.more_tokens(self.row_tokens, needed)
            self._move(self.batch)
        try:
            batch = self._begin(tokens)
        except gyre.OutOfMemory:
            self._move(self.batch)  # others have pages of this pool
            batch = self._begin(tokens)
        try:
            batch.append(self.encoder, 0, k, v)
            batch.attend(self.encoder, 0, q, out, **how)
            return self.encoder.submit()
        except Exception:
            self.encoder.clear()
            batch.rollback()
            raise

    def rollback(self, tokens: list[int]) -> None:
        shorter = [sequence.fork() for sequence in self.sequences]
        for sequence, count in zip(shorter, tokens):
            if count:
                sequence.rollback(count)
        self.sequences = shorter  # all of them or, if one is refused, none

    def clear(self) -> None:
        for sequence in self.sequences:
            sequence.clear()

    def copy(self) -> Pages:
        other = copy.copy(self)
        other.encoder = gyre.Encoder(self.shape.device)
        other._set_bounds(self.batch)
        other.sequences = [sequence.fork() for sequence in self.sequences]
        return other

    def select(self, rows: list[int]) -> None:
        chosen, used = [], set()
        for row in rows:
            chosen.append(self.sequences[row].fork() if row in used else self.sequences[row])
            used.add(row)
        more = len(rows) > self.batch
        self.sequences = chosen
        if more:
            self._move(len(rows))

    def save(self, paths) -> None:
        for sequence in self.sequences:
            self.pool.save(sequence, next(paths))

    def load(self, paths) -> None:
        self.sequences = [self.pool.load(next(paths)) for _ in self.sequences]

    @property
    def tokens(self) -> int:
        return self.row_tokens

    @property
    def nbytes(self) -> int:
        return self.pool.describe().nbytes

    def describe(self) -> list:
        return self.pool.describe().groups


def _named(page: bytes) -> list[int]:
    """A page's bytes, as tokens for the prefix index."""
    digest = struct.unpack("8i", hashlib.sha256(page).digest())
    return [*digest] * (_PAGE_TOKENS // len(digest))
