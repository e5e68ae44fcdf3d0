"""The trainer: loop(microbatches, sync, clip, step), with evaluation and checkpoints. Every rank has one trainer."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.markup import escape

from meshwright.checkpoint.manager import CheckpointManager
from meshwright.data.scores import Scores
from meshwright.data.store import TokenStore
from meshwright.device import memory_in_use
from meshwright.distributed.process_group import from_rank_0
from meshwright.errors import ModelError, StoppedError, described
from meshwright.models.objective import PRECOMPUTED, Batch
from meshwright.plan.given.inspection import model_sizes
from meshwright.train import evaluation
from meshwright.train.batches import write_batches
from meshwright.train.boundaries import check_boundaries
from meshwright.train.callbacks.hooks import due, in_step
from meshwright.train.engine.runner import Runner
from meshwright.train.engine.score_store import PassLines, score_store
from meshwright.train.engine.steps import StepEngine
from meshwright.train.forecast import Expectation
from meshwright.train.learning_rate import learning_rate
from meshwright.train.metrics import Recorder
from meshwright.train.outcomes import Outcomes
from meshwright.train.parts import PARTS, Parts, Progress, eval_loader
from meshwright.train.start.ending import Agreement
from meshwright.train.start.reference_values import (
    PREFIX,
    REFERENCE_FACTS,
    ReferenceValues,
    check_reference,
    reference_values,
)
from meshwright.train.start.run_files import source_facts
from meshwright.train.start.setup import RunSetup
from meshwright.train.start.teacher_setup import about_teacher

__all__ = ["Trainer"]

PATIENCE = 5.0
"""Seconds that a run that fails waits for the metrics of the step before. The failure may be that the device does nothing."""


class Trainer(StepEngine):
    """Trains the model of a run. All ranks call every method.

    Args:
        setup: the resolved run; its model is parallelized and gets its values here.
        store: the run's tokens.
        device: device of this rank.
        resume: checkpoint to resume from; ``None``: none.
        parts: the functions that make the parts of the trainer.
        progress: see below, for the time before the first step.

    Attributes:
        outcomes: what the host knows of the steps.
        unevaluated: whether the evaluation due after ``step`` was left out because a signal ended the run.
        precomputed: where the values of a reference that is computed once are; ``None``: there is none.
        progress: called before each microbatch, evaluation and save with words such as ``step 12``.
        agreement: decides what all ranks do after a step; ``None``: :meth:`run` makes one, which no signal asks to end.
        steps: number of optimizer steps in all.
    """

    def __init__(
        self,
        setup: RunSetup,
        store: TokenStore,
        device: torch.device,
        resume: Path | None = None,
        parts: Parts = PARTS,
        progress: Progress | None = None,
    ) -> None:
        speaks = dist.get_rank() == 0
        self._source = source_facts(setup.paths)  # read before there is anything to lose
        self.expectation = Expectation(setup, device, parts.forecast, speaks=speaks)  # before the model is parallelized
        self.precomputed = self.find_reference(setup, store)
        begins = self.precomputed is not None and not self.precomputed.there  # what is read later must not say it
        super().__init__(setup, device, parts, resumes=resume is not None, fills=begins)
        self.progress = progress or self.progress
        store = self.with_reference(store)
        self.unevaluated = False
        self.agreement: Agreement | None = None
        training, data = self.config.training, self.config.data
        self.loader = parts.loader(self._run, store)
        self.steps = training.steps or self.loader.steps(training.epochs or 0)
        self.evaluation = eval_loader(self._run, store)
        self.checkpoints = CheckpointManager(
            setup.paths.checkpoints,
            self.config.checkpoint.keep,
            self.config.checkpoint.asynchronous,
            attached=setup.paths.tokenizer,
        )
        if resume is not None:
            self.load(resume)
        if data.packed:  # only now, because the check needs the weights
            self._check_boundaries(self.runner, setup)
            if self.teacher is not None:
                with about_teacher():
                    self._check_boundaries(self.teacher.runner, self.teacher.setup)
        self.recorder = Recorder(self.config, speaks=speaks, steps=self.steps, resumed_step=self.step)
        self.outcomes = Outcomes(self.config, setup.paths, self._write_batch, self.recorder.say)
        self._line: tuple[int, dict[str, Any], bool] | None = None
        self.callbacks = parts.callbacks(self, resume)  # last: they see all of it

    def _check_boundaries(self, runner: Runner, setup: RunSetup) -> None:
        """Refuse packing for a model, of this layout or one beside it, in which one document changes another."""
        check_boundaries(
            runner.logits,
            setup.model,
            self.device,
            self.config.training.microbatch_size,
            self.config.data.sequence_length,
            exact=not model_sizes(setup.spec, setup.model).experts,
            multiple=self.setup.plan.sequence_multiple,
            share=self.batches.cut,
            pairs=self.config.data.pairs,
        )

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.steps_done

    @step.setter
    def step(self, number: int) -> None:
        self.steps_done = number

    def find_reference(self, setup: RunSetup, store: TokenStore) -> ReferenceValues | None:
        """Return where the values of the reference are, or will be; ``None``: the objective needs none. All ranks call it."""
        if setup.objective.reference != PRECOMPUTED:
            return None
        # One rank reads the ends of the weights.
        return from_rank_0(
            lambda: reference_values(setup, store), lambda error: ModelError("model.path", f"the reference: {described(error)}")
        )

    def with_reference(self, store: TokenStore) -> TokenStore:
        """Return the tokens with what the reference says of them; if it is not there yet, the model as it is computes it."""
        if self.precomputed is None:
            return store
        if self.precomputed.there:
            return Scores.open(self.precomputed.directory, store).beside(store)
        lines = PassLines("reference", store.index.tokens, speaks=self.rank == 0)
        done = score_store(
            self, store, self.precomputed.directory, self.precomputed.model, prefix=PREFIX, progress=lines.progress
        )
        lines.done(done.directory)
        return done.beside(store)

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
        rate = learning_rate(self.step, self.steps, self.config.optimizer.lr, self.config.schedule)
        gathered = self.run_microbatches(self.microbatches(self.step))
        self.callbacks.on_gradients()
        metrics = self.update(gathered, rate, logged=self.recorder.logs(self.step + 1))
        for line in self.balance.pop_warnings():
            self._write_line()
            self.recorder.say(f"[yellow]{escape(line)}[/yellow]")
        self.callbacks.on_step(metrics)
        self.outcomes.journal.add(self.step, rate, metrics, time.perf_counter() - begun)

    def microbatches(self, step: int) -> list[Batch]:
        """Return this rank's part of the microbatches of a step, on the host. They are the same in every call."""
        return self.batches.training(self.loader.microbatches(step), self.loader.numbers(step))

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
        write_batches(self.microbatches(step), folder / f"batch-rank-{self.rank}.safetensors")

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
        self.recorder.event(self.step, values, evaluation.shown(values, self.step, self.objective))
        return values["eval/loss"]

    def measure(self) -> dict[str, float]:
        """Return the values of an evaluation of the model as it is; none if nothing is held out."""
        if self.evaluation is None:
            return {}
        words = f"the evaluation after step {self.step}"
        held_out = self.batches.held_out(self.evaluation, lambda: self.progress(words))
        return evaluation.evaluate(self.runner, self.batches, held_out)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    @in_step("the checkpoint of step {}")
    def save(self) -> Path:
        """Save a checkpoint with everything that resuming needs, and return its path.

        Raises:
            NonFiniteError: see :meth:`read_finished_steps`; then nothing is saved.
        """
        self.read_finished_steps()
        self.progress(f"the checkpoint of step {self.step}")
        meta = {
            "callbacks": self.callbacks.values(),
            **self.facts_to_save(),
            "unevaluated": self.unevaluated,
            "loader": self.loader.state_dict(self.step),
            **({} if self.precomputed is None else {REFERENCE_FACTS: self.precomputed.model}),
            "source": self._source,
        }
        path = self.checkpoints.save(self.step, {**self.tensors_to_save(), **self.callbacks.tensors()}, meta)
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
        self.unevaluated = bool(self.read(checkpoint).get("unevaluated", False))

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of other data, or of another order of them."""
        self.loader.check_state(facts["loader"])
        check_reference(facts.get(REFERENCE_FACTS), self.precomputed)
