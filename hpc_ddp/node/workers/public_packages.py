"""Public packages that a script may import besides torch: their imports are known.

What a group's own package does at its import is not: it may patch torch, read the rank, or depend
on what the script has set before. A reviewer's 25 scripts that a fork changed (2026-11-30) all had
such a package. So the fork server imports these alone, and a worker all others.
"""

from __future__ import annotations

# Imported once for all workers: they neither change torch nor depend on a rank.
_NAMES = """
    torch torchvision torchaudio torchdata torchmetrics numpy scipy pandas sklearn joblib matplotlib
    seaborn PIL skimage imageio tqdm yaml h5py netCDF4 xarray zarr pyarrow einops safetensors
    transformers tokenizers datasets huggingface_hub accelerate peft diffusers evaluate timm
    sentencepiece tiktoken tensorboard networkx sympy omegaconf hydra absl click typer fire rich
    loguru jinja2 submitit requests packaging filelock fsspec psutil regex cloudpickle lmdb
    webdataset pydantic attr attrs tabulate termcolor colorama nibabel nltk sacrebleu rouge_score
    """
IMPORTED_AHEAD = frozenset(_NAMES.split())
# Imported by each worker, as they read the rank, say; they change nothing for other packages.
INERT = {"wandb", "lightning", "pytorch_lightning", "lightning_fabric", "cv2", "mlflow"}
