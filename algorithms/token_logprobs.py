"""An evening on prefixes, 1 of 2. Log-prob of each sampled token, entropy where it was sampled.

    log π(x_{t+1} | x_{≤t}) = log softmax(logits_t / temperature)[x_{t+1}]

For logits [Q, T, V] that is one line:

    (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)

Here logits exist only where a token was sampled, one row for each distinct prefix, in chunks, and
only over the tokens that could be drawn.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# (log-probs [l, V], the places [l] among the n sampled tokens of those that they predict) -> [l]
Compare = Callable[[Tensor, Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    predictors: Tensor,
    targets: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    chunk: int = 4096,
    kept_ids: Sequence[list[int] | None] | None = None,
    entropy_grad: bool = True,
    compare: Compare | None = None,
) -> tuple[Tensor, ...]:
    """Log-prob of each of n sampled tokens; entropy and varentropy of the policy at that place.

    `hidden` [U, D]: states of U distinct prefixes; `predictors` [n]: which of them ends before each
    token; `targets` [n]: the ids of the tokens; `to_logits` maps [l, D] to [l, V]. Returns three
    float32 vectors [n], in nats and nats². Gradients flow through the log-probs, and with
    `entropy_grad` through the entropy. The varentropy is the variance of -log π(x), whose mean is
    the entropy. `compare` adds a fourth vector, from the whole distributions (`kept_ids`: below).

    There is one row of logits for each distinct prefix after which a token was sampled. If these
    are more than `chunk`, `chunk` rows at a time exist, and the backward pass computes them again.
    """
    if kept_ids is None and compare is None:
        prefixes, row_of = predictors.unique(return_inverse=True)  # [l], [n]: prefixes[row_of]
    else:  # each token has kept ids, or a distribution to compare with, of its own
        prefixes, row_of = predictors, torch.arange(len(predictors), device=predictors.device)

    def one_chunk(start: int, tokens: Tensor) -> list[Tensor]:
        # not hidden[..], which adds up the gradients of equal prefixes in an arbitrary order
        states = hidden.index_select(0, prefixes[start : start + chunk])
        logits = to_logits(states).float() / temperature  # [l, V]
        if kept_ids is not None:
            logits = only_kept(logits, kept_ids[start : start + len(states)])
        all_logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            weighted = all_logprobs.exp() * all_logprobs
            entropy = -weighted.sum(-1)
        with torch.no_grad():
            varentropy = (weighted * all_logprobs).sum(-1) - entropy**2
        rows = row_of[tokens] - start
        compared = [] if compare is None else [compare(all_logprobs, tokens)]
        return [all_logprobs[rows, targets[tokens]], entropy[rows], varentropy[rows], *compared]

    num_vectors = 3 if compare is None else 4
    outputs = [*hidden.new_zeros(num_vectors, len(targets), dtype=torch.float32)]
    for start in range(0, len(prefixes), chunk):
        tokens = ((row_of >= start) & (row_of < start + chunk)).nonzero().squeeze(1)
        if len(prefixes) > chunk:
            parts = checkpoint(one_chunk, start, tokens, use_reentrant=False)
        else:
            parts = one_chunk(start, tokens)
        outputs = [x.index_copy(0, tokens, new) for x, new in zip(outputs, parts, strict=True)]
    return tuple(outputs)


def only_kept(logits: Tensor, kept_ids: Sequence[list[int] | None]) -> Tensor:
    """`logits` [n, V] with -1e30 in each row i for all but the ids `kept_ids[i]` (None: all stay).

    Top-k and top-p kept these ids when the token was sampled, so the softmax is over them only
    (arXiv:2512.02556, section 3.1). Otherwise the importance weights would be too small by the
    total probability of the kept ids. The entropy needs a finite -1e30, as 0 · -inf is not 0.
    """
    places = [(i, j) for i, ids in enumerate(kept_ids) for j in ids or []]
    index = torch.tensor(places, dtype=torch.int64, device=logits.device).view(-1, 2)
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    is_kept[index[:, 0], index[:, 1]] = True
    is_kept[[i for i, ids in enumerate(kept_ids) if ids is None]] = True
    return logits.masked_fill(~is_kept, -1e30)
