"""Everything on one rank, in the batched form: each expert's tokens in rows of its own."""

from __future__ import annotations

import threading

import torch

from moe_cpu.checks import check_no_scales, check_weight_on_input
from moe_cpu.combine import weight_and_reduce, weight_input
from moe_cpu.errors import ArgumentError, shape_error
from moe_cpu.grouping import group_by_expert, local_expert_ids
from moe_cpu.modular_kernel import FusedMoEPrepareAndFinalize, PrepareResult


class BatchedPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Scatters tokens to `[E, max_num_tokens, K]` for the experts, then gathers, weights and sums their results.

    A token's row within its expert is its rank among the (token, slot) pairs of that expert, in flat order. `prepare`
    returns local ids, from which `finalize` works the same rows out again, so nothing is remembered in between.

    Memory: the batched activations live in a buffer of the calling thread, reused by the next `prepare`, unless a
    gradient is wanted. Rows past `expert_num_tokens[e]` are undefined.
    """

    def __init__(self, max_num_tokens: int, num_local_experts: int) -> None:
        """
        Args:
            max_num_tokens: rows for each expert; a repeated id in one token takes one row for each repetition.
            num_local_experts: E.
        """
        super().__init__()
        for name, value in (("max_num_tokens", max_num_tokens), ("num_local_experts", num_local_experts)):
            if value < 0:
                raise ArgumentError(f"{name}: expected a number >= 0, got {value}")
        self.max_num_tokens = max_num_tokens
        self.num_local_experts = num_local_experts
        self._buffers = _Buffers()

    def prepare(
        self,
        a1: torch.Tensor,
        a1_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> PrepareResult:
        """Returns activations `[E, max_num_tokens, K]`, `expert_num_tokens [E]` int32, and local ids `[M, topk]`, -1 = skip.

        Raises: ArgumentError when an expert gets more than `max_num_tokens` rows, naming it; ExpertIdError.
        """
        check_no_scales(a1_scale=a1_scale, a2_scale=a2_scale)
        if apply_router_weight_on_input:
            check_weight_on_input(True, topk_ids.shape[1])
            a1 = weight_input(a1, topk_weights)
        E, K = self.num_local_experts, a1.shape[1]
        local_ids = local_expert_ids(topk_ids, E, expert_map)
        pairs, rows, counts = self._rows(local_ids)
        shape = (E, self.max_num_tokens, K)
        if torch.is_grad_enabled() and a1.requires_grad:
            batch = a1.new_zeros(shape)
        else:
            batch = self._buffers.take(shape, a1)
        batch.view(-1, K).index_copy_(0, rows, a1.index_select(0, pairs // max(topk_ids.shape[1], 1)))
        tokens = torch.tensor(counts, dtype=torch.int32, device=a1.device)
        return PrepareResult(batch, None, tokens, local_ids.to(topk_ids.dtype), None)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Gathers `fused_expert_output [E, max_num_tokens, K]` by the local ids that `prepare` returned, weights and sums.

        A slot with local id -1 adds exactly zero.

        Raises: ShapeError.
        Numerics: weights and sum in float32, slots in order, one rounding.
        """
        K = output.shape[1]
        expected = (self.num_local_experts, self.max_num_tokens, K)
        if tuple(fused_expert_output.shape) != expected:
            raise shape_error(
                "fused_expert_output", "[E, max_num_tokens, K]", expected, fused_expert_output.shape
            )
        pairs, rows, _ = self._rows(topk_ids.long())
        gathered = fused_expert_output.new_zeros((topk_ids.numel(), K))
        gathered.index_copy_(0, pairs, fused_expert_output.reshape(-1, K).index_select(0, rows))
        weight_and_reduce(
            output, gathered.view(*topk_ids.shape, K), topk_weights, topk_ids, apply_router_weight_on_input
        )

    def topk_indices_dtype(self) -> torch.dtype | None:
        """No preference."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """`max_num_tokens`."""
        return self.max_num_tokens

    def _rows(self, local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Flat pairs sorted by expert, the row of `[E * max_num_tokens, K]` that each takes, and the experts' counts."""
        pairs, counts = group_by_expert(local_ids, self.num_local_experts)
        for expert, count in enumerate(counts):
            if count > self.max_num_tokens:
                raise ArgumentError(
                    f"max_num_tokens: expected at least {count}, the tokens routed to local expert {expert}, got "
                    f"{self.max_num_tokens}; make BatchedPrepareAndFinalize with a larger max_num_tokens or split the batch"
                )
        starts = [range(e * self.max_num_tokens, e * self.max_num_tokens + n) for e, n in enumerate(counts)]
        rows = torch.tensor(
            [row for run in starts for row in run], dtype=torch.int64, device=local_ids.device
        )
        return pairs, rows, counts


class _Buffers(threading.local):
    """The batched activations of the calling thread; a copied or unpickled owner starts empty."""

    def __init__(self) -> None:
        self._batch: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type[_Buffers], tuple[()]]:
        return _Buffers, ()

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        if batch is None or batch.shape != shape or batch.dtype != like.dtype or batch.device != like.device:
            with torch.inference_mode(False):
                batch = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._batch = batch
        return batch
