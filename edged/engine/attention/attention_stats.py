"""Statistics of a sequence's attention while it decodes: norms of the heads' outputs, and which K/V rows they use."""

import torch

from edged.engine.attention.base import AttentionCall
from edged.engine.kv.store import KvStore

_FADING = 0.9
"""Factor that earlier attention is multiplied by at each observation."""
_GROWTH_ROWS = 256


class AttentionStats:
    """Attention statistics of one sequence, on its device; each observed iteration updates them without a host wait.

    `norms` [layers, kv_heads] are sums over `observations` of the L2 norms of the attention outputs, each the mean over
    the query heads of a KV head. `shares` [layers, kv_heads, rows] are fading sums of the attention that a row gets,
    `last_used` the iteration in which a query head last gave it more than the uniform share of its attention.
    """

    def __init__(self, kv: KvStore, iteration: int) -> None:
        """Rows that were written before the first observation count as used in `iteration`."""
        shape, device = (kv.layers, kv.kv_heads), kv.keys.device
        self.observations = 0
        self.iteration = iteration
        self.norms = torch.zeros(shape, dtype=torch.float32, device=device)
        self.shares = torch.zeros(*shape, 0, dtype=torch.float32, device=device)
        self.last_used = torch.zeros(*shape, 0, dtype=torch.int32, device=device)

    def begin(self, iteration: int, rows: int) -> None:
        """Begin an observation, in which `see` is called once for each layer, with at most `rows` rows of a head."""
        self.iteration = iteration
        self.observations += 1
        self.reserve(rows)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows of a head; new ones count as used in the latest observed iteration."""
        missing = rows - self.shares.shape[2]
        if missing > 0:
            more = (*self.norms.shape, missing + _GROWTH_ROWS)
            self.shares = torch.cat((self.shares, self.shares.new_zeros(more)), dim=2)
            self.last_used = torch.cat((self.last_used, self.last_used.new_full(more, self.iteration)), dim=2)

    def see(
        self, call: AttentionCall, query: torch.Tensor, out: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Add one layer: `query`, `out` [heads, d], `keys` [kv_heads, rows, d], valid up to `lengths` [kv_heads]."""
        kv_heads, rows = keys.shape[:2]
        scores = (query.view(kv_heads, -1, query.shape[-1]) @ keys.mT).float() * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        hidden = torch.arange(rows, device=keys.device) >= lengths[:, None]
        scores.masked_fill_(hidden[:, None], float("-inf"))
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.float().view(kv_heads, -1, 1)), dim=-1)
        attention = scores.softmax(-1)[..., :rows]
        used = (attention * lengths[:, None, None] > 1.0).any(1)
        self.norms[call.layer] += out.reshape(kv_heads, -1, out.shape[-1]).float().norm(dim=-1).mean(-1)
        self.shares[call.layer, :, :rows].mul_(_FADING).add_(attention.mean(1))
        self.last_used[call.layer, :, :rows].masked_fill_(used, self.iteration)

    def mean_norms(self) -> torch.Tensor:
        """Return a_h of MACE 4.3, the mean norms by head: [layers, kv_heads]."""
        return self.norms / max(1, self.observations)

    def rearrange(self, order: torch.Tensor, lengths: torch.Tensor) -> None:
        """Follow a pruning: row i becomes the former row `order[..., i]`, up to `lengths` [layers, kv_heads]."""
        gone = torch.arange(order.shape[2], device=order.device) >= lengths[..., None]
        self.shares = self.shares.gather(2, order).masked_fill_(gone, 0.0)
        self.last_used = self.last_used.gather(2, order).masked_fill_(gone, self.iteration)
