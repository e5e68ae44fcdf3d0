"""What context parallel saves, sends and costs: one long sequence on four gloo ranks, with each method.

python benchmarks/context.py --check

Four ranks shard the parameters in every row; ``cp`` of them share a sequence. So what differs between rows is activations.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from report import Bound, Table, publish

from meshwright.trace.live import LiveBytes

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
RANKS = 4
ROWS = [(1, "gather"), *((cp, method) for cp in (2, 4) for method in ("gather", "gather again", "ulysses", "ring"))]
"""``gather again``: with `context_recompute`, which gathers keys and values once more in backward."""


def measure(device: torch.device, cp: int, method: str, length: int, checkpointing: str) -> dict[str, Any]:
    """Train two microbatches of one sequence, and measure the second. The job of each rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import meshwright as mw
    from meshwright.distributed.comm_counter import CommCounter
    from meshwright.distributed.context.attend import _Context
    from meshwright.distributed.context.ring import _Plan
    from meshwright.distributed.context.sequences import sequences_of
    from meshwright.plan.axes.context.sharing import gathered_bytes
    from meshwright.plan.cost.activation_traffic import activation_traffic

    torch.manual_seed(0)
    config = dict(MODEL)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32)
    model.config.use_cache = False
    layout = mw.Layout(dp_shard=RANKS // cp, cp=cp)
    options = mw.ParallelOptions(
        param_dtype=None,
        context_parallel=method.removesuffix(" again"),
        context_recompute=True if method.endswith(" again") else None,
        activation_checkpointing=checkpointing,
        tokens=length // cp,
    )
    plan = mw.resolve(mw.spec_of(model, None), model, layout, options)
    mesh = mw.build_mesh(layout, "cpu")
    mw.parallelize(model, plan, mesh)
    ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(mesh.rank("dp")))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(length)[None]}
    found: dict[str, Any] = {}

    def step() -> None:
        with mw.context_parallel(plan, mesh, batch) as shard:
            output = model(input_ids=shard["input_ids"], position_ids=shard["position_ids"], use_cache=False)
        torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), shard["labels"].flatten(), reduction="sum").backward()

    step()
    begun = time.process_time()
    step()
    found["cpu"] = time.process_time() - begun
    before = sum(parameter.numel() * 4 for parameter in model.parameters()) // RANKS
    with LiveBytes(model, settle=True) as live, CommCounter() as counter:
        step()
    found |= {"peak": live.peak, "gathered": live.gathered, "shards": before}
    group = tuple(layout.group("cp", torch.distributed.get_rank()))
    everyone = len(group) == RANKS  # then the collectives of FSDP are over the same ranks
    found["counts"] = {} if everyone else dict(counter.counts_of.get(group, {}))
    found["bytes"] = {} if everyone else dict(counter.bytes_of.get(group, {}))
    found["planned"] = {item.kind: (item.calls, item.size) for item in activation_traffic(plan) if item.axis == "cp"}
    found["gathered_keys"] = gathered_bytes(plan, length // cp)
    found["skipped"] = None
    if method == "ring" and cp > 1:
        with mw.context_parallel(plan, mesh, batch) as shard:
            sequences = sequences_of(shard["position_ids"])
        context: _Context = next(vars(m)["_meshwright_context"] for m in model.modules() if "_meshwright_context" in vars(m))
        pieces = context.share.pieces(length)

        def visible(queries: range, keys: range) -> range:
            seen = sequences.keys(queries, True, None)
            return range(max(seen.start, keys.start), min(seen.stop, keys.stop))

        ring = _Plan(pieces[context.rank], pieces, visible, lambda *_: None, 1.0, None, context.group)
        pairs = sum(len({(at.start, place.start) for at, place, *_ in ring.blocks(source, 1)}) for source in range(cp))
        found["skipped"] = 1 - pairs / (cp * len(pieces[0]) ** 2)
    return found


def main() -> None:
    """Measure all rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--checkpointing", default="none", help="activation checkpointing of the layers")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    arguments = parser.parse_args()
    from meshwright.ranks.pool import Pool

    rows, bounds, alone = [], [], 0.0
    activations: dict[tuple[int, str], int] = {}
    for cp, method in ROWS:
        with Pool(RANKS, patience=600) as pool:
            ranks = pool.run(measure, cp, method, arguments.length, arguments.checkpointing)
        peak = max(rank["peak"] for rank in ranks)
        activations[cp, method] = max(rank["peak"] - rank["gathered"] - 2 * rank["shards"] for rank in ranks)
        per_token = sum(rank["cpu"] for rank in ranks) / (arguments.length * RANKS // cp) * 1e6
        alone = alone or per_token
        planned = ranks[0]["planned"]
        if ranks[0]["counts"]:
            agree = all((rank["counts"][kind], rank["bytes"][kind]) == due for rank in ranks for kind, due in planned.items())
            bounds.append(Bound(f"cp {cp} {method}: collectives and bytes as planned", 0.0 if agree else 1.0, 0.0))
        skipped = [rank["skipped"] for rank in ranks if rank["skipped"] is not None]
        rows.append((
            f"{cp} {method if cp > 1 else ''}", f"{peak / 2**20:.1f}", f"{activations[cp, method] / 2**20:.1f}",
            f"{activations[cp, method] / activations[1, 'gather']:.3f}", f"{ranks[0]['gathered_keys'] / 2**20:.1f}",
            ", ".join(f"{calls} {kind} of {size / 2**20:.1f} MiB" for kind, (calls, size) in planned.items()),
            f"{per_token:.1f}", f"{per_token / alone:.2f}", ", ".join(f"{share:.0%}" for share in sorted(set(skipped))),
        ))  # fmt: skip
        if cp > 1:
            share = activations[cp, method] / activations[1, "gather"]
            bounds.append(Bound(f"cp {cp} {method}: activations against cp 1", share, 1 / cp + 0.15))
    headers = (
        "cp", "peak, MiB", "of it activations", "against cp 1", "gathered keys", "over cp, planned", "CPU us/token", "ratio",
        "blocks skipped",
    )  # fmt: skip
    title = (
        f"One sequence of {arguments.length} tokens, Llama of 4 layers of 256, {arguments.checkpointing}, {RANKS} gloo ranks"
    )
    raise SystemExit(publish([Table(title, headers, rows)], bounds, arguments.markdown, check=arguments.check))


if __name__ == "__main__":
    main()
