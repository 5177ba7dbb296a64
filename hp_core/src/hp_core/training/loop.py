"""The training loop: steps, logging, evaluation, checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hp_core.config import RunConfig
from hp_core.data import Batch, BatchLoader
from hp_core.errors import ConfigError, TrainingError
from hp_core.mesh import Mesh
from hp_core.plan import ShardingPlan
from hp_core.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from hp_core.training.device import RankDevice
from hp_core.training.flops import flops_per_token, peak_flops
from hp_core.training.gradients import clip_gradients, first_non_finite, gradient_norm
from hp_core.training.metrics import MetricsWriter
from hp_core.training.optimizer import build_optimizer, check_optimizer
from hp_core.training.profiling import profile_steps
from hp_core.training.schedule import build_schedule
from hp_core.training.step import PluginCalls, StepLoss, accumulate_gradients, evaluate_step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingJob:
    """What the pipeline hands to `train`: the split model and everything around it."""

    config: RunConfig
    model: nn.Module
    template: nn.Module
    plan: ShardingPlan
    mesh: Mesh
    device: RankDevice
    calls: PluginCalls
    loader: BatchLoader
    eval_loader: BatchLoader | None
    save_assets: Callable[[Path], None]
    versions: Mapping[str, str]


def num_training_steps(config: RunConfig) -> int | None:
    """Optimizer steps of the run; None when the end of the data decides.

    Raises ConfigError when nothing would ever end it: hp's own loader starts the data again and again.
    """
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    if training.train_samples is not None:
        return math.ceil(training.train_samples / training.global_batch_size)
    if training.num_epochs is None and config.dataloader.target is None:
        raise ConfigError("training: nothing says when to stop. Set train_iters, train_samples or num_epochs.")
    return None


def train(job: TrainingJob) -> None:
    """Train to the end of the run. Collective: every rank calls it."""
    trainer = _Trainer(job)
    try:
        trainer.run()
    finally:
        trainer.close()


class _Trainer:
    """The state of a run: the step, the tokens seen, and what writes and measures them."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        config = job.config
        self.num_steps = num_training_steps(config)
        self.optimizer = build_optimizer(job.model, config.optimizer, config.lr_scheduler.lr)
        check_optimizer(self.optimizer, job.model)
        self.schedule = build_schedule(self.optimizer, config.lr_scheduler, self.num_steps)
        self.step = 0
        self.tokens = 0
        self.checkpoint_dir = Path(config.checkpoint.checkpoint_dir or Path(config.output_dir) / "checkpoints")
        self._restore()
        self.metrics = (
            MetricsWriter(Path(config.output_dir), num_steps=self.num_steps, start_step=self.step)
            if job.mesh.rank == 0
            else None
        )
        self._flops_per_token = flops_per_token(job.template, config.dataset.seq_length)
        self._timer = _Timer(self.tokens)

    def run(self) -> None:
        config, job = self.job.config, self.job
        saved = evaluated = self.step
        with profile_steps(
            config.profiling, Path(config.output_dir), rank=job.mesh.rank, start_step=self.step
        ) as end_step:
            while self.num_steps is None or self.step < self.num_steps:
                micro_batches = job.loader.next_step()
                if micro_batches is None:
                    break
                self._train_step(micro_batches)
                end_step()
                if config.training.eval_interval and self.step % config.training.eval_interval == 0:
                    self._evaluate()
                    evaluated = self.step
                if config.checkpoint.save_steps and self.step % config.checkpoint.save_steps == 0:
                    self._save()
                    saved = self.step
        if evaluated != self.step:
            self._evaluate()
        if saved != self.step:
            self._save()

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _train_step(self, micro_batches: list[Batch]) -> None:
        job, training = self.job, self.job.config.training
        lr = self.schedule.get_last_lr()[0]
        loss = accumulate_gradients(job.model, micro_batches, job.mesh, job.plan, job.calls)
        self.step += 1
        self.tokens += training.global_batch_size * micro_batches[0].input_ids.shape[1]
        logged = self.step % training.logging_steps == 0 or self.step == self.num_steps
        norm = None
        if logged or training.max_grad_norm is not None or job.config.debug.check_nan_inf:
            norm = gradient_norm(job.model, job.mesh, job.plan)
            self._check_finite(loss, norm)
            if training.max_grad_norm is not None:
                clip_gradients(job.model, norm, training.max_grad_norm)
        if loss.num_valid_tokens:
            self.optimizer.step()
        else:
            log.warning("step %d: no token carries loss; the parameters stay as they are", self.step)
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if logged and norm is not None:
            self._log(loss, norm.item(), float(lr))

    def _check_finite(self, loss: StepLoss, norm: torch.Tensor) -> None:
        if math.isfinite(loss.loss) and torch.isfinite(norm):
            return
        if not self.job.config.debug.check_nan_inf:
            log.warning("step %d: loss %s, gradient norm %s", self.step, loss.loss, norm.item())
            return
        found: list[str | None] = [None] * self.job.mesh.spec.world_size
        dist.all_gather_object(found, first_non_finite(self.job.model))
        places = [f"{fqn} on rank {rank}" for rank, fqn in enumerate(found) if fqn is not None]
        raise TrainingError(
            f"step {self.step}: loss {loss.loss}, gradient norm {norm.item()}; first gradient that is not finite: "
            f"{places[0] if places else 'none'}. Lower the learning rate or check the data of this step."
        )

    def _log(self, loss: StepLoss, norm: float, lr: float) -> None:
        seconds, tokens = self._timer.lap(self.tokens)
        values = {
            "loss": loss.loss,
            **({f"loss_{name}": value for name, value in loss.terms.items()} if len(loss.terms) > 1 else {}),
            "grad_norm": norm,
            "lr": lr,
            "tokens": self.tokens,
            "valid_tokens": loss.num_valid_tokens,
            "tokens_per_second": tokens / seconds,
            "epoch": self.job.loader.epoch,
        }
        if self._flops_per_token is not None:
            flops = self._flops_per_token * tokens / seconds / self.job.mesh.spec.world_size
            values["tflops"] = flops / 1e12
            peak = peak_flops(self.job.device.device)
            if peak is not None:
                values["mfu"] = flops / peak
        memory = self.job.device.peak_memory()
        if memory is not None:
            values["memory"] = memory
        if self.metrics is not None:
            self.metrics.log(self.step, values)

    def _evaluate(self) -> None:
        job = self.job
        if job.eval_loader is None:
            return
        job.eval_loader.rewind()
        total, tokens, steps = 0.0, 0, 0
        job.model.eval()
        while not job.config.training.eval_iters or steps < job.config.training.eval_iters:
            micro_batches = job.eval_loader.next_step()
            if micro_batches is None:
                break
            loss = evaluate_step(job.model, micro_batches, job.mesh, job.calls)
            total += loss.loss * loss.num_valid_tokens
            tokens += loss.num_valid_tokens
            steps += 1
        job.model.train()
        if self.metrics is not None:
            self.metrics.log_eval(self.step, {"loss": total / max(tokens, 1), "tokens": tokens})
        self._timer.restart(self.tokens)

    def _save(self) -> None:
        job = self.job
        if not job.config.checkpoint.save_ckpt:
            return
        folder = save_checkpoint(
            self.checkpoint_dir,
            step=self.step,
            tokens=self.tokens,
            model=job.model,
            plan=job.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
            loader_state=job.loader.state_dict(),
            device=job.device.device,
            versions=job.versions,
            save_assets=job.save_assets,
        )
        if job.mesh.rank == 0:
            log.info("saved %s", folder)
        self._timer.restart(self.tokens)

    def _restore(self) -> None:
        job = self.job
        if job.config.checkpoint.restore_from is None:
            return
        folder = find_checkpoint(self.checkpoint_dir, job.config.checkpoint.restore_from)
        resumed = load_checkpoint(
            folder,
            model=job.model,
            plan=job.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
            device=job.device.device,
        )
        job.loader.load_state_dict(resumed.loader_state)
        self.step, self.tokens = resumed.step, resumed.tokens
        if job.mesh.rank == 0:
            log.info("resumed from %s: %d steps done", folder, self.step)


class _Timer:
    """Wall time and tokens between two logs, without what is not training."""

    def __init__(self, tokens: int) -> None:
        self.restart(tokens)

    def restart(self, tokens: int) -> None:
        self._time, self._tokens = time.perf_counter(), tokens

    def lap(self, tokens: int) -> tuple[float, int]:
        """Seconds and tokens since the last lap or restart."""
        seconds, done = time.perf_counter() - self._time, tokens - self._tokens
        self.restart(tokens)
        return seconds, done
