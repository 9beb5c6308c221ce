"""The training loop.

All random numbers of a step depend only on (seed, step, process), and a checkpoint contains the whole state of a run.
So a run that was killed and resumed gives the same result as an uninterrupted one: on a CPU, bit for bit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from tritoncaps.data.files import remove_leftovers, write_atomically
from tritoncaps.extras import require
from tritoncaps.kernels.common.backends import check_installed
from tritoncaps.training.checkpoint import BEST, LAST, CheckpointError, first_problem, load_checkpoint, save_checkpoint
from tritoncaps.training.claim import Claim, claim_new
from tritoncaps.training.config import Config, ConfigError, flag, is_own
from tritoncaps.training.distributed import World, world
from tritoncaps.training.evaluation import Evaluation, as_it_is, autocast, evaluate, views
from tritoncaps.training.interrupts import Interrupts
from tritoncaps.training.metrics import Metrics
from tritoncaps.training.objective import Objective, correct, mix
from tritoncaps.training.own import BuildNetwork, LoadData, Loss, describe, try_network, with_own
from tritoncaps.training.progress import Progress
from tritoncaps.training.task import Data, build_network, load_splits, loss_of, pipeline_of, task_of


class DivergedError(RuntimeError):
    """The loss or a weight is not finite."""


class Result(NamedTuple):
    """The result of a run.

    Attributes:
        reason: why the run ended: "finished", "early stop" or "interrupted".
        folder: folder of the run.
        step: number of training steps.
        accuracy: accuracy of the last weights, on the held-out images if there are any, otherwise on the test images.
        best_accuracy: the best accuracy of all evaluations.
        seconds: time of training, without evaluations.
        images_per_second: speed of training.
        evaluation: the last evaluation; None if the run ended before the first one.
        evaluated_on: "validation" (held-out images) or "test".
        test_accuracy: accuracy on the test images; if there are held-out images, of the network that is best on them.
            nan for an interrupted run and for a run without a final test.
    """

    reason: str
    folder: Path
    step: int
    accuracy: float
    best_accuracy: float
    seconds: float
    images_per_second: float
    evaluation: Evaluation | None
    evaluated_on: str
    test_accuracy: float


def train(
    config: Config,
    resume: bool = False,
    quiet: bool = False,
    *,
    network: BuildNetwork | None = None,
    data: LoadData | None = None,
    loss: Loss | None = None,
) -> Result:
    """Train a network.

    ``network``, ``data`` and ``loss`` are functions of your own. They replace the model, the data and the loss that
    ``config`` names.

    Args:
        config: the settings.
        resume: continue the run in ``config.out``.
        quiet: do not show progress.
        network: ``network(task, iterations, backend)`` returns a module. The module takes images
            [N, channels, height, width] of the :class:`Task` and returns scores [N, classes] or class capsules.
        data: ``data(split, folder)`` returns the "train" or "test" images as an ImageSet, or a pair of an ImageSet and
            its Pipeline. The folder is the one of ``config.data_dir``.
        loss: ``loss(outputs, labels)`` returns the mean over the images, a scalar tensor. If it has a method
            ``set_step``, this is called with the number of each step.

    Returns:
        The accuracies, the reason why the run ended, and its folder.

    Raises:
        ConfigError: if a setting cannot be used, or another process uses the folder.
        CheckpointError: if the run cannot be resumed, or a checkpoint cannot be written.
        DataError: if a data file is missing or damaged.
        DivergedError: if the loss or a weight is not finite.

    Example:
        >>> from tritoncaps.training import Config, train
        >>> train(Config(data="toynorb", epochs=2)).accuracy  # doctest: +SKIP
    """
    require("tqdm", "training", "train")
    check_installed(config.backend)
    config = with_own(config, network, data, loss)
    with world(config.device) as w, _claimed(config, resume, w) as folder:
        saved = load_checkpoint(folder / LAST) if resume else None
        if saved is not None:
            _check_changes(saved["config"], config)
        trainer = Trainer(replace(config, out=str(folder)), w, saved, quiet, loss)
        try:
            return trainer.run()
        finally:
            trainer.close()


class Trainer:
    """The state of a run: data, network, optimiser and counters."""

    def __init__(
        self, config: Config, w: World, saved: dict[str, Any] | None, quiet: bool, loss: Loss | None = None
    ) -> None:
        self.config, self.world, self.folder, self.quiet = config, w, Path(config.out or ""), quiet or not w.is_main
        self.pipeline = pipeline_of(config)
        if loss is None and not is_own(config.model):
            loss_of(config)  # raises if the loss does not fit the network; for a user's network that is checked later
        self.data = load_splits(config)
        self.share = self._share()
        self.steps_per_epoch = len(self.data.train) // config.batch_size
        self.steps = config.steps or config.epochs * self.steps_per_epoch

        self.objective = self._build_objective(loss)
        self.network = self.objective.network
        self.average = _Average(self.network, config.ema) if config.ema else None
        trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimiser = torch.optim.Adam(trained, lr=config.lr, weight_decay=config.weight_decay)
        self.scaler = torch.amp.GradScaler(w.device.type, enabled=config.amp == "float16")

        self.step, self.seconds = 0, 0.0
        self.best, self.evaluations_since_best, self.evaluated = 0.0, 0, 0  # evaluated: step of the last evaluation
        self.latest: Evaluation | None = None
        if saved is not None:
            self._restore(saved)
        if config.graphs and w.device.type == "cpu":
            raise ConfigError("--graphs needs a GPU: it replays the network as CUDA graphs")
        if config.compile or config.graphs:
            self.network.compile(**({"mode": "reduce-overhead"} if config.graphs else {}))
        self.parallel: nn.Module = self.objective
        if w.size > 1:
            # buffers, as the running statistics of batch normalisation, are those of the first process
            self.parallel = DistributedDataParallel(self.objective)
        self.totals = torch.zeros(3, dtype=torch.float64, device=w.device)  # loss, right, images since the last log
        self.speed, self._clock, self._logged = 0.0, 0.0, (self.step, self.seconds)
        self.metrics = Metrics(self.folder, self.step) if w.is_main else None
        self.progress = Progress(self.steps * config.batch_size, self.step * config.batch_size, self.quiet)
        if w.is_main:
            remove_leftovers(self.folder)
            write_atomically(self.folder / "config.toml", lambda file: file.write(config.to_toml().encode()))

    def run(self) -> Result:
        with Interrupts(self.quiet) as interrupts:
            self._clock = time.perf_counter()
            reason = self._train(interrupts)
        accuracy = self.latest.accuracy if self.latest else float("nan")
        tested = float("nan") if reason == "interrupted" else self._test_accuracy(accuracy)
        kind, _ = self._evaluation_data()
        speed = self.speed
        return Result(
            reason, self.folder, self.step, accuracy, self.best, self.seconds, speed, self.latest, kind, tested
        )

    def _train(self, interrupts: Interrupts) -> str:
        """Train to the end of the run, and return why it ended."""
        if self.step and self.evaluated < self.step and self._is_time_to_evaluate():
            self._evaluate(interrupts)  # the run was interrupted in this evaluation
        if interrupts.asked:
            return "interrupted"
        for parts in self._batches():
            self._step(parts)
            self.progress.advance(self.config.batch_size)
            if self.step % self.config.log_every == 0 or self.step == self.steps:
                self._log()
            if self._is_time_to_evaluate():
                self._check()
                self._evaluate(interrupts)
                self.save()
                if self._is_good_enough():
                    return "early stop"
            elif self.step % self.config.checkpoint_every == 0:
                self.save()
            if self._asked(interrupts):
                self.save()
                return "finished" if self.step == self.steps == self.evaluated else "interrupted"
        if self.latest is None:  # a finished run was resumed
            self._evaluate(interrupts)
        return "finished" if self.latest is not None else "interrupted"

    def save(self) -> None:
        """Write the last checkpoint; an error if the loss or a weight is not finite."""
        self._check()
        if self.world.is_main:
            save_checkpoint(
                self.folder / LAST,
                self.config,
                network=self.network.state_dict(),
                average=self.average.state_dict() if self.average else None,
                optimiser=self.optimiser.state_dict(),
                scaler=self.scaler.state_dict(),
                images=describe(self.config.data),
                **{name: getattr(self, name) for name in _COUNTERS},
            )

    def close(self) -> None:
        self.parallel = self.objective  # drops the reference to the process group, which ends with the run
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()

    def _step(self, parts: list[tuple[Tensor, ...]]) -> None:
        """One step of the optimiser, on a batch in several parts."""
        self.objective.set_step(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        # random numbers of the whole batch, so that augmentation does not depend on the number of devices
        torch.manual_seed(_seed(self.config.seed, self.step))
        random = torch.rand(self.config.batch_size, self.pipeline.random_numbers)[self.world.rank :: self.world.size]
        random = random.pin_memory() if self.world.device.type == "cuda" else random
        torch.manual_seed(_seed(self.config.seed, self.step, self.world.rank))
        if self.config.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # a replay may overwrite the outputs of the step before
        for part, (batch, numbers) in enumerate(zip(parts, random.split(self.share), strict=True)):
            last = part == len(parts) - 1
            waits = isinstance(self.parallel, DistributedDataParallel) and not last
            with self.parallel.no_sync() if waits else nullcontext():  # type: ignore[operator]
                self._backward(batch, numbers)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.network)
        self.step += 1
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now

    def _backward(self, batch: tuple[Tensor, ...], random: Tensor) -> None:
        on_device = (x.to(self.world.device, non_blocking=True) for x in (random, *batch))
        random, images, labels, *drawings = on_device
        seen = self.pipeline.train(images, random)
        target = drawings[0].float() / 255 if drawings else None
        share = self._share_of_labels()
        with autocast(self.world.device, self.config.amp):
            loss, scores = self.parallel(mix(seen, share) if share < 1 else seen, labels, target, share)
        self.scaler.scale(loss / self.config.accumulate).backward()
        right = correct(scores.detach(), labels).sum()
        self.totals += torch.stack([loss.detach() * len(labels), right, torch.full_like(right, len(labels))])

    def _share_of_labels(self) -> float:
        """The weight of an image's own label in mixup, at random for each part of a batch, at least 1/2."""
        if not self.config.mixup:
            return 1.0
        share = torch.distributions.Beta(self.config.mixup, self.config.mixup).sample().item()
        return max(share, 1 - share)

    def _batches(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """The batches of this process from the current step to the last, each in parts."""
        sampler: DistributedSampler = DistributedSampler(
            self.data.train, self.world.size, self.world.rank, seed=self.config.seed, drop_last=True
        )
        parts = self.config.accumulate
        while self.step < self.steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            sampler.set_epoch(epoch)
            order = BatchSampler(sampler, self.share, drop_last=True)
            until = min(self.steps_per_epoch, done + self.steps - self.step)
            loader = DataLoader(
                self.data.train,
                batch_sampler=list(islice(order, done * parts, until * parts)),
                collate_fn=as_it_is,
                num_workers=self.config.workers,
                pin_memory=self.world.device.type == "cuda",
            )
            batches = iter(loader)
            for _ in range(until - done):
                yield [next(batches) for _ in range(parts)]

    def _log(self) -> None:
        """Log the mean loss and accuracy since the last call; an error if the loss is not finite."""
        loss, right, images = self.world.sum(self.totals.clone()).tolist()
        self.totals.zero_()
        if images == 0:
            return
        if not math.isfinite(loss):
            raise DivergedError(self._farewell("the loss"))
        step, seconds = self._logged
        self.speed = (self.step - step) * self.config.batch_size / max(self.seconds - seconds, 1e-9)
        self._logged = (self.step, self.seconds)
        numbers = {"loss": loss / images, "accuracy": right / images}
        self.progress.show(**numbers)
        if self.metrics is not None:
            self.metrics.add(
                "train",
                self.step,
                **numbers,
                epoch=self.step / self.steps_per_epoch,
                lr=self._learning_rate(),
                images_per_second=self.speed,
                seconds=self.seconds,
            )

    def _check(self) -> None:
        """Raise an error if the loss or a weight is not finite."""
        self._log()
        if not all(value.isfinite().all() for value in self.network.parameters()):
            raise DivergedError(self._farewell("a weight"))

    def _evaluation_data(self) -> tuple[str, Data]:
        """The held-out images if there are any, otherwise the test images."""
        held_out = self.data.validation
        return ("test", self.data.test) if held_out is None else ("validation", held_out)

    def _evaluate(self, interrupts: Interrupts) -> None:
        """Evaluate the network, and save it if it is the best one. Evaluations may take long: a signal interrupts them
        if there is only one process; the resumed run repeats them."""
        config, (kind, data) = self.config, self._evaluation_data()
        network = self.average if self.average is not None else self.network
        try:
            with interrupts.at_once() if self.world.size == 1 else nullcontext():
                self.latest = self._accuracy(network, data)
        except KeyboardInterrupt:
            if interrupts.asked:
                return
            raise
        self.evaluated = self.step
        accuracy, epoch = self.latest.accuracy, self.step / self.steps_per_epoch
        self.evaluations_since_best += 1
        if accuracy > self.best:
            self.best, self.evaluations_since_best = accuracy, 0
            if self.world.is_main:
                save_checkpoint(
                    self.folder / BEST,
                    config,
                    network=_weights(network),
                    step=self.step,
                    accuracy=accuracy,
                    images=describe(config.data),
                )
        if self.metrics is not None:
            seen = views(self.latest, data, config.novel)
            self.metrics.add(kind, self.step, accuracy=accuracy, epoch=epoch, seconds=self.seconds, **seen)
            split = "".join(f", {name} views {value:.2%}" for name, value in seen.items())
            self.progress.say(
                f"epoch {epoch:.2f}, step {self.step}: {kind} accuracy {accuracy:.2%}{split} "
                f"(best {self.best:.2%}), {self.seconds:.0f} s of training"
            )
            self.metrics.board.add_evaluation(kind, self.step, self.network, data, self.latest)
        self._clock = time.perf_counter()  # do not count the time of evaluations

    def _test_accuracy(self, accuracy: float) -> float:
        """The test accuracy at the end of a run. With held-out images, load the best network first."""
        if self.data.validation is None:
            return accuracy
        if not self.config.final_test:
            return float("nan")
        if self.world.is_main:
            best = self.folder / BEST
            kept = load_checkpoint(best)["network"] if best.exists() else _weights(self.average or self.network)
            self.network.load_state_dict(kept)
        self.world.share(self.network.state_dict().values())
        tested = self._accuracy(self.network, self.data.test)
        if self.metrics is not None:
            seen = views(tested, self.data.test, self.config.novel)
            epoch = self.step / self.steps_per_epoch
            self.metrics.add("test", self.step, accuracy=tested.accuracy, epoch=epoch, seconds=self.seconds, **seen)
        return tested.accuracy

    def _accuracy(self, network: nn.Module, data: Data) -> Evaluation:
        config = self.config
        return evaluate(network, data, self.pipeline, self.world, config.crops, config.amp, config.workers)

    def _build_objective(self, loss: Loss | None) -> Objective:
        config, task = self.config, task_of(self.config, self.data.train)
        torch.manual_seed(config.seed)
        network = build_network(config, task)
        suits = try_network(config.model, network, task, loss) if is_own(config.model) or loss else None
        margin_steps = config.margin_steps or max(self.steps // 2, 1)
        objective = Objective(
            network, loss or loss_of(config, suits), config.margin, margin_steps, config.reconstruction
        )
        decoder = getattr(network, "decoder", None)
        if decoder is not None and not objective.reconstruction:
            decoder.requires_grad_(False)
        return objective.to(self.world.device)

    def _restore(self, saved: dict[str, Any]) -> None:
        try:
            self.network.load_state_dict(saved["network"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.scaler.load_state_dict(saved["scaler"])
            if self.average is not None:
                self.average.load_state_dict(saved["average"])
            for name in _COUNTERS:
                setattr(self, name, saved[name])
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            reason = first_problem(error)
            raise CheckpointError(f"{self.folder / LAST} does not fit this configuration: {reason}") from None

    def _share(self) -> int:
        """Number of images in a part of this process's batch."""
        config, processes = self.config, self.world.size
        if config.amp == "float16" and self.world.device.type == "cpu":
            raise ConfigError("--amp float16 needs a GPU; use bfloat16 or none on the CPU")
        if config.batch_size % (processes * config.accumulate):
            raise ConfigError(
                f"--batch-size must be a multiple of {processes * config.accumulate}, "
                f"processes times --accumulate, but it is {config.batch_size}"
            )
        return config.batch_size // (processes * config.accumulate)

    def _learning_rate(self) -> float:
        config, done = self.config, min(self.step / self.steps, 1.0)
        if config.lr_schedule == "exponential":
            return config.lr * config.lr_decay ** (self.step / config.lr_decay_steps)
        if config.lr_schedule == "tail":
            done = max(done - (1 - config.lr_tail), 0.0) / config.lr_tail
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))

    def _is_time_to_evaluate(self) -> bool:
        return self.step == self.steps or self.step % (self.config.evaluate_every or self.steps_per_epoch) == 0

    def _is_good_enough(self) -> bool:
        """True if the last evaluation reached ``stop_at``, or if the last ``patience`` evaluations were not better."""
        reached = self.latest is not None and self.latest.accuracy >= self.config.stop_at > 0
        return reached or self.evaluations_since_best >= self.config.patience > 0

    def _asked(self, interrupts: Interrupts) -> bool:
        """True if any process got a signal. All processes must end at the same step."""
        if self.world.size == 1:
            return interrupts.asked
        if self.step % self.config.log_every:
            return False
        return bool(self.world.sum(torch.tensor(float(interrupts.asked), device=self.world.device)) > 0)

    def _farewell(self, what: str) -> str:
        last = self.folder / LAST
        kept = f"the last good checkpoint is {last}" if last.exists() else "there is no checkpoint yet"
        return f"{what} is not finite at step {self.step}: training stops; {kept}; try a lower --lr"


_COUNTERS = ("step", "seconds", "best", "evaluations_since_best", "evaluated")

# settings that must not change when a run is resumed
_FIXED = (
    *("data", "mono", "novel", "limit", "validation", "validation_instances", "model", "iterations", "routing"),
    *("competition", "final_lambda", "capsule_norm", "vote_bias", "loss", "batch_size", "seed"),
)


class _Average(AveragedModel):
    """A moving average of the weights and of the statistics of batch normalisation. torch's class copies the statistics
    of the current network, which do not belong to the averaged weights."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__(network, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.decay = decay

    def update_parameters(self, model: nn.Module) -> None:
        first, before = not self.n_averaged, [x.clone() for x in self.module.buffers()]
        super().update_parameters(model)
        for average, old in zip(self.module.buffers(), before, strict=True):
            if average.is_floating_point() and not first:
                average.copy_(old.lerp(average, 1 - self.decay))


def _seed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _weights(network: nn.Module) -> dict[str, Any]:
    return (network.module if isinstance(network, AveragedModel) else network).state_dict()


def _check_changes(saved: Config, config: Config) -> None:
    """Check that fixed settings of a resumed run did not change. Functions of the user may have a new name."""
    for name in _FIXED:
        before, now = getattr(saved, name), getattr(config, name)
        if before != now and not (name in ("data", "model", "loss") and is_own(before) and is_own(now)):
            raise ConfigError(f"{flag(name)} was {before} in {config.out} and cannot become {now}")
    if bool(saved.ema) != bool(config.ema):
        raise ConfigError(
            f"--ema was {saved.ema} in {config.out} and cannot become {config.ema}: "
            f"the moving average {'would be lost' if saved.ema else 'must start at the beginning of the run'}"
        )


@contextmanager
def _claimed(config: Config, resume: bool, w: World) -> Iterator[Path]:
    """The folder of the run, claimed by the main process until the run ends."""
    claims: list[Claim] = []

    def take() -> str:
        claims.append(_claim(config, resume))
        return str(claims[0].folder)

    try:
        yield Path(w.agree(take))
    finally:
        for claim in claims:
            claim.release()


def _claim(config: Config, resume: bool) -> Claim:
    """Claim the given folder, which must not contain a run unless it is resumed, or a new folder."""
    if config.out is None:
        if resume:
            raise ConfigError("--resume needs the folder of the run: name it with --out")
        return claim_new(Path("runs") / "-".join(_short(name) for name in (config.data, config.model)))
    claim = Claim(Path(config.out))
    if not resume and (claim.folder / LAST).exists():
        claim.release()
        raise ConfigError(f"--out {config.out} contains a run: continue it with --resume, or use another folder")
    return claim


def _short(name: str) -> str:
    """A name as part of a folder's name; for package.module:function, the name of the function."""
    return re.sub(r"\W+", "-", name.rpartition(":")[2]).strip("-") if is_own(name) else name
