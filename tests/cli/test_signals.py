"""A signal to end: all ranks save after this step or the next; the command ends with 75, and goes on when it is repeated."""

import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import _behind
from meshwright.train.config import load_config
from meshwright.train.start.ending import SAME, SIGNALS
from tests.cli.conftest import Command, Outcome, all_gone
from tests.cli.failing import fail
from tests.cli.test_launchers import ENVIRONMENT, ROOT, TORCHRUN, both, two_ranks
from tests.train.runs import checkpoints, eval_losses, losses, tiny_run, train

Meshwright = Callable[..., Outcome]
NAMES = [number.name for number in SIGNALS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[int, list[float]]:
    """Losses by number of ranks."""
    return {ranks: train(tiny_run(tmp_path_factory.mktemp("undisturbed"), corpus), ranks) for ranks in (1, 2)}


def check(found: Outcome, config: str, name: str) -> None:
    """Ended with a complete checkpoint of the step in which the signal came, the second, or of the third."""
    assert found.code == 75, found
    assert "Traceback" not in found.error + found.out
    assert "error: " not in found.error
    run = load_config(config)
    (last,) = checkpoints(run)
    assert last in ("step-00000002", "step-00000003")
    words = rf"^{name}: ended after step (\d) of 6, with the complete checkpoint (\S+); the same command goes on from it$"
    ended = re.search(words, found.error, re.MULTILINE)
    assert ended, found.error
    assert (f"step-0000000{ended[1]}", Path(ended[2]).name) == (last, last)
    assert len(losses(run)) == int(ended[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "asynchronous"), [("SIGTERM", False), ("SIGTERM", True), ("SIGINT", False), ("SIGUSR1", False)]
)
def test_to_the_launcher(
    meshwright: Meshwright, config: str, undisturbed: dict[int, list[float]], name: str, asynchronous: bool
) -> None:
    arguments = ("train", config, "--nproc", 2, f"checkpoint.asynchronous={asynchronous}")
    found = meshwright(*arguments, before=fail(f"ask the launcher with {name}", 1))
    check(found, config, name)
    assert f"{name}: the run ends after this step or the next" in found.error
    if name == "SIGTERM":
        again = meshwright(*arguments)
        assert again.code == 0, again
        assert losses(load_config(config)) == undisturbed[2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_to_a_run_of_one_process(meshwright: Meshwright, config: str, undisturbed: dict[int, list[float]], name: str) -> None:
    check(meshwright("train", config, before=fail(f"get {name}", 0)), config, name)
    if name == "SIGINT":
        assert meshwright("train", config).code == 0
        assert losses(load_config(config)) == undisturbed[1]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_to_one_worker_of_our_launcher(meshwright: Meshwright, config: str, rank: int) -> None:
    """SIGTERM to a worker stays what it was: the end of a failed job."""
    check(meshwright("train", config, "--nproc", 2, before=fail("get SIGUSR1", rank)), config, "SIGUSR1")
    other = f"output={load_config(config).output}-2"
    assert meshwright("train", config, other, "--nproc", 2, before=fail("get SIGTERM", rank)).code == 1


@pytest.mark.thorough
def test_to_all_processes_at_once(meshwright: Meshwright, config: str) -> None:
    """As `timeout`, systemd and some batch systems send it."""
    check(meshwright("train", config, "--nproc", 2, before=fail("terminate all", 1)), config, "SIGTERM")


@pytest.mark.thorough
def test_in_the_last_step(meshwright: Meshwright, config: str) -> None:
    """The run ends there anyway, with its evaluation."""
    found = meshwright("train", config, "--nproc", 2, "training.steps=2", before=fail("ask the launcher with SIGTERM", 1))
    assert found.code == 0, found
    assert "held-out loss after 2 steps" in found.out


@pytest.mark.thorough
def test_an_evaluation_that_was_left_out_is_made_when_the_run_goes_on(meshwright: Meshwright, config: str) -> None:
    arguments = ("train", config, "--nproc", 2, "training.eval_every=3")
    found = meshwright(*arguments, before=fail("ask the launcher with SIGTERM", 1))
    check(found, config, "SIGTERM")
    assert checkpoints(load_config(config)) == ["step-00000003"]
    assert "held-out loss after 3 steps" not in found.out
    assert "held-out loss after 3 steps" in meshwright(*arguments).out
    assert len(eval_losses(load_config(config))) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_the_export(meshwright: Meshwright, config: str, ranks: int) -> None:
    arguments = ("train", config, "--nproc", ranks, "training.steps=2", "export=true")
    found = meshwright(*arguments, before=_asked_in_the_export)
    assert found.code == 75, found
    assert "ended after the last step; its checkpoint is complete, and the same command exports it" in found.error
    assert not Path(load_config(config).output, "export").exists()
    assert meshwright(*arguments).code == 0
    assert Path(load_config(config).output, "export", "model.safetensors").exists()


def _asked_in_the_export() -> None:
    from meshwright.checkpoint import export

    launcher = os.getpid()

    def export_checkpoint(*_: object, **__: object) -> None:
        os.kill(launcher, signal.SIGTERM)
        time.sleep(30)

    export.export_checkpoint = export_checkpoint


def test_a_resume_that_would_be_refused_is_not_promised(meshwright: Meshwright, config: str) -> None:
    found = meshwright("train", config, "checkpoint.resume=never", before=fail("get SIGTERM", 0))
    assert found.code == 75
    assert "the same command with checkpoint.resume=auto goes on from it" in found.error


def _forks_a_child() -> None:
    """A worker whose code starts processes of its own, and ends one."""
    import multiprocessing

    from meshwright.train.trainer import Trainer

    plain = Trainer.train_step

    def train_step(self: Trainer) -> None:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(5)
        assert child.exitcode == -signal.SIGTERM
        plain(self)

    Trainer.train_step = train_step


def test_a_child_that_is_ended_is_no_wish_to_end_the_run(meshwright: Meshwright, config: str) -> None:
    found = meshwright("train", config, "training.steps=3", before=_forks_a_child)
    assert (found.code, found.error) == (0, ""), found


@pytest.mark.sampled(1)
@both
@pytest.mark.parametrize("rank", [0, 1])
def test_to_one_rank_of_others(start: Callable[..., Command], config: str, variables: Callable[..., object], rank: int) -> None:
    """All ranks end, with the code of a run that was ended, and rank 0 says it."""
    outcomes = two_ranks(start, variables, config, before=fail("get SIGTERM", rank))
    assert [found.code for found in outcomes] == [75, 75], outcomes
    check(outcomes[0], config, "SIGTERM")
    assert outcomes[1].error == ""


@pytest.mark.thorough
@pytest.mark.command
def test_to_torchrun(config: str) -> None:
    """It passes the signal on, to each rank as another one too, and waits."""
    long = ("training.steps=4000", "schedule.kind=constant", "metrics.jsonl=true")
    command = [*TORCHRUN, "meshwright.cli.main", "train", config, *long]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, text=True, **pipes) as process:
        run = load_config(config)
        end = time.monotonic() + 300
        while time.monotonic() < end and not (Path(run.output, "metrics.jsonl").exists() and len(losses(run)) > 3):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "SIGTERM: ended after step" in error
    (last,) = checkpoints(run)
    assert f"with the complete checkpoint {run.output}/checkpoints/{last}" in error


@pytest.mark.thorough
def test_a_second_signal_ends_at_once(meshwright: Meshwright, config: str) -> None:
    """A step that hangs has no end to wait for."""
    found = meshwright("train", config, "--nproc", 2, before=fail("terminate the launcher", 1))
    assert found.code == 1
    assert found.error.endswith("error: ended by SIGTERM [worker.ended]\n")
    assert found.seconds < 20
    found = meshwright("train", config, before=_hang_and_be_ended)
    assert (found.code, found.seconds < 20) == (128 + signal.SIGTERM, True), found


def _interrupted_in(name: str, everyone: bool = False) -> Callable[[], None]:
    """Ctrl-C as a function begins: to the process that calls it or, as from a terminal, to all processes of the command."""

    def patch() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
        module, _, function = name.rpartition(".")

        def interrupt(*_: object, **__: object) -> None:
            os.killpg(0, signal.SIGINT) if everyone else os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)

        setattr(pkgutil.resolve_name(module), function, interrupt)

    return patch


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("place", "ranks", "what"),
    [
        ("meshwright.models.weights.build.build_on_meta", 2, "the model and its plan are built"),
        ("meshwright.data.tokenizer.build_tokenizer", 2, "the tokenizer is made"),
        ("meshwright.data.preparation.prepare", 1, "the data are read"),
        ("meshwright.train.start.worker.run_worker", 2, "the workers start"),
        ("meshwright.train.trainer.Trainer.__init__", 2, "the workers start"),
        ("meshwright.train.trainer.Trainer.__init__", 1, "the model gets its values"),
    ],
)
def test_an_interruption_before_the_first_step_is_one_line(
    meshwright: Meshwright, config: str, place: str, ranks: int, what: str
) -> None:
    resumes = what == "the data are read"
    if resumes:
        assert meshwright("train", config, "training.steps=1").code == 0
    before = _interrupted_in(place, everyone=what == "the workers start")
    found = meshwright("train", config, "--nproc", ranks, before=before)
    assert (found.code, found.error) == (130, f"interrupted while {what}, before the first step; nothing is lost\n"), found
    assert found.seconds < 20
    all_gone(found)
    again = meshwright("train", config, "training.steps=2", "--nproc", ranks)
    assert (again.code, "resumed from" in again.out) == (0, resumes), again


