"""Images for `swin_moe` and `transforms`: scikit-learn's digits, or a folder that pillow reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from lm_model import Refused
from torch import Tensor
from torch.nn import functional as nn

DIGITS, TURNED = "digits", "turned"
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}


@dataclass(frozen=True)
class Images:
    """Images of mean 0 and variance 1 over the training set, and their classes.

    Attributes:
        train: ``[N,size,size,channels]``.
        train_labels: ``[N]`` int64.
        test: a quarter of all images, drawn without looking at them.
        test_labels: their classes.
        classes: their names.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]

    @property
    def channels(self) -> int:
        """Of an image."""
        return self.train.shape[-1]


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of scikit-learn: ``[1797,8,8]`` from 0 to 1, and what they are."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise Refused("the digits need scikit-learn: pip install 'fmoe-torch[examples]'") from None
    loaded = load_digits()
    return torch.from_numpy(loaded.images).float() / 16, torch.from_numpy(loaded.target).long()


def read(source: str, *, size: int, channels: int | None = None) -> Images:
    """Reads and splits `source`.

    Args:
        source: `DIGITS`; `TURNED`, the same a quarter turn to the left; or a folder with one folder of images for each
            class.
        size: side that every image is scaled to.
        channels: 1 for grey or 3 for colour; by default grey for digits, colour for a folder.

    Raises:
        Refused: if there is nothing to train on.
    """
    if source in (DIGITS, TURNED):
        images, labels = digits()
        images = images.rot90(1, (1, 2)) if source == TURNED else images
        images, classes = images.unsqueeze(1).expand(-1, channels or 1, -1, -1), tuple("0123456789")
        images = nn.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    else:
        images, labels, classes = folder(source, size, channels or 3)
    images = images.permute(0, 2, 3, 1).contiguous()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order.split([len(images) // 4, len(images) - len(images) // 4])
    if len(test) == 0:
        raise Refused(f"--data {source}: {len(images)} images are too few: a quarter of them is for testing")
    mean, deviation = images[train].mean(), images[train].std().clamp(min=1e-6)
    images = (images - mean) / deviation
    return Images(images[train], labels[train], images[test], labels[test], classes)


def folder(source: str, size: int, channels: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images ``[N,channels,size,size]`` from 0 to 1 of a folder, their classes, and the names of these."""
    try:
        from PIL import Image
    except ImportError:
        raise Refused("a folder of images needs pillow: pip install 'fmoe-torch[examples]'") from None
    root = Path(source)
    if not root.is_dir():
        raise Refused(f"--data {source}: there is no such folder (or {DIGITS}, or {TURNED})")
    try:
        files = {
            part.name: sorted(path for path in part.rglob("*") if path.suffix.lower() in SUFFIXES)
            for part in sorted(root.iterdir())
            if part.is_dir() and not part.name.startswith(".")
        }
    except OSError as error:
        raise Refused(f"--data {source}: {error.strerror}") from None
    classes = tuple(name for name, paths in files.items() if paths)
    if len(classes) < 2:
        raise Refused(f"--data {source}: needs a folder of images for each of at least 2 classes, has {len(classes)}")
    images, labels = [], []
    for label, name in enumerate(classes):
        for path in files[name]:
            try:
                with Image.open(path) as image:
                    scaled = image.convert("L" if channels == 1 else "RGB").resize(
                        (size, size), Image.Resampling.BILINEAR
                    )
                    pixels = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise Refused(f"--data {source}: cannot read {path}: {error}") from None
            images.append(pixels.view(size, size, channels).permute(2, 0, 1) / 255)
            labels.append(label)
    return torch.stack(images), torch.tensor(labels), classes
