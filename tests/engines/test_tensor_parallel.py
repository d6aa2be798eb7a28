"""Tensor parallelism with FSDP2: every mesh of four processes gives the losses and weights of one process."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from benchmarks.results import write_section
from runnerkit import dl, utils
from runnerkit.engines.sharding.tensor_plan import check_patterns, parallelize
from runnerkit.torchvision_cpu import import_torchvision
from tests.engines.tensor_parallel_job import (
    LENGTH,
    NUM_TOKENS,
    PLAN,
    SEED,
    Block,
    Runner,
    Transformer,
    data,
    mesh,
    train,
)
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.tiny import weights


class BySamples(Runner):
    """A runner whose loss is a mean over samples and positions; a batch weighs as many as it has samples."""

    weights_tokens = False


MESHES = {"2 x 2": (2, 4), "4 x 1": (1, 2), "1 x 4": (4, 8)}  # by data x tensor: tensor_parallel, batch_size
SETTINGS = {
    "token weights": {},
    "sample weights": {"runner": BySamples},
    "clipping": {"clip": 0.1},
    "accumulation": {"accumulate": 2},
    "clipping, accumulation, dropout": {"clip": 0.1, "accumulate": 2, "dropout": 0.2},
}
DROPOUT = "clipping, accumulation, dropout"
# Single settings of other meshes add nothing: test_gradient_law.py has them for "4 x 1", which divides no weights.
LAW = [(name, each) for name in MESHES for each in SETTINGS if name == "2 x 2" or each in ("token weights", DROPOUT)]
PAGE = Path(__file__).parents[2] / "docs" / "large_models.md"
HIDDEN = Shard(1)  # of (N, length, width)
SEQUENCE_PLAN = {
    "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=HIDDEN, use_local_output=True),
    "norm": SequenceParallel(use_local_output=True),
    "blocks.*.norms.*": SequenceParallel(use_local_output=True),
    "blocks.*.qkv.*": ColwiseParallel(input_layouts=HIDDEN),
    "blocks.*.out": RowwiseParallel(output_layouts=HIDDEN),
    "blocks.*.up": ColwiseParallel(input_layouts=HIDDEN),
    "blocks.*.down": RowwiseParallel(output_layouts=HIDDEN),
    "head": ColwiseParallel(input_layouts=HIDDEN, output_layouts=Replicate()),
}


def make(kind=Transformer, **kwargs):
    return utils.initialize_parameters(kind(**kwargs), seed=SEED)


def on_meta(kind=Transformer, **kwargs):
    with utils.parameters_on_meta():
        return kind(**kwargs)


def run(engine, *, model=None, **kwargs):
    model = model or make(dropout=kwargs.get("dropout", 0.0))
    trained = train(engine, model=model, **kwargs)
    return weights(model), trained.experiment_metrics, trained.sample_step


class Masks(dl.Callback):
    """A callback that records what the dropouts drop in the first batch."""

    def __init__(self):
        super().__init__()
        self.dropped = {}

    def on_stage_start(self, runner):
        for name, module in runner.current_run.stage.training_model.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(lambda module, args, output, name=name: self._see(name, args[0], output))

    def _see(self, name, given, output):
        self.dropped.setdefault(name, ((output == 0) & (given != 0)).tolist())

    def on_stage_end(self, runner):
        self.dropped = runner.engine.gather_object(self.dropped)


def see_dropouts():
    masks = Masks()
    plan = {**PLAN, "blocks.*.inner_dropout": "random_apart"}
    train(mesh(4, 2, plan=plan), dropout=0.5, inner_dropout=0.5, batch_size=4, num_epochs=1, callbacks={"masks": masks})
    return masks.dropped


def train_on_meta(folder):
    model = on_meta()
    save = dl.CheckpointCallback(folder, content="runner")
    runner = train(mesh(4, 2, init="meta"), model=model, batch_size=4, callbacks={"save": save})
    runner.load(folder, which="last")
    return weights(model), runner.experiment_metrics, runner.sample_step


def train_everything(folder):
    found = {}
    for name, setting in LAW:
        size, batch_size = MESHES[name]
        found[name, setting] = run(mesh(4, size), batch_size=batch_size, **SETTINGS[setting])
    found["4", "dropout"] = run(dl.DistributedDataParallelEngine(device="cpu"), batch_size=2, **SETTINGS[DROPOUT])
    found["2 x 1 x 2", "replicas"] = run(mesh(4, 2, replicas=2), batch_size=4)
    found["2 x 2", "sequence parallel"] = run(mesh(4, 2, plan=SEQUENCE_PLAN), batch_size=4)
    found["2 x 2", "meta"] = train_on_meta(folder / "meta")
    found["2 x 2", "checkpointed"] = run(mesh(4, 2, checkpoint_modules=[Block]), batch_size=4)
    found["dropouts"] = see_dropouts()
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_mesh_gives_losses_and_weights_of_one_process(tmp_path):
    """They agree to 1e-6 with weights of tokens and of samples, clipping and accumulation; also with replicas, sequence
    parallelism, recomputed activations and without a whole model. With dropout they are those of DDP, or of one
    process, whose number of processes divides the samples as the mesh does, and so draws the same.

    Each sample counts once: 26 are trained on, and 13 evaluated, by 8.
    """
    trained = together(lambda: train_everything(tmp_path), num_processes=4)
    assert_random_numbers_agree_where_activations_do(trained.pop("dropouts"))
    expected = {setting: run(dl.CPUEngine(), **arguments) for setting, arguments in SETTINGS.items()}
    ddp = partial(run, dl.DistributedDataParallelEngine(device="cpu"), batch_size=4, **SETTINGS[DROPOUT])
    with_dropout = {
        "1 x 4": expected.pop(DROPOUT), "2 x 2": together(ddp, num_processes=2), "4 x 1": trained.pop(("4", "dropout")),
    }  # fmt: skip
    seen = {}

    for (name, setting), (found, metrics, num_samples) in trained.items():
        one = with_dropout[name] if setting == DROPOUT else expected.get(setting, expected["token weights"])
        theirs, their_metrics, their_samples = one
        seen[name, setting] = (found - theirs).abs().max()
        assert seen[name, setting] < 1e-6, (name, setting)
        assert num_samples == their_samples == 52, (name, setting)
        for epoch, loaders in their_metrics.items():
            for key, values in loaders.items():
                assert metrics[epoch][key] == pytest.approx(values, abs=1e-6), (name, setting, key)
    assert len(trained) == len(LAW) + 4
    if "RUNNERKIT_WRITE_PARITY_TABLE" in os.environ:
        write_section("meshes", table(seen), PAGE, command="make parity")


def table(seen):
    """Return a Markdown table with a row for each setting and mesh."""
    lines = ["| data x tensor | with | largest difference of a weight |", "|---|---|---:|"]
    return "\n".join(lines + [f"| {name} | {setting} | {found:.0e} |" for (name, setting), found in seen.items()])


def assert_random_numbers_agree_where_activations_do(dropped):
    """Ranks 0 and 1 work on the same samples; within a divided network, "random_apart" gives each its own numbers."""
    names = ("dropout", "inner_dropout")
    assert dropped[0].keys() == {f"blocks.{block}.{name}" for block in range(2) for name in names}
    for name, mask in dropped[0].items():
        assert (dropped[1][name] == mask) == ("inner" not in name), name
        assert dropped[2][name] != mask, "rank 2 works on other samples"
        assert (dropped[3][name] == dropped[2][name]) == ("inner" not in name), name


# Checkpoints.


def save_run(folder, engine, *, asynchronous=False, callbacks=None, **kwargs):
    save = dl.CheckpointCallback(folder, content="runner", every_steps=2, asynchronous=asynchronous)
    return run(engine, logdir=folder, callbacks={"save": save, **(callbacks or {})}, **kwargs)


def save_and_resume(folder):
    """Return the weights of a run of whole models that was resumed."""

    def save(name, *, dropout=0.2, **kwargs):
        model = on_meta(dropout=dropout, inner_dropout=dropout)
        save_run(folder / name, mesh(4, 2, init="meta"), model=model, batch_size=4, **kwargs)

    save("all")
    try:
        save("killed", callbacks={"stop": Interrupt(6)})
    except KeyboardInterrupt:
        save("killed", resume=folder / "killed")
    save("first", dropout=0.0, num_epochs=1)
    whole = folder / "whole"
    save_run(whole, mesh(4, 2, sharded_checkpoints=True), batch_size=4, num_epochs=1)
    return save_run(whole, mesh(4, 2, sharded_checkpoints=True), batch_size=4, resume=whole)[0]


def resume_on(folder, name):
    size, batch_size = MESHES[name]
    save_run(folder, mesh(4, size, init="meta"), model=on_meta(), batch_size=batch_size, resume=folder)


def last(folder):
    return utils.load_checkpoint(folder / "checkpoints" / "last")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_one_mesh_is_resumed_on_any_other(tmp_path):
    """On the same mesh bit for bit, with dropout, interrupted within an epoch; on others to 1e-6."""
    whole = together(lambda: save_and_resume(tmp_path), num_processes=4)
    others = MESHES.keys() - {"2 x 2"}
    for name in others:
        shutil.copytree(tmp_path / "first", tmp_path / name, symlinks=True)
    together(lambda: [resume_on(tmp_path / name, name) for name in sorted(others)], num_processes=4)
    shutil.copytree(tmp_path / "first", tmp_path / "one", symlinks=True)
    (tmp_path / "one" / "checkpoints" / "last").unlink()
    found, *_ = save_run(tmp_path / "one", dl.CPUEngine(), resume=tmp_path / "one")

    for part in ("model_state_dict", "optimizer_state_dict"):
        torch.testing.assert_close(last(tmp_path / "killed")[part], last(tmp_path / "all")[part], rtol=0, atol=0)
    expected, *_ = run(dl.CPUEngine())
    assert (found - expected).abs().max() < 1e-6
    assert (whole - expected).abs().max() < 1e-6
    for name in others:
        model = make()
        model.load_state_dict(last(tmp_path / name)["model_state_dict"])
        assert (weights(model) - expected).abs().max() < 1e-6, name


# Parameters that the plan does not divide.


class Inner(torch.nn.Module):
    """A feed-forward network with a learned activation between its divided layers, and a norm of each half.

    Its outer layers may share a weight. They have an even number of tokens, one more than needed.
    """

    def __init__(self, tied):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(NUM_TOKENS + 1, 12), torch.nn.Linear(12, NUM_TOKENS + 1)
        if tied:
            self.head.weight = self.tokens.weight
        self.up, self.down = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)
        self.act, self.norm = torch.nn.PReLU(init=0.1), torch.nn.RMSNorm(6)

    def forward(self, tokens):
        """Map (N, length) tokens to (N, length, tokens) logits."""
        x = self.tokens(tokens)
        heads = self.norm(self.act(self.up(x)).unflatten(-1, (-1, 6)))
        return self.head(x + self.down(heads.flatten(-2)))


class LowTokens(Runner):
    """A runner whose targets are those that the first half of the outputs concerns."""

    def handle_batch(self, batch):
        """Predict each token, modulo 6, from those before it."""
        super().handle_batch((batch[0], batch[1] % 6))


def log_norms():
    """Return a callback that logs the norm of all gradients, and of each parameter's."""
    return {"norms": dl.GradNormCallback(per_parameter=True)}


