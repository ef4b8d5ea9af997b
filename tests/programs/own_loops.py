"""Programs with a loop of their own: at most ten lines for each."""

from __future__ import annotations

import numpy as np

from tests.programs.edits import add_after, append, change, drop
from tests.programs.program import Program

EXAMPLES = "pytorch/examples"
EXAMPLES_COMMIT = "77f55b9"
START = "from hpc_ddp.training import start"
STEP = "run.step(loss=loss)"
IN_MAIN = change(
    r"^(if __name__ == .__main__.:)\n    main\(\)$",
    r"\1\n    run = start()\n    main()\n    run.finish()",
)

MULTIGPU = Program(
    name="multi-GPU tutorial",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="distributed/ddp-tutorial-series/multigpu_torchrun.py",
    args="30 10",
    here={
        "multigpu_torchrun.py": (
            change(r"^import torch$", "import torch, time"),
            add_after(r"self\.optimizer\.step\(\)", "time.sleep(0.02)"),
        )
    },
    adopted={
        "multigpu_torchrun.py": (
            add_after("from datautils", START),
            drop(r"def ddp_setup", r"init_process"),
            drop(r"self\.model = model\.to"),
            drop(r"if os\.path\.exists\(snap", r"self\._load_snapshot"),
            change(r"^(\s+self\.model = )DDP\(.*\)$", r"\1run.wrap(model)"),
            add_after(
                r"self\.model = run", "run.track(model=self.model, optimizer=self.optimizer)"
            ),
            drop(r"def _load_snapshot", r"print\(f.Resuming"),
            drop(r"def _save_snapshot", r"print\(f.Epoch"),
            change(r"loss\.backward\(\)", "run.backward(loss)"),
            add_after(r"self\.optimizer\.step\(\)", STEP),
            drop(r"self\.train_data\.sampler"),
            drop(r"\w+ = \w+\.to\(self\.gpu", count=2),
            change(r"in range\(self.epochs_run, max_epochs\)", "in run.epochs(max_epochs)"),
            drop(r"if self\.gpu_id == 0", r"self\._save_snapshot"),
            change(
                r"return DataLoader\((?:.*\n)*?    \)$", "return run.loader(dataset, batch_size)"
            ),
            drop(r"ddp_setup\(\)"),
            change(r"^    destroy_process_group\(\)", "    run.finish()"),
            change(r"^(    import argparse)$", r"\1\n    run = start()"),
        )
    },
)

IMAGENET = Program(
    name="ImageNet",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="imagenet/main.py",
    args="--dummy --epochs 3 -b 4 -j 1 --dist-url env:// --no-accel --seed 1",
    here={
        "main.py": (
            change(
                r"FakeData\(\d+, \(3, 224, 224\), 1000", "FakeData(330, (3, 32, 32), 10", count=2
            ),
            change(r"(models\.__dict__\[args\.arch\]\()\)$", r"\1num_classes=10)"),
        )
    },
    adopted={
        "main.py": (
            add_after("from torch.utils.data import Subset", START),
            drop(r"dist\.init_process_group", "world_size=args"),
            change(
                r"^    if not use_accel:\n        print(?:.*\n)*?        model\.to\(device\)$",
                "    model = run.wrap(model)",
            ),
            drop(r"if args\.resume:", r"print\(.=> no checkpoint"),
            drop(r"train_sampler = torch"),
            change(
                r"^    train_loader = (?:.*\n)*?        num_workers.*$",
                "    train_loader = run.loader("
                "train_dataset, args.batch_size, num_workers=args.workers)\n"
                "    run.track(model=model, optimizer=optimizer, scheduler=scheduler)",
            ),
            change(r"in range\(args\.start_epoch, args\.epochs\)", "in run.epochs(args.epochs)"),
            drop(r"if args\.distributed:\n\s+train_sampler\.set"),
            change(r"is_best = acc1 > best_acc1", "run.best(acc1)"),
            drop(r"best_acc1 = max"),
            drop(r"if not args\.multiprocessing_distributed or", r"\}, is_best\)"),
            change(r"loss\.backward\(\)", "run.backward(loss)"),
            add_after(r"optimizer\.step\(\)", STEP),
            IN_MAIN,
        )
    },
)

DCGAN = Program(
    name="DCGAN",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="dcgan/main.py",
    args=(
        "--dataset fake --batchSize 4 --ngf 4 --ndf 4 --nz 8 --niter 2 --manualSeed 1 --workers 1"
    ),
    here={"main.py": (change(r"dset\.FakeData\(", "dset.FakeData(1500, "),)},
    adopted={
        "main.py": (
            add_after(r"import torchvision\.utils", f"{START}\nrun = start()"),
            change(
                r"^dataloader = torch(?:.*\n).*num_workers.*$",
                "dataloader = run.loader(dataset, opt.batchSize, num_workers=opt.workers)",
            ),
            drop(r"if opt\.net([GD])", r"net\w\.load_state", count=2),
            change(r"print\(net([GD])\)", r"net\1 = run.wrap(net\1)", count=2),
            add_after(
                r"optimizerG = ",
                "run.track(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD)",
            ),
            change(r"in range\(opt\.niter\)", "in run.epochs(opt.niter)"),
            # Every hundredth step it generates images, by which batch norm's averages move on.
            change(
                r"enumerate\(dataloader, 0\)", "enumerate(dataloader, run.position.epoch_steps)"
            ),
            add_after(r"optimizerG\.step\(\)", "run.step(loss=errG)"),
            drop(r"# do checkpointing", r"torch\.save\(netD"),
            append("run.finish()"),
        )
    },
)


