"""Faults that users of other systems met in training loops, and what is right."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from parity_cases import VOCAB, global_batch, make_checkpoint, reference_loss, reference_model, slice_rows
from run_helpers import column, metrics, train_ranks, write_run, write_tokens

from hp_core import IGNORE_INDEX, Batch, ConfigError, Mesh, Term, pipeline
from hp_core.mesh import plan_mesh
from hp_core.testing import RankPools, assert_close_gradients
from hp_core.training.device import select_device
from hp_core.training.loss import cross_entropy
from hp_core.training.step import LossSum, accumulate_gradients

FSDP = {"dp_shard_size": -1}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 17, 5, 40, 9, 2, 11, 23, 4, 31] * 4
    documents = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return write_tokens(tmp_path / "data.jsonl", [{"input_ids": ids} for ids in documents])


def of_tokens(valid: int, loss: float) -> tuple[Batch, Term]:
    """A batch with `valid` supervised tokens and a term in which each has the loss `loss`."""
    labels = torch.full((1, 8), IGNORE_INDEX)
    labels[0, :valid] = 5
    return Batch(labels, labels, labels, labels), Term(torch.tensor(valid * loss))


def oracle(per_rank: list[list[tuple[int, float]]]) -> float:
    """The logged loss of micro-batches given as (valid tokens, loss of each)."""
    mesh = Mesh(plan_mesh(dist.get_world_size(), []), "cpu")
    batches, terms = zip(*(of_tokens(*pair) for pair in per_rank[mesh.rank]), strict=True)
    losses = LossSum(list(batches), mesh, torch.device("cpu"))
    for term in terms:
        losses.add({"ce": term})
    return losses.result().loss


def test_ln01_ln02_the_loss_is_the_mean_over_tokens_not_over_micro_batches_or_ranks(pool: RankPools) -> None:
    """2 tokens of loss 1 and 6 of loss 3 are 2.5, never 2.0."""
    assert pool(1).run(oracle, [[(2, 1.0), (6, 3.0)]]) == [2.5]
    assert pool(2).run(oracle, [[(2, 1.0)], [(6, 3.0)]]) == [2.5, 2.5]
    assert pool(2).run(oracle, [[(2, 1.0), (6, 3.0)], [(0, 9.0), (8, 4.0)]]) == [3.25, 3.25]


def gradients_of(path: Path, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Gradients of the rows of the parity batch, split into micro-batches of these sizes."""
    session = pipeline.prepare(pipeline.load(path), select_device("gloo"))
    batch, micro, first = global_batch("llama"), [], 0
    for size in sizes:
        micro.append(slice_rows(batch, slice(first, first + size)))
        first += size
    accumulate_gradients(session.model, micro, session.mesh, session.plan, session.calls)
    return {n: p.grad.clone() for n, p in session.model.named_parameters() if p.grad is not None}


def test_ln04_any_partition_into_micro_batches_gives_the_same_gradients(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path
) -> None:
    path = write_run(tmp_path, llama, data)
    model = reference_model(llama)
    reference_loss(model, global_batch("llama")).backward()
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for sizes in ([1, 15], [3, 1, 12], [2, 5, 4, 5]):
        assert_close_gradients(expected, pool(1).run(gradients_of, path, sizes)[0])


@pytest.mark.parametrize("max_norm", ["null", "0.001"])
def test_ln05_parameter_changes_do_not_depend_on_the_number_of_ranks(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path, max_norm: str
) -> None:
    """Without clipping, and with a norm far above the limit, since clipping hides wrong scales."""
    path = write_run(tmp_path, llama, data, training={"train_iters": 3}, fsdp_config=FSDP)
    before = dict(reference_model(llama).named_parameters())
    changes = []
    for world in (1, 2, 4):
        after = pool(world).run(train_ranks, path, [f"training.max_grad_norm={max_norm}"])[0]
        changes.append({name: value - before[name].detach() for name, value in after.items()})
    for name, change in changes[0].items():
        for other in changes[1:]:
            torch.testing.assert_close(other[name], change, rtol=1e-3, atol=2e-7)


