"""Continues prompts with the model of a run as it is, on any layout.

Each new token is a forward of the whole text, in evaluation mode: slower than with a cache of keys and values, and right
wherever the model runs. Every text stands in a row of its own, filled up at its end, which the positions before do not see.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.prompts import encoded, ends
from meshwright.data.tokenizer import load_tokenizer
from meshwright.distributed.slices import whole_tensor
from meshwright.train.start.run_files import Paths

__all__ = ["continued"]


@torch.no_grad()
def continued(trainer: Any, prompts: list[str], tokens: int, *, raw: bool) -> list[str]:
    """Return the text after each prompt; all ranks call it, and get the same.

    Args:
        trainer: the trainer of this rank.
        prompts: the texts.
        tokens: largest number of new tokens.
        raw: take prompts as they are, even if there is a chat template.
    """
    config = trainer.config
    tokenizer = load_tokenizer(Paths(config.directory).tokenizer, config.model.trust_remote_code)
    known = trainer.setup.model.generation_config.eos_token_id
    texts: list[list[int]] = []
    stops: list[set[int]] = []
    before: list[str] = []
    for prompt in prompts:
        asked, inputs = encoded(tokenizer, prompt, raw=raw)
        before.append("\n" if asked else "")
        found = ends(tokenizer, known) if asked else known
        stops.append(set([found] if isinstance(found, int) else found or ()))
        texts.append(inputs["input_ids"][0].tolist())
    begun = [len(text) for text in texts]
    rows = config.training.microbatch_size
    for first in range(0, len(texts), rows):
        some = range(first, min(first + rows, len(texts)))
        live = set(some)
        for _ in range(tokens):
            following = _next_tokens(trainer, [texts[row] for row in some], rows, longest=max(begun) + tokens)
            for row, token in zip(some, following, strict=False):
                if row in live:
                    texts[row].append(token)
                    live -= {row} if token in stops[row] else set()
            if not live:
                break
    after = [tokenizer.decode(text[start:], skip_special_tokens=True) for text, start in zip(texts, begun, strict=True)]
    return [one + other for one, other in zip(before, after, strict=True)]


def _next_tokens(trainer: Any, texts: list[list[int]], rows: int, longest: int) -> list[int]:
    """Return the most likely next token of each text, the same on all ranks that share a sequence or its layers.

    All forwards have one shape: [rows, longest], filled up.
    """
    multiple = trainer.setup.plan.sequence_multiple
    length = -(-longest // multiple) * multiple
    ids = torch.zeros(rows, length, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    places = torch.arange(length).expand(rows, length)
    batch = trainer.batches.cut({"input_ids": ids, "position_ids": places, "places": places})
    own: list[int] = batch.pop("places")[0].tolist()
    logits = trainer.runner.logits(trainer.batches.to_device(batch))
    found = torch.zeros(len(texts), dtype=torch.int64, device=logits.device)
    for row, text in enumerate(texts):
        if len(text) - 1 in own:  # of the ranks that share the sequence, one has the place
            at = own.index(len(text) - 1)
            scores = logits[row : row + 1, at : at + 1]
            found[row] = (whole_tensor(scores) if isinstance(scores, DTensor) else scores).argmax(-1).reshape(())
    for axis in ("cp", "pp"):  # a stage that is not the last has zeros
        found = trainer.mesh.sum(found, axis)
    return found.tolist()
