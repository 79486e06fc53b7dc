"""Drawn digits and shapes with questions about them, for a demo that sees. Everything is drawn by distances, on any torch device."""
import math
import random
import struct
import zlib

import torch

COLOURS = {"red": (208, 32, 36), "green": (30, 150, 60), "blue": (36, 70, 205), "yellow": (236, 200, 20), "orange": (240, 125, 20),
           "purple": (130, 45, 165), "black": (25, 25, 25)}  # fmt: skip
SHAPES = ["circle", "square", "triangle", "star", "cross"]
NUMBERS = ["", "one", "two", "three", "four", "five", "six"]
MOST = 6  # objects of a picture
SEGMENTS = 40

QUESTIONS = {
    "digit": ["What digit is this?", "Which digit do you see?", "What number is drawn here?", "Read the digit."],
    "shape": ["What shape is this?", "Which shape do you see?", "Name the shape.", "What is drawn here?"],
    "colour": ["What colour is it?", "Which colour do you see?", "What color is this?", "Name the colour."],
    "count": ["How many are there?", "How many shapes do you see?", "Count them.", "How many shapes are drawn here?"],
    "describe": ["Describe the picture.", "What do you see?", "What is in the picture?", "Describe what you see."],
}  # fmt: skip


def arc(x, y, rx, ry, begin, end, parts=12):
    """Angles in degrees, clockwise from the right."""
    angles = [math.radians(begin + (end - begin) * i / parts) for i in range(parts + 1)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


STROKES = [
    [arc(0.5, 0.5, 0.32, 0.45, 0, 360)],
    [[(0.3, 0.25), (0.55, 0.05), (0.55, 0.95)]],
    [arc(0.5, 0.3, 0.3, 0.25, -170, 30) + [(0.2, 0.95), (0.82, 0.95)]],
    [arc(0.47, 0.28, 0.28, 0.23, -150, 90), arc(0.47, 0.73, 0.32, 0.24, -90, 150)],
    [[(0.65, 0.95), (0.65, 0.05), (0.18, 0.65), (0.85, 0.65)]],
    [[(0.78, 0.05), (0.28, 0.05), (0.25, 0.45)], arc(0.48, 0.66, 0.3, 0.28, -130, 150)],
    [arc(0.5, 0.68, 0.29, 0.27, 0, 360), [(0.22, 0.62), (0.3, 0.3), (0.62, 0.05)]],
    [[(0.18, 0.05), (0.82, 0.05), (0.42, 0.95)]],
    [arc(0.5, 0.28, 0.24, 0.23, 0, 360), arc(0.5, 0.73, 0.29, 0.25, 0, 360)],
    [arc(0.5, 0.32, 0.29, 0.27, 0, 360), [(0.78, 0.38), (0.7, 0.7), (0.4, 0.95)]],
]


def segments() -> torch.Tensor:
    """[10, SEGMENTS, 4]: ends of lines, centred, two units high; the last one again and again."""
    out = []
    for strokes in STROKES:
        lines = [(*a, *b) for s in strokes for a, b in zip(s, s[1:])]
        out.append([[2 * v - 1 for v in line] for line in lines + [lines[-1]] * (SEGMENTS - len(lines))])
    return torch.tensor(out)


class Scene:
    """One picture: a digit, or one or several equal shapes; and what may be asked of it."""

    def __init__(self, rng: random.Random, held_out: bool):
        self.colour = rng.choice(list(COLOURS))
        self.count, self.digit, self.shape = 1, None, None
        if rng.random() < 0.4:
            self.digit = rng.randrange(10)
        else:
            self.shape = rng.choice(SHAPES)
            self.count = rng.randint(1, MOST)
        if self.reserved() != held_out:
            self.__init__(rng, held_out)
            return
        self.objects = self.place(rng)
        self.background = [rng.randint(205, 255) for _ in range(3)]
        self.noise = rng.choice([0, 0, 4, 10])

    def reserved(self) -> bool:
        """What only the evaluation shows: one in seven of all pairs of a colour and a thing."""
        thing = self.digit if self.digit is not None else 10 + SHAPES.index(self.shape) * MOST + self.count
        return (thing + 3 * list(COLOURS).index(self.colour)) % 7 == 2

    def place(self, rng) -> list:
        """(x, y, size, angle) of each object, as shares of the picture."""
        if self.count == 1:
            size = rng.uniform(0.2, 0.4)
            tilt = rng.uniform(-0.25, 0.25) if self.digit is not None else rng.uniform(-0.5, 0.5)
            return [(rng.uniform(size, 1 - size), rng.uniform(size, 1 - size), size, tilt)]
        cells = rng.sample([(x, y) for x in range(3) for y in range(3)], self.count)
        size = rng.uniform(0.09, 0.13)
        return [((x + 0.5 + rng.uniform(-0.1, 0.1)) / 3, (y + 0.5 + rng.uniform(-0.1, 0.1)) / 3, size, rng.uniform(-0.5, 0.5)) for x, y in cells]

    def name(self) -> str:
        if self.digit is not None:
            return f"a {self.colour} {self.digit}" if self.colour != "orange" else f"an {self.colour} {self.digit}"
        if self.count == 1:
            return f"a{'n' if self.colour == 'orange' else ''} {self.colour} {self.shape}"
        plural = self.shape + ("es" if self.shape.endswith("s") else "s")
        return f"{NUMBERS[self.count]} {self.colour} {plural}"

    def ask(self, rng) -> tuple:
        """(kind, question, thinking, answer)"""
        kinds = ["colour", "describe", "digit" if self.digit is not None else "shape"] + ["count"] * (2 if self.shape else 0)
        kind = rng.choice(kinds)
        answer = {
            "digit": lambda: f"It is a {self.digit}.",
            "shape": lambda: f"It is a {self.shape}." if self.count == 1 else f"They are {self.shape + ('es' if self.shape.endswith('s') else 's')}.",
            "colour": lambda: f"It is {self.colour}.",
            "count": lambda: f"There {'is' if self.count == 1 else 'are'} {self.count}.",
            "describe": lambda: self.name()[0].upper() + self.name()[1:] + ".",
        }[kind]()
        return kind, rng.choice(QUESTIONS[kind]), f"The picture shows {self.name()}.", answer


def distance(shape: str, a, b):
    """To a shape of size 1 around 0; inside negative."""
    if shape == "circle":
        return torch.hypot(a, b) - 1
    if shape == "square":
        return torch.maximum(a.abs(), b.abs()) - 0.85
    if shape == "cross":
        return torch.minimum(torch.maximum(a.abs() - 0.32, b.abs() - 1), torch.maximum(a.abs() - 1, b.abs() - 0.32))
    if shape == "triangle":
        turns = [math.radians(90 + 120 * k) for k in range(3)]
        return torch.stack([a * math.cos(t) + b * math.sin(t) for t in turns]).amax(0) - 0.55
    # a star with five points: by its outline at each angle
    step, angle = math.pi / 5, torch.atan2(a, -b)
    inside = (angle / (2 * step) - torch.round(angle / (2 * step))).abs() * 2 * step
    rim = 0.42 * math.sin(step) / (torch.sin(step - inside) * 0.42 + torch.sin(inside))
    return (torch.hypot(a, b) - rim) * 0.6


def distances(x, y, shapes: list):
    """Of rows with one shape each; x, y [n, H, W]."""
    out = torch.empty_like(x)
    for shape in set(shapes):
        rows = [i for i, s in enumerate(shapes) if s == shape]
        out[rows] = distance(shape, x[rows], y[rows])
    return out


def draw(scenes: list, height: int, width: int, device: str, generator: torch.Generator) -> torch.Tensor:
    """[B, height, width, 3] U8."""
    count, side = len(scenes), min(height, width)
    ys = torch.arange(height, device=device).view(1, -1, 1) + 0.5
    xs = torch.arange(width, device=device).view(1, 1, -1) + 0.5
    cover = torch.zeros(count, height, width, device=device)
    lines = segments().to(device)
    for k in range(MOST):
        some = [i for i, s in enumerate(scenes) if k < s.count]
        if not some:
            break
        place = torch.tensor([scenes[i].objects[k] for i in some], device=device)
        cx, cy, size, angle = (place[:, j].view(-1, 1, 1) for j in range(4))
        size = size * side
        x, y = (xs - cx * width) / size, (ys - cy * height) / size
        x, y = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
        d = torch.empty_like(x)
        shapes = [j for j, i in enumerate(some) if scenes[i].shape]
        digits = [j for j, i in enumerate(some) if scenes[i].shape is None]
        if shapes:
            d[shapes] = distances(x[shapes], y[shapes], [scenes[some[j]].shape for j in shapes])
        if digits:
            d[digits] = to_lines(x[digits], y[digits], lines[[scenes[some[j]].digit for j in digits]]) - 0.13
        cover[some] = torch.maximum(cover[some], (0.5 - d * size).clamp(0, 1))
    ink = torch.tensor([COLOURS[s.colour] for s in scenes], device=device, dtype=torch.float32)
    ink = (ink + torch.randint(-14, 15, ink.shape, generator=generator, device=device)).view(count, 1, 1, 3)
    paper = torch.tensor([s.background for s in scenes], device=device, dtype=torch.float32).view(count, 1, 1, 3)
    noise = torch.tensor([s.noise for s in scenes], device=device).view(count, 1, 1, 1)
    picture = paper + (ink - paper) * cover.unsqueeze(-1)
    picture = picture + noise * torch.randn(picture.shape, generator=generator, device=device)
    return picture.round().clamp(0, 255).to(torch.uint8)


def to_lines(x, y, lines):
    """Distances to the nearest of each row's lines; lines [n, SEGMENTS, 4]."""
    nearest = torch.full_like(x, 1e9)
    for s in range(SEGMENTS):
        ax, ay, bx, by = (lines[:, s, j].view(-1, 1, 1) for j in range(4))
        dx, dy = bx - ax, by - ay
        t = (((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(x - ax - t * dx, y - ay - t * dy))
    return nearest


def png(picture: torch.Tensor) -> bytes:
    """An [H, W, 3] U8 picture as a file."""
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in picture.cpu())

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
