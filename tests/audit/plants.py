"""Bugs of the kinds that were found in the wild, planted into the trainer of a rank. As top-level functions they travel."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.audit.data import edge_words
from meshwright.audit.ranks import RankTrainer
from meshwright.checkpoint.state import initialize_optimizer
from meshwright.data.packing import IGNORE
from meshwright.distributed import _torch_compat
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.pipeline.stage_parts import StageParts
from meshwright.distributed.tensor.slicing import compute_with_slices
from meshwright.models.token_loss import count_tokens
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.result.program import Compute
from meshwright.train.optimizer import build_optimizer

UNIT = "model.layers.1"


def unit(trainer: RankTrainer) -> Any:
    return fsdp_units(trainer.model)[UNIT]


def around_backward(trainer: RankTrainer, before: Callable[..., tuple[Any, Any]] | None = None) -> None:
    inner = trainer.runner.forward_backward

    def forward_backward(batches: Any, counts: Any) -> Any:
        return inner(*before(batches, counts)) if before else inner(batches, counts)

    trainer.runner.forward_backward = forward_backward  # type: ignore[method-assign]


def divided_twice(trainer: RankTrainer) -> None:
    """The classic: FSDP averages what is divided by all tokens already. Here in one unit only."""
    unit(trainer).set_gradient_divide_factor(float(dist.get_world_size()))
    unit(trainer).set_force_sum_reduction_for_comms(False)


def never_reduced(trainer: RankTrainer) -> None:
    inner = trainer.sync.begin_microbatch

    def begin(*, last: bool) -> None:
        inner(last=last)
        unit(trainer).set_requires_gradient_sync(False, recurse=False)

    trainer.sync.begin_microbatch = begin  # type: ignore[method-assign]


def balance_loss_counted_by_each_rank_of_tp(trainer: RankTrainer) -> None:
    trainer.balance.aux_loss *= trainer.setup.layout.size("tp")


def balance_loss_over_tokens_of_the_rank(trainer: RankTrainer) -> None:
    inner = trainer.balance.begin_step
    trainer.balance.begin_step = lambda tokens: inner(tokens / dist.get_world_size())  # type: ignore[method-assign]


def replicas_not_synchronised(trainer: RankTrainer) -> None:
    """The unit's all-reduce goes over a group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = groups[dist.get_rank()]
    for group in _torch_compat.param_groups(unit(trainer)):
        group.mesh_info = copy.copy(group.mesh_info)
        group.mesh_info.replicate_process_group = alone


def tie_came_apart(trainer: RankTrainer) -> None:
    """What materialising a meta model does if nobody ties it again. FSDP itself puts shared weights back, unless it forgets."""
    head = trainer.model.lm_head
    assert isinstance(head.weight, DTensor)
    for group in _torch_compat.param_groups(trainer.model):
        for fsdp_param in group.fsdp_params:
            fsdp_param._module_info.shared_modules.clear()
            fsdp_param._module_info.shared_param_names.clear()
    head.weight = nn.Parameter(head.weight.full_tensor().detach().clone())  # type: ignore[assignment]


def averaged_by_rank(trainer: RankTrainer) -> None:
    """Each rank divides by its own tokens, and the mean over ranks is taken."""

    def before(batches: Any, counts: torch.Tensor) -> Any:
        return batches, torch.full_like(counts, count_tokens(batches) * dist.get_world_size())

    around_backward(trainer, before)


def lost_microbatch(trainer: RankTrainer) -> None:
    """Somebody calls zero_grad between microbatches, and only the last is left."""
    inner = trainer.sync.begin_microbatch

    def begin(*, last: bool) -> None:
        if last:
            trainer.sync.abandon()
        inner(last=last)

    trainer.sync.begin_microbatch = begin  # type: ignore[method-assign]


def local_clipping(trainer: RankTrainer) -> None:
    """Each rank clips by the norm of its own shards."""
    from meshwright.distributed.update.grad_clip import total_grad_norm

    def clip() -> torch.Tensor:
        shards = [p.grad.to_local() for p in trainer.model.parameters() if isinstance(p.grad, DTensor)]
        norm = torch.nn.utils.get_total_norm(shards)
        torch._foreach_mul_(shards, (trainer.config.training.clip_norm / norm).clamp(max=1.0))  # type: ignore[operator]
        if trainer.step == 0:
            trainer.result.clipped_norm = float(total_grad_norm(trainer.model.parameters()))
        return norm

    trainer.clip = clip  # type: ignore[method-assign]


