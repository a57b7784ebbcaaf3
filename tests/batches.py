"""mlx-lm's own batches, run to their end, and the same prompts alone."""

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step


def batch_tokens(model, prompts, caches, count, **named):
    """The tokens and the last caches that mlx-lm's batches give."""
    generator = BatchGenerator(model, **named)
    uids = generator.insert(prompts, max_tokens=[count] * len(prompts), caches=caches)
    try:
        return run_out(generator, uids)
    finally:
        generator.close()


def run_out(generator, uids):
    """The tokens and the last caches of requests that a generator has taken up."""
    got, left = {uid: [] for uid in uids}, {}
    while responses := generator.next_generated():
        for response in responses:
            got[response.uid].append(int(response.token))
            if response.finish_reason:
                left[response.uid] = response.prompt_cache
    return [got[uid] for uid in uids], [left[uid] for uid in uids]


def alone_tokens(model, prompt, cache, count, **named):
    """The tokens that mlx-lm gives after one prompt."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, **named
    )
    return [int(token) for token, _ in steps]


def batched_turns(model, prompts, caches, alone, count, **named):
    """Hold batches against each prompt alone, turn by turn; the caches of each."""
    for turn in prompts:
        got, caches = batch_tokens(model, turn, caches, count, **named)
        pairs = zip(turn, alone)
        assert got == [alone_tokens(model, *pair, count) for pair in pairs]
        yield caches
