"""Models of transformers: exports equal what from_pretrained reads, and start runs."""

import json
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp

from runnerkit import dl, utils
from runnerkit.torchvision_cpu import import_torchvision
from tests.engines.together import together
from tests.tiny import train

pytestmark = pytest.mark.slow  # transformers takes 5 s to import

SMALL = 4000  # bytes of a file, for several files
TOKENS = torch.arange(24).reshape(3, 8)
SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def transformers():
    import_torchvision()  # transformers imports torchvision, which may need the workaround
    import transformers

    return transformers


def gpt2(seed=0):
    """Return a language model of two layers, whose last layer is its embedding."""
    package = transformers()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return package.GPT2LMHeadModel(package.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, **SIZES))


def bert(seed=0):
    """Return a language model of two layers with a tied weight and a tied bias."""
    package = transformers()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, **SIZES}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return package.BertForMaskedLM(package.BertConfig(**sizes))


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def is_tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("make", [gpt2, bert])
@pytest.mark.parametrize("max_shard_size", ["5GB", SMALL])
def test_from_pretrained_gives_equal_logits(tmp_path, make, max_shard_size):
    """Also the base model without a head, and files and names equal those of save_pretrained."""
    model = make()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)

    out = utils.export_pretrained(model, tmp_path / "ours", max_shard_size=max_shard_size)

    read = type(model).from_pretrained(out)
    assert torch.equal(logits(read), logits(model))
    assert is_tied(read)
    base = transformers().AutoModel.from_pretrained(out)
    assert torch.equal(base.get_input_embeddings().weight, model.get_input_embeddings().weight)
    mine, theirs = ({each.name for each in folder.iterdir()} for folder in (out, tmp_path / "theirs"))
    assert mine == theirs
    if max_shard_size == SMALL:
        maps = [json.loads((each / "model.safetensors.index.json").read_text()) for each in (out, tmp_path / "theirs")]
        assert maps[0]["weight_map"].keys() == maps[1]["weight_map"].keys()
        assert maps[0]["metadata"]["total_size"] == maps[1]["metadata"]["total_size"]


@pytest.mark.parametrize("make", [gpt2, bert])
def test_a_run_starts_with_what_save_pretrained_wrote(tmp_path, make):
    """Their files hold tied weights once, and do not say of which names."""
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=SMALL)

    loaded = dl.SupervisedRunner().load(tmp_path, model=make(seed=9)).model

    assert torch.equal(logits(loaded), logits(model))
    assert is_tied(loaded)


class LanguageModelling(dl.Runner):
    def handle_batch(self, batch):
        self.batch_metrics["loss"] = self.model(batch, labels=batch).loss


def fit(model, folder, *, engine, lr=0.01, start=None):
    callbacks = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")]
    callbacks.append(dl.CheckpointCallback(folder, content="runner", resume_model=start))
    loaders = {"train": torch.utils.data.DataLoader(TOKENS, batch_size=1)}
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    options = {"optimizer": optimizer, "loaders": loaders, "callbacks": callbacks, "engine": engine}
    train(model, runner=LanguageModelling(), criterion=None, **options)
    return logits(model)


def two_runs(folder, make_engine):
    """Return the logits after a run, and those after another that starts with its export and learns nothing."""
    first = fit(gpt2(), folder / "first", engine=make_engine())
    if utils.get_rank() == 0:
        config = gpt2().config
        utils.export_pretrained(folder / "first", folder / "out", config=config, max_shard_size=SMALL, which="last")
    second = fit(gpt2(seed=9), folder / "second", engine=make_engine(), lr=0.0, start=folder / "out")
    return first, second


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_trained_model_goes_out_and_starts_the_next_run(tmp_path, num_processes):
    """The logdir and the model's config are enough for from_pretrained, and for a run, which has equal logits."""
    ddp = partial(dl.DistributedDataParallelEngine, 2, device="cpu")
    job = partial(two_runs, tmp_path, ddp if num_processes == 2 else dl.CPUEngine)

    trained, started = together(job) if num_processes == 2 else job()

    assert not torch.equal(trained, logits(gpt2()))
    assert torch.equal(started, trained)
    assert torch.equal(logits(transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out")), trained)


def test_a_sharded_checkpoint_with_both_names_of_a_tied_weight_is_read(tmp_path):
    """torch.distributed.checkpoint writes tied weights twice: the model tells which they are."""
    model = gpt2()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)

    out = utils.export_pretrained(tmp_path / "dcp", tmp_path / "out", config=model, max_shard_size=SMALL)

    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert "transformer.wte.weight" in weight_map and "lm_head.weight" not in weight_map
    read = type(model).from_pretrained(out)
    assert torch.equal(logits(read), logits(model))
    assert is_tied(read)


def test_the_dtype_is_that_of_the_weights(tmp_path):
    """from_pretrained converts to the dtype of the config, which may be that of the model before training."""
    model, config = gpt2().to(torch.float32), gpt2().config
    config.dtype = torch.bfloat16

    out = utils.export_pretrained(model, tmp_path / "out", config=config)

    assert torch.equal(logits(type(model).from_pretrained(out)), logits(model))
    half = utils.export_pretrained(gpt2().to(torch.bfloat16), tmp_path / "half")
    assert type(model).from_pretrained(half).dtype == torch.bfloat16


def test_options_of_generation_are_kept(tmp_path):
    model = gpt2()
    model.generation_config.max_new_tokens = 7

    out = utils.export_pretrained(model, tmp_path)

    assert type(model).from_pretrained(out).generation_config.max_new_tokens == 7


# By peft 0.21 with transformers 5.24.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_merged_before(tmp_path):
    """The error says how, and the merged model is read with the logits of the adapted one."""
    transformers()
    import peft

    adapted = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"], init_lora_weights=False))

    with pytest.raises(ValueError, match=r"adapters of peft beside .*: pass runner\.model\.merge_and_unload\(\)"):
        utils.export_pretrained(adapted, tmp_path / "out")
    merged = adapted.merge_and_unload()
    out = utils.export_pretrained(merged, tmp_path / "out")
    read = transformers().AutoModelForMaskedLM.from_pretrained(out)
    assert torch.equal(logits(read), logits(merged))
    assert not torch.equal(logits(read), logits(bert()))
