"""TRL's own trainers, asked for the loss of one batch and its gradients. What is compared are tokens, so that theirs are ours."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from llamatrain.adapters import peft as peft_files
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.safetensors import write_safetensors
from tests.adapters.test_peft import theirs
from tests.helpers.preferences import NUMBERS, Batch, Found, H, adapter_of

WORDS = ["<pad>", "<s>", "</s>", "a", "b", "c"]


def found(case: str, batch: Batch, folder: Path) -> Found:
    warnings.simplefilter("ignore")
    kind = case.partition("-")[0]
    peft_files.write_peft(folder / "given", adapter_of(case), "", H)
    trainer = made(kind, NUMBERS[kind], folder)
    for parameter in trainer.model.parameters():
        parameter.grad = None
    loss = trainer.compute_loss(trainer.model, told(kind, batch))
    loss.backward()
    trained = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert trained and all(".default." in name for name in trained)
    gradients = {name.replace(".default.", "."): each.grad.numpy() for name, each in trained.items()}
    (folder / "made").mkdir(exist_ok=True)
    write_safetensors(folder / "made" / peft_files.WEIGHTS, gradients)
    (folder / "made" / peft_files.CONFIG).write_bytes((folder / "given" / peft_files.CONFIG).read_bytes())
    pairs = read_adapter(folder / "made", H).pairs
    return Found(
        float(loss.detach()),
        {name: (pair.a, pair.b) for name, pair in pairs.items()},
        margin_of(kind, trainer),
    )


def margin_of(kind: str, trainer: Any) -> float:
    if kind in ("dpo", "kto"):
        return float(trainer._metrics["train"]["rewards/margins"][-1])
    return float(trainer._stored_metrics["train"]["rewards/margins"][-1])


def made(kind: str, numbers: dict[str, float], folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    trl, library = pytest.importorskip("trl"), pytest.importorskip("peft")
    model = library.PeftModel.from_pretrained(theirs(H), os.fspath(folder / "given"), is_trainable=True)
    said = {
        "output_dir": os.fspath(folder / "out"),
        "report_to": [],
        "use_cpu": True,
        "per_device_train_batch_size": 2,
    }
    said |= {"gradient_checkpointing": False, "bf16": False, "max_length": 512}
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    if kind == "dpo":
        config, trainer = trl.DPOConfig(**said, **numbers), trl.DPOTrainer
    elif kind == "kto":
        config, trainer = trl.KTOConfig(**said, **numbers), trl.KTOTrainer
        row = {"prompt": "a", "completion": "b", "label": True}
    elif kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        config, trainer = ORPOConfig(**said, **numbers), ORPOTrainer
    else:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        simpo = {
            "loss_type": "simpo",
            "cpo_alpha": 0.0,
            "beta": numbers["beta"],
            "simpo_gamma": numbers["gamma"],
        }
        config, trainer = CPOConfig(**said, **simpo), CPOTrainer
    made = trainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list([row] * 2),
        processing_class=tokenizer(),
    )
    if "ref" in made.model.peft_config:
        made.model.delete_adapter(
            "ref"
        )  # the adapter as it was given; our reference is the model without one
    for name, each in made.model.named_parameters():
        each.requires_grad_("lora_" in name)
    return made


def tokenizer() -> Any:
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    inner = library.Tokenizer(
        library.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a")
    )
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    pad, bos, eos = WORDS[:3]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, bos_token=bos, eos_token=eos
    )


def told(kind: str, batch: Batch) -> dict[str, Any]:
    """The batch as a trainer's collator has it."""
    if kind == "dpo":
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return dict(
            DataCollatorForPreference(pad_token_id=0)([dict(zip(names, each, strict=True)) for each in batch])
        )
    if kind == "kto":
        from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

        before = [batch[-1], *batch[:-1]]
        rows = [
            {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label}
            for (prompt, answer, label), (_, other, _) in zip(batch, before, strict=True)
        ]
        return dict(DataCollatorForUnpairedPreference(pad_token_id=0)(rows))
    from trl.experimental.utils import DPODataCollatorWithPadding

    rows = []
    for prompt, *answers in batch:
        row = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            ids = prompt + answer
            row |= {f"{name}_input_ids": ids, f"{name}_attention_mask": [1] * len(ids)}
            row[f"{name}_labels"] = [-100] * len(prompt) + answer
        rows.append(row)
    return dict(DPODataCollatorWithPadding(pad_token_id=0)(rows))