def dropout_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        layer = trainer.model.get_submodule(UNIT)
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.1))


def data_of_rank_0_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        trainer.loader.data_rank = 0


def other_seed_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        trainer.loader.seed += 1
        trainer.loader._epochs.clear()


def frozen_moves(trainer: RankTrainer) -> None:
    frozen = next(p for name, p in trainer.named.items() if not trainer.planned[name].trainable)

    def after_step(*_: Any) -> None:
        with torch.no_grad():
            frozen.data.to_local().mul_(1.001)

    trainer.optimizer.register_step_post_hook(after_step)


def other_values_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        with torch.no_grad():
            for parameter in _torch_compat.owned_parameters(unit(trainer)):
                parameter.to_local().mul_(1.001)


def other_rate_on_rank_1(trainer: RankTrainer) -> None:
    """The optimizer of one rank steps twice as far, so replicas part."""

    def before_step(optimizer: Any, *_: Any) -> None:
        if trainer.rank == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 2

    trainer.optimizer.register_step_pre_hook(before_step)


def decays_vectors(trainer: RankTrainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.5


def decays_biases_of_experts(trainer: RankTrainer) -> None:
    """`[experts, features]` has two dimensions, and is a vector of each expert."""
    moved = {id(p): p for name, p in trainer.named.items() if "experts" in name and name.endswith("_bias")}
    decayed, plain = trainer.optimizer.param_groups
    decayed["params"] += moved.values()
    plain["params"] = [p for p in plain["params"] if id(p) not in moved]


def plan_decays_by_dimensions(trainer: RankTrainer) -> None:
    """The plan itself is wrong: whatever has two dimensions is decayed, as it was once."""
    rows = [replace(row, decayed=len(row.shape) >= 2) for row in trainer.setup.plan.parameters]
    trainer.optimizer = build_optimizer(trainer.model, trainer.config.optimizer, rows)
    initialize_optimizer(trainer.optimizer)


def decays_nothing(trainer: RankTrainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0


def gathers_again(trainer: RankTrainer) -> None:
    """Correct, and wasteful: every unit is resharded and gathered in every microbatch, though the plan defers."""
    inner = trainer.sync.begin_microbatch

    def begin(*, last: bool) -> None:
        trainer.sync._reshard()
        inner(last=last)

    trainer.sync.begin_microbatch = begin  # type: ignore[method-assign]


def another_collective_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        layer = trainer.model.get_submodule(UNIT)
        layer.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(7)))