def tokens(count: int) -> bytes:
    """Return letters drawn at random from 128, as numbers of two bytes."""
    return np.random.default_rng(1).integers(128, size=count).astype(np.uint16).tobytes()


NANOGPT = Program(
    name="nanoGPT",
    repository="karpathy/nanoGPT",
    commit="3adf61e1",
    script="train.py",
    args=(
        "--dataset=small --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=16"
        " --block_size=16 --batch_size=4 --gradient_accumulation_steps=8 --dropout=0.1"
        " --max_iters=300 --lr_decay_iters=300 --warmup_iters=10 --eval_interval=50 --eval_iters=4"
    ),
    here={"train.py": (change(" else 50304$", " else 128"),)},
    files={"data/small/train.bin": tokens(5000), "data/small/val.bin": tokens(5000)},
    adopted={
        "train.py": (
            add_after("from contextlib", START),
            change(r"^    init_process_group.*$", "    run = start()"),
            change(r"device = f'cuda.*$", "device = str(run.device)"),
            drop(r"torch\.cuda\.set_device"),
            change(r"^    model = DDP\(.*$", "    model = run.wrap(model)"),
            change(
                r"^X, Y = get_batch.*$",
                "run.track(model=model, optimizer=optimizer, scaler=scaler)",
            ),
            change(r"^while True:$", "for iter_num in run.steps(max_iters + 1):"),
            drop(r"if losses\['val'\] < best_val", r"torch\.save\(checkpoint"),
            # A batch that is drawn ahead would be lost at a stop, and another one drawn.
            drop(r"X, Y = get_batch\('train'\)"),
            change(r"^        with ctx:$", r"        X, Y = get_batch('train')\n\g<0>"),
            add_after(r"optimizer\.zero_grad", STEP),
            drop("iter_num \\+= 1"),
            drop("# termination conditions", "break"),
            change(r"^    destroy_process_group.*$", "    run.finish()"),
        )
    },
)


def sums() -> str:
    """Return lines like 28+7=35."""
    pairs = np.random.default_rng(1).integers(100, size=(300, 2)).tolist()
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


MINGPT = Program(
    name="minGPT-ddp",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="distributed/minGPT-ddp/mingpt/main.py",
    here={
        "main.py": (change(r"\b(has_gpu|gpu_count) = .*", r"\1 = 2", count=2),),
        "trainer.py": (
            drop("import boto3"),
            drop(r"self\.acc = torch"),
            change(r"torch\.device\(f.*\)", 'torch.device("cpu")'),
            change(r"(source|targets)\.to\(self\.local_rank\)", r"\1.to(self.device)", count=2),
        ),
        "gpt2_train_cfg.yaml": (
            change("path: https.*", "path: text.txt"),
            change("block_size: .*", "block_size: 16"),
            change("truncate: .*", "truncate: 1.0"),
            change("n_layer: .*", "n_layer: 2"),
            change("n_head: .*", "n_head: 2"),
            change("n_embd: .*", "n_embd: 16"),
            change("max_epochs: .*", "max_epochs: 4"),
            change("batch_size: .*", "batch_size: 8"),
            change("data_loader_workers: .*", "data_loader_workers: 1"),
            change("use_amp: .*", "use_amp: False"),
        ),
    },
    files={"text.txt": sums()},
    adopted={
        "main.py": (
            drop("def ddp_setup", r"torch\.accelerator\.set_dev"),
            drop(r"ddp_setup\(\)"),
            drop(r"destroy_process_group\(\)"),
        ),
        "trainer.py": (
            add_after("import io", f"{START}\nrun = start()"),
            change(
                r"self\._prepare_dataloader\(train_dataset\)",
                "run.loader(train_dataset, self.config.batch_size)",
            ),
            drop(r"self\.model = model\.to"),
            drop("# load snapshot if", r"self\._load_snapshot"),
            change(
                r"self\.model = DDP\(.*\)",
                "self.model = run.wrap(model)\n"
                "        run.track(model=self.model, optimizer=self.optimizer)",
            ),
            drop("def _load_snapshot", r"print\(f.Resuming"),
            drop(r"if train:\n\s+dataloader\.sampler"),
            drop("def _save_snapshot", r"print\(f.Snapshot saved"),
            change(
                r"self\.scaler\.scale\(loss\)\.backward\(\)",
                "run.backward(self.scaler.scale(loss))",
            ),
            change(r"^( +)loss\.backward\(\)", r"\1run.backward(loss)"),
            change(r"^( +)    self\.optimizer\.step\(\)", rf"\g<0>\n\1{STEP}"),
            change(
                r"in range\(self\.epochs_run, self\.config\.max_epochs\)",
                "in run.epochs(self.config.max_epochs)",
            ),
            drop(r"if self\.local_rank == 0 and epoch", r"self\._save_snapshot"),
            append("        run.finish()"),
        ),
    },
)


