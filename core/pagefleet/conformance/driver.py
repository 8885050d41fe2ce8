"""Drives one backend step by step, as the engine would, and compares every step with the dense reference.

Requests are teacher-forced: all their tokens are known beforehand, and a step computes the next few of some of them.
A step checks the logits of each token it computes, so a test only says which tokens run together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import Backend, ForwardBatch, KVLayout, ModelSpec, WeightSource
from pagefleet.conformance.cases import Case, RandomWeights
from pagefleet.conformance.reference import DenseDecoder, Reference, ReferenceRun, relative_error, tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Prompt:
    """A teacher-forced request: its tokens, its blocks, and how many tokens are in the cache."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


Work = Sequence[tuple[Prompt, int]]
"""The rows of a step: a prompt and how many of its pending tokens to compute."""


class Driver:
    """One loaded backend with its cache, and the reference beside it."""

    def __init__(
        self,
        backend: Backend,
        model: ModelSpec,
        weights: WeightSource,
        reference: Reference,
        dtype: str,
        block_size: int,
        num_blocks: int,
        kv_dtype: str | None = None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.reference = reference
        self.dtype = dtype
        self.limit = tolerance(dtype)  # of the relative error of what a step returns
        self.rng = np.random.default_rng(1)
        self.free = self.rng.permutation(num_blocks).tolist()  # handed out from the end
        shape = model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim
        self.layout = KVLayout(*shape, kv_dtype or dtype)
        backend.load(model, weights, dtype)
        backend.allocate_kv(self.layout)
        self._runs: dict[tuple[int, ...], ReferenceRun] = {}

    @classmethod
    def of_case(
        cls, backend: Backend, case: Case, dtype: str, block_size: int, num_blocks: int, kv_dtype: str | None = None
    ) -> Driver:
        """With a case's random weights, and the dense decoder as its reference."""
        weights = RandomWeights(case.model, case.seed)
        reference = DenseDecoder(case.model, weights.float64())
        return cls(backend, case.model, weights, reference, dtype, block_size, num_blocks, kv_dtype)

    # -- requests ------------------------------------------------------------------------------------------

    def prompt(self, num_tokens: int, *, prefix: Prompt | None = None, num_shared: int = 0) -> Prompt:
        """A new request of random tokens. With `prefix`, its first `num_shared` blocks are that request's too."""
        tokens = self.rng.integers(0, self.model.vocab_size, num_tokens).tolist()
        if prefix is None:
            return Prompt(tokens)
        shared = num_shared * self.layout.block_size
        self.grow(prefix, shared)
        tokens[:shared] = prefix.tokens[:shared]
        return Prompt(tokens, prefix.blocks[:num_shared], shared)

    def grow(self, prompt: Prompt, num_tokens: int) -> None:
        """Give a request the blocks for its first `num_tokens` tokens."""
        while len(prompt.blocks) * self.layout.block_size < num_tokens:
            prompt.blocks.append(self.free.pop())

    def release(self, prompt: Prompt) -> None:
        """Take a request's blocks back; they are the next to be handed out."""
        self.free.extend(prompt.blocks)
        prompt.blocks, prompt.computed = [], 0

    def slots(self, prompt: Prompt, start: int, end: int) -> NDArray[np.int32]:
        """The slots of a request's positions start .. end - 1."""
        block, offset = np.divmod(np.arange(start, end), self.layout.block_size)
        return (np.array(prompt.blocks, np.int32)[block] * self.layout.block_size + offset).astype(np.int32)

    # -- steps ---------------------------------------------------------------------------------------------

    def batch(
        self, work: Work, *, logit_rows: Sequence[int] | None = None, padding: int = 0, extra_columns: int = 0
    ) -> ForwardBatch:
        """The batch of a step; by default it asks for the logits of every token."""
        for prompt, count in work:
            self.grow(prompt, prompt.computed + count)
        counts = [count for _, count in work]
        spans = [(prompt, prompt.computed, prompt.computed + count) for prompt, count in work]
        total = sum(counts)
        padding += -(total + padding) % self.backend.traits.token_multiple
        tables = np.zeros((len(work), max(len(prompt.blocks) for prompt, _ in work) + extra_columns), np.int32)
        for row, (prompt, _) in enumerate(work):
            tables[row, : len(prompt.blocks)] = prompt.blocks
        wanted = list(range(total) if logit_rows is None else logit_rows)
        wanted += [0] * (-len(wanted) % self.backend.traits.token_multiple)
        return ForwardBatch(
            token_ids=_int32([prompt.tokens[start:end] for prompt, start, end in spans], padding, 0),
            positions=_int32([range(start, end) for _, start, end in spans], padding, 0),
            slots=_int32([self.slots(*span).tolist() for span in spans], padding, -1),
            query_starts=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens=np.array([end for _, _, end in spans], np.int32),
            block_tables=tables,
            logit_rows=np.array(wanted, np.int32),
        )

    def forward(self, batch: ForwardBatch) -> NDArray[np.float32]:
        """Run a batch; logits on the host, their form checked."""
        logits = self.backend.to_host(self.backend.forward(batch))
        kind = type(logits).__name__
        assert isinstance(logits, np.ndarray), f"to_host() returned {kind}, not a numpy array [rows, vocab_size]"
        assert logits.dtype == np.float32, f"to_host() returned {logits.dtype}, not float32"
        assert logits.shape == (len(batch.logit_rows), self.model.vocab_size), f"logits are {logits.shape}"
        return np.array(logits)  # a backend may reuse its memory in the next step

    def step(self, work: Work, *, padding: int = 0, extra_columns: int = 0) -> NDArray[np.float32]:
        """Compute the work, compare all its logits with the reference, and return them [T, vocab_size]."""
        batch = self.batch(work, padding=padding, extra_columns=extra_columns)
        want = self.expected(work)
        got = self.forward(batch)[: len(want)]
        self.advance(work)
        self.compare(got, want, "logits")
        return got

    def advance(self, work: Work) -> None:
        """Note that the work is in the cache now."""
        for prompt, count in work:
            prompt.computed += count

    def finish(self, prompts: Sequence[Prompt], chunk: int) -> None:
        """Compute all the prompts' pending tokens, up to `chunk` of each a step."""
        while work := [(prompt, min(chunk, prompt.pending)) for prompt in prompts if prompt.pending]:
            self.step(work)

    # -- the reference -------------------------------------------------------------------------------------

    def run_of(self, prompt: Prompt) -> ReferenceRun:
        """The reference's results for all tokens of a request."""
        key = tuple(prompt.tokens)
        if key not in self._runs:
            self._runs[key] = self.reference.run(key)
        return self._runs[key]

    def expected(self, work: Work, op: str | None = None) -> NDArray[np.float64]:
        """The reference's logits of the step's tokens, in their order; with `op`, what that op gave."""
        runs = [self.run_of(prompt) for prompt, _ in work]
        values = [run.logits if op is None else run.ops[op] for run in runs]
        return np.concatenate([v[p.computed : p.computed + n] for v, (p, n) in zip(values, work, strict=True)])

    def compare(self, got: NDArray[Any], want: NDArray[Any], what: str) -> None:
        """Fail if a vector differs from the reference's by more than the dtype's tolerance."""
        error, limit = relative_error(got, want), self.limit
        if not np.isfinite(got).all():
            raise AssertionError(f"{what} are not finite: a slot was read that the step must not read")
        assert error <= limit, f"{what} differ from the reference by {error:.2e}, more than {limit:.2e} ({self.dtype})"

    # -- the cache -----------------------------------------------------------------------------------------

    def all_blocks(self) -> NDArray[np.int32]:
        return np.arange(self.layout.num_blocks, dtype=np.int32)

    def exchange_shape(self) -> tuple[int, ...]:
        """The shape of the whole cache in the exchange form."""
        layout = self.layout
        heads = (layout.block_size, layout.num_kv_heads, layout.row_size)
        return (layout.num_blocks, layout.num_layers, 2, *heads)

    def poison(self) -> None:
        """Make every slot recognisable, before anything is written: a step that reads one gives itself away.

        With NaN where the backend exchanges blocks, since 0 * NaN is still NaN; else with the keys and values of
        unrelated requests.
        """
        if self.backend.traits.exchanges_blocks:
            nan = encode(np.full(self.exchange_shape(), np.nan, np.float32), self.layout.dtype)
            self.backend.import_blocks(self.all_blocks(), nan)
            return
        fillers = [self.prompt(self.layout.block_size) for _ in range(self.layout.num_blocks)]
        self.forward(self.batch([(filler, self.layout.block_size) for filler in fillers], logit_rows=[0]))
        self.free = self.rng.permutation(self.layout.num_blocks).tolist()

    def imprint(self) -> None:
        """Give every number of the cache a value that changes from slot to slot, so that a move is seen too."""
        shape = self.exchange_shape()
        ramp = self.rng.standard_normal(shape).astype(np.float32)
        self.backend.import_blocks(self.all_blocks(), encode(ramp, self.layout.dtype))

    def export(self) -> NDArray[Any]:
        """The whole cache, with its bits: unsigned integers of the dtype's width, [slots, layers, 2, heads, dim]."""
        data = np.array(self.backend.export_blocks(self.all_blocks()))
        assert data.shape == self.exchange_shape(), f"export_blocks() returned shape {data.shape}"
        itemsize = {"float32": 4, "int8": 1}.get(self.layout.dtype, 2)
        assert data.dtype.itemsize == itemsize, f"export_blocks() returned {data.dtype} for {self.layout.dtype}"
        by_slot = data.view(f"u{itemsize}").transpose(0, 3, 1, 2, 4, 5)
        return by_slot.reshape(-1, *by_slot.shape[2:])


def encode(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """float32 values in the exchange form: bfloat16 as its uint16 bits, cut; int8 as -1 (and its scale as NaN)."""
    if dtype == "int8":
        return np.full(values.shape, -1, np.int8)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype)


def decode(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The values of the unsigned integers `Driver.export` returns."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(dtype).astype(np.float32)


def compositions(total: int) -> list[tuple[int, ...]]:
    """Every way to cut `total` tokens into chunks: 2 ** (total - 1) of them."""
    cuts = (c for n in range(total) for c in itertools.combinations(range(1, total), n))
    return [tuple(np.diff([0, *cut, total]).tolist()) for cut in cuts]


def _int32(parts: Sequence[Sequence[int]], padding: int, fill: int) -> NDArray[np.int32]:
    """The parts one after the other, then `padding` times `fill`."""
    return np.array([*itertools.chain.from_iterable(parts), *[fill] * padding], np.int32)
