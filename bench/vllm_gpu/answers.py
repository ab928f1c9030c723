"""Answers of one engine that must not depend on how vLLM runs a request: in chunks, after a prefix hit, beside others, or
after a preemption. `report` gets one row for each comparison."""


def prompts_of(lengths, seed=0):
    import numpy

    return [numpy.random.default_rng([seed, i, n]).integers(10, 128000, n).tolist() for i, n in enumerate(lengths)]


def sampling(tokens, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def generate(llm, prompts, tokens):
    """[tokens, logprobs of those tokens] of each prompt, and how many tokens the prefix cache had."""
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling(tokens, logprobs=1), use_tqdm=False)
    answers = []
    for out in outs:
        one = out.outputs[0]
        answers.append([list(one.token_ids), [float(x[t].logprob) for t, x in zip(one.token_ids, one.logprobs)]])
    return answers, sum(out.num_cached_tokens or 0 for out in outs)


def one_by_one(llm, prompts, tokens):
    answers = [generate(llm, [p], tokens) for p in prompts]
    return [answer[0] for answer, _ in answers], sum(cached for _, cached in answers)


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def compare(name, got_and_cached, wanted):
    got, cached = got_and_cached
    pairs = list(zip(got, wanted))
    return {
        "name": name,
        "of": len(wanted),
        "equal_tokens": sum(a[0] == b[0] for a, b in pairs),
        "equal_logprobs": sum(a == b for a, b in pairs),
        "cached": cached,
        "part_at": [first_difference(a[0], b[0]) for a, b in pairs if a[0] != b[0]],
        "logprobs_differ_at": [[i, first_difference(a[1], b[1])] for i, (a, b) in enumerate(pairs) if a[1] != b[1]],
    }


def same(llm, report):
    """Chunks, prefix hits that leave one token, and requests one by one, against all at once without them."""
    block = llm.llm_engine.vllm_config.cache_config.block_size
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.scheduler_config
    page = max(block, 64)
    prompts = prompts_of([page + 1, 2 * page + 1, 4 * page + 1, 5 * page + 17, 7 * page + 1, 16 * page + 1, 9, 1], 21)
    llm.reset_prefix_cache()
    plain, _ = generate(llm, prompts, 32)
    report(compare("again, from the prefix cache", generate(llm, prompts, 32), plain))
    runs = [
        ("all at once again", 0, generate),
        ("one by one", 0, one_by_one),
        (f"chunks of {page}, one by one", page, one_by_one),
        ("chunks of 24, one by one", 24, one_by_one),
        (f"chunks of {page}", page, generate),
        ("chunks of 24", 24, generate),
    ]
    for name, chunk, run in runs:
        llm.reset_prefix_cache()
        scheduler.long_prefill_token_threshold = chunk
        found = run(llm, prompts, 32)
        report(compare(name, found, plain))
    llm.reset_prefix_cache()
    report(compare(f"{name} again, against the first time", run(llm, prompts, 32), found[0]))
    scheduler.long_prefill_token_threshold = 0


def preempt(llm, report):
    """With room for some of the requests only: the last of them are preempted, and computed again."""
    block = llm.llm_engine.vllm_config.cache_config.block_size
    prompts = prompts_of([3 * block - 5] * 8, 31)
    alone, _ = one_by_one(llm, prompts, 2 * block)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    count, preempted = [0], scheduler._preempt_request

    def counted(*a, **k):
        count[0] += 1
        return preempted(*a, **k)

    scheduler._preempt_request = counted
    together = generate(llm, prompts, 2 * block)
    report(compare(f"{count[0]} preemptions", together, alone))
