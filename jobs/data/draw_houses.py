"""Draw houses that a storm has damaged less or more: a small set of images for jobs/designsafe.py.

::

    python jobs/data/draw_houses.py houses
    python jobs/data/draw_houses.py houses --train 20 --size 48

makes ``houses/{Train,Validation,Test}/{C0,C2,C4}/<n>.png``: low, medium and high damage. A seed
gives the same pictures wherever it is drawn. They are no photographs: good for tests and for a
first look, and for nothing that is to be known of real houses.
"""

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("C0", "C2", "C4")
SPLITS = ("Train", "Validation", "Test")
WALLS = ["#d8cbb0", "#c9b7a0", "#b9c4c9", "#e0dccf", "#a9b59d", "#c79f86"]
ROOFS = ["#6b4a3a", "#54565b", "#7d3f34", "#4d5b66", "#8a7a66"]
TARP, RAFTER, HOLE = "#2f6fc4", "#8d7453", "#211d1b"


def draw_house(damage: str, size: int, chance: random.Random) -> Image.Image:
    """Return a picture of `size` x `size` pixels; `damage` is one of `CLASSES`, `chance` draws the
    rest."""
    image = Image.new("RGB", (100, 100))  # in percent, made smaller or bigger at the end
    pen = ImageDraw.Draw(image)
    light = chance.randint(-25, 25)
    horizon = chance.randint(60, 72)
    pen.rectangle((0, 0, 100, horizon), fill=_rgb(150 + light, 180 + light, 210 + light))
    pen.rectangle((0, horizon, 100, 100), fill=_rgb(95 + light, 120 + light, 70 + light))

    left, right = chance.randint(10, 25), chance.randint(72, 90)
    top, ground = chance.randint(42, 52), chance.randint(78, 86)
    ridge = top - chance.randint(16, 24)
    middle = (left + right) // 2 + chance.randint(-6, 6)
    pen.rectangle((left, top, right, ground), fill=chance.choice(WALLS))
    roof = [(left - 5, top), (middle, ridge), (right + 5, top)]
    pen.polygon(roof, fill=chance.choice(ROOFS))
    panes = range(left + 5, right - 10, 16)
    for x in panes:
        broken = chance.random() < {"C0": 0.05, "C2": 0.4, "C4": 0.9}[damage]
        pen.rectangle((x, top + 8, x + 8, top + 18), fill=HOLE if broken else "#9fc2d8")
    door = chance.choice(panes)
    pen.rectangle((door, ground - 16, door + 8, ground), fill="#5b4636")

    if damage != "C0":
        for _ in range(chance.randint(2, 4) if damage == "C2" else chance.randint(1, 3)):
            x, y = _on_roof(left, right, top, ridge, middle, chance)
            fill = chance.choice([HOLE, TARP, RAFTER])
            pen.polygon(_patch(x, y, chance.randint(4, 8), chance), fill=fill)
    if damage == "C4":
        _take_roof_off(pen, left, right, top, ridge, middle, chance)
        for _ in range(chance.randint(14, 26)):  # what lies about
            x, y = chance.randint(2, 98), chance.randint(ground - 4, 98)
            fill = chance.choice([*WALLS, *ROOFS, RAFTER, HOLE])
            pen.polygon(_patch(x, y, chance.randint(2, 5), chance), fill=fill)
    for _ in range(chance.randint(0, 2)):  # a tree, before any house
        x, r = chance.choice([chance.randint(0, 8), chance.randint(92, 100)]), chance.randint(5, 9)
        pen.rectangle((x - 1, ground - 18, x + 1, ground + 4), fill="#5b4636")
        pen.ellipse((x - r, ground - 18 - 2 * r, x + r, ground - 16), fill="#4f7a45")
    return image.resize((size, size), Image.Resampling.LANCZOS)


def _take_roof_off(
    pen: ImageDraw.ImageDraw,
    left: int,
    right: int,
    top: int,
    ridge: int,
    middle: int,
    chance: random.Random,
) -> None:
    """Show the sky, and rafters, through most of the roof, and a hole in the wall.

    All numbers are in percent of the picture: the walls' sides and top, and the roof's ridge.
    """
    sky = _rgb(165, 185, 205)
    a, b = sorted(chance.sample(range(left - 5, right + 5), 2))
    if b - a < 35:
        a, b = left - 5, middle + 8
    pen.polygon([(a, top - 1), (min(max(middle, a), b), ridge - 2), (b, top - 1)], fill=sky)
    for x in range(a, b, 7):
        pen.line([(x, top), (x + chance.randint(-4, 4), top - chance.randint(5, 14))], fill=RAFTER)
    x = chance.randint(left + 4, right - 16)
    pen.polygon(_patch(x + 8, top + 16, 11, chance), fill=HOLE)


def _on_roof(
    left: int, right: int, top: int, ridge: int, middle: int, chance: random.Random
) -> tuple[int, int]:
    """Return a random point (x, y) on the roof; all numbers are in percent of the picture."""
    x = chance.randint(left + 8, right - 8)
    slope = (x - left) / (middle - left) if x < middle else (right - x) / (right - middle)
    return x, round(top - 2 - chance.random() * 0.7 * slope * (top - ridge))


def _patch(x: int, y: int, r: int, chance: random.Random) -> list[tuple[int, int]]:
    """Return the corners of something torn around the point (x, y), at most `r` percent from it."""
    corners = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    return [(x + i * chance.randint(1, r), y + j * chance.randint(1, r)) for i, j in corners]


def _rgb(*parts: int) -> tuple[int, int, int]:
    """Return a colour whose parts are brought into 0 to 255."""
    red, green, blue = (min(max(part, 0), 255) for part in parts)
    return red, green, blue


def draw_set(folder: Path, counts: dict[str, int], size: int, seed: int) -> None:
    """Write the images; `counts` says how many of each class are in each of `SPLITS`.

    Raise OSError if the folder can't be written.
    """
    for split, count in counts.items():
        for damage in CLASSES:
            place = folder / split / damage
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                chance = random.Random(f"{seed} {split} {damage} {number}")
                draw_house(damage, size, chance).save(place / f"{number:03}.png")


def main() -> None:
    """Draw the set of the command line; exit with 2 and a message for wrong options, and where the
    folder can't be written."""
    parser = argparse.ArgumentParser(description="Draw houses with low, medium and high damage.")
    parser.add_argument("folder", type=Path, help="where Train, Validation and Test go")
    parser.add_argument("--train", type=int, default=80, help="images per class to train on")
    parser.add_argument("--test", type=int, default=20, help="per class in the other two")
    parser.add_argument("--size", type=int, default=96, help="sides in pixels")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, least in {"train": 0, "test": 0, "size": 1}.items():
        if (number := getattr(args, name)) < least:
            parser.error(f"--{name} is {number}; accepted: a whole number from {least}")
    counts = dict(zip(SPLITS, (args.train, args.test, args.test), strict=True))
    try:
        draw_set(args.folder, counts, args.size, args.seed)
    except OSError as error:
        parser.error(f"{args.folder} is no folder to write into: {error}")
    print(f"{args.folder}: {len(CLASSES) * sum(counts.values())} images")


if __name__ == "__main__":
    main()
