#!/usr/bin/env python3
"""Makes tests/vectors/images: files of all formats with the pixels that Pillow reads in them, and resized images of torchvision.

    python3 scripts/make_image_vectors.py        # seconds; needs Pillow, numpy, torch, torchvision, safetensors
"""
import io
import pathlib

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save_file
from torchvision.transforms.v2 import InterpolationMode, functional

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "vectors" / "images"
WIDTH, HEIGHT = 19, 13
RESIZES = [((13, 19), (32, 64)), ((64, 33), (32, 32)), ((100, 40), (96, 64)), ((8, 8), (3, 20)), ((48, 80), (48, 32)),
           ((9, 200), (32, 192)), ((70, 70), (64, 64)), ((333, 41), (32, 64))]


def picture(width=WIDTH, height=HEIGHT, seed=0):
    """Slopes, edges and noise: no two directions look alike."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x * 7 + y * 3) % 256], -1)
    rgb[height // 3:height // 2, width // 2:] = (250, 10, 30)
    rgb = rgb + random.integers(-9, 10, rgb.shape)
    return Image.fromarray(np.clip(rgb, 0, 255).astype(np.uint8))


def over_white(image):
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, (255, 255, 255))
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_alpha(image):
    alpha = np.add.outer(np.arange(image.height) * 20, np.arange(image.width) * 3) % 256
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    return image


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def files():
    rgb, grey = picture(), picture(seed=1).convert("L")
    alpha, palette = with_alpha(rgb), picture(seed=2).quantize(37)
    yield "rgb.png", saved(rgb, "PNG")
    yield "rgba.png", saved(alpha, "PNG")
    yield "grey.png", saved(grey, "PNG")
    yield "grey_alpha.png", saved(alpha.convert("LA"), "PNG")
    yield "one_bit.png", saved(grey.convert("1"), "PNG")
    yield "palette.png", saved(palette, "PNG")
    yield "palette_four_bits.png", saved(picture(seed=3).quantize(11), "PNG", bits=4)
    yield "palette_transparent.png", saved(palette, "PNG", transparency=3)
    for orientation in range(1, 9):
        yield f"turned_{orientation}.png", saved(rgb, "PNG", exif=exif(orientation))
    yield "rgb.jpg", saved(rgb, "JPEG", quality=90)
    yield "half_colour.jpg", saved(picture(61, 47, 4), "JPEG", quality=75, subsampling="4:2:0")
    yield "progressive.jpg", saved(picture(61, 47, 5), "JPEG", quality=60, progressive=True)
    yield "grey.jpg", saved(grey, "JPEG")
    yield "cmyk.jpg", saved(rgb.convert("CMYK"), "JPEG", quality=95)
    yield "turned_6.jpg", saved(rgb, "JPEG", quality=90, exif=exif(6))
    yield "lossless.webp", saved(rgb, "WEBP", lossless=True)
    yield "lossy.webp", saved(picture(61, 47, 6), "WEBP", quality=80)
    yield "alpha.webp", saved(alpha, "WEBP", lossless=True, exact=True)
    yield "animated.webp", saved(rgb, "WEBP", lossless=True, save_all=True, append_images=[picture(seed=7)])
    yield "turned_8.webp", saved(rgb, "WEBP", lossless=True, exif=exif(8))
    yield "palette.gif", saved(palette, "GIF")
    yield "interlaced.gif", saved(palette, "GIF", interlace=1)
    yield "transparent.gif", saved(palette, "GIF", transparency=5)
    yield "animated.gif", saved(palette, "GIF", save_all=True, append_images=[picture(seed=8).quantize(9)])
    yield "rgb.bmp", saved(rgb, "BMP")
    yield "grey.bmp", saved(grey, "BMP")
    yield "one_bit.bmp", saved(grey.convert("1"), "BMP")
    yield "palette.bmp", saved(palette, "BMP")


def pixels(data):
    image = Image.open(io.BytesIO(data))
    image.seek(0)
    image.load()
    from PIL import ImageOps
    image = ImageOps.exif_transpose(image)
    transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    return np.asarray(over_white(image) if transparent else image.convert("RGB"))


def resized():
    for number, ((height, width), to) in enumerate(RESIZES):
        image = np.array(picture(width, height, 20 + number))
        out = functional.resize(torch.from_numpy(image).permute(2, 0, 1), list(to), InterpolationMode.BICUBIC, antialias=True)
        yield f"{number}.from", image
        yield f"{number}.to", out.permute(1, 2, 0).contiguous().numpy()


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, data in files():
        tensors[name + ".file"] = np.frombuffer(data, np.uint8).copy()
        tensors[name + ".rgb"] = np.ascontiguousarray(pixels(data))
    save_file(tensors, OUT / "files.safetensors")
    save_file(dict(resized()), OUT / "resized.safetensors")


if __name__ == "__main__":
    main()
