"""Fine-tune a Hugging Face classifier with LoRA, save its adapters only, and export it for from_pretrained.

pip install 'runnerkit[hf]' transformers peft
python examples/finetune_hf.py
torchrun --standalone --nproc-per-node=2 examples/finetune_hf.py --ddp
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import transformers
from torch import nn

from runnerkit import dl, utils

SUBJECTS = ["film", "plot", "cast", "music", "ending", "story", "camera", "script"]
GOOD = ["good", "great", "funny", "clever", "moving", "fresh"]
BAD = ["bad", "dull", "boring", "weak", "silly", "stale"]
INPUTS = ["input_ids", "attention_mask"]


def reviews(number: int, *, seed: int) -> tuple[list[str], list[int]]:
    """Make sentences such as "the plot is not very clever", and their labels: 1 if positive."""
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(number):
        is_good, is_negated = draw.random() < 0.5, draw.random() < 0.5
        words = ["the", draw.choice(SUBJECTS), "is", *(["not"] if is_negated else []), *draw.choice([[], ["very"]])]
        texts.append(" ".join([*words, draw.choice(GOOD if is_good else BAD)]))
        labels.append(int(is_good != is_negated))
    return texts, labels


def make_tokenizer() -> Any:
    """Create a tokenizer with one token for each word."""
    words = ["[PAD]", "[UNK]", "the", "is", "not", "very", *SUBJECTS, *GOOD, *BAD]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_loader(tokenizer: Any, number: int, *, seed: int, train: bool) -> dl.TensorLoader:
    """Load reviews as token numbers (N, T), their mask (N, T) and labels (N,)."""
    texts, labels = reviews(number, seed=seed)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    tensors = {**{key: tokens[key] for key in INPUTS}, "labels": torch.tensor(labels)}
    return dl.TensorLoader(tensors, batch_size=32, shuffle=train)


def make_model(vocab_size: int) -> Any:
    """Make a small BERT with adapters. A real one comes from ``BertForSequenceClassification.from_pretrained``."""
    config = transformers.BertConfig(
        vocab_size=vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    base = transformers.BertForSequenceClassification(config)
    # Of the base, only the classifier is trained, which a pretrained model does not have yet.
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value", "dense"])
    return peft.get_peft_model(base, lora)


def main(arguments: Sequence[str] | None = None) -> dl.SupervisedRunner:
    """Train, export, print the accuracy, and return the runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--logdir", type=Path, default=Path("logs/finetune_hf"))
    parser.add_argument("--cpu", action="store_true", help="do not use GPUs")
    parser.add_argument("--ddp", action="store_true", help="train in several processes")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)

    utils.set_global_seed(42)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    trained = [each for each in model.parameters() if each.requires_grad]
    runner = dl.SupervisedRunner(input_key=INPUTS, target_key="labels").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(trained, lr=3e-3),
        loaders={
            "train": make_loader(tokenizer, 2000, seed=0, train=True),
            "valid": make_loader(tokenizer, 500, seed=1, train=False),
        },
        callbacks=[
            dl.AccuracyCallback(input_key="logits", target_key="labels"),
            # Adapters and the classifier, with a hash of the frozen base, which a resumed run must have too.
            dl.CheckpointCallback(
                options.logdir,
                monitor="valid/accuracy",
                mode="max",
                content="runner",
                trainable_only=True,
                load_best_on_end=True,
            ),
        ],
        num_epochs=options.epochs,
        logdir=options.logdir,
        resume="auto",
        cpu=options.cpu,
        ddp=options.ddp,
    )
    if runner.engine.is_main_process:  # under torchrun, every process reaches this line
        export(runner.model, tokenizer, options.logdir / "hf")
        print(f"accuracy on unseen reviews: {runner.epoch_metrics['valid']['accuracy']:.1%}")
    return runner


def export(model: Any, tokenizer: Any, out: Path) -> None:
    """Export the model, and classify with what from_pretrained reads."""
    merged = model.merge_and_unload().cpu().eval()  # an ordinary BERT, with the adapters added to its weights
    utils.export_pretrained(merged, out)
    tokenizer.save_pretrained(out)

    texts = ["the plot is not very clever", "the camera is not dull"]
    tokens = transformers.AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="pt")
    read = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    with torch.no_grad():
        logits = read(**{key: tokens[key] for key in INPUTS}).logits
        assert torch.equal(logits, merged(**{key: tokens[key] for key in INPUTS}).logits)
    for text, probabilities in zip(texts, logits.softmax(dim=1), strict=True):
        print(f"{probabilities[1]:.0%} positive: {text}")


if __name__ == "__main__":
    main()