def rank_1_leaves(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        raise SystemError("no CUDA-capable device is detected")


def slower_on_every_rank(trainer: RankTrainer) -> None:
    """The learning rate is a tenth off: no replica differs, and every gradient of the first step is right."""

    def before_step(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    trainer.optimizer.register_step_pre_hook(before_step)


def stands_still_in_step_2(trainer: RankTrainer) -> None:
    def before_step(optimizer: Any, *_: Any) -> None:
        if trainer.step == 1:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    trainer.optimizer.register_step_pre_hook(before_step)


def last_bits(trainer: RankTrainer) -> None:
    """Each weight goes into the second step off by what sums in another order may make of it, and little more."""

    def after_step(*_: Any) -> None:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad and trainer.step + 1 < trainer.case.steps:
                parameter.data.mul_(1 + 8 * torch.finfo(parameter.dtype).eps)

    trainer.optimizer.register_step_post_hook(after_step)


def norm_without_optimizer(trainer: RankTrainer) -> None:
    norm = trainer.named["model.norm.weight"]
    for group in trainer.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not norm]
    trainer.optimizer.state.pop(norm)


def gradient_left_from_step_1(trainer: RankTrainer) -> None:
    """The optimizer does not know one parameter when gradients are cleared."""
    parameter = trainer.named[f"{UNIT}.mlp.up_proj.weight"]
    inner = trainer.optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        left = parameter.grad
        inner(set_to_none=set_to_none)
        parameter.grad = left

    trainer.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def second_moment_lost(trainer: RankTrainer) -> None:
    def after_step(optimizer: Any, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].zero_()

    trainer.optimizer.register_step_post_hook(after_step)


def gradient_a_percent_off(trainer: RankTrainer) -> None:
    inner = trainer.sync.finish

    def finish() -> None:
        inner()
        for parameter in _torch_compat.owned_parameters(unit(trainer)):
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().mul_(1.01)

    trainer.sync.finish = finish  # type: ignore[method-assign]


def buffer_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        next(trainer.model.buffers()).mul_(1.5)


def buffer_on_rank_1_in_the_end(trainer: RankTrainer) -> None:
    def after_step(*_: Any) -> None:
        if trainer.rank == 1:
            next(trainer.model.buffers()).mul_(1.5)

    trainer.optimizer.register_step_post_hook(after_step)


def buffer_off_after_step_1(trainer: RankTrainer, only: int | None = None) -> None:
    """And right again in the end."""
    buffer = next(trainer.model.buffers())
    inner = trainer.runner.forward_backward

    def forward_backward(batches: Any, counts: Any) -> Any:
        if trainer.step == 1 and only in (None, trainer.rank):
            buffer.div_(2)
        return inner(batches, counts)

    def after_step(*_: Any) -> None:
        if trainer.step == 0 and only in (None, trainer.rank):
            buffer.mul_(2)

    trainer.runner.forward_backward = forward_backward  # type: ignore[method-assign]
    trainer.optimizer.register_step_post_hook(after_step)


def buffer_off_after_step_1_on_rank_1(trainer: RankTrainer) -> None:
    buffer_off_after_step_1(trainer, only=1)


def parameter_by_another_name(trainer: RankTrainer) -> None:
    def after_step(*_: Any) -> None:
        norm = trainer.model.get_submodule("model.norm")
        norm._parameters["gain"] = norm._parameters.pop("weight")

    trainer.optimizer.register_step_post_hook(lambda *_: after_step() if trainer.step == trainer.case.steps - 1 else None)


def evaluation_mode_on_rank_1(trainer: RankTrainer) -> None:
    if trainer.rank == 1:
        trainer.model.get_submodule(UNIT).eval()


def half_the_loss_from_step_2(trainer: RankTrainer) -> None:
    """Only the number that is reported."""
    inner = trainer.runner.forward_backward

    def forward_backward(batches: Any, counts: Any) -> Any:
        sums = inner(batches, counts)
        if trainer.step > 0:
            sums.values["loss"] = sums.values["loss"] / 2
        return sums

    trainer.runner.forward_backward = forward_backward  # type: ignore[method-assign]


def gathers_again_in_step_2(trainer: RankTrainer) -> None:
    inner = trainer.sync.begin_microbatch

    def begin(*, last: bool) -> None:
        if trainer.step == 1:
            trainer.sync._reshard()
        inner(last=last)

    trainer.sync.begin_microbatch = begin  # type: ignore[method-assign]


def replanned(trainer: RankTrainer, style: str, of: Callable[[str], bool] = bool, **changes: Any) -> None:
    """Modules of a style do something else than their actions say: all, or those whose names are asked for."""
    plan = trainer.setup.plan
    modules = {row.module for row in plan.tensor_parallel if row.style == style and of(row.module)}
    for action in plan.program:
        if isinstance(action, Compute) and action.module in modules:
            del trainer.model.get_submodule(action.module).forward  # the class's own comes back
            compute_with_slices(trainer.model, replace(action, row=replace(action.row, **changes)), trainer.mesh)


def norms_not_summed(trainer: RankTrainer) -> None:
    """Under sequence parallel each rank has the gradient of its own part of the sequence."""
    replanned(trainer, "sequence_parallel", sums=())


def query_norms_not_summed(trainer: RankTrainer) -> None:
    """Each rank has the gradient of its own heads."""
    replanned(trainer, "replicated_with_grad_allreduce", sums=())


def router_not_summed(trainer: RankTrainer) -> None:
    """Each rank has the gradient that comes through its own slices of the experts."""
    replanned(trainer, "router", sums=())


def shared_heads_not_summed(trainer: RankTrainer) -> None:
    """Two ranks share a head of keys, and each has the gradient of its own queries."""
    replanned(trainer, "grouped_colwise", sums=())


def regions_not_entered(trainer: RankTrainer) -> None:
    """The all-reduce of backward is forgotten: upstream of attention and MLP gradients are those of slices."""
    replanned(trainer, "region", entry=Move.NONE)


def _around_forward(module: nn.Module, change: Callable[..., Any]) -> None:
    """``change(inner, *args, **kwargs)`` instead of a module's forward, inside of all hooks."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: change(inner, *args, **kwargs)


def wrong_rotary_positions_on_rank_1(trainer: RankTrainer) -> None:
    """The attention of one layer rotates queries and keys by the positions of the tokens before them."""

    def change(inner: Any, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        return inner(*args, position_embeddings=tuple(part.roll(1, 1) for part in position_embeddings), **kwargs)

    if trainer.rank == 1:
        _around_forward(trainer.model.get_submodule(f"{UNIT}.self_attn"), change)


def rotary_begins_elsewhere_on_rank_1(trainer: RankTrainer) -> None:
    """What context parallel does where it forgets which part of the sequence it has."""

    def change(inner: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return inner(hidden, position_ids + 3 * (position_ids > 2))

    if trainer.rank == 1:
        _around_forward(trainer.model.get_submodule("model.rotary_emb"), change)


def wrong_head_of_a_group(trainer: RankTrainer) -> None:
    """Queries meet the keys and values of the group beside their own."""
    attention = trainer.model.get_submodule(f"{UNIT}.self_attn")
    for name in ("k_proj", "v_proj"):
        module = attention.get_submodule(name)
        _around_forward(module, lambda inner, hidden: inner(hidden).roll(attention.head_dim, -1))


def position_ids_shifted_on_rank_1(trainer: RankTrainer) -> None:
    """The model is handed other positions than it should: nothing computes wrongly before the rotary embedding is fed."""

    def change(inner: Any, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        return inner(*args, position_ids=position_ids + 3 * (position_ids > 2), **kwargs)

    if trainer.rank == 1:
        _around_forward(trainer.model.get_submodule("model"), change)


def _changed_dispatch(trainer: RankTrainer, change: Callable[..., Any]) -> None:
    if trainer.rank == 1:
        _around_forward(trainer.model.get_submodule(f"{UNIT}.mlp.experts"), change)


def dropped_token_in_dispatch(trainer: RankTrainer) -> None:
    """One token of one rank gets nothing back from its experts: a capacity that is one too small."""

    def change(inner: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        kept = torch.ones_like(weights)
        kept[5] = 0
        return inner(hidden, index, weights * kept)

    _changed_dispatch(trainer, change)


def swapped_combine_weights(trainer: RankTrainer) -> None:
    """The two experts of a token are added up with each other's weight."""
    _changed_dispatch(trainer, lambda inner, hidden, index, weights: inner(hidden, index, weights.flip(1)))


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + gradient.detach().sign() / 10)


