"""mlx-lm's own batches, run to their end."""

from mlx_lm.generate import BatchGenerator


def batch_tokens(model, prompts, caches, count, **named):
    """The tokens and the last caches that mlx-lm's batches give."""
    generator = BatchGenerator(model, **named)
    uids = generator.insert(prompts, max_tokens=[count] * len(prompts), caches=caches)
    got, left = {uid: [] for uid in uids}, {}
    while responses := generator.next_generated():
        for response in responses:
            got[response.uid].append(int(response.token))
            if response.finish_reason:
                left[response.uid] = response.prompt_cache
    generator.close()
    return [got[uid] for uid in uids], [left[uid] for uid in uids]