def assert_same_norms(found, expected):
    """Check the norms of all nine parameters, up to rounding."""
    norms = {key: value for key, value in expected.items() if key.startswith("gradient_norm")}
    assert len(norms) == 1 + 9
    assert {key: found[key] for key in norms} == pytest.approx(norms, rel=1e-4, abs=1e-5)


INNER_PLAN = {"up": "colwise", "down": "rowwise"}


def run_inner(engine, *, tied=False, **kwargs):
    return run(engine, model=make(Inner, tied=tied), **kwargs)


def run_tied_on_meta(plan):
    engine = mesh(4, 2, plan=plan, init="meta", shard_modules=[torch.nn.RMSNorm])
    return train(engine, model=on_meta(Inner, tied=True), batch_size=4).experiment_metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parameters_that_the_plan_does_not_divide():
    """Of parameters on divided activations, each process has a part of the gradient, which "sum_gradients" adds up.
    Norms of divided, summed and whole gradients are those of one process, before clipping.

    Tied weights stay tied, though torch divides the parameter of each module by itself.

    Plans that would train another model are accepted by torch; the first step refuses them.
    """

    def refused(plan, *, tied=False, **kwargs):
        model = make(Inner, tied=tied)
        try:
            train(mesh(4, 2, plan=plan, shard_modules=None), model=model, batch_size=4, **kwargs)
        except ValueError as error:
            return str(error)

    def work():
        plan = {**INNER_PLAN, "norm": "replicated_with_grad_allreduce", "act": "sum_gradients"}
        tied = {**plan, "tokens": "embedding", "head": "colwise_gather"}
        return (
            run_inner(
                mesh(4, 2, plan=plan, shard_modules=[torch.nn.Linear]), batch_size=4, clip=0.1, callbacks=log_norms()
            ),
            run_inner(mesh(4, 2, plan=tied, shard_modules=None), batch_size=4, tied=True),
            run_tied_on_meta(tied),
            refused({**INNER_PLAN, "act": "sum_gradients"}),
            refused({**plan, "head": "colwise"}, runner=LowTokens),
            refused({**plan, "tokens": "embedding"}, tied=True),
        )

    sums, tied, tied_on_meta, *errors = together(work, num_processes=4)

    expected, metrics, _ = run_inner(dl.CPUEngine(), clip=0.1, callbacks=log_norms())
    assert_same_norms(sums[1][2]["train"], metrics[2]["train"])
    assert (sums[0] - expected).abs().max() < 1e-6
    assert sums[1][2]["train"]["loss"] == pytest.approx(metrics[2]["train"]["loss"], abs=1e-6)
    expected, metrics, _ = run_inner(dl.CPUEngine(), tied=True)
    assert (tied[0] - expected).abs().max() < 5e-5  # an embedding's values are large for a head: steps amplify rounding
    for each in (tied[1], tied_on_meta):
        assert each[2]["train"]["loss"] == pytest.approx(metrics[2]["train"]["loss"], abs=5e-5)
    assert "the gradient of 'norm.weight' differs between the processes that work on the s" in errors[0]
    assert "the loss differs between the processes that work on the same samples" in errors[1]
    assert "plan: tokens.weight and head.weight are one parameter, which must be divided" in errors[2]


