"""Random weights that do not depend on the topology: HF's own `_init_weights`, drawn whole, then sliced.

Every module is initialised as in a plain HF build, children before parents and each by the (sub-)model that it
belongs to, but with a random state of its own, seeded from the run's seed and the module's FQN. Only the parameters
that the module's turn writes exist at that time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import ModelError
from hp_core.models.build import INITIAL_VALUES, modules_in_init_order
from hp_core.models.writes import TensorWrites, storage_key
from hp_core.plan import ShardingPlan


def init_shards(
    template: PreTrainedModel,
    plan: ShardingPlan,
    rank: int,
    seed: int,
    write: Callable[[str, torch.Tensor], None],
    names: Collection[str] | None = None,
) -> None:
    """Draw random weights and hand this rank's part of each parameter to `write(fqn, local tensor)`.

    `template` is the model from `build_on_meta`, never sharded; it is the same afterwards. `names` (FQNs of the plan)
    limits the work to these parameters, whose values are the same as in a full init. Tied parameters come once. What
    `_init_weights` leaves alone keeps the value that its constructor gave it: as `build_on_meta` recorded it, or as
    `reset_parameters` gives it in torch's own modules. Buffers have their values already.

    Needs memory for the parameters that one module writes, mostly its own. Changes no global random state. Raises
    ModelError for a parameter that nothing gives values to.
    """
    canonical = {alias: fqn for fqn, param in plan.params.items() for alias in (fqn, *param.tied_names)}
    initial: Mapping[str, torch.Tensor] = getattr(template, INITIAL_VALUES, {})
    with _untied(template) as tied_names, torch.no_grad(), torch.random.fork_rng(devices=[]):
        parameters = _Parameters(template)
        wanted = {
            key: canonical[name]
            for key, name in parameters.names.items()
            if name in canonical and name not in tied_names and (names is None or canonical[name] in names)
        }
        writers = {fqn: keys for fqn, keys in _rehearse(template, parameters).items() if keys & wanted.keys()}
        last_writer = {key: fqn for fqn, keys in writers.items() for key in keys}
        for fqn, module, owner in modules_in_init_order(template):
            for key in writers.get(fqn, ()):
                parameters.materialise(key, initial)
            if fqn in writers:
                _init_module(fqn, module, owner, seed)
            for key in writers.get(fqn, ()):
                if last_writer[key] == fqn:
                    value = parameters.take(key)
                    if key in wanted:
                        if value.is_meta or bool(value.isnan().any()):
                            raise ModelError(
                                f"{type(owner).__name__}: _init_weights gives no values to parameter {wanted[key]}. "
                                "Write it there, or give it values in the constructor."
                            )
                        write(wanted[key], plan.part(wanted[key], rank, value))


class _Parameters:
    """The parameters of the template, by id, with every place that holds each, so that a real one can stand in."""

    def __init__(self, template: PreTrainedModel) -> None:
        self.names: dict[int, str] = {}
        self.by_storage: dict[int, int] = {}
        self._meta: dict[int, nn.Parameter] = {}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for fqn, module in template.named_modules():
            for name, param in module._parameters.items():
                if param is not None:
                    key = id(param)
                    self.names.setdefault(key, f"{fqn}.{name}" if fqn else name)
                    self.by_storage[storage_key(param)] = key
                    self._meta[key] = param
                    self._places.setdefault(key, []).append((module, name))

    def materialise(self, key: int, initial: Mapping[str, torch.Tensor]) -> None:
        """Put a real parameter in place, unless it is there, with its constructor's values or else NaN."""
        module, name = self._places[key][0]
        if module._parameters[name] is self._meta[key]:
            meta = self._meta[key]
            value = initial.get(self.names[key], torch.tensor(float("nan")))
            real = torch.empty(meta.shape, dtype=meta.dtype).copy_(value)
            self._put(key, nn.Parameter(real, requires_grad=meta.requires_grad))

    def take(self, key: int) -> torch.Tensor:
        """The values of a parameter that has become complete; the meta parameter comes back to its places."""
        module, name = self._places[key][0]
        param = module._parameters[name]
        assert param is not None
        self._put(key, self._meta[key])
        return param.detach()

    def _put(self, key: int, param: nn.Parameter) -> None:
        for module, name in self._places[key]:
            module._parameters[name] = param


def _rehearse(template: PreTrainedModel, parameters: _Parameters) -> dict[str, set[int]]:
    """Module FQN to the parameters that its turn writes, found on the meta device: its own, and others' (GPT-2's
    attention writes its output projection)."""
    writers = {}
    for fqn, module, owner in modules_in_init_order(template):
        own = dict(module._parameters)
        with _spare_buffers(module), TensorWrites() as writes:
            try:
                owner._init_weights(module)
            except (NotImplementedError, RuntimeError):
                # It reads values, which meta tensors do not have: taken to write its own parameters only. What is
                # then left without values is an error by name.
                writes.written.clear()
        module._parameters.update(own)
        foreign = {parameters.by_storage[key] for key in writes.written if key in parameters.by_storage}
        writers[fqn] = {id(param) for param in own.values() if param is not None} | foreign
    return writers


def _init_module(fqn: str, module: nn.Module, owner: PreTrainedModel, seed: int) -> None:
    """Let HF initialise one module, whose parameters are real, from the random state that belongs to its name."""
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    generator = torch.default_generator
    with _spare_buffers(module):
        generator.manual_seed(int.from_bytes(digest[:8], "little"))
        owner._init_weights(module)
        incomplete = any(bool(param.isnan().any()) for param in module.parameters(recurse=False))
        reset = getattr(module, "reset_parameters", None)
        if incomplete and reset is not None and type(module).__module__.startswith("torch.nn."):
            reset()
            owner._init_weights(module)


@contextmanager
def _untied(template: PreTrainedModel) -> Iterator[frozenset[str]]:
    """HF initialises before it ties: until the end, the names that are tied to others hold parameters of their own.

    Without it the head, which comes last, would draw the embedding again and fill its padding row.
    """
    tied: dict[str, nn.Parameter] = {}
    for target, source in template.all_tied_weights_keys.items():
        param = template.get_parameter(target)
        if param is template.get_parameter(source):
            tied[target] = param
            _set_parameter(template, target, nn.Parameter(torch.empty_like(param), requires_grad=param.requires_grad))
    try:
        yield frozenset(tied)
    finally:
        for target, param in tied.items():
            _set_parameter(template, target, param)


def _set_parameter(model: nn.Module, fqn: str, param: nn.Parameter) -> None:
    parent, _, name = fqn.rpartition(".")
    model.get_submodule(parent)._parameters[name] = param


@contextmanager
def _spare_buffers(module: nn.Module) -> Iterator[None]:
    """Let `_init_weights` write to copies of the buffers of `module`."""
    buffers = dict(module._buffers)
    module._buffers.update({name: value.clone() for name, value in buffers.items() if value is not None})
    try:
        yield
    finally:
        module._buffers.update(buffers)
