"""Programs with another library's Trainer, or with checkpoints of their own."""

from __future__ import annotations

import json
import random

from tests.programs.edits import add_after, change, drop
from tests.programs.own_loops import EXAMPLES, EXAMPLES_COMMIT, START
from tests.programs.program import TRAINER_LINES, Program, saved

VOCABULARY = 50
SMALL_LLAMA = "dim=32, n_layers=2, n_heads=4, vocab_size=256"


def _words(count: int) -> str:
    """Return a text of words drawn at random, in lines of ten."""
    draw = random.Random(1)
    words = [f"w{draw.randrange(VOCABULARY)}" for _ in range(count)]
    return "".join(f"{' '.join(words[at : at + 10])}\n" for at in range(0, count, 10))


def _tokenizer() -> str:
    """Return the file of a tokenizer of those words."""
    model = {"type": "WordLevel", "vocab": {f"w{index}": index for index in range(VOCABULARY)}}
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    return json.dumps({**parts, "model": {**model, "unk_token": "w0"}})


def _images(folder: str, label: str, count: int) -> dict[str, str]:
    """Return pictures of 8 by 8 random pixels, as text (plain PPM), by the names of files."""
    draw = random.Random(label)

    def picture() -> str:
        return "P3 8 8 255\n" + " ".join(str(draw.randrange(256)) for _ in range(8 * 8 * 3))

    return {f"{folder}/{label}_{index}.jpg": picture() for index in range(count)}


LIGHTNING = Program(
    name="Lightning's transformer",
    repository="Lightning-AI/pytorch-lightning",
    commit="7f0c3436cd",
    script="examples/pytorch/basics/transformer.py",
    files={"data/wikitext-2.txt": _words(53_000)},  # 1600 samples of 35, with the ends of lines
    here={
        "transformer.py": (
            change(r"^import torch$", "import os, time, torch"),
            change(r"^(\s+)(output = self\.model.*\n.*\n.*train_loss)", r"\1time.sleep(0.1)\n\1\2"),
            change(r"n - 4000, 2000, 2000", "n - 80, 40, 40"),
            change(r"(batch_size=)20, shuffle=True", r"\g<1>4, shuffle=True"),
            change(
                r"(L\.Trainer\(.*)max_epochs=20\)$",
                r'\1max_epochs=1, accelerator="cpu", devices=2, num_nodes=2)',
            ),
            add_after(r"trainer\.test\(", saved("model.state_dict()")),
        )
    },
    adopted={
        "transformer.py": (
            add_after(
                r"from lightning\.pytorch\.demos", "from hpc_ddp.integrations.lightning import fit"
            ),
            change(r"trainer\.fit\(", "fit(trainer, "),
        )
    },
    limit=TRAINER_LINES,
    unequal_because=(
        "Lightning begins the epoch's order anew after a stop amid it, and restores no generator"
    ),
)

