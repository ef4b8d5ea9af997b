"""Public packages whose imports are known to change nothing for torch.

A group's own package may do anything at its import: patch torch, set its variables, or its default
type. Nearly all of a reviewer's 25 scripts that a fork changed (2026-11-30) had such a package.
"""

from __future__ import annotations

_NAMES = """
    torch torchvision torchaudio torchdata torchmetrics numpy scipy pandas sklearn joblib matplotlib
    seaborn PIL skimage imageio cv2 tqdm yaml h5py netCDF4 xarray zarr pyarrow einops safetensors
    transformers tokenizers datasets huggingface_hub accelerate peft diffusers evaluate timm
    sentencepiece tiktoken tensorboard networkx sympy omegaconf hydra absl click typer fire rich
    loguru jinja2 submitit requests packaging filelock fsspec psutil regex cloudpickle lmdb
    webdataset pydantic attr attrs tabulate termcolor colorama nibabel nltk sacrebleu rouge_score
    wandb lightning pytorch_lightning lightning_fabric mlflow
    """
HARMLESS_PACKAGES = frozenset(_NAMES.split())
