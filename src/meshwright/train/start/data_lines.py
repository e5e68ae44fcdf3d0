"""Lines about the data of a run: what became of its rows, how many epochs it trains on them, how even ranks share them."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.errors import number_of
from meshwright.plan.axes.context.sharing import unevenness
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup

if TYPE_CHECKING:
    from meshwright.data.index import StoreIndex
    from meshwright.data.loader import TrainLoader
    from meshwright.data.store import TokenStore

__all__ = ["describe_data", "describe_sharing", "plain_loader", "unread_columns"]


def plain_loader(config: RunConfig, store: "TokenStore") -> "TrainLoader":
    """Return the loader of a run in one process, which knows how many sequences there are."""
    from meshwright.data.loader import TrainLoader

    return TrainLoader(
        store,
        sequence_length=config.data.sequence_length,
        global_batch_size=config.training.global_batch_size,
        microbatch_size=1,
        seed=config.training.seed,
        packing=config.data.packing,
        shuffle=config.data.shuffle,
    )


def unread_columns(setup: RunSetup) -> str:
    """Name the columns that the objective does not use; empty: it uses all of them."""
    read = {*setup.objective.reads, ROUTED_EXPERTS}  # this one the routers read
    names = [name for name in setup.config.data.tensors if name not in read]
    return f"data.tensors: objective {setup.objective.name} was not seen to read {_some(names)}" if names else ""


def describe_data(config: RunConfig, store: "TokenStore") -> str:
    """Describe in a few lines what became of the data, and how many epochs a run trains on them.

    Args:
        config: configuration of the run.
        store: its tokens.
    """
    index, loader = store.index, plain_loader(config, store)
    length, batch, sequences = config.data.sequence_length, config.training.global_batch_size, loader.sequences(1)
    steps = config.training.steps or loader.steps(config.training.epochs or 0)
    epochs, filled = steps * batch / sequences, index.train_tokens / (sequences * length)
    packed = "packed " if config.data.packing == "pack" else ""
    lines = [
        f"data: {number_of(index.rows, 'row')}, {number_of(index.documents, 'document')} of "
        f"{number_of(index.tokens, 'token')}, {index.eval_documents:,} held "
        f"out; {index.truncated:,} truncated, {index.dropped:,} dropped, {index.empty:,} empty, {index.bad:,} bad"
        f"{f', {index.mapped_away:,} left out by data.map' if index.mapped_away else ''}"
        f"{_extras(index)}",
        f"{number_of(sequences, f'{packed}sequence')} of {length:,}, {filled:.1%} full; "
        f"{number_of(steps, 'step')} of {batch:,} {'is' if steps == 1 else 'are'} {epochs:.3g} epochs",
    ]
    lines += [
        f"data: the chat template writes nothing of the {name} of {number_of(count, 'chat')}, so the model does not see them; "
        "set tokenizer.chat_template to one that does"
        for name, count in index.unwritten.items()
    ]
    unread = (("columns", index.unread_columns), ("keys of messages", index.unread_keys))
    if shown := [f"the {what} {_some(names)}" for what, names in unread if names]:
        lines.append(f"data: not read: {'; '.join(shown)}")
    if index.bad:
        lines += ["left out (data.bad_rows=skip):", *(f"  {row}" for row in index.bad_rows)]
    return "\n".join(lines)


def _extras(index: "StoreIndex") -> str:
    """What else the chats of a store have, as the end of a line."""
    alike = number_of(index.alike, "pair")
    parts = [f"{alike} left out, since both answers are the same"] if index.alike else []
    parts += [f"{number_of(count, 'chat')} with {name}" for name, count in index.given.items()]
    parts += [f"{number_of(index.unlearned, 'answer')} not learned (weight 0)"] if index.unlearned else []
    return f"; {', '.join(parts)}" if parts else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def describe_sharing(setup: RunSetup, store: "TokenStore") -> str:
    """Say how even the work of attention is over the ranks that share sequences; empty without context parallel.

    The work of a position is the number of keys up to it in its document. Windows are not taken into account.
    """
    cp, balance = setup.layout.size("cp"), setup.plan.options.context_balance
    if cp == 1:
        return ""
    rows = torch.cat([batch["position_ids"] for batch in plain_loader(setup.config, store).microbatches(0)])
    work = nn.functional.pad((rows + 1).sum(0), (0, -rows.shape[1] % setup.plan.sequence_multiple))
    most = unevenness(work.tolist(), cp, balance)
    return f"context parallel: in the first step, the rank with the most attention has {most:.2f} of the mean"