class Answers(Runner):
    """A runner that predicts the next tokens."""

    def predict_batch(self, batch):
        """Return logits."""
        return self.model(batch[0])


def test_each_sample_is_predicted_once():
    """Processes that work on the same samples predict the same."""
    model = make()
    loader = torch.utils.data.DataLoader(data(13), batch_size=4)

    found = [*Answers(model).predict_loader(loader=loader, engine=mesh(4, 2))]

    expected = [*Answers(model).predict_loader(loader=loader, engine=dl.CPUEngine())]
    assert torch.cat(found).shape == (13, LENGTH, NUM_TOKENS)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=1e-5)


# Models of other libraries.


def make_llama(tied):
    import_torchvision()  # transformers imports torchvision, which may need the workaround
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_TOKENS, **sizes, **heads, tie_word_embeddings=tied))


class LlamaRunner(dl.Runner):
    """A runner of a model that computes its own loss."""

    def handle_batch(self, batch):
        """Predict each token from those before it."""
        self.batch_metrics["loss"] = self.model(input_ids=batch[0], labels=batch[0]).loss


def train_llama(engine=None, *, tied, **kwargs):
    model = make(make_llama, tied=tied) if engine else on_meta(make_llama, tied=tied)
    if engine is None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        engine = mesh(4, 2, plan=None, shard_modules=[LlamaDecoderLayer], init="meta")
    return train(engine, runner=LlamaRunner, model=model, seed=SEED, **kwargs).experiment_metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_llama_is_divided_by_its_own_plan_and_starts_with_its_own_initialisation():
    """With grouped-query attention, a divided embedding and head, shared or not, and without a whole model."""
    pytest.importorskip("transformers")

    metrics = together(lambda: [train_llama(batch_size=4, tied=tied) for tied in (False, True)], num_processes=4)

    for tied in (False, True):
        for epoch, loaders in train_llama(dl.CPUEngine(), tied=tied).items():
            for key, values in loaders.items():
                assert metrics[tied][epoch][key] == pytest.approx(values, abs=1e-6), (tied, key)


