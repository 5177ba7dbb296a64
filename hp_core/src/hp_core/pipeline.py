"""The flow of a run, in one direction: config, plugins, mesh, model, replace, plan, apply, weights, train.

The only caller of hooks. `run` goes to the end; tests and tools stop after `prepare`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core.config import RunConfig, build_config, config_to_yaml, read_config
from hp_core.data import Batch, BatchLoader, build_loader, load_tokenizer
from hp_core.errors import ConfigError, ModelError, PlanError, PluginError
from hp_core.mesh import Mesh, MeshSpec, plan_mesh
from hp_core.models import (
    build_from_config,
    decoder_blocks,
    load_weights,
    loss_fault,
    main_dtype,
    materialize,
    packing_fault,
    save_assets,
    vocabulary_size,
)
from hp_core.plan import PlanFragment, Precision, ShardingPlan, merge_fragments
from hp_core.plugins import PluginSet, find_plugins, load_plugins, select_plugins
from hp_core.runtime import compute_on_local_tensors, distribute_parameters, install_boundaries
from hp_core.training.activation_checkpoint import apply_activation_checkpoint
from hp_core.training.determinism import enable_full_determinism, seed_everything
from hp_core.training.device import RankDevice, select_device, start_process_group
from hp_core.training.loop import TrainingJob, num_training_steps, train
from hp_core.training.loss import Term, cross_entropy
from hp_core.training.step import PluginCalls

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A validated configuration and the plugins that it selects."""

    config: RunConfig
    plugins: PluginSet


@dataclass(frozen=True)
class Session:
    """A model that is split, filled and ready to train. `template` is the model as it was built, without weights."""

    config: RunConfig
    plugins: PluginSet
    mesh: Mesh
    template: nn.Module
    plan: ShardingPlan
    model: nn.Module
    calls: PluginCalls
    device: RankDevice