def wrong_backward_in_an_mlp(trainer: RankTrainer) -> None:
    """A kernel with a backward of its own, which is wrong; forward is right."""
    module = trainer.model.get_submodule(f"{UNIT}.mlp")
    _around_forward(module, lambda inner, hidden: inner(_WrongBackward.apply(hidden)))


def wrong_backward_between_modules(trainer: RankTrainer) -> None:
    """On the way from a layer to the one before it."""
    trainer.model.get_submodule(UNIT).register_forward_pre_hook(
        lambda _, args: (_WrongBackward.apply(args[0]), *args[1:]), prepend=True
    )


def _last_word_of_rank_0(trainer: RankTrainer) -> int:
    return edge_words(trainer.model.config.vocab_size, trainer.setup.layout.size("tp"))[1]


def last_word_of_a_slice_not_looked_up(trainer: RankTrainer) -> None:
    """A bound that is one too small: the word is taken for one of the next rank, which does not have it either."""
    word = _last_word_of_rank_0(trainer)

    def change(inner: Any, ids: torch.Tensor) -> torch.Tensor:
        return inner(ids).masked_fill((ids == word).unsqueeze(-1), 0)

    _around_forward(trainer.model.get_submodule("model.embed_tokens"), change)


def _around_loss(trainer: RankTrainer, change: Callable[..., Any]) -> None:
    inner = trainer.objective.sums
    trainer.objective.sums = lambda model, batch: change(inner, model, batch)  # type: ignore[method-assign]


def last_word_of_a_slice_is_no_label(trainer: RankTrainer) -> None:
    word = _last_word_of_rank_0(trainer)

    def change(inner: Any, model: Any, batch: Any) -> Any:
        return inner(model, {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == word, IGNORE)})

    _around_loss(trainer, change)


def mean_of_a_microbatch(trainer: RankTrainer) -> None:
    """A mean that is made a sum again: the same, but for a microbatch without a label."""

    def change(inner: Any, model: Any, batch: Any) -> Any:
        tokens = (batch["labels"] != IGNORE).sum()
        return tuple(term / tokens * tokens for term in inner(model, batch))

    _around_loss(trainer, change)


