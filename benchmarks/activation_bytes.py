"""Bytes of activations under each mode of activation checkpointing: held for backward, and at the worst moment of a step.

python benchmarks/activation_bytes.py --check

What is counted is memory of tensors that operators made and that is still referenced (parameters, buffers and gradients of
parameters are not): the same on every machine, whatever its allocator does. Each mode has a process of its own.
"""

import argparse
import gc
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from report import Bound, Table, publish
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "use_cache": False,
}
LAYERS = (4, 8)
"""What a layer costs is the difference of two models, free of embedding, head and loss."""
BATCH, LENGTH = 2, 512
MODES = ("none", "selective", "submodule", "full")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


class Watch(TorchDispatchMode):
    """Inside, memory that operators make is known while it lives."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.name().partition(".")[0]] += 1
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.model:
                storage = item.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.held())
        return result

    def held(self) -> int:
        """Bytes that are referenced now."""
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(size for _, size in self.alive.values())

    @property
    def products(self) -> int:
        return sum(self.calls[name] for name in PRODUCTS)


def measure(mode: str, layers: int) -> tuple[int, int, int]:
    """Bytes held between forward and backward, bytes at the peak without parameter gradients, and matrix products in all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright.distributed.memory.activation_checkpointing import recompute
    from meshwright.plan.given.closed_choices import ActivationCheckpointing
    from meshwright.plan.given.inspection import inspect_model
    from meshwright.plan.given.spec import ParallelSpec
    from meshwright.plan.memory.recompute import recompute_layer

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, num_hidden_layers=layers)).train()
    for layer in model.model.layers:
        for action in recompute_layer(inspect_model(ParallelSpec("layer", ()), layer), "", ActivationCheckpointing(mode)):
            recompute(layer, action, None)
    for parameter in model.parameters():  # gradients of parameters are the plan's business, not that of activations
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    tokens = torch.randint(MODEL["vocab_size"], (BATCH, LENGTH + 1))
    gc.disable()  # references alone free what is not needed any more
    with Watch(model) as watch:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
    held = watch.held()
    with watch:
        loss.backward()
    return held, watch.peak, watch.products


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "LAYERS"), help="measure one, print three numbers")
    arguments = parser.parse_args()
    if arguments.one:
        print(*measure(arguments.one[0], int(arguments.one[1])))
        return 0

    found = {}
    for mode in MODES:
        for layers in LAYERS:
            command = [sys.executable, __file__, "--one", mode, str(layers)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[mode, layers] = tuple(map(int, output.split()[-3:]))
    few, many = LAYERS
    unit = BATCH * LENGTH * MODEL["hidden_size"] * 4
    slope = {mode: (found[mode, many][0] - found[mode, few][0]) / (many - few) for mode in MODES}
    table = Table(
        f"Activations of a Llama of {many} layers (hidden {MODEL['hidden_size']}, {BATCH} x {LENGTH} tokens, fp32)",
        ("activation_checkpointing", "held, MiB", "of none", "a layer, hidden states", "peak, MiB", "of none", "products"),
        notes=(
            "held: between forward and backward; peak: worst moment of both; without parameters and their gradients.",
            f"a layer, hidden states: what one layer more holds, in tensors of the size of its input ({unit / 2**20:.0f} MiB).",
            "products: matrix products of forward and backward, recomputed ones included.",
        ),
    )
    plain = found["none", many]
    for mode in MODES:
        held, peak, products = found[mode, many]
        table.rows.append(
            (mode, f"{held / 2**20:.1f}", f"{held / plain[0]:.3f}", f"{slope[mode] / unit:.2f}",
             f"{peak / 2**20:.1f}", f"{peak / plain[1]:.3f}", f"{products} ({products / plain[2] - 1:+.1%})")
        )  # fmt: skip
    bounds = [
        Bound("full: a layer keeps its input alone, in hidden states", slope["full"] / unit, 1.0),
        *(
            Bound(f"a layer under {after} against {before}", slope[after] / slope[before], 1.0, below=True)
            for before, after in itertools.pairwise(MODES)
        ),
    ]
    return publish([table], bounds, arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
