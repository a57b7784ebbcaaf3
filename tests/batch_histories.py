"""The laws of every cache that holds several sequences, whatever happens to them.

Each sequence is served as if it had always been alone, and leaves as the cache that it
would then have.
"""

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)


class BatchHistory(RuleBasedStateMachine):
    """merge, extend, filter, extract, prompts padded on the right, decode.

    ``batch`` has a cache for each layer; ``rows`` has, for each sequence, what its kind
    knows of it.
    """

    most = 5  # sequences at a time
    shortest, longest = 0, 20  # prompts of a batch
    decodes = 15  # single tokens

    def set_up(self, draw):
        """Draw what all sequences share."""

    def alone(self, draw):
        """A new sequence: its caches, a layer each, and its row."""
        raise NotImplementedError

    def feed(self, batch, rows, lengths, chunk):
        """Feed the rows' next tokens, padded, and hold them against the oracle."""
        raise NotImplementedError

    def check_alone(self, caches, row, cuts):
        """Hold caches that left a batch, and what they are fed, against the oracle."""
        raise NotImplementedError

    def twin(self, row):
        """A row that goes on for itself."""
        raise NotImplementedError

    def check_batch(self, batch, rows):
        """Hold what a batch says of itself against its rows."""

    @initialize(data=st.data())
    def begin(self, data):
        self.set_up(data.draw)
        self.batch, self.rows = self.newcomers(data.draw, 3)

    def newcomers(self, draw, most):
        count = draw(st.integers(1, most), "newcomers")
        caches, rows = zip(*(self.alone(draw) for _ in range(count)))
        return merged(caches), list(rows)

    def step(self, lengths, chunk=None):
        self.feed(self.batch, self.rows, lengths, chunk or max(lengths))
        self.check_batch(self.batch, self.rows)

    def index(self):
        return st.integers(0, len(self.rows) - 1)

    @rule(data=st.data())
    def decode(self, data):
        for _ in range(data.draw(st.integers(1, self.decodes), "decoded")):
            self.step([1] * len(self.rows))

    @rule(data=st.data())
    def prefill(self, data):
        B, size = len(self.rows), st.integers(self.shortest, self.longest)
        ragged = st.lists(size, min_size=B, max_size=B).filter(any)
        alike = st.integers(1, self.longest).map(lambda length: [length] * B)
        lengths = data.draw(ragged | alike, "lengths")
        self.step(lengths, data.draw(st.integers(1, self.longest), "chunk"))

    @rule(data=st.data())
    def filter(self, data):
        B = len(self.rows)
        order = data.draw(st.permutations(range(B)), "order")
        kept = order[: data.draw(st.integers(1, B), "stay")]
        for layer in self.batch:
            layer.filter(kept)
        self.rows = [self.rows[index] for index in kept]

    def extend(self, batch, rows):
        for layer, other in zip(self.batch, batch):
            layer.extend(other)
        self.rows += rows

    @precondition(lambda self: len(self.rows) < self.most)
    @rule(data=st.data())
    def join(self, data):
        self.extend(*self.newcomers(data.draw, min(2, self.most - len(self.rows))))

    @rule(data=st.data())
    def leave(self, data):
        index = data.draw(self.index(), "leaves")
        alone = [layer.extract(index) for layer in self.batch]
        row = self.twin(self.rows[index])
        cuts = data.draw(st.lists(st.integers(1, 9), max_size=3), "cuts alone")
        self.check_alone(alone, row, cuts)
        if len(self.rows) < self.most and data.draw(st.booleans(), "comes back"):
            self.extend(merged([alone]), [row])

    def teardown(self):
        if hasattr(self, "rows"):
            self.step([1] * len(self.rows))
            for index, row in enumerate(self.rows):
                alone = [layer.extract(index) for layer in self.batch]
                self.check_alone(alone, self.twin(row), [1, 5, 1])


def merged(caches):
    """One batch a layer of the caches of several sequences."""
    return [type(layers[0]).merge(list(layers)) for layers in zip(*caches)]


def hold(kind, examples, steps):
    """Hold a kind of cache to the laws, in that many histories of so many steps."""
    options = hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None
    )
    run_state_machine_as_test(kind, settings=options)
