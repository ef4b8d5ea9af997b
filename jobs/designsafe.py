"""Fine-tune a ResNet to tell how much damage a hurricane has done to a house.

The images lie in DATA/Train/C0, C2, C4 (low, medium, high damage), likewise in DATA/Validation, and
in DATA/Test if there is one; other classes do as well. To try it, draw some houses, and on a CPU
take few pixels. In one process, on one node, on two nodes, and on two nodes played here::

    python jobs/data/draw_houses.py ~/houses
    python jobs/designsafe.py --data ~/houses --size 64
    hpc-ddp submit --nodes 1 --gpus-per-node 4 jobs/designsafe.py --data ~/houses --weights r34.pth
    hpc-ddp submit --nodes 2 --gpus-per-node 4 jobs/designsafe.py --data ~/houses --weights r34.pth
    hpc-ddp dry-run --nodes 2 --gpus-per-node 2 jobs/designsafe.py --data ~/houses --size 64

Compute nodes have no internet, so pretrained weights come from a file, made on the login node::

    python -c 'import torch, torchvision; torch.save(torchvision.models.resnet34(
        weights="DEFAULT").state_dict(), "r34.pth")'

Validation is exact, over all ranks, and so is what follows from it: the learning rate, the best
model (kept apart from the newest checkpoint, where a resume goes on), the confusion matrix. At the
end the run's folder has confusion.png, predictions.png, and the best model in export/; the pictures
are in TensorBoard, too.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from hpc_ddp.training import Run, UsageError, start

NAMES = {"C0": "C0 low", "C2": "C2 medium", "C4": "C4 high"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what ImageNet's weights are used to
SMOOTHING = 0.1


def open_image(path: str) -> Any:
    """Return the PIL image of a file. Raise UsageError, which names the file, where it can't be
    read as an image."""
    try:
        return torchvision.datasets.folder.pil_loader(path)
    except (OSError, SyntaxError) as error:  # PIL has both for what is broken
        raise UsageError(f"{path} can't be read as an image: {error}") from error


def open_folder(folder: Path, size: int, augment: bool = False) -> ImageFolder:
    """Return a data set of images (3, size, size) and class numbers; with `augment` images are
    changed at random, after a resume in the same way.

    Raise UsageError for a folder without images in folders of classes. An image is read only when
    it is taken from the data set, which raises what `open_image` raises.
    """
    steps = [v2.Resize((size, size)), *([v2.AutoAugment()] if augment else []), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    try:
        return ImageFolder(str(folder), v2.Compose(steps), loader=open_image)
    except OSError as error:
        raise UsageError(
            f"{folder} is no folder of images: {error}",
            hint="it needs a folder for each class; python jobs/data/draw_houses.py draws some",
        ) from error


def open_data(data: Path, size: int) -> tuple[ImageFolder, ImageFolder, ImageFolder]:
    """Return the data sets for training, validation and test; without a folder ``Test`` the one for
    validation is also that for the test.

    Raise UsageError where two of them have different classes, and what `open_folder` raises.
    """
    training = open_folder(data / "Train", size, augment=True)
    validation = open_folder(data / "Validation", size)
    test = open_folder(data / "Test", size) if (data / "Test").exists() else validation
    for images in (validation, test):
        if images.classes != training.classes:
            raise UsageError(
                f"{images.root} has the classes {', '.join(images.classes)};"
                f" accepted: those of Train, {', '.join(training.classes)}"
            )
    return training, validation, test


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return a state dict, on the CPU, from a file that torch.save or safetensors has written.

    Raise UsageError where the file can't be read as weights.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return {name.removeprefix("module."): tensor for name, tensor in state.items()}
    except Exception as error:  # of many kinds, with pages of advice behind the first line
        why = str(error).partition("\n")[0] or repr(error)
        raise UsageError(
            f"{path} can't be read as weights: {why}", hint="a state_dict, by torch.save"
        ) from error


def make_model(arch: str, weights: Path | None, classes: int, freeze: bool) -> nn.Module:
    """Return a network of torchvision's with a new head; with `freeze` only the head is trained.

    `weights` is a file for `read_weights`, whose head is left out, or None. Raise UsageError where
    it has the weights of another network, and what `read_weights` raises.
    """
    model: Any = torchvision.models.get_model(arch, weights=None)
    width = model.fc.in_features
    model.fc = nn.Identity()
    if weights is not None:
        state = {k: v for k, v in read_weights(weights).items() if not k.startswith("fc.")}
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            why = str(error).splitlines()[:2][-1].strip()[:200]
            raise UsageError(f"{weights} has no weights of a {arch}: {why}") from error
    if freeze:
        model.requires_grad_(False)
        model.eval()  # batch norm's running statistics are part of it, and no gradient holds them
    model.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))
    return model  # type: ignore[no-any-return]


def evaluate(
    run: Run, model: nn.Module, images: ImageFolder, batch_size: int, **loading: Any
) -> tuple[float, float, torch.Tensor]:
    """Return mean loss, as in training (`SMOOTHING`), accuracy, and the confusion matrix: how often
    class i (row) was read as class j (column).

    Each image counts once over all ranks, and all ranks get the same numbers. All ranks call it.
    `loading` are options of the loader.
    """
    classes = len(images.classes)
    confusion, loss_sum = torch.zeros(classes**2, dtype=torch.float64), 0.0
    with run.evaluating(model) as plain:
        for x, y in run.shard(images, batch_size, **loading):
            with run.autocast():
                logits = plain(x).float()
            loss_sum += cross_entropy(logits, y, reduction="sum", label_smoothing=SMOOTHING).item()
            cells = y * classes + logits.argmax(1)
            confusion += torch.bincount(cells.cpu(), minlength=classes**2)
    loss_sum, *counts = run.sum(loss_sum, *confusion)
    confusion = torch.tensor(counts).reshape(classes, classes)
    seen = sum(counts)
    return loss_sum / seen, confusion.trace().item() / seen, confusion


def report(run: Run, model: nn.Module, images: ImageFolder, confusion: torch.Tensor) -> None:
    """Print the confusion matrix; draw it, and predictions of 12 images, as PNG in the run's folder
    and in TensorBoard.

    All ranks call it, with the `confusion` of `evaluate`. On rank 0, raise OSError if a PNG can't
    be written, and what `open_image` raises.
    """
    names = [NAMES.get(name, name) for name in images.classes]
    for name, row in zip(names, confusion.int().tolist(), strict=True):
        run.print(
            f"{name:>12}  read as " + "  ".join(f"{n} {c}" for n, c in zip(names, row, strict=True))
        )
    with run.evaluating(model) as plain:
        if run.rank != 0:  # nothing below talks to peers
            return
        chosen = [i * len(images) // 12 for i in range(12)]
        x = torch.stack([images[i][0] for i in chosen]).to(run.device)
        read = plain(x).softmax(1).cpu()
    pictures = {
        "confusion": draw_confusion(confusion, names),
        "predictions": draw_predictions(images, chosen, read, names),
    }
    for name, figure in pictures.items():
        figure.savefig(run.folder.path / f"{name}.png", dpi=100)
        if run.tensorboard is not None:
            run.tensorboard.add_figure(name, figure, run.position.step)


def draw_confusion(confusion: torch.Tensor, names: list[str]) -> Any:
    """Return matplotlib's figure of a confusion matrix (classes, classes): counts, coloured by
    row."""
    from matplotlib.figure import Figure  # drawn on no screen

    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.imshow(
        confusion / confusion.sum(1, keepdim=True).clamp(min=1), cmap="Blues", vmin=0, vmax=1
    )
    for (i, j), count in [(divmod(k, len(names)), n) for k, n in enumerate(confusion.flatten())]:
        dark = count > 0.5 * confusion[i].sum()
        axes.text(
            j, i, f"{count:.0f}", ha="center", va="center", color="white" if dark else "black"
        )
    axes.set(xticks=range(len(names)), xticklabels=names, xlabel="read as")
    axes.set(yticks=range(len(names)), yticklabels=names, ylabel="true")
    return figure


def draw_predictions(
    images: ImageFolder, chosen: list[int], read: torch.Tensor, names: list[str]
) -> Any:
    """Return matplotlib's figure of 12 images, with the class that the model reads; where that is
    wrong, also the true one.

    `chosen` are their indexes in `images`, `read` the probabilities (12, classes) of the classes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    for i, p, axes in zip(chosen, read, figure.subplots(3, 4).flat, strict=True):
        path, true = images.samples[i]
        axes.imshow(open_image(path).resize((128, 128)))
        right = p.argmax() == true
        axes.set_title(
            f"{names[p.argmax()]}, {p.max():.0%}", color="green" if right else "red", size=9
        )
        axes.set_xlabel("" if right else f"it is {names[true]}", size=8)
        axes.set(xticks=[], yticks=[])
    return figure


