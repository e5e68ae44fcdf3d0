"""The trainer: loop(microbatches, sync, clip, step), with evaluation and checkpoints. Every rank has one trainer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.markup import escape

from meshwright.checkpoint import state, storage
from meshwright.checkpoint.directory import read_meta
from meshwright.checkpoint.manager import CheckpointManager, check_same_model
from meshwright.data.store import TokenStore
from meshwright.device import memory_in_use
from meshwright.distributed.data.fsdp_units import move_buffers
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.errors import CheckpointError, StoppedError
from meshwright.models.weights.initial_values import initialize_buffers
from meshwright.plan.given.inspection import model_sizes
from meshwright.train import evaluation
from meshwright.train.batches import RankBatches
from meshwright.train.boundaries import check_boundaries
from meshwright.train.callbacks.hooks import due, in_step
from meshwright.train.engine import COUNT, SUM
from meshwright.train.forecast import Expectation
from meshwright.train.guard import Guard
from meshwright.train.metrics import Recorder
from meshwright.train.optimizer import learning_rate, set_learning_rate
from meshwright.train.outcomes import Outcomes
from meshwright.train.parts import PARTS, Parts, RankSetup, balance_of_plan, eval_loader, seed_of_dropout
from meshwright.train.start.ending import Agreement
from meshwright.train.start.run_files import source_facts
from meshwright.train.start.setup import RunSetup, plain_config

__all__ = ["Trainer"]

PATIENCE = 5.0
"""Seconds that a run that fails waits for the metrics of the step before. The failure may be that the device does nothing."""


class Trainer:
    """Trains the model of a run. All ranks call every method.

    Args:
        setup: the resolved run; its model is parallelized and gets its values here.
        store: the run's tokens.
        device: device of this rank.
        resume: checkpoint to resume from; ``None``: none.
        parts: the functions that make the parts of the trainer.

    Attributes:
        model: the parallelized model.
        mesh: the mesh of the layout.
        batches: makes the microbatches of this rank.
        engine: runs the microbatches.
        guard: makes steps that are not finite change nothing.
        step: number of optimizer steps done.
        outcomes: what the host knows of the steps.
        unevaluated: whether the evaluation due after ``step`` was left out because a signal ended the run.
        progress: called before each microbatch, evaluation and save with words such as ``step 12``.
        agreement: decides what all ranks do after a step; ``None``: :meth:`run` makes one, which no signal asks to end.
        steps: number of optimizer steps in all.
    """

    def __init__(
        self, setup: RunSetup, store: TokenStore, device: torch.device, resume: Path | None = None, parts: Parts = PARTS
    ) -> None:
        self.setup, self.config, self.device = setup, setup.config, device
        self.mesh = parts.mesh(setup, device)
        run = RankSetup(setup, device, self.mesh)
        self.rank, self._source = dist.get_rank(), source_facts(setup.paths)  # read before there is anything to lose
        self.step = 0
        self.unevaluated = False
        self.progress: Callable[[str], None] = lambda what: None
        self.agreement: Agreement | None = None
        training, data = self.config.training, self.config.data

        self.objective = setup.objective
        self.expectation = Expectation(setup, device, parts.forecast, speaks=self.rank == 0)  # before the model is parallelized
        self.model = parts.distribute(run)
        self.objective.attach(self.model)
        shards_on = torch.device("cpu") if setup.plan.options.cpu_offload else device
        if resume is None or self.config.saves_trained_only:
            parts.fill(run, self.model, shards_on)
        else:
            for model in models_of(self.model):
                initialize_buffers(model, shards_on)
        move_buffers(self.model, device)
        self.model.train()
        self.optimizer = parts.optimizer(run, self.model)
        if self.config.optimizer.use is None or resume is not None:  # the state of others may begin otherwise than with zeros
            state.initialize_optimizer(self.optimizer)
        most = training.max_skipped if training.on_nonfinite == "skip" else 1
        self.guard = Guard(self.optimizer, device, most, self.config.optimizer.use)
        self.sync, self.balance = parts.sync(run, self.model), balance_of_plan(run, self.model)
        self.loader = parts.loader(run, store)
        self.batches = RankBatches(run, self.objective, self.loader)
        made = (self.model, self.objective, self.sync, self.balance)
        self.engine = parts.engine(run, *made, self._before_microbatch)
        self.steps = training.steps or self.loader.steps(training.epochs or 0)
        self.evaluation = eval_loader(run, store)
        self.checkpoints = CheckpointManager(
            setup.paths.checkpoints,
            self.config.checkpoint.keep,
            self.config.checkpoint.asynchronous,
            attached=setup.paths.tokenizer,
        )
        torch.manual_seed(seed_of_dropout(run))
        if resume is not None:
            self.load(resume)
        if data.packing == "pack":  # only now, because the check needs the weights
            dense, multiple = not model_sizes(setup.spec, setup.model).experts, setup.plan.sequence_multiple
            rows, length = training.microbatch_size, data.sequence_length
            check_boundaries(
                self.engine.logits, setup.model, device, rows, length, exact=dense, multiple=multiple, share=self.batches.cut
            )
        self.recorder = Recorder(self.config, speaks=self.rank == 0, steps=self.steps, resumed_step=self.step)
        self.outcomes = Outcomes(self.config, setup.paths, self._write_batch, self.recorder.say)
        self._line: tuple[int, dict[str, Any], bool] | None = None
        self.callbacks = parts.callbacks(self, resume)  # last: they see all of it

    def _before_microbatch(self, words: str = "") -> None:
        self.progress(f"step {self.step + 1}{words and ', '}{words}")

    def clip(self) -> torch.Tensor:
        """Clip the gradient of the whole model, and return its norm before clipping."""
        return self.engine.clip(self.config.training.clip_norm)

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, evaluate, and save.

        Raises:
            NonFiniteError: a loss or gradient norm was NaN or infinite, and the step is not skipped or too many were.
            StoppedError: the run was asked to end; there is a checkpoint of the step that was done last.
        """
        agreement = self.agreement or Agreement(self.config.checkpoint.every_minutes)
        steps, training = self.callbacks.begin(agreement, self.steps), self.config.training
        try:
            if self.step == 0 or self.unevaluated:
                self.evaluate()
            if self.callbacks.saves:
                self.save()
            if self.step >= steps:
                why = self.callbacks.finished or f"training.{'steps' if training.epochs is None else 'epochs'}"
                self.recorder.say(f"nothing to train: step {self.step} of {steps} is done ({why})")
            while self.step < steps:
                self.progress(f"step {self.step + 1}")
                with self.expectation.step():
                    self.train_step()
                self.step += 1
                self._write_line()  # of the step before, while the device has this one to do
                if self.recorder.logs(self.step):
                    self._log()
                else:
                    self.recorder.advance(self.step)
                decision = agreement.after(self.step)
                last = self.step == (steps := self.callbacks.last_step(steps, decision.finish))
                ends = bool(decision.end) and not last  # after the last step the run ends anyway, with its evaluation
                self.unevaluated = last or due(self.step, training.eval_every)
                if self.unevaluated and not ends:
                    self.evaluate()
                if last or decision.save or ends or due(self.step, self.config.checkpoint.every) or self.callbacks.saves:
                    path = self.save()
                    agreement.saved()
                if ends:
                    self.checkpoints.finish()
                    auto = self.config.checkpoint.resume == "auto"
                    how = "the same command" if auto else "the same command with checkpoint.resume=auto"
                    where = f"after step {self.step} of {steps}, with the complete checkpoint {path}"
                    raise StoppedError("run.stopped", f"{decision.end}: ended {where}; {how} goes on from it")
            self.checkpoints.finish()
            self.callbacks.on_end()
        except BaseException as error:
            self.callbacks.failed(error)
            self.checkpoints.wait_for_save()
            if self.outcomes.journal.arrives_within(PATIENCE):
                self._write_line()
            raise
        finally:
            self.expectation.close()
            self.recorder.close()

    @in_step("step {}", 1)
    def train_step(self) -> None:
        """Run one optimizer step. The host does not wait for it; :meth:`metrics` returns how it went."""
        begun = time.perf_counter()
        self.callbacks.on_step_start()
        on_host = self.batches.microbatches(self.step)
        # Tokens are counted before backward: the loss is divided by all tokens of the step, so no factor depends on the layout.
        *batches, counted = map(self.batches.to_device, (*on_host, {"counts": self.batches.counts(on_host)}))
        counts = self.mesh.sum(counted["counts"])
        counts, routed = counts[:-1], counts[-1]
        self.balance.begin_step(routed)
        rate = learning_rate(self.step, self.steps, self.config.optimizer.lr, self.config.schedule)
        set_learning_rate(self.optimizer, rate)
        sums = self.engine.forward_backward(list(self.engine.prepared(batches)), divisors := counts.clamp(min=1))
        self.callbacks.on_gradients()
        norm = self.clip()
        metrics = sums.over_ranks(self.mesh)
        for term, count in zip(self.objective.terms, divisors, strict=True):
            if term in metrics:
                metrics[f"{term}_loss"] = metrics.pop(term).double() / count
        for name in self.objective.metric_names:
            total, count = metrics.pop(f"{name}{SUM}"), metrics.pop(f"{name}{COUNT}")
            metrics[name] = total / count.clamp(min=1)
        metrics |= {"gradient_norm": norm.to(self.device), "tokens": counts[0]}
        self.guard.judge(metrics["loss"], metrics["gradient_norm"])
        self.guard.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics |= self.balance.finish_step(
            lambda loads: self.mesh.sum(self.mesh.sum(loads), "pp"),
            unless=self.guard.flag,
            logged=self.recorder.logs(self.step + 1),
        )
        for line in self.balance.pop_warnings():
            self._write_line()
            self.recorder.say(f"[yellow]{escape(line)}[/yellow]")
        self.callbacks.on_step(metrics)
        self.outcomes.journal.add(self.step, rate, metrics, time.perf_counter() - begun)

    def metrics(self) -> dict[str, Any]:
        """Wait for the last step, and return its metrics.

        Times are means since the last call, and ``skipped`` counts the steps since then that changed nothing.

        Raises:
            NonFiniteError: see :meth:`read_finished_steps`.
        """
        self.read_finished_steps()
        return self._summary(self._facts())

    def _facts(self) -> dict[str, Any]:
        return {"epoch": round(self.loader.epochs(self.step), 6), "memory_bytes": memory_in_use(self.device)}

    def _summary(self, facts: dict[str, Any]) -> dict[str, Any]:
        summary = self.outcomes.summary()
        return {**summary, **self.expectation.metrics(summary["step_seconds"]), **facts}

    def _log(self) -> None:
        """Write the line of the step that was done last; on an accelerator, only after the next step is launched."""
        self._line = self.step, self._facts(), self.expectation.measured
        if not self.outcomes.journal.post():
            self._write_line()

    def _write_line(self) -> None:
        """Write the line that is due, if one is."""
        if self._line is not None:
            (step, facts, tells), self._line = self._line, None
            self.outcomes.read(posted=True)
            self.recorder.step(step, self._summary(facts))
            if tells:
                self.expectation.tell(self.recorder.say)

    def read_finished_steps(self) -> None:
        """Wait for the device, and read how the steps went that the host has not read yet. Write the line that is due.

        Raises:
            NonFiniteError: see :meth:`Outcomes.read`.
        """
        self._write_line()
        self.outcomes.read()

    def _write_batch(self, step: int, folder: Path) -> None:
        self.batches.write(step, folder / f"batch-rank-{self.rank}.safetensors")

    @in_step("the evaluation after step {}")
    def evaluate(self) -> float | None:
        """Return the mean loss in nats over the held-out targets, the same on all ranks; ``None``: nothing is held out.

        Raises:
            NonFiniteError: see :meth:`read_finished_steps`.
        """
        self.read_finished_steps()
        self.unevaluated = False
        if not (values := self.measure()):
            return None
        self.callbacks.on_evaluation(values)
        self.recorder.event(self.step, values, evaluation.shown(values, self.step, self.objective.unit))
        return values["eval/loss"]

    def measure(self) -> dict[str, float]:
        """Return the values of an evaluation of the model as it is; none if nothing is held out."""
        words = f"the evaluation after step {self.step}"
        return evaluation.evaluate(self.engine, self.batches, self.evaluation, lambda: self.progress(words))

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        saved = state.model_tensors(self.model, trained=self.config.saves_trained_only)
        return {**saved, **state.optimizer_tensors(self.model, self.optimizer)}

    @in_step("the checkpoint of step {}")
    def save(self) -> Path:
        """Save a checkpoint with everything that resuming needs, and return its path.

        Raises:
            NonFiniteError: see :meth:`read_finished_steps`; then nothing is saved.
        """
        self.read_finished_steps()
        self.progress(f"the checkpoint of step {self.step}")
        tensors = {**self._tensors(), **self.callbacks.tensors(), **state.rng_tensors(self.rank, self.device)}
        meta = {
            "callbacks": self.callbacks.values(),
            "world_size": dist.get_world_size(),
            "layout": str(self.setup.layout),
            "parameters": list(self.setup.stored),
            "unevaluated": self.unevaluated,
            "loader": self.loader.state_dict(self.step),
            "model_config": plain_config(self.setup.model),
            "source": self._source,
            "config": self.config.model_dump(mode="json"),
        }
        path = self.checkpoints.save(self.step, tensors, meta)
        self.recorder.say(
            f"checkpoint {escape(str(path))}" + (" is being written" if self.config.checkpoint.asynchronous else "")
        )
        self.callbacks.on_save(path)
        return path

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint of the same model, written on this or another layout, and continue after its step.

        Raises:
            CheckpointError: it is a checkpoint of another model, optimizer or data; then nothing was changed.
        """
        check_same_model(checkpoint, self.setup.stored, plain_config(self.setup.model))
        meta, stored = read_meta(checkpoint), storage.contents(checkpoint)
        self.loader.check_state(meta["loader"])
        tensors = self._tensors()
        if self.config.optimizer.use is not None:  # a parameter without a gradient so far has no state there
            tensors = state.without_absent(self.model, self.optimizer, tensors, stored)
        if missing := sorted(tensors.keys() - stored.keys()):
            shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            said = f"{checkpoint}: lacks {shown}; its run trained other parameters (parallel.freeze), or with another optimizer"
            raise CheckpointError("checkpoint.model", said)
        generators = state.rng_tensors(self.rank, self.device)
        same_ranks = meta["world_size"] == dist.get_world_size() and generators.keys() <= stored.keys()
        if same_ranks:
            tensors.update(generators)
        storage.read(checkpoint, tensors)
        if same_ranks:
            state.set_rng(tensors, self.rank, self.device)
        else:
            # Other ranks wrote it. Each rank seeds a new random stream, which does not repeat the numbers drawn before.
            torch.manual_seed(seed_of_dropout(RankSetup(self.setup, self.device, self.mesh), meta["step"]))
        self.step, self.unevaluated = int(meta["step"]), bool(meta.get("unevaluated", False))
