"""What each schedule of a pipeline waits, holds and sends on four gloo ranks, beside the plan's replay and torch's own stages.

python benchmarks/pipeline.py --check

Two cores cannot run four ranks at once, so wall time there is the machine's. Each turn is therefore measured in CPU time of its
thread, and the schedule is replayed with these times: that is the idle share with a core for each rank. ``waits`` is the wall
time of a step in which a rank computes nothing.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from report import Bound, Table, publish

from meshwright.trace.live import LiveBytes

MODEL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
ROWS, LENGTH, WORLD = 2, 256, 4
FULL = ("gpipe", "1f1b", "interleaved_1f1b")
"""Schedules that do not split backward: those that torch's own stages can run over units that reshard."""


def of_config() -> Any:
    """The model, with the same values on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = dict(MODEL)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32)


def plan_of(model: Any, pp: int, schedule: str, microbatches: int) -> Any:
    """The plan on four ranks."""
    import meshwright as mw

    options = mw.ParallelOptions(
        param_dtype=None, microbatches=microbatches, tokens=ROWS * LENGTH, pipeline_schedule=schedule, sync="defer"
    )
    return mw.resolve(mw.spec_of(model, None), model, mw.Layout(pp=pp, dp_shard=WORLD // pp), options)


def batches_of(reader: int, microbatches: int) -> list[dict[str, torch.Tensor]]:
    """The microbatches of a data rank."""
    draws = torch.Generator().manual_seed(reader)
    ids = torch.randint(0, MODEL["vocab_size"], (microbatches, ROWS, LENGTH + 1), generator=draws)
    return [{"input_ids": item[:, :-1], "labels": item[:, 1:]} for item in ids]


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of a microbatch."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def measure(device: torch.device, pp: int, schedule: str, microbatches: int) -> dict[str, Any]:
    """Run steps under a schedule, and measure the third and the fourth. The job of each rank."""
    import meshwright as mw
    from meshwright.distributed.comm_counter import CommCounter
    from meshwright.plan.axes.pipeline.schedule_turns import Phase, ScheduledOp

    model = of_config()
    plan = plan_of(model, pp, schedule, microbatches)
    mesh = mw.build_mesh(plan.layout, "cpu")
    pipeline = mw.Pipeline(model, plan, mesh)
    del model
    batches = batches_of(mesh.rank("dp"), microbatches)
    turns: dict[ScheduledOp, float] = {}
    held: list[int] = []
    meter: list[LiveBytes] = []

    def step() -> None:
        pipeline.step(batches, loss_of, divisor=microbatches * ROWS * LENGTH)
        for parameter in pipeline.model.parameters():
            parameter.grad = None

    def timed(stage: Any, name: str, phase_of: Any) -> None:
        inner = getattr(stage, name)

        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            result = inner(microbatch, *args, **kwargs)
            turns[ScheduledOp(phase_of(kwargs), stage.stage_index, microbatch)] = time.thread_time() - begun
            held.extend(found.held for found in meter)
            return result

        setattr(stage, name, run)

    step()
    for stage in pipeline._stages.stages:
        timed(stage, "forward_one_chunk", lambda kwargs: Phase.FORWARD)
        timed(stage, "backward_one_chunk", lambda kwargs: Phase.BACKWARD if kwargs.get("full_backward", True) else Phase.INPUT)
        timed(stage, "backward_weight_one_chunk", lambda kwargs: Phase.WEIGHT)
    step()
    torch.distributed.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    found: dict[str, Any] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "turns": dict(turns)}
    buffers = [
        info.buffer
        for stage in pipeline._stages.stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
        if getattr(info, "buffer", None) is not None
    ]
    found["buffers"] = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    with LiveBytes(pipeline.model, buffers) as live, CommCounter() as counter:
        before = live.held
        meter.append(live)
        step()
    found |= {"peak": live.peak - before, "counts": dict(counter.counts)}
    return found


def floor(device: torch.device, pp: int, schedule: str, microbatches: int) -> dict[str, Any]:
    """torch's own stages and FSDP2 over the same cut, driven by hand: full backward, shapes found by a first forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    from meshwright.distributed.comm_counter import CommCounter
    from meshwright.distributed.pipeline.cut import crossing_of, cut_model
    from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
    from meshwright.plan.axes.pipeline.stage_rows import on_stages

    model = of_config()
    plan = plan_of(model, pp, schedule, microbatches)
    mesh = init_device_mesh("cpu", (pp, WORLD // pp), mesh_dim_names=("pp", "dp"))
    count = len(plan.stages)

    class Stage(torch.nn.Module):
        """Calls a stage as torch's schedules do."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.part, self.index = of_config(), index
            cut = next(action for action in on_stages(plan, [index]).program if type(action).__name__ == "Cut")
            cut_model(self.part, cut)
            for row in plan.stages[index].layers:
                fully_shard(self.part.get_submodule(row), mesh=mesh["dp"])
            fully_shard(self, mesh=mesh["dp"])

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            tokens = given if self.index == 0 else torch.zeros(given.shape[:2], dtype=torch.long)
            crossing_of(self.part).received = None if self.index == 0 else given
            output = self.part(input_ids=tokens, use_cache=False)
            return getattr(output, "logits", output)

    stages = [
        PipelineStage(Stage(index), index, count, device, group=mesh["pp"].get_group())
        for index in stages_of_rank(plan, mesh["pp"].get_local_rank())
    ]
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}[schedule]
    run = kind(
        stages if schedule == "interleaved_1f1b" else stages[0],
        microbatches,
        loss_fn=lambda logits, labels: loss_of(logits, {"labels": labels}) / (microbatches * ROWS * LENGTH),
        scale_grads=False,
    )
    batches = batches_of(mesh["dp"].get_local_rank(), microbatches)
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> None:
        arguments = {"target": labels, "losses": [], "return_outputs": False} if last else {"return_outputs": False}
        run.step(*([ids] if first else []), **arguments)
        for stage in stages:
            for parameter in stage.submod.parameters():
                parameter.grad = None

    step()
    step()
    cpu = time.process_time()
    step()
    found = {"cpu": time.process_time() - cpu}
    with CommCounter() as counter:
        step()
    return found | {"counts": dict(counter.counts)}


def of_schedule(pp: int, schedule: str, microbatches: int, rounds: int) -> tuple[list[str], list[Bound]]:
    """Measure a schedule, and return its row and bounds."""
    from meshwright.plan.axes.pipeline.replay import receive_buffers, replay, replay_of_plan
    from meshwright.plan.axes.pipeline.schedule_turns import order_of
    from meshwright.plan.axes.pipeline.stage_plan import crossing_bytes, pipeline_messages
    from meshwright.plan.cost.price import totals_of_rank
    from meshwright.ranks.pool import Pool

    with torch.device("meta"):
        plan = plan_of(of_config(), pp, schedule, microbatches)
    measured, floors = [], []
    for _ in range(rounds):
        with Pool(WORLD, patience=600) as pool:
            measured.append(pool.run(measure, pp, schedule, microbatches))
        if schedule in FULL:
            with Pool(WORLD, patience=600) as pool:
                floors.append(pool.run(floor, pp, schedule, microbatches))
    ranks = measured[0]
    place = [plan.layout.coordinates(rank)["pp"] for rank in range(WORLD)]
    each = len(plan.stages) // pp
    times: dict[Any, list[float]] = defaultdict(list)
    for of_round in measured:
        for rank in of_round:
            for turn, seconds in rank["turns"].items():
                times[turn.phase, turn.stage].append(seconds)
    means = {key: sum(values) / len(values) for key, values in times.items()}
    timed = replay(order_of(plan.options.pipeline_schedule, pp, each, microbatches), lambda turn: means[turn.phase, turn.stage])
    waits = sum(1 - rank["cpu"] / rank["wall"] for rank in ranks) / WORLD
    messages = [pipeline_messages(plan, index)[0] for index in place]
    traffic = [totals_of_rank(plan, index).traffic for index in place]
    due = [
        {"send": messages[rank], "all_gather": traffic[rank].all_gathers, "reduce_scatter": traffic[rank].reduce_scatters}
        for rank in range(WORLD)
    ]
    name = f"pp {pp}, {schedule}"
    agree = all(ranks[rank]["counts"].get(kind, 0) == count for rank in range(WORLD) for kind, count in due[rank].items())
    peaks = [max(rank["peak"] for rank, own in zip(ranks, place, strict=True) if own == index) for index in range(pp)]
    room = [receive_buffers(plan, index) * crossing_bytes(plan) for index in place]
    bounds = [
        Bound(f"{name}: messages, all-gathers and reduce-scatters as planned", 0.0 if agree else 1.0, 0.0),
        Bound(f"{name}: receive buffers as planned", 0.0 if [rank["buffers"] for rank in ranks] == room else 1.0, 0.0),
    ]
    cpu = sum(rank["cpu"] for of_round in measured for rank in of_round) / rounds
    by_hand = sum(rank["cpu"] for of_round in floors for rank in of_round) / rounds if floors else None
    counts = floors[0][0]["counts"] if floors else {}
    run = replay_of_plan(plan)
    row = [
        schedule,
        f"{replay_of_plan(plan, even=True).bubble:.1%}",
        f"{run.bubble:.1%}",
        f"{timed.bubble:.1%}",
        f"{waits:.0%}",
        " ".join(f"{number:g}" for number in run.alive),
        " ".join(f"{peak / 2**20:.1f}" for peak in peaks),
        f"{room[0] / 2**20:.1f}",
        " / ".join(str(due[0][kind]) for kind in ("all_gather", "reduce_scatter", "send")),
        " / ".join(str(counts.get(kind, 0)) for kind in ("all_gather", "reduce_scatter", "send")) if floors else "",
        "" if by_hand is None else f"{cpu / by_hand:.2f}",
    ]
    return row, bounds


def main() -> None:
    """Measure all schedules, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--rounds", type=int, default=1, help="how often each job runs")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    arguments = parser.parse_args()
    from meshwright.plan.given.closed_choices import PipelineSchedule

    columns = (
        "schedule", "idle, equal stages", "idle, planned", "idle, CPU times", "waits", "alive by rank",
        "step's peak, MiB by rank", "buffers, MiB", "gathers / reductions / messages", "torch by hand", "CPU against it",
    )  # fmt: skip
    tables, bounds = [], []
    for pp in (4, 2):
        rows = []
        for schedule in PipelineSchedule:
            row, held = of_schedule(pp, str(schedule), arguments.microbatches, arguments.rounds)
            rows.append(row)
            bounds += held
        layout = f"pp {pp}" + (f" x shard {WORLD // pp}" if pp < WORLD else "")
        title = f"{layout}, {arguments.microbatches} microbatches of {ROWS} x {LENGTH} tokens, Llama of 8 layers of 192"
        tables.append(Table(title, columns, rows))
    raise SystemExit(publish(tables, bounds, arguments.markdown, check=arguments.check))


if __name__ == "__main__":
    main()
