"""What sharding a stack that runs twice holds and sends: DiffusionGemma, one optimizer step of rank 0.

    python benchmarks/diffusion_gemma_memory.py real --check       (gloo ranks, a model of some 300 MiB in fp32)
    python benchmarks/diffusion_gemma_memory.py fake --check       (26B, no memory; worlds that are not there)
    python benchmarks/diffusion_gemma_memory.py gpu                (26B, rank 0 on a GPU; the other ranks are not there)

``real`` measures each case under fake tensors too: collectives, bytes, what was whole must agree, and peaks nearly (a
thread of gloo may hold a buffer longer than the step does). Collectives and their bytes must be the plan's.
See README.md.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusion_case import Case, Found, forked, measure_fake, measure_gpu, measure_real, planned
from report import Bound, Table, publish
from rounds import say

from meshwright.plan.cost.price import Totals, totals
from meshwright.plan.given.closed_choices import SyncPolicy

EXAMPLE = Path(__file__).parents[1] / "examples" / "diffusion_gemma_26b_8gpu.yaml"

SMALL: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "diffusion_gemma",
            "canvas_length": 32,
            "text_config": {
                **{"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
                "hidden_size": 384,
                "intermediate_size": 256,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "global_head_dim": 64,
                "num_experts": 64,
                "top_k_experts": 4,
                "moe_intermediate_size": 256,
                "max_position_embeddings": 256,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 16,
            },
        }
    },
    "parallel": {"param_dtype": "float32", "reduce_dtype": "float32"},
    "data": {"corpus": "python-stdlib", "sequence_length": 128, "packing": "pad"},
    "diffusion": {"mode": "one_block"},
    "training": {"steps": 1},
}
"""Experts are 96 % of it."""

COLUMNS = (
    "ranks", "units", "stacks", "microbatches", "sync", "AG", "RS", "sent MiB",
    "gathered", "plan", "gradients", "plan", "peak", "over state",
)  # fmt: skip

NOTES = (
    "units: one for a layer, or the experts of a layer one of their own inside it. stacks: encoder and decoder as twin units, "
    "or as shared ones.",
    "AG, RS: all-gathers and reduce-scatters of rank 0 in the step; sent: the larger buffer of each, added up.",
    "gathered, gradients: the most bytes of whole parameters (on their way included), and of gradients that backward made and "
    "that are not reduced yet, at once, in MiB, each beside what the plan says; they need not be at their most together.",
    "peak: the most bytes of all storages alive at once, in MiB. over state: without sharded parameters and AdamW's state.",
)


def cases(arguments: argparse.Namespace, config: dict[str, Any]) -> Iterator[Case]:
    """Those that differ: with one microbatch a unit reduces once whatever its policy, so that two of three are one case."""
    chosen = (arguments.ranks, arguments.microbatches, arguments.units, arguments.stacks, arguments.sync)
    for ranks, microbatches, units, stacks, sync in product(*chosen):
        if microbatches == 1 and sync == SyncPolicy.RESHARD_EACH and SyncPolicy.REDUCE_EACH in arguments.sync:
            continue
        yield Case(config, ranks, units == "experts", stacks == "twin", sync, microbatches)


def row_of(case: Case, found: Found, promised: Totals) -> list[str]:
    """What is shown of a case."""
    return [
        str(case.world),
        "experts" if case.experts else "layer",
        "twin" if case.twin else "shared",
        str(case.microbatches),
        case.sync or "",
        str(found.counts["all_gather"]),
        str(found.counts["reduce_scatter"]),
        _mib(sum(found.sent.values())),
        _mib(found.gathered),
        _mib(promised.gathered_peak_bytes),
        _mib(found.gradients),
        _mib(promised.unsharded_gradient_peak_bytes),
        _mib(found.peak),
        _mib(found.peak - found.state),
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def bounds_of(name: str, found: Found, promised: Totals) -> Iterator[Bound]:
    """Collectives and bytes are the plan's."""
    traffic = promised.traffic
    pairs = (
        (found.counts.get("all_gather", 0), traffic.all_gathers),
        (found.counts.get("reduce_scatter", 0), traffic.reduce_scatters),
        (found.sent.get("all_gather", 0), traffic.all_gather_bytes),
        (found.sent.get("reduce_scatter", 0), traffic.reduce_scatter_bytes),
    )
    yield Bound(f"{name}: collectives and bytes unlike the plan's", sum(one != other for one, other in pairs), 0)


def run_real(arguments: argparse.Namespace) -> tuple[list[Table], list[Bound]]:
    """Gloo ranks, and the same under fake tensors."""
    table = Table(
        "Gloo ranks: DiffusionGemma of 4 layers, 64 experts, fp32, 128 tokens a microbatch", (*COLUMNS, "fake - real, bytes"),
        notes=(*NOTES, "fake - real: of the peak, the same case under fake tensors, and the largest rank."),
    )  # fmt: skip
    bounds = []
    for case in cases(arguments, {**SMALL, "output": "."}):
        promised = totals(planned(case).plan)
        runs = forked(measure_real, case.world, case, gloo=True)
        (fake,) = forked(measure_fake, 1, case, gloo=False)
        real = max(runs, key=lambda found: found.peak)
        row = row_of(case, real, promised)
        table.rows.append([*row, f"{fake.peak - real.peak:+,d}"])
        name = " ".join(row[:5])
        say(f"{' '.join(row)}: {real.seconds:.0f} s, fake {fake.peak - real.peak:+,d} bytes")
        bounds += bounds_of(name, real, promised)
        alike = (replace(real, seconds=0, peak=0), replace(fake, seconds=0, peak=0))
        bounds.append(Bound(f"{name}: fake unlike real", alike[0] != alike[1], 0))
        bounds.append(Bound(f"{name}: peak of fake over real, off by", abs(fake.peak / real.peak - 1), arguments.tolerance))
    return [table], bounds