def run(config_path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train as configured, as one rank of the world that the environment describes."""
    logging.basicConfig(format="%(message)s")
    # One account of the run is enough; what goes wrong on a rank is raised there.
    logging.getLogger("hp_core").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    loaded = load(config_path, overrides)
    num_training_steps(loaded.config)  # a run without an end is refused before the model is built
    if loaded.config.training.enable_full_determinism:
        enable_full_determinism()
    device = select_device(loaded.config.training.backend)
    start_process_group(device)
    train(training_job(prepare(loaded, device)))
    # Not after a failure: the other ranks would report a lost connection before this one has told the cause.
    dist.destroy_process_group()


def load(config_path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read and validate the configuration, select and load its plugins. Needs no devices."""
    raw = read_config(Path(config_path), overrides)
    index = find_plugins()
    plugins = load_plugins(select_plugins(index, raw))
    config = build_config(raw, plugins.option_specs, installed=index.keys)
    return Loaded(config, plugins.with_options(config.options))


def prepare(loaded: Loaded, device: RankDevice) -> Session:
    """Everything up to the loaded weights. Collective, inside a process group."""
    config, plugins = loaded.config, loaded.plugins
    spec = plan_mesh(dist.get_world_size(), plugins.axis_requests())
    model = build_model(config, plugins)
    replace_modules(model, spec, plugins)
    template = copy.deepcopy(model)
    plan = make_plan(model, spec, config, plugins)
    agree(config, plugins, plan)
    mesh = Mesh(spec, device.device.type)
    if mesh.rank == 0:
        log.info("%s", spec.describe())
    model = apply_plan(model, mesh, plan, config, plugins)
    fill_weights(model, template, mesh, plan, config, plugins, device)
    model.train()
    seed_everything(config.training.seed, stream=batch_stream(mesh))
    return Session(config, plugins, mesh, template, plan, model, plugin_calls(model, mesh, plan, plugins), device)


def make_plan(model: nn.Module, mesh: MeshSpec, config: RunConfig, plugins: PluginSet) -> ShardingPlan:
    """Each strategy adds its part, in configured order."""
    precision = configured_precision(model, config)
    fragments: dict[str, PlanFragment] = {}
    for name in plugins.names:
        fragment = plugins.call_one(
            name, "hp_plan_sharding", model=model, mesh=mesh, precision=precision, plan_so_far=dict(fragments)
        )
        if fragment is not None:
            fragments[name] = fragment
    return merge_fragments(model, mesh, precision, fragments.items())


def configured_precision(model: nn.Module, config: RunConfig) -> Precision:
    """Parameters are stored as the model was built; gradients are always reduced in fp32."""
    storage = main_dtype(model)
    compute = torch.bfloat16 if config.mixed_precision.enabled else storage
    if config.mixed_precision.enabled and storage != torch.float32:
        raise ConfigError(
            f"mixed_precision.enabled keeps float32 parameters, but model.torch_dtype stores {storage}. "
            "Remove one of the two keys."
        )
    if not config.mixed_precision.enabled and storage in (torch.bfloat16, torch.float16):
        log.warning("parameters are stored in %s: small updates are lost. Consider mixed_precision.enabled.", storage)
    return Precision(storage=storage, compute=compute, reduce=torch.float32)


def build_model(config: RunConfig, plugins: PluginSet) -> nn.Module:
    """The model on the meta device: a plugin's, or what `model._target_` makes."""
    model_config = config.model
    if config.mixed_precision.enabled and model_config.torch_dtype is None:
        model_config = replace(model_config, torch_dtype="float32")
    found = plugins.first("hp_load_model", config=model_config)
    model: nn.Module = found[1] if found is not None else build_from_config(model_config)
    fault = loss_fault(model)
    if fault is not None:
        raise ModelError(fault)
    if config.dataset.packing:
        fault = packing_fault(model, micro_batch_size=config.training.micro_batch_size)
        if fault is not None:
            raise ModelError(f"dataset.packing: {fault}. Set dataset.packing: false.")
    return model


def replace_modules(model: nn.Module, mesh: MeshSpec, plugins: PluginSet) -> None:
    """Put the plugins' replacements in the place of the model's modules."""
    owners: dict[str, str] = {}
    for name, modules in plugins.call("hp_replace_modules", model=model, mesh=mesh):
        for fqn, module in sorted(modules.items()):
            if fqn in owners:
                raise PluginError(f'{fqn} is replaced by both "{owners[fqn]}" and "{name}"')
            owners[fqn] = name
            model.set_submodule(fqn, module, strict=True)


def agree(config: RunConfig, plugins: PluginSet, plan: ShardingPlan) -> None:
    """Raise PlanError unless all ranks have the same versions, plugins, order, configuration and plan. Collective."""
    mine = {
        "plugins and versions": plugins.describe(),
        "configuration": config_to_yaml(config),
        "plan": plan.digest(),
    }
    digests = {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in mine.items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    for rank, theirs in enumerate(everyone):
        for what in digests:
            if theirs[what] != everyone[0][what]:
                raise PlanError(
                    f"rank {rank} has another {what} than rank 0. Start all ranks from the same installation."
                )


def apply_plan(model: nn.Module, mesh: Mesh, plan: ShardingPlan, config: RunConfig, plugins: PluginSet) -> nn.Module:
    """Split the parameters over the model axes, install what the plan says, then let each strategy do its part.

    From the inside out, a block's forward: HF's own on local tensors, activation checkpointing, boundaries, FSDP.
    """
    mode = config.activation_checkpoint.mode
    blocks = decoder_blocks(model)
    if mode != "off" and not blocks:
        raise ModelError(f"activation_checkpoint.mode: {mode}, but {type(model).__name__} has no repeated blocks")
    for fqn, attributes in plan.attributes.items():
        for name, value in attributes.items():
            setattr(model.get_submodule(fqn), name, value)
    distribute_parameters(model, mesh, plan)
    compute_on_local_tensors(model, blocks, mesh, plan)
    apply_activation_checkpoint(blocks, mode)
    install_boundaries(model, mesh, plan)
    for name in plugins.names:
        model = plugins.call_one(name, "hp_apply_plan", model=model, mesh=mesh, plan=plan) or model
    return model


def fill_weights(
    model: nn.Module,
    template: nn.Module,
    mesh: Mesh,
    plan: ShardingPlan,
    config: RunConfig,
    plugins: PluginSet,
    device: RankDevice,
) -> None:
    """Give the parameters memory and values, each rank its own part: a plugin's, the checkpoint's or random ones."""
    materialize(model, plan, device.device)
    if plugins.first("hp_load_weights", model=model, plan=plan, config=config.model) is None:
        load_weights(model, plan, template, mesh.rank, seed=config.training.seed)


def batch_stream(mesh: Mesh) -> int:
    """A number that ranks share exactly when they see the same tokens: their place along data and sequence axes."""
    stream = 0
    for axis in mesh.spec.batch_axes:
        stream = stream * mesh.spec.size(axis) + mesh.compute_coordinates[axis]
    return stream


def plugin_calls(model: nn.Module, mesh: Mesh, plan: ShardingPlan, plugins: PluginSet) -> PluginCalls:
    """The hooks of a step, bound to this run."""

    def shard_batch(batch: Batch) -> Batch:
        for name in plugins.names:
            batch = plugins.call_one(name, "hp_shard_batch", batch=batch, mesh=mesh) or batch
        return batch

    def begin_micro_batch(index: int, count: int) -> None:
        plugins.call("hp_begin_micro_batch", model=model, index=index, count=count)

    def compute_loss(outputs: Any, batch: Batch) -> Mapping[str, Term]:
        terms: dict[str, Term] = {}
        owners: dict[str, str] = {}
        for name, more in plugins.call("hp_compute_loss", outputs=outputs, batch=batch, mesh=mesh, plan=plan):
            for term in more:
                if term in owners:
                    raise PluginError(f'the loss term "{term}" is computed by both "{owners[term]}" and "{name}"')
                owners[term] = name
            terms.update(more)
        if "ce" not in terms:
            terms["ce"] = cross_entropy(outputs, batch)
        return terms

    return PluginCalls(shard_batch, begin_micro_batch, compute_loss)


def training_job(session: Session) -> TrainingJob:
    """A prepared model together with its data and what a run writes."""
    config, mesh = session.config, session.mesh
    output_dir = Path(config.output_dir)
    if mesh.rank == 0:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
        (output_dir / "plan.json").write_text(json.dumps(session.plan.to_json(), indent=1), encoding="utf-8")
        (output_dir / "versions.json").write_text(json.dumps(session.plugins.versions(), indent=1), encoding="utf-8")

    def loader(for_eval: bool) -> BatchLoader:
        return build_loader(
            config,
            dp_rank=mesh.data_rank,
            dp_size=mesh.data_size,
            vocab_size=vocabulary_size(session.template),
            seed=config.training.seed,
            for_eval=for_eval,
        )

    def save_export_assets(folder: Path) -> None:
        save_assets(session.template, folder)
        if config.dataset.tokenizer is not None:
            tokenizer = load_tokenizer(
                config.dataset.tokenizer,
                local_files_only=config.model.local_files_only,
                trust_remote_code=config.model.trust_remote_code,
            )
            tokenizer.save_pretrained(folder)

    return TrainingJob(
        config=config,
        model=session.model,
        template=session.template,
        plan=session.plan,
        mesh=mesh,
        device=session.device,
        calls=session.calls,
        loader=loader(for_eval=False),
        eval_loader=loader(for_eval=True) if config.dataset.eval_path is not None else None,
        save_assets=save_export_assets,
        versions=session.plugins.versions(),
    )