TRANSFORMERS = Program(
    name="Transformers' run_clm",
    repository="huggingface/transformers",
    commit="00d481d18f",
    script="examples/pytorch/language-modeling/run_clm.py",
    args=(
        "--output_dir out --cache_dir cache --report_to none --use_cpu"
        " --model_type gpt2 --tokenizer_name words"
        f" --config_overrides n_embd=16,n_layer=1,n_head=2,vocab_size={VOCABULARY}"
        " --do_train --train_file words.txt --block_size 16"
        " --per_device_train_batch_size 4 --num_train_epochs 1"
    ),
    files={
        "words.txt": _words(31_000),  # 1840 samples for training, in 115 steps
        "words/tokenizer.json": _tokenizer(),
        "words/tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    },
    here={
        "run_clm.py": (
            change(r"^import math$", "import math, time"),
            add_after(
                r"model = AutoModelForCausalLM\.from_config",
                "model.register_forward_pre_hook(lambda *_: time.sleep(0.1))",
            ),
            add_after(r"trainer\.save_model\(", saved("model.state_dict()")),
        )
    },
    adopted={
        "run_clm.py": (
            add_after(
                r"from transformers\.utils\.versions",
                "from hpc_ddp.integrations.transformers import train",
            ),
            change(r"trainer\.train\(.*\)$", "train(trainer)"),
        )
    },
    limit=TRAINER_LINES,
)

ACCELERATE = Program(
    name="Accelerate's complete_cv",
    repository="huggingface/accelerate",
    commit="16cb6eb8",
    script="examples/complete_cv_example.py",
    args="--cpu --data_dir pets",
    # 20 batches of 4 on each of 4 ranks, and a fifth of all for the evaluation
    files={**_images("pets", "cat", 200), **_images("pets", "dog", 200)},
    here={
        "complete_cv_example.py": (
            change(r"^import re$", "import re, time"),
            change(r'create_model\("resnet50d", pretrained=True', 'create_model("test_resnet"'),
            change(r"num_workers=4", "num_workers=0", count=2),
            change(
                r'"num_epochs": 3(.*)"batch_size": 64, "image_size": 224',
                r'"num_epochs": 5\1"batch_size": 4, "image_size": 32',
            ),
            add_after(r"optimizer\.step\(\)", "time.sleep(0.1)"),
            change(
                r"^(\s+)accelerator\.end_training",
                rf"\1{saved('accelerator.unwrap_model(model).state_dict()')}\n\g<0>",
            ),
        )
    },
    adopted={
        "complete_cv_example.py": (
            add_after(
                r"from accelerate\.utils", "from hpc_ddp.integrations.accelerate import Stop"
            ),
            add_after(r"# Sample hyper", "stop = Stop(accelerator)"),
            change(
                r"^(\s+)starting_epoch = 0$",
                r"\1stop.load(model)\n\1starting_epoch = stop.position.epoch",
            ),
            change(r"in active_dataloader:", "in stop.batches(active_dataloader, epoch):"),
            add_after(r"overall_step \+= 1", "stop.save(loss=loss)"),
            change(r"^(\s+)accelerator\.end_training", r"\1stop.finish()\n\g<0>"),
        )
    },
    unequal_because="a batch is fetched ahead of its step, with the random crops of its images",
)

# All ranks gather the weights.
_WHOLE = "weights = {name: part.detach().full_tensor() for name, part in %s.named_parameters()}"

FSDP2 = Program(
    name="the FSDP2 example",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="distributed/FSDP2/example.py",
    here={
        "example.py": (
            change(r"^import os$", "import os, time"),
            drop(r"_min_gpu_count = \d", r"exit\(\)"),
            change(r", device_id=device\)", ")"),
            change(r"n_layers=10", "n_layers=2"),
            change(r"in range\(10\)", "in range(80)"),
            add_after(r"optim\.step\(\)", "time.sleep(0.1)"),
            change(
                r"^(\s+)(torch\.distributed\.destroy)",
                rf"\1{_WHOLE % 'model'}\n\1{saved('weights')}\n\1\2",
            ),
        ),
        # It leaves the numbers of its layers to chance.
        "model.py": (
            add_after(
                r"self\.output\.reset_parameters",
                "for layer in self.layers:\n    layer.reset_parameters()",
            ),
        ),
    },
    adopted={
        "example.py": (
            change(r"^from checkpoint import.*$", START),
            drop(r"backend = torch\.distributed"),
            change(r"torch\.distributed\.init_process_group\(.*$", "run = start()"),
            drop(r"checkpointer = ", r"if checkpointer\.last"),
            change(r"^    (    model\.(to_empty|reset_parameters)\()", r"\1", count=2),
            drop(r"else:\n\s+checkpointer\.load_model"),
            drop(r"if checkpointer\.last", r"checkpointer\.load_optim"),
            add_after(r"optim = ", "run.track(model=model, optim=optim)"),
            change(r"in range\((\d+)\):", r"in run.steps(\1):"),
            add_after(r"optim\.zero_grad", "run.step(loss=loss)"),
            drop(r"checkpointer\.save"),
            change(r"torch\.distributed\.destroy_process_group", "run.finish"),
        )
    },
)

TENSOR_PARALLEL = Program(
    name="the FSDP and tensor parallel example",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="distributed/tensor_parallelism/fsdp_tp_example.py",
    here={
        "fsdp_tp_example.py": (
            change(r"^import os$", "import os, time"),
            drop(r"_min_gpu_count = \d", r"sys\.exit\(\)"),
            change(r"torch\.accelerator\..*\.type$", '"cpu"'),
            change(r"dim=256, n_layers=2, n_heads=16, vocab_size=32000", SMALL_LLAMA),
            change(r"randint\(32000, \(8, 256\)", "randint(256, (2, 16)"),
            change(r"^num_iterations = 10", "num_iterations = 80"),
            add_after(r"optimizer\.step\(\)", "time.sleep(0.1)"),
            change(
                r"^if dist\.is_initialized",
                rf"{_WHOLE % 'sharded_model'}\n{saved('weights')}\n\g<0>",
            ),
        ),
        # torch can't share out the CPU's fused attention.
        "llama2_model.py": (
            change(
                r"F\.scaled_dot.*$",
                "torch.softmax(xq @ xk.transpose(2, 3) / self.head_dim**0.5, dim=-1) @ xv",
            ),
        ),
    },
    adopted={
        "fsdp_tp_example.py": (
            add_after(r"from log_utils", START),
            add_after(r"logger = get_logger", "run = start()"),
            add_after(r"optimizer = ", "run.track(model=sharded_model, optimizer=optimizer)"),
            change(r"in range\(num_iterations\)", "in run.steps(num_iterations)"),
            add_after(r"optimizer\.step\(\)", "optimizer.zero_grad()\nrun.step()"),
            drop(r"if dist\.is_initialized"),
            change(r"^ +dist\.destroy_process_group", "run.finish"),
        )
    },
)

TIMM = Program(
    name="timm's train.py",
    repository="huggingface/pytorch-image-models",
    commit="aa4b5850",
    script="train.py",
    args=(
        "--data-dir pets --model test_resnet --num-classes 2 --input-size 3 32 32"
        " --batch-size 4 --epochs 4 --device cpu --no-prefetcher --workers 1 --warmup-epochs 1"
    ),
    files={  # 25 steps an epoch
        **_images("pets/train/cat", "cat", 200),
        **_images("pets/train/dog", "dog", 200),
        **_images("pets/validation/cat", "tabby", 16),
        **_images("pets/validation/dog", "terrier", 16),
    },
    here={
        "train.py": (
            change(r"device_ids=\[device\], ", ""),
            add_after(r"num_updates \+= 1", "time.sleep(0.1)"),
            change(
                r"^(\s+)(if args\.distributed:\n\s+torch\.distributed\.destroy)",
                rf"\1{saved('task.get_eval_model().state_dict()')}\n\1\2",
            ),
        )
    },
    adopted={
        "train.py": (
            add_after(r"from timm import utils", START),
            change(
                r"^(\s+)device = utils\.init_distributed_device\(args\)",
                r"\1vars(args).update(distributed=True, rank=run.rank, world_size=run.world_size)\n"
                r"\1device = run.device",
            ),
            change(
                r"^    loader_eval = None$",
                "    loader_train = run.loader("
                "dataset_train, args.batch_size, num_workers=args.workers, drop_last=True)\n\\g<0>",
            ),
            change(
                r"task\.prepare_distributed\(",
                "task.trainable_module = run.wrap(task.trainable_module, ",
            ),
            change(
                r"^    start_epoch = 0$",
                "    run.track(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)\n"
                r"\g<0>",
            ),
            change(r"in range\(start_epoch, num_epochs\)", "in run.epochs(num_epochs)"),
            drop(r"_set_loader_epoch\(loader_train"),
            add_after(r"lr_scheduler\.step_update\(num_updates=", "run.step(loss=loss)"),
            change(r"torch\.distributed\.destroy_process_group", "run.finish"),
            change(r"^    main\(\)$", "    run = start()\n    main()"),
        )
    },
)

_DIGITS = "torch.utils.data.TensorDataset(torch.randn(%d, 1, 28, 28), torch.arange(%d) %% 10)"

FABRIC = Program(
    name="Fabric's image classifier",
    repository="Lightning-AI/pytorch-lightning",
    commit="7f0c3436cd",
    script="examples/fabric/image_classifier/train_fabric.py",
    args="--batch-size 4 --epochs 4",
    here={
        "train_fabric.py": (
            change(r"^import argparse$", "import argparse, os, time"),
            change(r"Fabric\(\)$", 'Fabric(accelerator="cpu", devices=2, num_nodes=2)'),
            change(r"MNIST\(.*train=True.*$", _DIGITS % (400, 400)),  # 25 steps an epoch
            change(r"MNIST\(.*train=False.*$", _DIGITS % (32, 32)),
            add_after(r"optimizer\.step\(\)", "time.sleep(0.1)"),
            change(r"^(\s+)if hparams\.save_model", rf"\1{saved('model.state_dict()')}\n\g<0>"),
        )
    },
    adopted={
        "train_fabric.py": (
            add_after(r"from lightning\.fabric", "from hpc_ddp.integrations.fabric import Stop"),
            add_after(r"fabric = Fabric\(", "stop = Stop(fabric)\nfabric.launch()"),
            add_after(
                r"scheduler = StepLR",
                "stop.load(model=model, optimizer=optimizer, scheduler=scheduler)",
            ),
            change(r"in range\(1, hparams", "in range(stop.position.epoch or 1, hparams"),
            change(
                r"in enumerate\(train_loader\)", "in enumerate(stop.batches(train_loader, epoch))"
            ),
            add_after(r"optimizer\.step\(\)", "stop.save(loss=loss)"),
            change(r"^(\s+)if hparams\.save_model", r"\1stop.finish()\n\g<0>"),
        )
    },
)

PROGRAMS = (LIGHTNING, TRANSFORMERS, ACCELERATE, FSDP2, TENSOR_PARALLEL, TIMM, FABRIC)