# Errors.


class Two:
    """A mesh of two processes, as far as the checks need one."""

    def size(self):
        """Return the number of processes."""
        return 2

    def get_local_rank(self):
        """Return the first rank."""
        return 0


NARROW = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Embedding(1, 4))


class Adapted(torch.nn.Module):
    """A layer of peft's, as far as the checks read one."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self):
        super().__init__()
        self.base_layer = torch.nn.Linear(4, 4)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 4, bias=False)})


ADAPTED = torch.nn.Sequential(Adapted())
OUTSIDE = torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2))  # its output layer is never called


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (None, None, r"tensor_parallel=2 needs plan=\{.*\}, as Transformer does not bring one"),
        (None, {"head": "columns"}, r"'head' has the unknown style 'columns'; use .* one of colwise, rowwise"),
        (None, {"*norm*": "sequence"}, "'blocks.0.norms' is a ModuleList .* but SequenceParallel is the style of one"),
        (None, {"head": "colwise"}, "plan: 'head' has out_features=11, which tensor_parallel=2 does not divide"),
        (NARROW, {"0": "colwise_gather"}, "'0' has out_features=1, which tensor_parallel=2 does not divide"),
        (NARROW, {"1": "embedding"}, "'1' has num_embeddings=1, which tensor_parallel=2 does not divide"),
        (None, {"norm": "colwise"}, "plan: ColwiseParallel cannot divide 'norm', a LayerNorm"),
        (None, {"norm": "random_apart", "n*m": "random_apart"}, r"plan: 'norm' and 'n\*m' both give 'norm' a style"),
        (
            ADAPTED,
            {"0": "colwise"},
            r"'0' has adapters, and so several layers: give those .* '\*.up.lora_B.*': 'colwise'",
        ),
        (ADAPTED, {"0.base_layer": "colwise"}, "0.base_layer and the adapters 0.lora_B must be divided alike"),
        (ADAPTED, {"0.base_layer": "rowwise"}, "0.base_layer and the adapters 0.lora_A must be divided alike"),
        (ADAPTED, {"*lora_B.*": "colwise"}, "0.base_layer and the adapters 0.lora_B must be divided alike"),
        (OUTSIDE, {"0.out_proj": "rowwise"}, "MultiheadAttention computes with the weights of '0.out_proj' itself"),
    ],
)
def test_plans_that_do_not_fit_are_named(model, plan, message):
    """The error says what would fit; torch does not name the layer."""
    with pytest.raises(ValueError, match=message):
        parallelize(model or Transformer(), Two(), plan)


def test_a_pattern_must_match_in_one_of_the_models():
    """A plan of a generator does not concern the discriminator."""
    models = [torch.nn.Sequential(torch.nn.Conv1d(1, 1, 1)), Transformer()]
    unmatched = [parallelize(each, Two(), {"layers.*": "colwise", "*.conv": "colwise"}) for each in models]

    check_patterns([{"a", "b"}, {"c"}], models)
    with pytest.raises(ValueError, match=r"no module is named '\*\.conv'; the model has 0, tokens, blocks, blocks.0"):
        check_patterns(unmatched, models)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel must divide the number of processes, got 3 for 4"),
        ({"replicas": 2, "tensor_parallel": 4}, "replicas=2 times tensor_parallel=4 must divide the number of"),
        ({}, "plan acts on the processes of tensor_parallel=2 or more"),
    ],
)
def test_bad_arguments_are_refused_where_they_are_given(arguments, message):
    """The errors are raised before processes start."""
    with pytest.raises(ValueError, match=message):
        dl.FullyShardedDataParallelEngine(4, plan=PLAN, **arguments)