def shard(count: int) -> bytes:
    """Return a file of llm.c: 256 numbers of which the first three count, then the tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = (20240520, 1, count)
    return header.tobytes() + tokens(count)


LLM_C = Program(
    name="llm.c, train_gpt2.py",
    repository="karpathy/llm.c",
    commit="f1e2ace",
    script="train_gpt2.py",
    args=(
        "--input_bin tokens.bin --model d12 --batch_size 2 --sequence_length 16"
        " --total_batch_size 256 --num_iterations 250 --overfit_single_batch 0 --write_tensors 0"
    ),
    here={
        "train_gpt2.py": (
            drop("import tiktoken"),
            drop(r"enc = tiktoken"),
            change(
                '"d12": GPTConfig.*$',
                '"d12": GPTConfig(block_size=16, vocab_size=128, n_layer=2, n_head=2, n_embd=16),',
            ),
            change(r"ReduceOp\.AVG", "ReduceOp.SUM"),  # gloo has no other
        )
    },
    files={"tokens.bin": shard(20000)},
    adopted={
        "train_gpt2.py": (
            add_after("from contextlib", START),
            drop(r"assert torch\.cuda\.is_available\(\), .for now"),
            change(r"^        init_process_group.*$", "        run = start()"),
            change(r"device = f'cuda.*$", "device = str(run.device)"),
            drop(r"torch\.cuda\.set_device"),
            change(r"^        model = DDP\(.*$", "        model = run.wrap(model)"),
            change(
                r"^( +)device_type=device, zero_stage.*$",
                r"\g<0>\n"
                "    run.track(model=model, optimizer=optimizer)\n"
                "    for _ in range(run.position.step * grad_accum_steps):\n"
                "        train_loader.next_batch()",
            ),
            change(r"for step in range\(args\.num", "for step in run.steps(args.num"),
            add_after(r"optimizer\.step\(\)", "run.step(loss=lossf)"),
            change(r"^        destroy_process_group.*$", "        run.finish()"),
        )
    },
)

MNIST = Program(
    name="MNIST, of one process",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="mnist/main.py",
    args="--epochs 4 --batch-size 2 --test-batch-size 50",
    here={
        "main.py": (
            change(
                r"datasets\.MNIST\((?:.*\n)\s*transform=transform",
                "datasets.FakeData(600, (1, 28, 28), 10, transform",
                count=2,
            ),
        )
    },
    adopted={
        "main.py": (
            add_after("from torch.optim.lr", START),
            change(
                r"train_loader = torch.*$",
                "train_loader = run.loader(dataset1, **train_kwargs)",
            ),
            change(r"model = Net\(\)\.to\(device\)", "model = run.wrap(Net())"),
            add_after(
                r"scheduler = ",
                "run.track(model=model, optimizer=optimizer, scheduler=scheduler)",
            ),
            change(r"in range\(1, args\.epochs \+ 1\)", "in run.epochs(args.epochs)"),
            change(r"loss\.backward\(\)", "run.backward(loss)"),
            add_after(r"optimizer\.step\(\)", STEP),
            IN_MAIN,
        )
    },
)

CIFAR = Program(
    name="pytorch-cifar, of one process",
    repository="kuangliu/pytorch-cifar",
    commit="49b7aa9",
    script="main.py",
    here={
        "main.py": (
            change(
                r"datasets\.CIFAR10\(\n.*transform=(\w+)",
                r"datasets.FakeData(400, (3, 32, 32), 10, \1",
                count=2,
            ),
            change(r"batch_size=128", "batch_size=4"),
            change(r"^net = SimpleDLA", "net = LeNet"),
            change(r"start_epoch\+200", "start_epoch+4"),
        ),
        "utils.py": (change(r"^_, term_width = .*$", "term_width = 80"),),  # it asks a terminal
    },
    adopted={
        "main.py": (
            add_after("from utils", f"{START}\nrun = start()"),
            change(
                r"trainloader = torch.*\(\n\s*(trainset.*), shuffle=True(.*)\)",
                r"trainloader = run.loader(\1\2)",
            ),
            change(r"net = net\.to\(device\)", "net = run.wrap(net)"),
            drop("if device == 'cuda'", r"cudnn\.bench"),
            drop(r"if args\.resume", "start_epoch = check"),
            add_after(
                "scheduler = ", "run.track(net=net, optimizer=optimizer, scheduler=scheduler)"
            ),
            change(r"loss\.backward\(\)", "run.backward(loss)"),
            add_after(r"optimizer\.step\(\)", STEP),
            drop("if acc > best_acc", "best_acc = acc"),
            add_after(r"acc = 100", "run.best(acc)"),
            change(r"in range\(start_epoch, start_epoch\+(\d+)\)", r"in run.epochs(\1)"),
            append("run.finish()"),
        )
    },
)

PROGRAMS = (MULTIGPU, IMAGENET, NANOGPT, MINGPT, DCGAN, LLM_C, MNIST, CIFAR)
