"""Drafts: tokens that are likely to follow, looked up in a sequence's own text, and tried in room below the knee.

A forward reads the weights for one token of a sequence as for several. So tokens that followed the latest ones when
these came before (prompt lookup decoding) are computed as further decodes of the sequence, and each position is sampled
as it would be alone. Those that were guessed right are kept: an answer's tokens are the same with drafts and without.
"""

import heapq
from collections.abc import Iterable

from edged.engine.sampling.draft_lookup import MOST, Draft
from edged.engine.sequence import Sequence
from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.scheduler.task import Kind, Plan

_LEAST_GAIN = 1.15
"""How many times its share of the time a drafted token must be worth: prices are not exact."""


def draft(sequences: Iterable[Sequence], plan: Plan, cost: CostModel, now: float, most_rows: int) -> None:
    """Give the decodes of `plan` drafts, as long as the tokens that they are expected to bring are worth their time.

    Only room below the knee is given, of at most `most_rows` rows with the decodes themselves: prompts and fine-tuning
    have theirs already. Readers who have text left need no speed.
    """
    load = Load()
    for grant in plan.grants:
        if grant.task.kind is Kind.DECODE:
            load.decodes += 1
            load.context += grant.task.context - grant.task.pruned
        else:
            load.add_chunk(grant.num_tokens, grant.task.context, grant.task.kind is Kind.FINETUNE)
    room, before_s = min(cost.free_tokens(load), most_rows - load.decodes), cost.priced_s(load)
    found: list[tuple[float, int, Sequence, Draft]] = []
    for sequence in sequences:
        sequence.draft = None
        most = min(MOST, room, sequence.request.sampling.max_tokens - sequence.generated - 1)
        if most > 0 and _may_draft(sequence, now) and (one := _find(sequence, most)):
            heapq.heappush(found, (-sequence.lookup.share(one.kind), sequence.task.task_id, sequence, one))
    tokens = float(max(1, load.decodes))
    while found and room:
        negative, number, sequence, one = heapq.heappop(found)
        chance = -negative
        more = Load(load.prefill_tokens, load.decodes + 1, load.finetune_tokens, load.context, load.pairs)
        more.context += sequence.task.context
        after_s = cost.priced_s(more)
        if chance * before_s < _LEAST_GAIN * tokens * (after_s - before_s):
            break
        if sequence.draft is None:
            sequence.draft = Draft([], one.kind)
        own = sequence.draft.tokens
        own.append(one.tokens[len(own)])
        load, before_s, tokens, room = more, after_s, tokens + chance, room - 1
        if len(own) < len(one.tokens):
            heapq.heappush(found, (negative * sequence.lookup.share(one.kind), number, sequence, one))


def _find(sequence: Sequence, most: int) -> Draft | None:
    """Return a draft of at most `most` tokens, of those that the sequence's grammar allows."""
    one = sequence.lookup.find(sequence.token_ids, most)
    if one is not None and sequence.matcher is not None:
        del one.tokens[sequence.matcher.allowed(one.tokens) :]
    return one if one is not None and one.tokens else None


def _may_draft(sequence: Sequence, now: float) -> bool:
    """Whether a sequence decodes one token at a time, of its own text alone, for somebody who waits for it.

    Penalties count the tokens before each one, and pruning observes decodes one by one.
    """
    single = sequence.compacted is None and sequence.watch is None and not sequence.request.sampling.penalizes
    reader = sequence.task.reader
    waits = reader is None or reader.dry_s <= now
    return sequence.decoding and single and waits and not sequence.request.candidate