def run_fake(arguments: argparse.Namespace) -> tuple[list[Table], list[Bound]]:
    """Rank 0 of worlds that are not there, without memory."""
    table = Table(f"Fake tensors: {_named(arguments)}", (*COLUMNS, "seconds"), notes=(*NOTES, "seconds: to trace the step."))
    bounds = []
    for case in cases(arguments, _large(arguments)):
        promised = totals(planned(case).plan)
        (found,) = forked(measure_fake, 1, case, gloo=False)
        table.rows.append([*row_of(case, found, promised), f"{found.seconds:.0f}"])
        say(" ".join(table.rows[-1]))
        bounds += bounds_of(" ".join(table.rows[-1][:5]), found, promised)
    return [table], bounds


def run_gpu(arguments: argparse.Namespace) -> tuple[list[Table], list[Bound]]:
    """Rank 0 of worlds that are not there, with memory of a GPU.

    Raises:
        SystemExit: no GPU.
    """
    if not forked(torch.cuda.is_available, 1, gloo=False)[0]:  # asked in another process: a GPU does not survive forking
        raise SystemExit("gpu: no CUDA device here; `real` and `fake` need none")
    notes = (*NOTES, "allocator: torch.cuda.max_memory_allocated, in MiB; without NCCL, whose ranks are not there.")
    table = Table(f"GPU: {_named(arguments)}", (*COLUMNS, "allocator"), notes=notes)
    bounds = []
    for case in cases(arguments, _large(arguments)):
        promised = totals(planned(case).plan)
        (measured,) = forked(_on_gpu, 1, case, gloo=False)
        name = [str(case.world), *(("experts",) if case.experts else ("layer",)), "twin" if case.twin else "shared"]
        if measured is None:
            table.rows.append([*name, str(case.microbatches), case.sync or "", *[""] * (len(COLUMNS) - 5), "out of memory"])
        else:
            found, allocated = measured
            table.rows.append([*row_of(case, found, promised), _mib(allocated)])
            bounds += bounds_of(" ".join(table.rows[-1][:5]), found, promised)
        say(" ".join(table.rows[-1]))
    return [table], bounds


def _on_gpu(case: Case) -> tuple[Found, int] | None:
    try:
        return measure_gpu(case)
    except torch.OutOfMemoryError:
        return None


def _large(arguments: argparse.Namespace) -> dict[str, Any]:
    config = yaml.safe_load(arguments.config.read_text())
    config["layout"] = {}
    config["data"]["sequence_length"] = arguments.length
    if arguments.layers is not None:
        config["model"]["config"]["text_config"]["num_hidden_layers"] = arguments.layers
    return config


def _named(arguments: argparse.Namespace) -> str:
    text = _large(arguments)["model"]["config"]["text_config"]
    shape = f"{text['num_hidden_layers']} layers, hidden {text['hidden_size']}, {text['num_experts']} experts"
    return f"{arguments.config.stem} ({shape}), {arguments.length} tokens a microbatch"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    policies = [str(policy) for policy in SyncPolicy]
    for mode, run, ranks, microbatches, sync in (
        ("real", run_real, [2, 4], [1, 4], policies),
        ("fake", run_fake, [8, 64, 256], [1], ["reduce_each"]),
        ("gpu", run_gpu, [8, 64], [1], ["reduce_each"]),
    ):
        one = modes.add_parser(mode, help=(run.__doc__ or "").splitlines()[0])
        one.set_defaults(run=run)
        one.add_argument("--ranks", type=int, nargs="+", default=ranks)
        one.add_argument("--microbatches", type=int, nargs="+", default=microbatches, help="in the optimizer step")
        one.add_argument("--units", nargs="+", choices=("layer", "experts"), default=["layer", "experts"])
        one.add_argument("--stacks", nargs="+", choices=("shared", "twin"), default=["shared", "twin"])
        one.add_argument("--sync", nargs="+", choices=policies, default=sync)
        one.add_argument("--markdown", type=Path, help="file to write the table to")
        one.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
        if mode == "real":
            one.add_argument("--tolerance", type=float, default=0.0, help="of the peak of fake over real")
        else:
            one.add_argument("--config", type=Path, default=EXAMPLE, help="of a run; its layout is dp_shard alone")
            one.add_argument("--length", type=int, default=1024, help="tokens of a microbatch")
            one.add_argument("--layers", type=int, help="fewer layers than the configuration has")
    arguments = parser.parse_args()
    tables, bounds = arguments.run(arguments)
    return publish(tables, bounds, arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