def attention_context(trainer: RankTrainer) -> dict[str, Any]:
    """The attributes of an attention, among them what it does with its part of each sequence."""
    return vars(trainer.model.get_submodule(f"{UNIT}.self_attn"))


def mask_dropped(trainer: RankTrainer) -> None:
    """An attention that takes every part of the sequence for visible."""
    own = attention_context(trainer)
    context = own["_meshwright_context"]
    action = context.action
    own["_meshwright_context"] = replace(context, action=replace(action, row=replace(action.row, causal=False)))


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gathered: torch.Tensor) -> torch.Tensor:
        return gathered.view_as(gathered)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


class _Unreduced:
    """Adds up half of the gradients of keys: those of this rank and not those of the other."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.action = inner, inner.action

    def __call__(self, rule: Any, sequences: Any, query: Any, key: Any, value: Any, sinks: Any) -> torch.Tensor:
        return self.inner(rule, sequences, query, _Kept.apply(key), value, sinks)


def keys_not_reduced(trainer: RankTrainer) -> None:
    own = attention_context(trainer)
    own["_meshwright_context"] = _Unreduced(own["_meshwright_context"])


CANVAS_LAYER = "model.decoder.layers.1.self_attn"


class _OverCanvas:
    """Changes what an attention over a canvas computes with, on every rank."""

    def __init__(self, inner: Any, rule: Callable[..., torch.Tensor] | None = None, keys: Any = None) -> None:
        self.inner, self.action, self.rule, self.keys = inner, inner.action, rule, keys

    def __call__(self, rule: Any, canvases: Any, query: Any, key: Any, value: Any, sinks: Any) -> torch.Tensor:
        if self.rule is not None:
            canvases = replace(canvases, rule=partial(self.rule, canvases.rule), _made={})
        if self.keys is not None:
            key, value = self.keys(canvases, key), self.keys(canvases, value)
        return self.inner(rule, canvases, query, key, value, sinks)


def over_canvas(trainer: RankTrainer, **changes: Any) -> None:
    own = vars(trainer.model.get_submodule(CANVAS_LAYER))
    own["_meshwright_context"] = _OverCanvas(own["_meshwright_context"], **changes)


def block_sees_its_clean_copy(trainer: RankTrainer) -> None:
    """The last column of each piece of a canvas sees all clean tokens: those of its block, and of later ones."""

    def off(rule: Any, ask: range, positions: range, asked: range, window: int | None) -> torch.Tensor:
        seen = rule(ask, positions, asked, window)
        seen[..., -1:, : len(positions)] = True
        return seen

    over_canvas(trainer, rule=off)


def keys_of_another_document(trainer: RankTrainer) -> None:
    """Rank 0 sends the clean keys of the other sequence of its microbatch."""
    if trainer.mesh.rank("cp") == 0:

        def swapped(canvases: Any, keys: torch.Tensor) -> torch.Tensor:
            clean = canvases.clean // 2
            return torch.cat([keys[:, :, :clean].roll(1, 0), keys[:, :, clean:]], dim=2)

        over_canvas(trainer, keys=swapped)


def noise_of_rank_1(trainer: RankTrainer) -> None:
    """Random numbers by rank, and not by sequence."""
    if trainer.mesh.rank("cp") == 1:
        trainer.objective.seed += 1


def around_share(trainer: RankTrainer, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    inner = trainer.batches.share

    def share(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shard = inner(batch)
        change(shard)
        return shard

    trainer.batches.share = share  # type: ignore[method-assign]


def contiguous_positions_under_zigzag(trainer: RankTrainer) -> None:
    rank = trainer.mesh.rank("cp")

    def change(shard: dict[str, torch.Tensor]) -> None:
        length = shard["position_ids"].shape[1]
        shard["position_ids"].copy_(torch.arange(rank * length, (rank + 1) * length))

    around_share(trainer, change)


def labels_shifted_after_the_cut(trainer: RankTrainer) -> None:
    def change(shard: dict[str, torch.Tensor]) -> None:
        counts = shard["labels"] != IGNORE
        shard["labels"] = torch.where(counts, shard["input_ids"].roll(-1, 1), IGNORE)

    around_share(trainer, change)


def balance_of_each_rank_of_cp(trainer: RankTrainer) -> None:
    trainer.balance.group = None


# -- stages ------------------------------------------------------------------------------------------------------------------


def part_with(trainer: RankTrainer, stage: int) -> Any:
    """The model of a stage, if this rank has it."""
    assert isinstance(trainer.model, StageParts)
    return trainer.model[stage] if str(stage) in trainer.model.parts else None


def stages_of(trainer: RankTrainer) -> Any:
    """What runs the stages of the rank."""
    return trainer.runner.inner.stages  # type: ignore[attr-defined]


def list_of_layers_cut(trainer: RankTrainer) -> None:
    """The later stage looks the types of its layers up by their places among its own, and not in the whole model."""
    if (part := part_with(trainer, 1)) is not None:
        modules = part.model.layers._modules
        _first, *others = (name for name, layer in modules.items() if not any(True for _ in layer.parameters()))
        for name in others:  # the first stands for all: the next ones are passed through at the end
            module = modules.pop(name)
            crossing, argument, returned, index, _ = vars(module)["_facts"]
            vars(module)["_facts"] = (crossing, argument, returned, index, False)
            modules[name] = module


def halves_of_resharded_units(trainer: RankTrainer) -> None:
    """Backward in halves under units that are resharded, as in torch's own stage: no parameter of theirs is in the graph."""
    for stage in stages_of(trainer).stages:
        sync, inner = stage.sync, stage.sync.begin_backward
        stage.submod.modules = lambda: iter(())  # so no unit is found, and torch gets what is registered

        def begin(*, last: bool, splits: bool, sync: Any = sync, inner: Any = inner) -> None:
            inner(last=last, splits=splits)
            for module in sync.units():
                module.reshard()

        sync.begin_backward = begin
        sync._use.end = lambda model: None  # which would refuse a step in which a parameter got no gradient