def test_ln06_a_chunk_without_targets_is_exactly_zero() -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    batch, _ = of_tokens(0, 0.0)
    batch = Batch(batch.input_ids[:, :4], batch.labels[:, :4], batch.position_ids, batch.document_ids)
    term = cross_entropy(SimpleNamespace(logits=logits), batch)
    term.total.backward()
    assert term.total.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_ln06_a_step_without_any_target_leaves_the_parameters_and_says_so(
    pool: RankPools, tmp_path: Path, llama: Path
) -> None:
    ids = list(range(3, 11))
    data = write_tokens(tmp_path / "masked.jsonl", [{"input_ids": ids, "labels": [IGNORE_INDEX] * 8}] * 8)
    optimizer = {"_target_": "torch.optim.AdamW", "weight_decay": 0.5}
    path = write_run(tmp_path, llama, data, training={"train_iters": 2}, optimizer=optimizer, fsdp_config=FSDP)
    before = dict(reference_model(llama).named_parameters())
    warnings, after = pool(2).run(train_and_listen, path)[0]
    assert warnings == [f"step {n}: no token carries loss; the parameters stay as they are" for n in (1, 2)]
    assert [record["loss"] for record in metrics(path)] == [0.0, 0.0]
    assert all(torch.equal(after[name], param) for name, param in before.items())


def train_and_listen(path: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hp_core.training.loop").addHandler(handler)
    return messages, train_ranks(path)


def test_ln07_filler_rows_count_nowhere(pool: RankPools, tmp_path: Path, llama: Path) -> None:
    """Three rows for steps of four, on two ranks: the same as three rows on one."""
    generator = torch.Generator().manual_seed(1)
    documents = [{"input_ids": torch.randint(3, VOCAB, (8,), generator=generator).tolist()} for _ in range(3)]
    data = write_tokens(tmp_path / "three.jsonl", documents)
    training = {"train_iters": None, "num_epochs": 1}
    path = write_run(tmp_path, llama, data, training=training, fsdp_config=FSDP)
    pool(2).run(train_ranks, path)
    (record,) = metrics(path)

    ids = torch.tensor([document["input_ids"] for document in documents])
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), IGNORE_INDEX)], dim=1)
    positions = torch.arange(8).expand(3, 8)
    model = reference_model(llama)
    expected = reference_loss(model, Batch(ids, labels, positions, torch.zeros_like(ids)))
    expected.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("micro", [4, 1])
def test_ln11_hg01_evaluation_loss_is_the_training_loss_of_the_same_rows(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path, micro: int
) -> None:
    """At learning rate 0, on 1 and 2 ranks (whose numbers of rows differ), accumulating or not."""
    training = {"train_iters": None, "num_epochs": 1, "global_batch_size": 16, "micro_batch_size": micro}
    losses = []
    for world in (1, 2):
        path = write_run(
            tmp_path,
            llama,
            data,
            training=training,
            dataset={"eval_path": str(data)},
            lr_scheduler={"lr": 0.0},
            fsdp_config=FSDP,
        )
        pool(world).run(train_ranks, path)
        train_losses, tokens = column(path, "loss"), column(path, "valid_tokens")
        mean = sum(loss * n for loss, n in zip(train_losses, tokens, strict=True)) / sum(tokens)
        (evaluated,) = column(path, "eval_loss")
        assert evaluated == pytest.approx(mean, rel=1e-6)
        assert column(path, "eval_tokens") == [sum(tokens)]
        losses.append(evaluated)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_gr11_replicas_stay_bit_identical_and_equal_to_one_rank(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path
) -> None:
    path = write_run(tmp_path, llama, data, training={"train_iters": 3}, fsdp_config={"dp_shard_size": 2})
    ranks = pool(4).run(train_ranks, path)
    single = pool(1).run(train_ranks, path, ["fsdp_config.dp_shard_size=1"])[0]
    for name, value in ranks[0].items():
        assert all(torch.equal(value, other[name]) for other in ranks[1:]), name
        torch.testing.assert_close(value, single[name], rtol=1e-4, atol=1e-6)