def parse_args() -> argparse.Namespace:
    """Return the options of the command line; exit with 2 and a message for wrong ones."""
    parser = argparse.ArgumentParser(description="Fine-tune a ResNet on images of damaged houses.")
    parser.add_argument(
        "--data", type=Path, required=True, help="has Train, Validation, maybe Test"
    )
    parser.add_argument("--weights", type=Path, help="pretrained ones, .pth or .safetensors")
    parser.add_argument("--freeze", action="store_true", help="train the head alone")
    arches = ["resnet18", "resnet34", "resnet50", "shufflenet_v2_x0_5"]
    parser.add_argument(
        "--arch", choices=arches, default="resnet34", help="of torchvision's models"
    )
    parser.add_argument("--size", type=int, default=244, help="sides of an image, in pixels")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="images per process and step")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of Adam")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--workers", type=int, default=0, help="that load images, per process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Batch norm can't train on a single value, and deep in the network an image is not many more.
    for name, least in {"size": 1, "epochs": 1, "batch-size": 2, "workers": 0}.items():
        if (given := getattr(args, name.replace("-", "_"))) < least:
            parser.error(f"--{name} is {given}; accepted: a whole number from {least}")
    return args


def main() -> None:
    """Train, load the best checkpoint, test it, and draw its errors."""
    args = parse_args()
    run = start(seed=args.seed, precision=args.precision, tensorboard=True)
    training, validation, test = open_data(args.data, args.size)
    model = make_model(args.arch, args.weights, len(training.classes), args.freeze)
    model = run.wrap(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    loading: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": args.workers}
    batches = run.loader(training, drop_last=True, **loading)  # batch norm refuses a batch of one
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(args.epochs):
        for x, y in batches:
            with run.autocast():
                loss = cross_entropy(model(x), y, label_smoothing=SMOOTHING)
            run.backward(loss)
            run.update(optimizer)
            run.step(loss=loss, lr=optimizer.param_groups[0]["lr"])
        mean_loss, accuracy, _ = evaluate(run, model, validation, **loading)
        scheduler.step(mean_loss)  # the same number on all ranks, so the same rate
        best = "  best so far" if run.best(accuracy) else ""  # its checkpoint stays
        run.print(f"epoch {epoch}  validation loss {mean_loss:.4f}  accuracy {accuracy:.4f}{best}")
        if run.tensorboard is not None:
            run.tensorboard.add_scalar("validation/loss", mean_loss, run.position.step)
            run.tensorboard.add_scalar("validation/accuracy", accuracy, run.position.step)

    step = run.load_best(model)
    _, accuracy, confusion = evaluate(run, model, test, **loading)
    run.print(f"test accuracy {accuracy:.4f} of the model of step {step}")
    report(run, model, test, confusion)
    run.finish(accuracy=accuracy)


if __name__ == "__main__":
    main()