def keyword_dropped(trainer: RankTrainer) -> None:
    """A later stage is called without positions: it takes packed documents for one."""
    if (part := part_with(trainer, 1)) is not None:
        inner = part.model.forward
        part.model.forward = lambda *args, position_ids=None, **kwargs: inner(*args, **kwargs)


def tied_gradients_not_added(trainer: RankTrainer) -> None:
    stages_of(trainer).copies.clear()


def divided_by_microbatches(trainer: RankTrainer) -> None:
    """What torch's schedules do with the gradients of each stage, unless they are told otherwise."""
    for stage in stages_of(trainer).stages:
        sync = stage.sync
        inner = sync.finish

        def finish(inner: Callable[[], None] = inner, stage: Any = stage) -> None:
            inner()
            for parameter in stage.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad /= trainer.setup.plan.options.microbatches

        sync.finish = finish


def gradients_lost_between_runs(trainer: RankTrainer) -> None:
    """An evaluation between two runs of a step; torch's stage drops gradients when it is initialised anew after it."""
    stages = stages_of(trainer)
    inner = stages._run

    def run(work: Any, *, last: bool) -> None:
        for sync in stages.syncs.values() if last else ():
            sync.abandon()
            sync.begin_step()
        inner(work, last=last)

    stages._run = run


def soft_cap_of_hidden_states(trainer: RankTrainer) -> None:
    """The first stage does to its hidden state what the head does to logits."""
    if (part := part_with(trainer, 0)) is not None:
        inner = part.forward
        part.forward = lambda *args, **kwargs: torch.tanh(inner(*args, **kwargs) / 30.0) * 30.0


def multiplier_on_each_stage(trainer: RankTrainer) -> None:
    """A later stage multiplies what it receives as the first one does the embedding."""
    if (part := part_with(trainer, 1)) is not None:
        first = next(layer for layer in part.model.layers if any(True for _ in layer.parameters()))
        factor = part.config.hidden_size**0.5
        first.register_forward_pre_hook(lambda module, args: (args[0] * factor, *args[1:]))


# -- adapters ------------------------------------------------------------------------------------------------------------------


def adapter_of(trainer: RankTrainer, module: str) -> Any:
    return trainer.model.get_submodule(f"{UNIT}.{module}")


def alpha_applied_twice(trainer: RankTrainer) -> None:
    adapter_of(trainer, "self_attn.q_proj").scaling["default"] *= 2


def adapter_behind_the_sum_of_slices(trainer: RankTrainer) -> None:
    """Each rank of tp adds the whole product of a matrix whose inputs are sliced, instead of its part."""
    b = adapter_of(trainer, "self_attn.o_proj").lora_B["default"]
    b.register_forward_hook(lambda module, args, output: output * dist.get_world_size())