def test_an_interruption_in_a_function_that_python_calls_at_a_fork_is_one_still(tmp_path: Path) -> None:
    """Python drops what is raised there, and says so on stderr."""
    code = f"""
import os, signal, time
from pathlib import Path
from meshwright.train.start.ending import wishes_to_end

noted = []
try:
    with wishes_to_end(Path({str(tmp_path / "asked")!r}), noted):
        os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
        if os.fork() == 0:
            os._exit(0)
        time.sleep(30)
except Exception as error:
    print(type(error).__name__, len(noted))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("SignalException 2\n", "")


def test_an_interruption_of_another_command_says_so(meshwright: Meshwright, config: str) -> None:
    before = _interrupted_in("meshwright.models.weights.build.build_on_meta")
    found = meshwright("plan", config, before=before)
    assert (found.code, found.error) == (130, "interrupted while the model and its plan are built\n")


def test_an_interruption_that_an_import_took_for_its_own_error_is_one_still() -> None:
    taken, last = RuntimeError("Error calling __set_name__"), ModuleNotFoundError("Could not import module")
    taken.__context__, last.__cause__ = KeyboardInterrupt(), taken
    assert _behind(last) is taken.__context__
    assert _behind(ValueError()) is None


def _hang_and_be_ended() -> None:
    """In the process of a run of one rank: its second step hangs, and two signals come."""
    from meshwright.train.trainer import Trainer

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SAME + 0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    def train_step(self: Trainer) -> None:
        threading.Thread(target=twice, daemon=True).start()
        time.sleep(60)
        raise AssertionError("it should have ended")

    Trainer.train_step = train_step