def test_gn04_the_logged_norm_does_not_depend_on_the_topology(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path
) -> None:
    norms = []
    for world, shard in ((1, 1), (4, 4), (4, 2), (4, 1)):
        path = write_run(tmp_path, llama, data, training={"train_iters": 1}, fsdp_config={"dp_shard_size": shard})
        pool(world).run(train_ranks, path)
        norms += column(path, "grad_norm")
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-6)


def test_ac03_the_learning_rate_moves_once_per_optimizer_step(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path
) -> None:
    scheduler = {"lr_decay_style": "linear", "lr_warmup_steps": 2, "lr": 0.01}
    rates = []
    for micro in (4, 1):
        training = {"train_iters": 8, "micro_batch_size": micro}
        path = write_run(tmp_path, llama, data, training=training, lr_scheduler=scheduler)
        pool(1).run(train_ranks, path)
        rates.append(column(path, "lr"))
    assert rates[0] == rates[1] == pytest.approx([0, 0.005, 0.01, 0.05 / 6, 0.04 / 6, 0.005, 0.02 / 6, 0.01 / 6])


def test_ac04_tokens_are_counted_once_whatever_the_ranks(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path
) -> None:
    path = write_run(tmp_path, llama, data, training={"train_iters": 2}, fsdp_config=FSDP)
    for world in (1, 2):
        pool(world).run(train_ranks, path)
        assert column(path, "tokens") == [4 * 8, 2 * 4 * 8]


def test_in06_a_random_model_starts_near_the_entropy_of_its_vocabulary(
    pool: RankPools, tmp_path: Path, llama: Path, data: Path
) -> None:
    model = {
        "_target_": "hp_core.models.HyperAutoModelForCausalLM.from_config",
        "config_path": str(llama),
        "pretrained_model_name_or_path": None,
    }
    path = write_run(tmp_path, llama, data, model=model, training={"train_iters": 1}, fsdp_config=FSDP)
    results = [pool(world).run(train_ranks, path)[0] for world in (1, 2, 4)]
    (record,) = metrics(path)
    assert record["loss"] == pytest.approx(math.log(VOCAB), abs=0.5)
    assert record["grad_norm"] > 0
    for name, value in results[0].items():
        for other in results[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_rs10_a_run_that_the_data_ends_has_a_final_checkpoint(pool: RankPools, tmp_path: Path, llama: Path) -> None:
    data = write_tokens(tmp_path / "short.jsonl", [{"input_ids": list(range(3, 11))}] * 12)
    training = {"train_iters": None, "num_epochs": 1}
    path = write_run(tmp_path, llama, data, training=training, checkpoint={"save_ckpt": True, "save_steps": 100})
    pool(1).run(train_ranks, path)
    assert column(path, "step") == [1, 2, 3]
    assert [folder.name for folder in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_run_that_nothing_would_end_is_refused(tmp_path: Path, llama: Path, data: Path) -> None:
    path = write_run(tmp_path, llama, data, training={"train_iters": None})
    with pytest.raises(ConfigError) as error:
        pipeline.run(path)
    assert str(error.value) == ("training: nothing says when to stop. Set train_iters, train_samples or num_epochs.")


def test_check_nan_inf_names_the_parameter(pool: RankPools, tmp_path: Path, llama: Path, data: Path) -> None:
    path = write_run(tmp_path, llama, data, debug={"check_nan_inf": True}, lr_scheduler={"lr": 1e30})
    with pytest.raises(
        ValueError, match=r"step 2: loss nan, gradient norm nan; first gradient that is not finite: model\.embed"
    ):
        pool(1).run(train_ranks, path)
